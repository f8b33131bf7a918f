"""`summarize`: the position measures of MTEB's results as a table, one row per task, subset and length class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from mteb.results import TaskResult

from mteb_fair.scores import SCORE, Grouping, from_entry, measure_groups, pool_groups
from mteb_fair.tasks import TASKS, PosIR

COLUMNS = ("task", "split", "subset", "length", "n", SCORE, "psi", "harmonic_mean", "slope")


def groupings_of(task_name: str) -> tuple[Grouping, ...]:
    """Returns the position groups of a task by its name, also of one on local or selected data; () for other tasks."""
    # The longest name first: PosIRCrossLingual starts with PosIR.
    for name in sorted(TASKS, key=len, reverse=True):
        if task_name == name or task_name.startswith(f"{name}-"):
            return TASKS[name].groupings
    return ()


def summarize(results: Iterable[TaskResult], *, pool_subsets: bool = False) -> pd.DataFrame:
    """Returns the position measures of task results as a table with the columns `COLUMNS`.

    The first row of a task covers all document lengths, and its score is MTEB's own, the mean over queries. PosIR has
    further rows for its length classes, whose score is the mean over position bins, as published. Tasks without
    positions have a score alone.

    Args:
        results: The results, such as ``mteb.evaluate(...).task_results``.
        pool_subsets: Whether the queries of all languages are counted together, as one subset "all".

    Returns:
        The table. What is undefined, such as the PSI of a task without positions, is missing.
    """
    rows: list[dict[str, Any]] = []
    for result in results:
        groupings = groupings_of(result.task_name)
        for split, entries in result.scores.items():
            keys = {"task": result.task_name, "split": split}
            if not groupings:
                rows += [{**keys, "subset": e["hf_subset"], "length": "all", SCORE: e["main_score"]} for e in entries]
            elif pool_subsets:
                rows += _rows({**keys, "subset": "all"}, groupings, entries)
            else:
                for entry in entries:
                    rows += _rows({**keys, "subset": entry["hf_subset"]}, groupings, [entry])
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _rows(
    keys: Mapping[str, str], groupings: Sequence[Grouping], entries: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    rows = []
    for grouping in groupings:
        scores = pool_groups(from_entry(grouping, entry) for entry in entries)
        measures = measure_groups([scores[name] for name in grouping.groups])
        n = sum(score.n for score in scores.values())
        score = measures.mean
        if not grouping.name and groupings is PosIR.groupings:
            # Every query is in one bin, so this is the mean over queries.
            score = sum(s.n * s.mean for s in scores.values() if s.mean is not None) / n if n else None
        rows.append(
            {
                **keys,
                "length": grouping.name or "all",
                "n": n,
                SCORE: score,
                "psi": measures.psi,
                "harmonic_mean": measures.harmonic_mean,
                "slope": measures.slope,
            }
        )
    return rows
