from __future__ import annotations

import re
from typing import Any

import pandas as pd
import pyterrier as pt
import pytest
from ir_measures import RR, nDCG

from fair_evaluation import evaluate_positions, from_experiment, psi_test

QIDS = ["q1", "q2", "q3", "q4"]
TOPICS = pd.DataFrame(
    {
        "qid": QIDS,
        "query": ["a", "b", "c", "d"],
        "place": ["beginning", "end", "beginning", "end"],
        "position": [0.1, 0.9, 0.2, 0.8],
        "tokens": [100, 100, 600, 600],
        "question": ["a", "a", "b", "b"],
    }
)
QRELS = pd.DataFrame({"qid": QIDS, "docno": ["d1", "d2", "d3", "d4"], "label": 1})


def system(*ranks: int) -> pt.Transformer:
    """Ranks the relevant document of each query so; 0 is not at all."""
    rows = []
    for qid, docno, rank in zip(QIDS, QRELS["docno"], ranks, strict=True):
        rows += [(qid, f"x{i}", 10.0 - i, i - 1) for i in range(1, 4) if i != rank]
        rows += [(qid, docno, 10.0 - rank, rank - 1)] if rank else []
    return pt.Transformer.from_df(pd.DataFrame(rows, columns=["qid", "docno", "score", "rank"]))


@pytest.fixture(scope="module")
def results() -> Any:
    return pt.Experiment(
        [system(1, 2, 1, 2), system(1, 1, 2, 0)],
        TOPICS,
        QRELS,
        [RR @ 10, nDCG @ 10],
        names=["one", "two"],
        perquery="both",
    )


def test_systems_by_place(results: Any) -> None:
    evaluated = from_experiment(results, TOPICS, measure="RR@10", position="place")
    assert list(evaluated) == ["one", "two"]
    one, two = evaluated.values()
    assert (one.name, one.measure, one.n_queries) == ("one", "RR@10", 4)
    assert one.groups["mean"].tolist() == [1, 0.5]
    assert one.psi == 0.5
    assert two.groups["mean"].tolist() == [0.75, 0.5]  # what is not found scores 0
    assert psi_test(one, two, n_resamples=99).difference == pytest.approx(0.5 - 1 / 3)


def test_both_forms_and_all_forms_of_positions(results: Any) -> None:
    expected = from_experiment(results, TOPICS, measure="RR@10", n_resamples=20, position="place")["two"].to_dict()
    by_query = TOPICS.set_index("qid")["place"]
    for frame in (results, results.perquery, (None, results[1])):
        for positions in (by_query, by_query.to_dict(), by_query.astype("category"), by_query[::-1]):
            assert from_experiment(frame, positions, measure="RR@10", n_resamples=20)["two"].to_dict() == expected
    one_measure = results.perquery[results.perquery["measure"] == "RR@10"]
    assert from_experiment(one_measure, by_query, n_resamples=20)["two"].to_dict() == expected
    assert from_experiment(results, by_query, measure=RR @ 10, n_resamples=20)["two"].to_dict() == expected  # type: ignore[arg-type]


def test_topics_of_position_collections(results: Any) -> None:
    topics = TOPICS.drop(columns="position")
    by_place = from_experiment(results, topics, measure="RR@10", n_resamples=20)["two"]
    assert by_place.groups["group"].tolist() == ["beginning", "end"]
    named = from_experiment(results, topics, measure="RR@10", n_resamples=20, position="place")["two"]
    assert by_place.to_dict() == named.to_dict()


def test_settings_reach_the_evaluation(results: Any) -> None:
    found = from_experiment(
        results,
        TOPICS,
        measure="RR@10",
        length="tokens",
        unit="question",
        bins=[0, 0.5, 1],
        n_resamples=20,
        seed=3,
        confidence=0.5,
    )["one"]
    rows = TOPICS.assign(score=[1, 0.5, 1, 0.5])
    expected = evaluate_positions(
        rows,
        length="tokens",
        unit="question",
        bins=[0, 0.5, 1],
        n_resamples=20,
        seed=3,
        confidence=0.5,
        name="one",
        measure="RR@10",
    )
    assert found.to_dict() == expected.to_dict()
    assert list(found.lengths) == ["(0, 512]", "(512, 1024]"]


def test_several_positions_of_a_query(results: Any) -> None:
    positions = {"q1": ["beginning", "end"], "q2": ["end"], "q3": "beginning", "q4": "end"}
    found = from_experiment(results, positions, measure="RR@10")["one"]
    assert found.groups["mean"].tolist() == pytest.approx([1, 2 / 3])
    rows = pd.DataFrame(
        {"qid": ["q1", "q1", "q2", "q3", "q4"], "position": ["beginning", "end", "end", "beginning", "end"]}
    )
    assert from_experiment(results, rows, measure="RR@10")["one"].to_dict() == found.to_dict()


def test_categories_keep_their_order_and_other_columns_are_left_out(results: Any) -> None:
    order = pd.CategoricalDtype(["z", "a"])
    series = pd.Series(["a", "z", "a", "z"], index=QIDS).astype(order)
    found = from_experiment(results, series, measure="RR@10")["one"]
    assert found.groups["group"].tolist() == ["z", "a"]
    frame = series.rename_axis("qid").rename("place").reset_index().assign(score=9, group=9)
    assert from_experiment(results, frame, measure="RR@10")["one"].to_dict() == found.to_dict()


class TestErrors:
    def test_no_queries_in_the_results(self) -> None:
        means = pt.Experiment([system(1, 1, 1, 1)], TOPICS, QRELS, [RR @ 10], names=["one"])
        message = "results: the columns ['qid', 'measure', 'value'] are missing, there are ['name', 'RR@10']; run pt."
        with pytest.raises(ValueError, match=re.escape(message)):
            from_experiment(means, TOPICS, position="place")

    def test_no_frame(self) -> None:
        with pytest.raises(TypeError, match=r"results: expected the result of pt\.Experiment"):
            from_experiment({"one": {"RR@10": 1}}, TOPICS)  # type: ignore[arg-type]

    @pytest.mark.parametrize("measure", [None, "AP"])
    def test_which_measure(self, results: Any, measure: str | None) -> None:
        with pytest.raises(ValueError, match=rf"measure: expected one of \['.+@10', '.+@10'\], got {measure!r}"):
            from_experiment(results, TOPICS, measure=measure)

    def test_queries_without_a_position(self, results: Any) -> None:
        message = (
            "positions: 1 of 4 queries of 'one' have no position, such as ['q4'] (ids with a position are of type str)"
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            from_experiment(results, TOPICS[:3], measure="RR@10")

    def test_ids_of_another_type(self, results: Any) -> None:
        with pytest.raises(
            ValueError,
            match=re.escape("have no position, such as ['q1', 'q2', 'q3', 'q4'] (ids with a position are of type int)"),
        ):
            from_experiment(results, {1: "end"}, measure="RR@10")  # type: ignore[dict-item]

    def test_positions_without_a_score(self, results: Any) -> None:
        positions = {**TOPICS.set_index("qid")["place"], "q5": "end"}
        with pytest.raises(ValueError, match=re.escape("positions: 1 queries have no score in 'one', such as ['q5']")):
            from_experiment(results, positions, measure="RR@10")

    @pytest.mark.parametrize(("column", "value"), [("position", "none"), ("length", "none"), ("unit", "none")])
    def test_columns_that_are_not_there(self, results: Any, column: str, value: str) -> None:
        with pytest.raises(
            ValueError, match=re.escape("positions: the columns ['none'] are missing, there are ['qid', 'query'")
        ):
            from_experiment(results, TOPICS, measure="RR@10", **{column: value})  # type: ignore[arg-type]

    def test_a_mapping_has_no_lengths(self, results: Any) -> None:
        with pytest.raises(
            ValueError, match=re.escape("positions: the columns ['tokens'] are missing, there are ['qid', 'position']")
        ):
            from_experiment(results, dict.fromkeys(QIDS, "end"), measure="RR@10", length="tokens")

    def test_positions_of_another_type(self, results: Any) -> None:
        with pytest.raises(TypeError, match="positions: expected a mapping, a series or a frame, got list"):
            from_experiment(results, ["end"] * 4, measure="RR@10")  # type: ignore[arg-type]

    def test_systems_of_one_name(self, results: Any) -> None:
        with pytest.raises(
            ValueError, match="results: the system 'one' has queries twice; give the systems different names="
        ):
            from_experiment(pd.concat([results.perquery] * 2), TOPICS, measure="RR@10")
