"""Evaluation by position of a PyTerrier experiment."""

from __future__ import annotations

from typing import Any, Unpack

import pandas as pd

from fair_evaluation.position_evaluation import EvaluationOptions, Positions, evaluate_scores
from fair_evaluation.position_result import PositionEvaluation


def from_experiment(
    results: pd.DataFrame | tuple[Any, pd.DataFrame],
    positions: Positions,
    *,
    measure: str | None = None,
    **options: Unpack[EvaluationOptions],
) -> dict[str, PositionEvaluation]:
    """Evaluates the systems of a `pt.Experiment` by position.

    Args:
        results: The result of ``pt.Experiment(..., perquery=True)`` or ``perquery="both"``, with the columns ``name``,
            ``qid``, ``measure`` and ``value``.
        positions: The position of the answer by query id: a mapping, a series, or a frame with ``qid`` and the columns
            named by ``position``, ``length`` and ``unit``, such as the topics.
        measure: The measure to evaluate, such as "nDCG@10". Needed only if the experiment has several.
        **options: As in `evaluate_positions`: the columns ``position``, ``length`` and ``unit`` of the positions, and
            ``bins``, ``order``, ``length_classes``, ``confidence``, ``n_resamples`` and ``seed``.

    Returns:
        The evaluation of each system by name, in the order of the experiment.

    Raises:
        TypeError: ``results`` is not a frame, or ``positions`` has none of the forms above.
        ValueError: Columns or the measure are missing, queries and positions do not match, or two systems have the
            same name.
    """
    if isinstance(results, tuple) and len(results) == 2:
        results = results[1]  # perquery="both"
    if not isinstance(results, pd.DataFrame):
        raise TypeError(
            f"results: expected the result of pt.Experiment(..., perquery=True), got {type(results).__name__}"
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
        evaluations[str(name)] = evaluate_scores(
            part, positions, what=repr(name), name=str(name), measure=str(measure), **options
        )
    return evaluations
