from __future__ import annotations

import builtins
import logging
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from ir_measures import RR, Qrel, ScoredDoc, nDCG

from fair_evaluation import from_run

POSITIONS = {"q1": "beginning", "q2": "end", "q3": "end"}
RUN = pd.DataFrame(
    [("q1", "d1", 3.0), ("q1", "d2", 2.0), ("q2", "d1", 3.0), ("q2", "d2", 2.0), ("q3", "d3", 1.0)],
    columns=["qid", "docno", "score"],
)
QRELS = pd.DataFrame([("q1", "d1", 1), ("q2", "d2", 1), ("q3", "d3", 1)], columns=["qid", "docno", "label"])


def test_by_hand() -> None:
    result = from_run(RUN, QRELS, positions=POSITIONS, measure="RR@10", name="mine")
    assert (result.name, result.measure, result.n_queries) == ("mine", "RR@10", 3)
    assert result.groups["mean"].tolist() == [1.0, 0.75]
    assert from_run(RUN, QRELS, positions=POSITIONS).groups["mean"].tolist() == pytest.approx([1, (1 + 0.63093) / 2])
    assert from_run(RUN, QRELS, positions=POSITIONS).measure == "nDCG@10"


def test_all_forms(tmp_path: Path) -> None:
    expected = from_run(RUN, QRELS, positions=POSITIONS, measure=RR @ 10, n_resamples=20).to_dict()
    renamed = (
        RUN.rename(columns={"qid": "query_id", "docno": "doc_id"}),
        QRELS.rename(columns={"qid": "query_id", "docno": "doc_id", "label": "relevance"}),
    )
    run_file, qrels_file = tmp_path / "run", tmp_path / "qrels"
    run_file.write_text("".join(f"{r.qid} Q0 {r.docno} 0 {r.score} x\n" for r in RUN.itertuples()))
    qrels_file.write_text("".join(f"{r.qid} 0 {r.docno} {r.label}\n" for r in QRELS.itertuples()))
    runs: list[Any] = [
        RUN,
        renamed[0],
        {q: dict(zip(part["docno"], part["score"], strict=True)) for q, part in RUN.groupby("qid")},
        [ScoredDoc(*row) for row in RUN.itertuples(index=False)],
        (ScoredDoc(*row) for row in RUN.itertuples(index=False)),
        run_file,
        str(run_file),
        RUN.assign(query_id=RUN["qid"], extra=1),
    ]
    for run in runs:
        assert from_run(run, QRELS, positions=POSITIONS, measure="RR@10", n_resamples=20).to_dict() == expected
    for qrels in (
        renamed[1],
        [Qrel(*row) for row in QRELS.itertuples(index=False)],
        {q: {d: n} for q, d, n in QRELS.to_numpy()},
        qrels_file,
    ):
        assert from_run(RUN, qrels, positions=POSITIONS, measure="RR@10", n_resamples=20).to_dict() == expected


def test_queries_without_results_score_0_and_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fair_evaluation"):
        result = from_run(RUN[RUN["qid"] != "q3"], QRELS, positions=POSITIONS, measure="RR@10", name="mine")
    assert result.groups["mean"].tolist() == [1.0, 0.25]
    note = "1 of 3 queries have no results and score 0, such as ['q3']"
    assert note in result.notes
    assert caplog.messages == [f"mine: {note}"]


def test_an_empty_run() -> None:
    result = from_run(RUN[:0], QRELS, positions=POSITIONS)
    assert (result.mean, result.psi) == (0, 0)
    assert from_run({}, QRELS, positions=POSITIONS).to_dict() == result.to_dict()


def test_queries_that_are_not_judged_are_said() -> None:
    run = pd.concat([RUN, pd.DataFrame([("q9", "d1", 1.0)], columns=RUN.columns)])
    result = from_run(run, QRELS, positions=POSITIONS)
    assert "1 queries of the run are not judged and left out, such as ['q9']" in result.notes
    assert result.n_queries == 3


class TestErrors:
    def test_judged_queries_without_a_position(self) -> None:
        with pytest.raises(
            ValueError, match=re.escape("positions: 1 of 3 queries of qrels have no position, such as ['q3']")
        ):
            from_run(RUN, QRELS, positions={"q1": "beginning", "q2": "end"})

    def test_positions_without_a_judgement(self) -> None:
        with pytest.raises(ValueError, match=re.escape("positions: 1 queries have no score in qrels, such as ['q4']")):
            from_run(RUN, QRELS, positions={**POSITIONS, "q4": "end"})

    def test_no_judgements(self) -> None:
        with pytest.raises(ValueError, match="qrels: expected judgements, got none"):
            from_run(RUN, QRELS[:0], positions=POSITIONS)

    @pytest.mark.parametrize("measure", ["nDGC@10", "", "nDCG@"])
    def test_unknown_measures(self, measure: str) -> None:
        with pytest.raises(
            ValueError,
            match=re.escape(f"measure: expected a measure of ir_measures, such as 'nDCG@10', got {measure!r}"),
        ):
            from_run(RUN, QRELS, positions=POSITIONS, measure=measure)

    def test_columns(self) -> None:
        with pytest.raises(
            ValueError, match=re.escape("run: the columns ['score'] are missing, there are ['query_id', 'doc_id']")
        ):
            from_run(RUN[["qid", "docno"]], QRELS, positions=POSITIONS)
        with pytest.raises(ValueError, match=re.escape("qrels: the columns ['relevance'] are missing")):
            from_run(RUN, QRELS[["qid", "docno"]], positions=POSITIONS)

    def test_ids_that_are_no_strings(self) -> None:
        with pytest.raises(
            TypeError,
            match=re.escape(
                "run: expected strings in query_id, as ir_measures does, got [1, 1, 1, 1, 1]; use astype(str)"
            ),
        ):
            from_run(RUN.assign(qid=1), QRELS, positions=POSITIONS)
        with pytest.raises(TypeError, match="qrels: expected strings in doc_id"):
            from_run(RUN, QRELS.assign(docno=[1, 2, 3]), positions=POSITIONS)

    def test_scores_that_are_missing(self) -> None:
        with pytest.raises(
            ValueError, match=re.escape("run: score is missing or NaN for the queries ['q1', 'q1', 'q2', 'q2', 'q3']")
        ):
            from_run(RUN.assign(score=float("nan")), QRELS, positions=POSITIONS)

    def test_a_document_twice(self) -> None:
        with pytest.raises(
            ValueError, match=re.escape("run: expected each document once per query, got [('q1', 'd1')] more than once")
        ):
            from_run(pd.concat([RUN, RUN[:1]]), QRELS, positions=POSITIONS)

    def test_ir_measures_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = builtins.__import__

        def without(name: str, *args: Any, **kwargs: Any) -> Any:
            if name == "ir_measures":
                raise ImportError(name)
            return original(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(
            ImportError, match=re.escape("from_run needs ir_measures: pip install 'fair-calibration[evaluation]'")
        ):
            from_run(RUN, QRELS, positions=POSITIONS)


def test_measures_of_other_kinds() -> None:
    assert from_run(RUN, QRELS, positions=POSITIONS, measure=nDCG(cutoff=1)).groups["mean"].tolist() == [1, 0.5]


class TestCompetingEvidence:
    """Several copies of the evidence in one collection make the scores of positions incomparable."""

    NOTE = "at several positions in one collection: these compete"

    def test_several_relevant_documents_at_several_positions(self, caplog: pytest.LogCaptureFixture) -> None:
        qrels = pd.DataFrame([("q1", f"d{i}", 1) for i in range(3)] + [("q2", "d9", 1)], columns=QRELS.columns)
        run = pd.DataFrame([("q1", "d0", 2.0), ("q2", "d9", 1.0)], columns=RUN.columns)
        positions = pd.DataFrame(
            [("q1", "beginning"), ("q1", "middle"), ("q1", "end"), ("q2", "end")], columns=["qid", "place"]
        )
        with caplog.at_level(logging.WARNING):
            result = from_run(run, qrels, positions=positions)
        assert any(self.NOTE in note and "1 queries, such as ['q1']" in note for note in result.notes)
        assert self.NOTE in caplog.text
        lists = {"q1": ["beginning", "middle", "end"], "q2": "end"}
        assert from_run(run, qrels, positions=lists).notes == result.notes

    def test_rotations_in_one_collection(self) -> None:
        topics = pd.DataFrame({"qid": ["r0a", "r1a"], "place": ["beginning", "end"], "question": "a"})
        qrels = pd.DataFrame([("r0a", "r0d", 1), ("r1a", "r1d", 1)], columns=QRELS.columns)
        together = {qid: {"r0d": 2.0, "r1d": 1.0} for qid in topics["qid"]}
        (note,) = [n for n in from_run(together, qrels, positions=topics, unit="question").notes if self.NOTE in n]
        assert "2 queries, such as ['r0a', 'r1a']" in note
        apart = {"r0a": {"r0d": 2.0, "x": 1.0}, "r1a": {"r1d": 1.0}}
        assert not any(self.NOTE in n for n in from_run(apart, qrels, positions=topics, unit="question").notes)

    def test_a_query_of_several_groups_with_one_document(self) -> None:
        qrels = pd.DataFrame([("q1", "d1", 1)], columns=QRELS.columns)
        result = from_run({"q1": {"d1": 1.0}}, qrels, positions={"q1": ["beginning", "end"]})
        assert not any(self.NOTE in note for note in result.notes)
