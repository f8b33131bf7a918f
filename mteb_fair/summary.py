"""Position measures of MTEB results as a table: one row per model, task, language and length class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from mteb.results import TaskResult

from mteb_fair.posir import PosIR
from mteb_fair.registry import TASKS
from mteb_fair.scores import SCORE, Grouping, from_entry, measure_groups, pool_groups

COLUMNS = ("task", "split", "subset", "length", "n", SCORE, "psi", "harmonic_mean", "slope")


def groupings_of(task_name: str) -> tuple[Grouping, ...]:
    """Returns the position groups of a task, also of one on local or selected data; none where it is not ours."""
    # The longest name first: PosIRCrossLingual starts with PosIR.
    for name in sorted(TASKS, key=len, reverse=True):
        if task_name == name or task_name.startswith(f"{name}-"):
            return TASKS[name].groupings
    return ()


def summarize(results: Iterable[TaskResult], *, pool_subsets: bool = False) -> pd.DataFrame:
    """Returns the measures of task results as a table with the columns `COLUMNS`.

    The score of a length class of PosIR is the mean of its position bins, as published; the first row of a task is over
    all lengths, and its score is the mean over queries, MTEB's own. Tasks without positions have that row alone.

    Args:
        results: Such as ``mteb.evaluate(...).task_results``.
        pool_subsets: Whether the queries of all languages are counted together, as one subset "all".
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
