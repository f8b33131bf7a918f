from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fair_evaluation import PositionEvaluation, evaluate_positions, from_mteb, psi_test
from fair_evaluation.psi_difference import _decide, resample_psi
from fair_evaluation.resampling import add_up_units

PLACES = ("beginning", "middle", "end")


def evaluate(table: np.ndarray, name: str = "", **settings: Any) -> PositionEvaluation:
    """Evaluates one question per row of ``table``, asked at each place."""
    rows = [(f"{p}{q}", table[q, i], p, q) for q in range(len(table)) for i, p in enumerate(PLACES)]
    frame = pd.DataFrame(rows, columns=["qid", "score", "position", "question"])
    return evaluate_positions(frame, name=name, **{"n_resamples": 1, "unit": "question", **settings})


def systems(n: int, levels_a: list[float], levels_b: list[float], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores 0 or 1 of two systems, alike since questions are easy or hard for both."""
    rng = np.random.default_rng(seed)
    easy = rng.random((n, 1)) < 0.5
    return tuple(
        (rng.random((n, 3)) < np.array(levels) + np.where(easy, 0.15, -0.15)).astype(float)
        for levels in (levels_a, levels_b)
    )  # type: ignore[return-value]


def test_by_hand() -> None:
    a, b = np.array([[0.8, 0.6, 0.4]] * 4), np.array([[0.5, 0.5, 0.4]] * 4)
    result = psi_test(evaluate(a, "plain"), evaluate(b, "fair"), n_resamples=99)
    assert result.names == ("plain", "fair")
    assert result.psi == pytest.approx((0.5, 0.2))
    assert result.difference == pytest.approx(0.3)
    # Every question has the same scores, so that nothing varies.
    assert result.interval == pytest.approx((0.3, 0.3))
    assert result.p_value == 0.01  # the least there is
    assert (result.standard_error, result.bias) == (pytest.approx(0), pytest.approx(0))
    assert (result.n_queries, result.n_resamples) == (12, 99)
    assert str(result) == (
        "PSI 0.500 (plain) - 0.200 (fair) = 0.300 [0.300, 0.300], p = 0.0100 (12 queries, 99 resamples)"
    )


def test_a_system_and_itself() -> None:
    a, _ = systems(40, [0.8, 0.6, 0.3], [0.5] * 3, 0)
    result = psi_test(evaluate(a), evaluate(a), n_resamples=99)
    assert (result.difference, result.p_value, result.interval) == (0, 1, (0, 0))


def test_the_sign_is_that_of_the_order() -> None:
    a, b = (evaluate(table) for table in systems(60, [0.8, 0.6, 0.3], [0.7, 0.6, 0.5], 0))
    one, other = psi_test(a, b, n_resamples=500), psi_test(b, a, n_resamples=500)
    assert one.difference == -other.difference
    assert one.p_value == other.p_value
    assert one.interval == pytest.approx((-other.interval[1], -other.interval[0]))
    assert psi_test(a, b, n_resamples=500, seed=1).p_value != one.p_value
    assert psi_test(a, b, n_resamples=500) == one


def test_p_value_and_interval_agree() -> None:
    decided = set()
    for seed in range(8):
        a, b = systems(60, [0.8, 0.6, 0.35], [0.75, 0.6, 0.5], seed)
        result = psi_test(evaluate(a), evaluate(b), n_resamples=999)
        assert (result.p_value <= 0.05) == (not result.interval[0] <= 0 <= result.interval[1])
        decided.add(result.p_value <= 0.05)
    assert decided == {True, False}


def test_rejections_under_the_null_and_with_an_effect() -> None:
    """200 samples each: 5 % are 10 rejections, with a standard deviation of 3.1."""

    def rejections(levels_a: list[float], levels_b: list[float]) -> int:
        rejected = 0
        for seed in range(200):
            unit, group = np.repeat(np.arange(80), 3), np.tile(np.arange(3), 80)
            a, b = (add_up_units(unit, group, t.ravel(), 3) for t in systems(80, levels_a, levels_b, seed))
            psi, drawn = resample_psi(a, b, n_resamples=199, seed=seed)
            rejected += _decide(psi[0] - psi[1], drawn, 0.95)[1] <= 0.05
        return rejected

    assert 2 <= rejections([0.8, 0.65, 0.5], [0.8, 0.65, 0.5]) <= 19
    assert rejections([0.8, 0.65, 0.5], [0.7, 0.65, 0.65]) > 120


def test_pairing_and_units_are_used() -> None:
    """The same questions are easy for both systems: without pairs the difference would vary more."""
    a, b = systems(300, [0.8, 0.6, 0.3], [0.8, 0.6, 0.35], 0)
    paired = psi_test(evaluate(a), evaluate(a * 0.9), n_resamples=500)
    assert paired.standard_error == pytest.approx(0, abs=1e-12)  # PSI does not change with the scale
    assert psi_test(evaluate(a), evaluate(b), n_resamples=500).standard_error > 0.01


def test_unequal_bias_is_said() -> None:
    rng = np.random.default_rng(0)
    a = evaluate(rng.beta(8, 1, (15, 3)))  # level and noise differ
    b = evaluate((rng.random((15, 3)) < 0.4).astype(float))
    text = str(psi_test(a, b, n_resamples=500))
    assert text.splitlines()[1].startswith("note: the difference is biased, here by about -0.")
    assert "(first)" in text


def test_queries_in_several_groups() -> None:
    rows = [("a", 0.8, ["beginning", "end"]), ("b", 0.4, ["end"]), ("c", 0.6, ["beginning"]), ("d", 0.3, ["end"])]
    a, b = (
        evaluate_positions(pd.DataFrame(r, columns=["qid", "score", "position"]))
        for r in (rows, [(q, s / 2 + 0.1, p) for q, s, p in rows[::-1]])
    )
    assert psi_test(a, b, n_resamples=99).difference == pytest.approx((1 - 0.5 / 0.7) - (1 - 0.35 / 0.45))


def test_classes_of_length() -> None:
    rows = [(f"{p}{i}", (i % 5) / 5, p, 100 + 900 * (i % 2)) for i in range(20) for p in PLACES]
    frame = pd.DataFrame(rows, columns=["qid", "score", "position", "length"])
    a, b = (evaluate_positions(f, length="length") for f in (frame, frame.assign(score=frame["score"] * 0.5)))
    assert psi_test(a.lengths["(0, 512]"], b.lengths["(0, 512]"], n_resamples=99).n_queries == 30


class TestErrors:
    a = evaluate(np.array([[0.8, 0.6, 0.4]] * 2))

    def test_other_queries(self) -> None:
        other = evaluate(np.array([[0.8, 0.6, 0.4]] * 3))
        message = "got 3 rows of one system alone, such as [('beginning2', 'beginning'),"
        with pytest.raises(ValueError, match=re.escape(message)):
            psi_test(self.a, other)

    def test_other_units(self) -> None:
        with pytest.raises(ValueError, match="expected the same queries in the same groups and units, got 12 rows"):
            psi_test(self.a, evaluate(np.array([[0.8, 0.6, 0.4]] * 2), unit=None))

    def test_one_group(self) -> None:
        one = evaluate_positions(pd.DataFrame({"qid": ["a", "b"], "score": 0.5, "position": "end"}))
        with pytest.raises(ValueError, match=re.escape("expected queries in at least two groups, got them in ['end']")):
            psi_test(one, one)

    def test_no_queries(self) -> None:
        entry = {"hf_subset": "default", "end_n": 3, "end_ndcg_at_10": 0.5}
        scores = from_mteb({"task_name": "t", "scores": {"test": [entry]}})["default"]
        with pytest.raises(ValueError, match="b: expected an evaluation of queries, got one of group scores alone"):
            psi_test(self.a, scores)

    def test_something_else(self) -> None:
        with pytest.raises(TypeError, match="a: expected a PositionEvaluation, got dict"):
            psi_test({}, self.a)  # type: ignore[arg-type]

    @pytest.mark.parametrize("settings", [{"confidence": 1}, {"n_resamples": 0}])
    def test_settings(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=f"{next(iter(settings))}: expected"):
            psi_test(self.a, self.a, **settings)
