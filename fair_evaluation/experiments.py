"""Evaluation by position of PyTerrier experiments."""

from __future__ import annotations

from typing import Any, Unpack

import pandas as pd

from fair_evaluation.position_evaluation import EvaluationOptions, evaluate_positions
from fair_evaluation.position_result import PositionEvaluation
from fair_evaluation.query_positions import Positions, join_positions


def from_experiment(
    results: pd.DataFrame | tuple[Any, pd.DataFrame],
    positions: Positions,
    *,
    measure: str | None = None,
    position: str = "position",
    length: str | None = None,
    unit: str | None = None,
    **options: Unpack[EvaluationOptions],
) -> dict[str, PositionEvaluation]:
    """Evaluates the systems of a `pt.Experiment` by position.

    Args:
        results: What ``pt.Experiment(..., perquery=True)`` or ``perquery="both"`` returns, with the columns ``name``,
            ``qid``, ``measure`` and ``value``.
        positions: By query id: a mapping or a series of positions, or a frame with ``qid`` and the columns that
            ``position``, ``length`` and ``unit`` name, such as topics.
        measure: The measure, such as "nDCG@10"; may be left out where the experiment has one alone.
        position: The column of positions; see `evaluate_positions` for these and the other settings.
        length: The column of document lengths.
        unit: The column of units.
        **options: ``bins``, ``order``, ``length_classes``, ``confidence``, ``n_resamples``, ``seed``.

    Returns:
        The evaluation of each system, by its name, in the order of the experiment.

    Raises:
        TypeError: ``results`` is no frame, such as that of an experiment without ``perquery``.
        ValueError: It has no such columns or measure, or queries and positions do not fit, or a system occurs twice.
    """
    if isinstance(results, tuple) and len(results) == 2:
        results = results[1]  # perquery="both"
    if not isinstance(results, pd.DataFrame):
        raise TypeError(
            f"results: expected what pt.Experiment(..., perquery=True) returns, got {type(results).__name__}"
        )
    if missing := [column for column in ("name", "qid", "measure", "value") if column not in results.columns]:
        raise ValueError(
            f"results: the columns {missing} are missing, there are {list(results.columns)}; run pt.Experiment with "
            "perquery=True or perquery='both'"
        )
    measures = list(dict.fromkeys(results["measure"].map(str)))
    if measure is None and len(measures) == 1:
        (measure,) = measures
    if str(measure) not in measures:
        raise ValueError(f"measure: expected one of {measures}, got {measure!r}")
    scores = results[results["measure"].map(str) == str(measure)].rename(columns={"value": "score"})
    evaluations = {}
    for name, part in scores.groupby("name", sort=False):
        if part["qid"].duplicated().any():
            raise ValueError(f"results: the system {name!r} has queries twice; give the systems different names=")
        table = join_positions(part, positions, position=position, length=length, unit=unit, what=repr(name))
        evaluations[str(name)] = evaluate_positions(
            table, position=position, length=length, unit=unit, name=str(name), measure=str(measure), **options
        )
    return evaluations
