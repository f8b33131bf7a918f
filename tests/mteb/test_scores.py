from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mteb_fair.scores import (
    Grouping,
    GroupScore,
    from_entry,
    measure_groups,
    pool_groups,
    score_groups,
    to_entry,
)


def group(n: int, mean: float | None) -> GroupScore:
    return GroupScore(n=n, mean=mean)


class TestScoreGroups:
    def test_means_over_the_queries_of_a_group(self) -> None:
        scores = score_groups({"a": 1.0, "b": 0.5, "c": 0.2}, {"a": ["x"], "b": ["x"], "c": ["y"]}, ["x", "y"])
        assert scores == {"x": group(2, 0.75), "y": group(1, 0.2)}

    def test_a_query_counts_in_each_of_its_groups(self) -> None:
        scores = score_groups({"a": 1.0}, {"a": ["x", "y"]}, ["x", "y"])
        assert scores == {"x": group(1, 1.0), "y": group(1, 1.0)}

    def test_a_query_that_found_nothing_scores_0(self) -> None:
        assert score_groups({"a": 1.0}, {"a": ["x"], "b": ["x"]}, ["x"]) == {"x": group(2, 0.5)}

    def test_a_group_without_queries_is_there_without_a_mean(self) -> None:
        assert score_groups({"a": 1.0}, {"a": ["x"]}, ["x", "y"])["y"] == group(0, None)


class TestMeasures:
    def test_by_hand(self) -> None:
        measures = measure_groups([group(1, 0.8), group(5, 0.6), group(2, 0.4)])
        assert measures.mean == pytest.approx(0.6)
        assert measures.psi == pytest.approx(0.5)  # 1 - .4 / .8
        assert measures.harmonic_mean == pytest.approx(3 / (1 / 0.8 + 1 / 0.6 + 1 / 0.4))
        assert measures.slope == pytest.approx(-0.6)  # from 1/6 to 5/6 it falls by .4

    def test_equal_groups_are_fair(self) -> None:
        measures = measure_groups([group(1, 0.3)] * 4)
        assert (measures.psi, measures.slope) == (pytest.approx(0), pytest.approx(0))
        assert measures.harmonic_mean == pytest.approx(0.3)

    def test_all_zero(self) -> None:
        measures = measure_groups([group(2, 0.0), group(3, 0.0)])
        assert (measures.mean, measures.psi, measures.harmonic_mean, measures.slope) == (0, 0, 0, 0)

    def test_one_zero_group(self) -> None:
        measures = measure_groups([group(2, 0.5), group(3, 0.0)])
        assert (measures.psi, measures.harmonic_mean) == (1, 0)

    def test_empty_groups_keep_their_place_but_count_for_nothing(self) -> None:
        measures = measure_groups([group(1, 0.8), group(0, None), group(2, 0.4)])
        assert measures.mean == pytest.approx(0.6)
        assert measures.slope == pytest.approx(-0.6)

    def test_one_group_has_no_slope(self) -> None:
        measures = measure_groups([group(1, 0.8), group(0, None)])
        assert (measures.slope, measures.psi) == (None, 0)

    def test_no_queries_at_all(self) -> None:
        measures = measure_groups([group(0, None)] * 3)
        assert (measures.mean, measures.psi, measures.harmonic_mean, measures.slope) == (None, None, None, None)

    def test_no_groups(self) -> None:
        with pytest.raises(ValueError, match="at least one position group"):
            measure_groups([])

    @given(st.lists(st.floats(0, 1), min_size=2, max_size=25))
    def test_slope_is_that_of_least_squares(self, means: list[float]) -> None:
        places = (np.arange(len(means)) + 0.5) / len(means)
        expected = np.polyfit(places, means, 1)[0]
        assert measure_groups([group(1, mean) for mean in means]).slope == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("n", "mean"), [(0, 0.5), (2, None), (-1, None), (1, float("nan")), (1, -0.1)])
def test_impossible_scores(n: int, mean: float | None) -> None:
    with pytest.raises(ValueError, match="GroupScore: expected"):
        group(n, mean)


@given(st.lists(st.lists(st.floats(0, 1), max_size=5), min_size=1, max_size=5))
def test_pooling_is_scoring_all_queries_at_once(parts: list[list[float]]) -> None:
    every = [score for part in parts for score in part]
    labels = {str(i): ["x"] for i in range(len(every))}
    at_once = score_groups({str(i): score for i, score in enumerate(every)}, labels, ["x"])["x"]
    separate = [
        score_groups({str(i): s for i, s in enumerate(part)}, {str(i): ["x"] for i in range(len(part))}, ["x"])
        for part in parts
    ]
    pooled = pool_groups(separate)["x"]
    assert pooled.n == at_once.n
    assert pooled.mean == (None if at_once.mean is None else pytest.approx(at_once.mean))


class TestEntries:
    grouping = Grouping(name="q1", groups=("q1_a", "q1_b"))

    def test_names_and_values(self) -> None:
        entry = to_entry(self.grouping, {"q1_a": group(2, 0.5), "q1_b": group(0, None)})
        assert entry == {
            "q1_a_ndcg_at_10": 0.5,
            "q1_a_n": 2,
            "q1_b_ndcg_at_10": None,
            "q1_b_n": 0,
            "q1_position_mean_ndcg_at_10": 0.5,
            "q1_psi": 0.0,
            "q1_harmonic_mean": 0.5,
            "q1_slope": None,
        }

    def test_through_json_and_back(self) -> None:
        scores = {"q1_a": group(2, 0.5), "q1_b": group(0, None)}
        entry = json.loads(json.dumps(to_entry(self.grouping, scores), allow_nan=False))
        assert from_entry(self.grouping, entry) == scores

    def test_another_tasks_entry(self) -> None:
        with pytest.raises(ValueError, match="expected the scores 'q1_a_ndcg_at_10' and 'q1_a_n'"):
            from_entry(self.grouping, {"ndcg_at_10": 0.5})
