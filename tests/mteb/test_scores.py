from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mteb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mteb_fair import FineWebPosQ, PosIR, summarize
from mteb_fair.scores import COLUMNS, Grouping, score_groups
from tests.mteb.layouts import write_fineweb, write_posir

SECOND = 1 / math.log2(3)


def score(per_query: Mapping[str, float], labels: Mapping[str, Sequence[str]], *groups: str) -> dict[str, Any]:
    return score_groups(Grouping(name="", groups=groups), per_query, labels)


def measure(*means: float | None) -> dict[str, Any]:
    """Scores groups with one query each, or none where the mean is None."""
    per_query = {str(number): mean for number, mean in enumerate(means) if mean is not None}
    return score(per_query, {query: [query] for query in per_query}, *map(str, range(len(means))))


class TestGroups:
    def test_means_over_the_queries_of_a_group(self) -> None:
        entry = score({"a": 1.0, "b": 0.5, "c": 0.2}, {"a": ["x"], "b": ["x"], "c": ["y"]}, "x", "y")
        assert (entry["x_n"], entry["x_ndcg_at_10"], entry["y_n"], entry["y_ndcg_at_10"]) == (2, 0.75, 1, 0.2)

    def test_a_query_counts_in_each_of_its_groups(self) -> None:
        entry = score({"a": 1.0}, {"a": ["x", "y", "of another partition"]}, "x", "y")
        assert (entry["x_n"], entry["x_ndcg_at_10"], entry["y_n"], entry["y_ndcg_at_10"]) == (1, 1, 1, 1)

    def test_a_query_that_found_nothing_scores_0(self) -> None:
        entry = score({"a": 1.0}, {"a": ["x"], "b": ["x"]}, "x")
        assert (entry["x_n"], entry["x_ndcg_at_10"]) == (2, 0.5)

    def test_names_and_values(self) -> None:
        grouping = Grouping(name="q1", groups=("q1_a", "q1_b"))
        entry = score_groups(grouping, {"a": 0.25, "b": 0.75}, {"a": ["q1_a"], "b": ["q1_a"]})
        assert json.loads(json.dumps(entry, allow_nan=False)) == {
            "q1_a_ndcg_at_10": 0.5,
            "q1_a_n": 2,
            "q1_b_ndcg_at_10": None,
            "q1_b_n": 0,
            "q1_position_mean_ndcg_at_10": 0.5,
            "q1_psi": 0.0,
            "q1_harmonic_mean": 0.5,
            "q1_slope": None,
        }


class TestMeasures:
    def test_by_hand(self) -> None:
        measures = measure(0.8, 0.6, 0.4)
        assert measures["position_mean_ndcg_at_10"] == pytest.approx(0.6)
        assert measures["psi"] == pytest.approx(0.5)  # 1 - .4 / .8
        assert measures["harmonic_mean"] == pytest.approx(3 / (1 / 0.8 + 1 / 0.6 + 1 / 0.4))
        assert measures["slope"] == pytest.approx(-0.6)  # from 1/6 to 5/6 it falls by .4

    def test_equal_groups_are_fair(self) -> None:
        measures = measure(0.3, 0.3, 0.3, 0.3)
        assert (measures["psi"], measures["slope"]) == (pytest.approx(0), pytest.approx(0))
        assert measures["harmonic_mean"] == pytest.approx(0.3)

    @pytest.mark.parametrize(
        ("means", "expected"),
        [
            ((0.0, 0.0), (0, 0, 0, 0)),
            ((None, None, None), (None, None, None, None)),
            ((0.8, None), (0.8, 0, 0.8, None)),
        ],
    )
    def test_extremes(self, means: Sequence[float | None], expected: tuple[float | None, ...]) -> None:
        measures = measure(*means)
        names = ("position_mean_ndcg_at_10", "psi", "harmonic_mean", "slope")
        assert tuple(measures[name] for name in names) == expected

    def test_one_zero_group(self) -> None:
        measures = measure(0.5, 0.0)
        assert (measures["psi"], measures["harmonic_mean"]) == (1, 0)

    def test_empty_groups_keep_their_place_but_count_for_nothing(self) -> None:
        measures = measure(0.8, None, 0.4)
        assert measures["position_mean_ndcg_at_10"] == pytest.approx(0.6)
        assert measures["slope"] == pytest.approx(-0.6)

    @given(st.lists(st.floats(0, 1), min_size=2, max_size=25))
    def test_slope_is_that_of_least_squares(self, means: list[float]) -> None:
        places = (np.arange(len(means)) + 0.5) / len(means)
        expected = np.polyfit(places, means, 1)[0]
        assert measure(*means)["slope"] == pytest.approx(expected, abs=1e-9)


class TestSummarize:
    def test_posir_by_language(self, tmp_path: Path, keyword_encoder: Any) -> None:
        for language, text in (("eng-Latn", "red"), ("fra-Latn", "red red red")):
            write_posir(
                tmp_path,
                language,
                "law",
                corpus={"d1": "red red", "d2": text},
                queries={"q1": ("red", [0, 10], 100, 300), "q2": ("red", [90, 100], 100, 300)},
                qrels=[("q1", "d1", 1), ("q2", "d2", 1)],
            )
        result = mteb.evaluate(keyword_encoder, PosIR(data_folder=tmp_path), cache=None, show_progress_bar=False)
        table = summarize(result.task_results)
        assert tuple(table.columns) == COLUMNS
        assert table["length"].tolist() == ["all", "q1", "q2", "q3", "q4"] * 2
        rows = table.set_index(["subset", "length"])
        assert rows.loc[("eng-Latn", "q1"), "psi"] == pytest.approx(1 - SECOND)
        assert rows.loc[("fra-Latn", "q1"), "slope"] == pytest.approx((1 - SECOND) / 0.9)
        assert math.isnan(rows.loc[("eng-Latn", "q2"), "psi"])
        assert rows.loc[("eng-Latn", "all"), "n"] == rows.loc[("eng-Latn", "q1"), "n"] == 2
        assert rows.loc[("eng-Latn", "q2"), "n"] == 0
        assert rows.loc[("eng-Latn", "all"), "ndcg_at_10"] == pytest.approx((1 + SECOND) / 2, abs=1e-5)

    def test_other_tasks(self, tmp_path: Path, keyword_encoder: Any) -> None:
        write_fineweb(tmp_path, [("red", "red", ["end"])])
        result = mteb.evaluate(keyword_encoder, FineWebPosQ(data_folder=tmp_path), cache=None, show_progress_bar=False)
        (row,) = summarize(result.task_results).to_dict("records")
        assert (row["n"], row["ndcg_at_10"], row["psi"]) == (1, 1, 0)
        result.task_results[0].scores["test"][0] = {"hf_subset": "default", "ndcg_at_10": 0.6, "main_score": 1.0}
        (row,) = summarize(result.task_results).to_dict("records")  # of MTEB's own tasks
        assert (row["ndcg_at_10"], row["main_score"]) == (0.6, 1)
        assert math.isnan(row["psi"])
