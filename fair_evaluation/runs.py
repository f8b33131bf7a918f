"""Evaluation by position of a run, scored by ir_measures."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, Unpack

import pandas as pd

from fair_evaluation.position_evaluation import EvaluationOptions, evaluate_positions
from fair_evaluation.position_result import PositionEvaluation
from fair_evaluation.query_positions import Positions, join_positions

logger = logging.getLogger("fair_evaluation")
_NAMED = 5  # how many records an error names
_NAMES = {"qid": "query_id", "docno": "doc_id", "label": "relevance"}
"""PyTerrier's names of columns, and those of ir_measures."""
Table = pd.DataFrame | Mapping[str, Mapping[str, float]] | str | os.PathLike[str] | Iterable[Any]


def from_run(
    run: Table,
    qrels: Table,
    *,
    positions: Positions,
    measure: Any = "nDCG@10",
    name: str = "run",
    position: str = "position",
    length: str | None = None,
    unit: str | None = None,
    **options: Unpack[EvaluationOptions],
) -> PositionEvaluation:
    """Scores a run query by query with ir_measures, and evaluates it by position.

    Args:
        run: A frame with ``qid``, ``docno`` and ``score`` (or ``query_id``, ``doc_id``), ``{query: {document:
            score}}``, the path of a TREC run, or `ir_measures.ScoredDoc` tuples. A judged query without results scores
            0, which is logged and noted.
        qrels: Likewise, with ``label`` (or ``relevance``) in the place of the score. Its queries are those evaluated.
        positions: By query id, see `from_experiment`.
        measure: One of ir_measures, or its name.
        name: What the run is called.
        position: See `evaluate_positions`, for these and the other settings.
        length: Likewise.
        unit: Likewise.
        **options: ``bins``, ``order``, ``length_classes``, ``confidence``, ``n_resamples``, ``seed``.

    Raises:
        ImportError: ir_measures is not installed.
        TypeError: Ids are no strings, which ir_measures needs.
        ValueError: The measure is unknown, columns or values are missing, a document is twice in a query, there are no
            judgements, or queries and positions do not fit.
    """
    ir_measures = _ir_measures()
    measure = _parse(ir_measures, measure)
    judged = _to_frame("qrels", qrels, ir_measures.read_trec_qrels, "relevance")
    found = _to_frame("run", run, ir_measures.read_trec_run, "score")
    if len(judged) == 0:
        raise ValueError("qrels: expected judgements, got none")
    metrics = list(ir_measures.iter_calc([measure], judged, found))
    scores = pd.DataFrame({"qid": [m.query_id for m in metrics], "score": [float(m.value) for m in metrics]})
    table = join_positions(scores, positions, position=position, length=length, unit=unit, what="qrels")
    result = evaluate_positions(
        table, position=position, length=length, unit=unit, name=name, measure=str(measure), **options
    )
    queries, answered = list(dict.fromkeys(judged["query_id"])), set(found["query_id"])
    notes = []
    if bare := [query for query in queries if query not in answered]:
        notes.append(f"{len(bare)} of {len(queries)} queries have no results and score 0, such as {bare[:_NAMED]}")
    if strangers := [query for query in dict.fromkeys(found["query_id"]) if query not in set(queries)]:
        notes.append(f"{len(strangers)} queries of the run are not judged and left out, such as {strangers[:_NAMED]}")
    for note in notes:
        logger.warning("%s: %s", name, note)
    return replace(result, notes=result.notes + tuple(notes))


def _ir_measures() -> ModuleType:
    try:
        import ir_measures
    except ImportError as error:
        raise ImportError("from_run needs ir_measures: pip install 'fair-calibration[evaluation]'") from error
    return ir_measures


def _parse(ir_measures: ModuleType, measure: Any) -> Any:
    if not isinstance(measure, str):
        return measure
    try:
        return ir_measures.parse_measure(measure)
    except (NameError, ValueError) as error:
        raise ValueError(f"measure: expected a measure of ir_measures, such as 'nDCG@10', got {measure!r}") from error


def _to_frame(what: str, table: Any, read: Any, value: str) -> pd.DataFrame:
    """Returns query_id, doc_id and the value, checked."""
    if isinstance(table, str | os.PathLike):
        table = read(os.fspath(table))
    if isinstance(table, Mapping):
        table = [(query, document, v) for query, documents in table.items() for document, v in documents.items()]
    elif not isinstance(table, pd.DataFrame):
        table = [(row.query_id, row.doc_id, getattr(row, value)) for row in table]
    columns = ["query_id", "doc_id", value]
    frame = table if isinstance(table, pd.DataFrame) else pd.DataFrame(table, columns=columns)
    # A frame may have both kinds of names: ir_measures' own come first.
    frame = frame.rename(columns={k: v for k, v in _NAMES.items() if v not in frame.columns})
    if missing := [column for column in columns if column not in frame.columns]:
        raise ValueError(f"{what}: the columns {missing} are missing, there are {list(frame.columns)}")
    frame = frame[columns]
    for column in columns[:2]:
        if odd := [v for v in frame[column] if not isinstance(v, str)]:
            raise TypeError(
                f"{what}: expected strings in {column}, as ir_measures does, got {odd[:_NAMED]}; use astype(str)"
            )
    if (absent := frame[value].isna()).any():
        raise ValueError(
            f"{what}: {value} is missing or NaN for the queries {frame['query_id'][absent].tolist()[:_NAMED]}"
        )
    if (twice := frame.duplicated(columns[:2])).any():
        found = list(frame.loc[twice, columns[:2]].itertuples(index=False, name=None))
        raise ValueError(f"{what}: expected a document once for a query, got {found[:_NAMED]} more than once")
    return frame
