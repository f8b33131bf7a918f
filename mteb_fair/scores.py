"""Scores by position group in MTEB's results, and `summarize`, which puts them in a table.

Groups are ordered from the beginning of a document to its end. Undefined values, such as the mean of a group without
queries or the slope of one group, are None (``null`` in JSON) and never NaN, and the number of queries is given beside
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from mteb.results import TaskResult

from fair_evaluation.measures import harmonic_mean, position_sensitivity_index, slope

METRIC = "ndcg_cut_10"
"""The per-query score that is grouped, as pytrec_eval calls it; `SCORE` is its name in MTEB's results."""
SCORE = "ndcg_at_10"
_MEASURES = ("psi", "harmonic_mean", "slope")
COLUMNS = ("task", "split", "subset", "length", "n", SCORE, *_MEASURES, "main_score")


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """A partition of documents by position: PosIR has one for each length quartile, for instance.

    Attributes:
        name: The prefix of the names of its measures; empty for the main partition.
        groups: The names of the groups, from the beginning of documents to the end. Partitions of one task share no
            names.
    """

    name: str
    groups: tuple[str, ...]


def score_groups(
    grouping: Grouping, per_query: Mapping[str, float], labels: Mapping[str, Iterable[str]]
) -> dict[str, float | int | None]:
    """Computes the scores of position groups and the measures over them, as flat scores of an MTEB result.

    Groups without queries have no mean and are left out of the measures. A group's place, from which the slope is
    computed, is the middle of its share of the positions, which run from 0 to 1.

    Args:
        grouping: The groups.
        per_query: The score of each query; missing queries, which retrieved nothing, score 0.
        labels: The groups of each query in all partitions; a query counts in every group that it is labelled with.
    """
    members: dict[str, list[float]] = {group: [] for group in grouping.groups}
    for query, names in labels.items():
        for name in members.keys() & names:
            members[name].append(per_query.get(query, 0.0))
    entry: dict[str, float | int | None] = {}
    places, means = [], []
    for number, (group, scores) in enumerate(members.items()):
        entry[f"{group}_{SCORE}"] = mean = math.fsum(scores) / len(scores) if scores else None
        entry[f"{group}_n"] = len(scores)
        if mean is not None:
            places.append((number + 0.5) / len(members))
            means.append(mean)
    prefix = f"{grouping.name}_" if grouping.name else ""
    entry[f"{prefix}position_mean_{SCORE}"] = math.fsum(means) / len(means) if means else None
    entry[f"{prefix}psi"] = position_sensitivity_index(means) if means else None
    entry[f"{prefix}harmonic_mean"] = harmonic_mean(means) if means else None
    entry[f"{prefix}slope"] = slope(places, means) if means else None
    return entry


def summarize(results: Iterable[TaskResult]) -> pd.DataFrame:
    """Returns the position measures of task results as a table with the columns `COLUMNS`.

    The first row of a task covers all document lengths. PosIR has further rows for its length classes. The score of a
    row is the mean over its position groups, as published, except in the first row of PosIR, where it is the
    mean over queries. ``main_score`` is the one that MTEB reports for a task, such as the accuracy for ColDeRReranking.

    Args:
        results: The results, such as ``mteb.evaluate(...).task_results``.

    Returns:
        The table. What is undefined, such as the PSI of a task without positions, is missing.
    """
    rows: list[dict[str, Any]] = []
    for result in results:
        for split, entries in result.scores.items():
            for entry in entries:
                keys = {"task": result.task_name, "split": split, "subset": entry["hf_subset"]}
                rows += [{**keys, **row} for row in _rows(entry)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _rows(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for all lengths and one for each length class of a result."""
    if "psi" not in entry:
        return [{"length": "all", SCORE: entry.get(SCORE), "main_score": entry["main_score"]}]
    lengths = [key.removesuffix("_psi") for key in entry if key.endswith("_psi")]
    groups: dict[str, list[str]] = {length: [] for length in ["", *lengths]}
    for key in entry:
        if key.endswith("_n"):  # such as q1_bin00_n
            length = next((length for length in lengths if key.startswith(f"{length}_")), "")
            groups[length].append(key.removesuffix("_n"))
    rows = []
    for length, names in groups.items():
        prefix = f"{length}_" if length else ""
        n, score = sum(entry[f"{name}_n"] for name in names), entry[f"{prefix}position_mean_{SCORE}"]
        if lengths and not length:
            score = sum(entry[f"{name}_n"] * (entry[f"{name}_{SCORE}"] or 0.0) for name in names) / n
        measures = {name: entry[f"{prefix}{name}"] for name in _MEASURES}
        row = {"length": length or "all", "n": n, SCORE: score, **measures}
        rows.append(row if length else {**row, "main_score": entry["main_score"]})
    return rows
