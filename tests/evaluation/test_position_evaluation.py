from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fair_evaluation import PositionEvaluation, evaluate_positions

ROWS = [
    ("a", 1.0, "beginning"),
    ("b", 0.6, "beginning"),
    ("c", 0.5, "middle"),
    ("d", 0.7, "middle"),
    ("e", 0.2, "end"),
    ("f", 0.6, "end"),
]


def evaluate(rows: Any, **settings: Any) -> PositionEvaluation:
    """Evaluates tuples of query id, score and position, and of length or unit if the settings name such a column."""
    columns = ["qid", "score", "position", *(settings[c] for c in ("length", "unit") if c in settings)]
    return evaluate_positions(pd.DataFrame(list(rows), columns=columns), **settings)


def means(result: PositionEvaluation) -> dict[str, Any]:
    return dict(zip(result.groups["group"], result.groups["mean"], strict=True))


def scores(n: int, level: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).beta(4 * level, 4 * (1 - level), n)


class TestValues:
    def test_by_hand(self) -> None:
        result = evaluate(ROWS, name="mine", measure="nDCG@10")
        assert (result.name, result.measure, result.n_queries) == ("mine", "nDCG@10", 6)
        assert result.groups["group"].tolist() == ["beginning", "middle", "end"]
        assert result.groups["n"].tolist() == [2, 2, 2]
        assert result.groups["position"].tolist() == pytest.approx([1 / 6, 1 / 2, 5 / 6])
        assert means(result) == pytest.approx({"beginning": 0.8, "middle": 0.6, "end": 0.4})
        assert result.mean == pytest.approx(0.6)
        assert result.psi == pytest.approx(0.5)
        assert result.harmonic_mean == pytest.approx(3 / (1 / 0.8 + 1 / 0.6 + 1 / 0.4))
        assert result.slope == pytest.approx(-0.6)
        assert result.notes[1:] == ()  # but for the bias of PSI in groups of 2

    def test_frames_and_mappings(self) -> None:
        frame = pd.DataFrame(ROWS, columns=["qid", "score", "position"], index=[5, 5, 4, 3, 2, 1])
        expected = evaluate(ROWS).to_dict()
        assert evaluate_positions(frame).to_dict() == expected
        assert evaluate_positions(frame.to_dict("records")).to_dict() == expected
        assert evaluate_positions(row for row in frame.to_dict("records")).to_dict() == expected
        renamed = frame.rename(columns={"position": "at"}).assign(other="other")
        assert evaluate_positions(renamed, position="at").to_dict() == expected
        assert list(frame.columns) == ["qid", "score", "position"]

    def test_the_order_of_rows_is_nothing(self) -> None:
        positions = np.random.default_rng(1).random(60)
        frame = pd.DataFrame({"qid": [f"q{i}" for i in range(60)], "score": scores(60, 0.5, 0), "position": positions})
        one = evaluate_positions(frame, bins=4, n_resamples=50)
        assert (
            evaluate_positions(frame.sample(frac=1, random_state=2), bins=4, n_resamples=50).to_dict() == one.to_dict()
        )

    def test_numbers_are_cut_into_bins(self) -> None:
        rows = [("a", 0.8, 0.05), ("b", 0.4, 0.051), ("c", 0.6, 1.0)]
        result = evaluate(rows)
        assert len(result.groups) == 20
        assert result.groups["n"].tolist() == [1, 1, *[0] * 17, 1]
        assert result.psi == pytest.approx(0.5)
        assert result.slope == pytest.approx(np.polyfit([0.025, 0.075, 0.975], [0.8, 0.4, 0.6], 1)[0])
        assert evaluate(rows, bins=[0, 0.5, 1]).psi == pytest.approx(0)

    def test_a_query_counts_in_each_of_its_groups(self) -> None:
        rows = [("a", 0.8, ["beginning", "middle"]), ("b", 0.4, ["middle"]), ("c", 0.2, {"end"}), ("d", 0.6, "end")]
        result = evaluate(rows)
        assert means(result) == pytest.approx({"beginning": 0.8, "middle": 0.6, "end": 0.4})
        assert result.n_queries == 4
        assert result.groups["n"].sum() == 5
        flat = [
            ("a", 0.8, "beginning"),
            ("a", 0.8, "middle"),
            ("b", 0.4, "middle"),
            ("c", 0.2, "end"),
            ("d", 0.6, "end"),
        ]
        assert evaluate(flat).to_dict() == result.to_dict()

    def test_length_classes(self) -> None:
        rows = [
            ("a", 0.8, "beginning", 100),
            ("b", 0.4, "end", 512),
            ("c", 0.9, "beginning", 2000),
            ("d", 0.9, "end", 1537),
        ]
        result = evaluate(rows, length="length", name="m")
        assert list(result.lengths) == ["(0, 512]", "over 1536"]
        assert result.lengths["(0, 512]"].psi == pytest.approx(0.5)
        assert result.lengths["over 1536"].psi == 0
        assert result.lengths["over 1536"].name == "m over 1536"
        assert result.psi == pytest.approx(1 - 0.65 / 0.85)
        assert "no queries with documents of length (512, 1024], (1024, 1536]" in result.notes
        two = evaluate(rows, length="length", length_classes=[0, 1000, np.inf])
        assert list(two.lengths) == ["(0, 1000]", "over 1000"]

    def test_a_class_of_lengths_keeps_all_groups(self) -> None:
        rows = [("a", 0.8, "beginning", 100), ("b", 0.4, "end", 100), ("c", 0.4, "end", 600)]
        part = evaluate(rows, length="length").lengths["(512, 1024]"]
        assert part.groups["n"].tolist() == [0, 1]
        assert part.groups["position"].tolist() == [0.25, 0.75]

    @given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=30))
    def test_means_are_those_of_pandas(self, rows: list[tuple[float, int]]) -> None:
        frame = pd.DataFrame(rows, columns=["score", "position"]).assign(qid=range(len(rows)))
        result = evaluate_positions(frame, order=range(4), n_resamples=5)
        expected = frame.groupby("position")["score"].mean()
        assert result.groups.dropna(subset="mean")["mean"].tolist() == pytest.approx(expected.tolist())
        assert result.groups["n"].tolist() == [sum(p == i for _, p in rows) for i in range(4)]
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["n_queries"] == len(rows)


class TestIntervals:
    def test_those_of_a_group_are_of_its_scores(self) -> None:
        frame = pd.DataFrame(
            {"score": np.r_[scores(80, 0.8, 0), scores(50, 0.4, 1)], "position": [*["beginning"] * 80, *["end"] * 50]}
        )
        result = evaluate_positions(frame.assign(qid=range(130)), n_resamples=5000)
        for _, row in result.groups.iterrows():
            of = frame.loc[frame["position"] == row["group"], "score"]
            reach = 1.96 * of.std() / np.sqrt(len(of))  # the normal interval
            assert row["low"] == pytest.approx(of.mean() - reach, abs=0.01)
            assert row["high"] == pytest.approx(of.mean() + reach, abs=0.01)
        low, high = result.intervals["mean"]
        assert low < result.mean < high  # type: ignore[operator]
        assert (
            evaluate_positions(frame.assign(qid=range(130)), confidence=0.5).groups["high"][0]
            < result.groups["high"][0]
        )

    def test_the_seed_is_what_they_depend_on(self) -> None:
        one, again, other = (evaluate(ROWS, seed=seed, n_resamples=20).to_dict() for seed in (1, 1, 2))
        assert one == again
        assert one["intervals"] != other["intervals"]

    def test_the_interval_of_psi_takes_its_bias_off(self) -> None:
        """Of a fair system in 10 groups of 20, PSI is well above 0, and so is every resample."""
        frame = pd.DataFrame(
            {"qid": range(200), "score": scores(200, 0.5, 3), "position": [i % 10 for i in range(200)]}
        )
        result = evaluate_positions(frame, order=range(10))
        assert result.psi is not None
        assert result.psi > 0.15
        low, high = result.intervals["psi"]
        assert 0 <= low < high < result.psi + 0.05
        assert low < result.psi - 0.1
        assert any("PSI is biased upward" in note and "20 queries" in note for note in result.notes)

    def test_units_are_resampled_together(self) -> None:
        """Questions differ much and places little: what is asked at all places has a slope that hardly varies."""
        level = np.random.default_rng(0).random(60)
        rows = [
            (
                f"{place} {i}",
                0.8 * level[i] + 0.1 * (place == "beginning") + 0.02 * (i % 3 == 0) * (place == "end"),
                place,
                i,
            )
            for i in range(60)
            for place in ("beginning", "middle", "end")
        ]
        frame = pd.DataFrame(rows, columns=["qid", "score", "position", "question"])
        together, apart = evaluate_positions(frame, unit="question"), evaluate_positions(frame)
        width = {key: np.ptp(result.intervals["slope"]) for key, result in (("t", together), ("a", apart))}
        assert width["t"] < 0.1 * width["a"]
        assert together.slope == pytest.approx(apart.slope)
        assert together.groups["low"].tolist() == pytest.approx(apart.groups["low"].tolist(), abs=0.02)

    def test_one_query_in_a_group_has_no_interval(self) -> None:
        result = evaluate([*ROWS[:5]])
        assert result.groups["low"].isna().tolist() == [False, False, True]
        note = "only one query or unit in end, which does not vary in resamples: intervals are too narrow"
        assert note in result.notes
        alone = evaluate([("a", 0.5, "end")])
        assert alone.intervals == {}

    def test_scores_that_do_not_vary(self) -> None:
        result = evaluate([(q, 0.5, p) for q, _, p in ROWS])
        assert (result.psi, result.slope) == (0, pytest.approx(0))
        assert result.intervals["psi"] == (0, 0)


class TestEdges:
    def test_all_scores_0(self) -> None:
        result = evaluate([(q, 0.0, p) for q, _, p in ROWS])
        assert (result.mean, result.psi, result.harmonic_mean, result.slope) == (0, 0, 0, 0)

    def test_one_group_at_0(self) -> None:
        result = evaluate([(q, 0.0 if p == "end" else s, p) for q, s, p in ROWS])
        assert (result.psi, result.harmonic_mean) == (1, 0)

    def test_groups_without_queries(self) -> None:
        rows = [("a", 0.8, 0), ("b", 0.4, 2), ("c", 0.4, 2)]
        result = evaluate(rows, order=[0, 1, 2, 3])
        assert result.groups["n"].tolist() == [1, 0, 2, 0]
        assert result.groups["mean"].isna().tolist() == [False, True, False, True]
        assert result.psi == pytest.approx(0.5)
        assert result.slope == pytest.approx(-0.8)  # from 1/8 to 5/8
        assert result.notes[0] == "no queries in 1, 3: the measures leave these groups out"
        assert result.to_dict()["groups"][1] == {
            "group": "1",
            "position": 0.375,
            "n": 0,
            "mean": None,
            "low": None,
            "high": None,
        }

    def test_one_group(self) -> None:
        result = evaluate([("a", 0.8, "end"), ("b", 0.4, "end")])
        assert (result.psi, result.slope) == (0, None)
        assert "psi" not in result.intervals
        assert result.notes == ("there is only one group with queries, so PSI is 0 whatever its score",)

    @pytest.mark.parametrize("kind", [int, np.float32, "Float64", "Int64", bool])
    def test_other_numbers(self, kind: Any) -> None:
        frame = pd.DataFrame({"qid": [1, 2], "score": pd.Series([1, 0], dtype=kind), "position": ["beginning", "end"]})
        assert evaluate_positions(frame).psi == 1

    def test_ids_of_several_types(self) -> None:
        assert evaluate([("1", 0.8, "end"), (1, 0.4, "end"), (2, 0.4, "beginning")]).n_queries == 3


class TestErrors:
    @pytest.mark.parametrize("rows", [[], pd.DataFrame({"qid": [], "score": [], "position": []})])
    def test_no_rows(self, rows: Any) -> None:
        with pytest.raises(ValueError, match="rows: expected at least one, got none"):
            evaluate_positions(rows)

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            (
                ("g", float("nan"), "end"),
                "score: expected finite numbers from 0 on, without which there is no PSI, got [nan]",
            ),
            (("g", float("inf"), "end"), "got [inf] for the queries ['g'] (1 of 7 rows)"),
            (("g", -0.1, "end"), "got [-0.1] for the queries ['g'] (1 of 7 rows)"),
            (
                ("g", 0.1, None),
                "position: 1 of 7 values are missing (None, NaN, an empty list), such as those of the queries",
            ),
            (("g", 0.1, []), "such as those of the queries ['g']"),
            ((None, 0.1, "end"), "qid: 1 of 7 values are missing"),
            (
                ("a", 0.1, "beginning"),
                "qid: expected a query once in a group, got 1 rows too many, such as 'a' in beginning",
            ),
            (("g", 0.1, ["end", "end"]), "such as 'g' in end"),
            (("g", 0.1, "ending"), "order: expected all groups from the beginning of documents to their end"),
        ],
    )
    def test_rows_that_are_wrong(self, row: Any, message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            evaluate([*ROWS, row])

    def test_a_query_twice_in_a_bin(self) -> None:
        with pytest.raises(ValueError, match=re.escape("such as 'a' in (0.1, 0.15]")):
            evaluate([("a", 0.5, 0.12), ("a", 0.5, 0.13)])

    def test_scores_that_are_no_numbers(self) -> None:
        with pytest.raises(TypeError, match="score: expected numbers, got a column of"):
            evaluate([("a", "0.5", "end")])

    @pytest.mark.parametrize("column", ["position", "length", "unit"])
    def test_columns_that_are_not_there(self, column: str) -> None:
        frame = pd.DataFrame(ROWS, columns=["qid", "score", "position"])
        with pytest.raises(
            ValueError, match=re.escape("rows: the columns ['none'] are missing, there are ['qid', 'score'")
        ):
            evaluate_positions(frame, **{column: "none"})

    def test_units_that_are_missing(self) -> None:
        with pytest.raises(ValueError, match="unit: 1 of 2 values are missing"):
            evaluate([("a", 0.5, "end", "u"), ("b", 0.5, "end", None)], unit="unit")

    @pytest.mark.parametrize("confidence", [0, 1, 95, float("nan")])
    def test_confidence(self, confidence: float) -> None:
        with pytest.raises(ValueError, match=r"confidence: expected a number between 0 and 1, such as 0\.95, got"):
            evaluate(ROWS, confidence=confidence)

    @pytest.mark.parametrize("n_resamples", [0, -1, 2.5, True, "100"])
    def test_resamples(self, n_resamples: Any) -> None:
        with pytest.raises(ValueError, match="n_resamples: expected an integer of at least 1, got"):
            evaluate(ROWS, n_resamples=n_resamples)
