"""Evaluation by position of a run that ir_measures scores."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Unpack, cast

import pandas as pd

from fair_evaluation.position_evaluation import EvaluationOptions, Positions, evaluate_scores
from fair_evaluation.position_result import PositionEvaluation

logger = logging.getLogger("fair_evaluation")
_SHOWN = 5  # records named in an error
_COLUMNS = {"qid": "query_id", "docno": "doc_id", "label": "relevance"}  # PyTerrier's names, and those of ir_measures
Table = pd.DataFrame | Mapping[str, Mapping[str, float]] | str | os.PathLike[str] | Iterable[Any]


def from_run(
    run: Table,
    qrels: Table,
    *,
    positions: Positions,
    measure: Any = "nDCG@10",
    name: str = "run",
    **options: Unpack[EvaluationOptions],
) -> PositionEvaluation:
    """Scores a run query by query with ir_measures, and evaluates it by position.

    Args:
        run: A frame with ``qid``, ``docno`` and ``score`` (or ``query_id`` and ``doc_id``), a dict ``{query: {document:
            score}}``, the path of a TREC run, or `ir_measures.ScoredDoc` tuples. A judged query without results scores
            0, with a warning and a note in the result.
        qrels: The judgements in the same forms, with ``label`` (or ``relevance``) instead of the score. The judged
            queries are the ones that are evaluated.
        positions: The position of the answer by query id, as in `from_experiment`.
        measure: A measure of ir_measures, or its name.
        name: A name for the run.
        **options: As in `evaluate_positions`: the columns ``position``, ``length`` and ``unit`` of the positions, and
            ``bins``, ``order``, ``length_classes``, ``confidence``, ``n_resamples`` and ``seed``.

    Returns:
        The evaluation. Its notes also say, as warnings do, where copies of the evidence compete in one collection, so
        that the scores of the positions are not comparable.

    Raises:
        ImportError: ir_measures is not installed.
        TypeError: Ids are not strings, which ir_measures needs.
        ValueError: The measure is unknown, columns or values are missing, a document occurs twice for a query, there
            are no judgements, or queries and positions do not match.
    """
    try:
        import ir_measures
    except ImportError as error:
        raise ImportError("from_run needs ir_measures: pip install 'fair-calibration[evaluation]'") from error
    try:
        measure = ir_measures.parse_measure(measure) if isinstance(measure, str) else measure
    except (NameError, ValueError) as error:
        raise ValueError(f"measure: expected a measure of ir_measures, such as 'nDCG@10', got {measure!r}") from error
    judged = _to_frame("qrels", qrels, ir_measures.read_trec_qrels, "relevance")
    found = _to_frame("run", run, ir_measures.read_trec_run, "score")
    if len(judged) == 0:
        raise ValueError("qrels: expected judgements, got none")
    metrics = list(ir_measures.iter_calc([measure], judged, found))
    scores = pd.DataFrame({"qid": [m.query_id for m in metrics], "score": [float(m.value) for m in metrics]})
    result = evaluate_scores(scores, positions, what="qrels", name=name, measure=str(measure), **options)
    queries, answered = list(dict.fromkeys(judged["query_id"])), set(found["query_id"])
    notes = []
    if missing := [query for query in queries if query not in answered]:
        notes.append(
            f"{len(missing)} of {len(queries)} queries have no results and score 0, such as {missing[:_SHOWN]}"
        )
    if unjudged := [query for query in dict.fromkeys(found["query_id"]) if query not in set(queries)]:
        notes.append(f"{len(unjudged)} queries of the run are not judged and left out, such as {unjudged[:_SHOWN]}")
    if competing := _competing_queries(judged, found, result):
        notes.append(
            f"{len(competing)} queries, such as {competing[:_SHOWN]}, have relevant documents, or copies of them, at "
            "several positions in one collection: these compete, so a position scores low where another one wins, and "
            "the positions are not comparable; make one collection per position, as build_collections and build_probes "
            "do, and search each by itself"
        )
    for note in notes:
        logger.warning("%s: %s", name, note)
    return replace(result, notes=result.notes + tuple(notes))


def _competing_queries(judged: pd.DataFrame, found: pd.DataFrame, result: PositionEvaluation) -> list[str]:
    """Returns the queries whose evidence stands in one collection at several positions.

    They have several relevant documents and several positions; or a query of the same unit, such as the same question
    asked at another position, has its relevant document among the documents found.
    """
    rows, relevant = cast(pd.DataFrame, result.rows), judged[judged["relevance"] > 0]
    positions = rows.groupby("qid")["group"].nunique()
    documents = relevant.groupby("query_id")["doc_id"].nunique()
    several = set(positions.index[positions > 1]) & set(documents.index[documents > 1])
    unit = rows.drop_duplicates("qid").set_index("qid")["unit"]
    owned = relevant.assign(unit=relevant["query_id"].map(unit)).dropna(subset="unit")
    listed = found.assign(unit=found["query_id"].map(unit)).dropna(subset="unit")
    pairs = listed.merge(owned, on=["doc_id", "unit"], suffixes=("", "_owner"))
    own = set(relevant[["query_id", "doc_id"]].itertuples(index=False, name=None))
    pairs_of_query = pairs[["query_id", "doc_id"]].itertuples(index=False, name=None)
    several |= {query for query, document in pairs_of_query if (query, document) not in own}
    return [query for query in dict.fromkeys(judged["query_id"]) if query in several]


def _to_frame(what: str, table: Any, read: Any, value: str) -> pd.DataFrame:
    """Returns a table as a checked frame of ``query_id``, ``doc_id`` and the value."""
    if isinstance(table, str | os.PathLike):
        table = read(os.fspath(table))
    if isinstance(table, Mapping):
        table = [(query, document, v) for query, documents in table.items() for document, v in documents.items()]
    elif not isinstance(table, pd.DataFrame):
        table = [(row.query_id, row.doc_id, getattr(row, value)) for row in table]
    columns = ["query_id", "doc_id", value]
    frame = table if isinstance(table, pd.DataFrame) else pd.DataFrame(table, columns=columns)
    # A frame may have the names of both: those of ir_measures take precedence.
    frame = frame.rename(columns={k: v for k, v in _COLUMNS.items() if v not in frame.columns})
    if missing := [column for column in columns if column not in frame.columns]:
        raise ValueError(f"{what}: the columns {missing} are missing, there are {list(frame.columns)}")
    frame = frame[columns]
    for column in columns[:2]:
        if odd := [v for v in frame[column] if not isinstance(v, str)]:
            raise TypeError(
                f"{what}: expected strings in {column}, as ir_measures does, got {odd[:_SHOWN]}; use astype(str)"
            )
    if (absent := frame[value].isna()).any():
        raise ValueError(
            f"{what}: {value} is missing or NaN for the queries {frame['query_id'][absent].tolist()[:_SHOWN]}"
        )
    if (twice := frame.duplicated(columns[:2])).any():
        found = list(frame.loc[twice, columns[:2]].itertuples(index=False, name=None))
        raise ValueError(f"{what}: expected each document once per query, got {found[:_SHOWN]} more than once")
    return frame
