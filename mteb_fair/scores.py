"""Computes scores per position group, and PSI, harmonic mean and slope over the groups.

Every position task and script takes its numbers from here. Groups are ordered from the beginning of a document to its
end. Undefined values, such as the mean of a group without queries or the slope of one group, are None (``null`` in
JSON) and never NaN, and the number of queries is given beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fair_evaluation.measures import harmonic_mean, position_sensitivity_index, slope

METRIC = "ndcg_cut_10"
"""The per-query score that is grouped, as pytrec_eval calls it; `SCORE` is its name in MTEB's results."""
SCORE = "ndcg_at_10"


@dataclass(frozen=True, kw_only=True)
class GroupScore:
    """The mean score of a group's queries.

    Attributes:
        n: The number of queries.
        mean: Their mean score; None without queries.
    """

    n: int
    mean: float | None

    def __post_init__(self) -> None:
        if self.n < 0 or (self.n == 0) != (self.mean is None):
            raise ValueError(
                f"GroupScore: expected a mean if and only if there are queries, got n={self.n}, {self.mean}"
            )
        if self.mean is not None and not (math.isfinite(self.mean) and self.mean >= 0):
            raise ValueError(f"GroupScore: expected a finite, nonnegative mean, got {self.mean}")


@dataclass(frozen=True, kw_only=True)
class PositionMeasures:
    """The measures over a list of position groups.

    Attributes:
        mean: The mean over the groups, all with the same weight; None without queries.
        psi: The position sensitivity index ``1 - min / max``; 0 is position-fair. 0 if all groups score 0; None without
            queries.
        harmonic_mean: The harmonic mean over the groups, 0 if any group scores 0; None without queries.
        slope: The slope of the least-squares line of score over position, where positions run from 0 to 1 and a group
            is placed at the middle of its share; negative if the beginning is favoured. None with one group.
    """

    mean: float | None
    psi: float | None
    harmonic_mean: float | None
    slope: float | None


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

    def key(self, suffix: str) -> str:
        """Returns the name of a measure in MTEB's flat results."""
        return f"{self.name}_{suffix}" if self.name else suffix


def score_groups(
    per_query: Mapping[str, float], labels: Mapping[str, Iterable[str]], groups: Sequence[str]
) -> dict[str, GroupScore]:
    """Computes the mean score of each group; a query counts in every group that it is labelled with.

    Args:
        per_query: The score of each query; missing queries, which retrieved nothing, score 0.
        labels: The groups of each query in all partitions; groups that are not in ``groups`` are ignored.
        groups: The names, in order.
    """
    members: dict[str, list[float]] = {group: [] for group in groups}
    for query, names in labels.items():
        for name in names:
            if name in members:
                members[name].append(per_query.get(query, 0.0))
    return {
        name: GroupScore(n=len(scores), mean=math.fsum(scores) / len(scores) if scores else None)
        for name, scores in members.items()
    }


def pool_groups(parts: Iterable[Mapping[str, GroupScore]]) -> dict[str, GroupScore]:
    """Pools groups of the same names, such as those of several subsets, as if all queries had been scored at once."""
    members: dict[str, list[GroupScore]] = {}
    for part in parts:
        for name, score in part.items():
            members.setdefault(name, []).append(score)
    pooled = {}
    for name, scores in members.items():
        n = sum(score.n for score in scores)
        total = math.fsum(score.n * score.mean for score in scores if score.mean is not None)
        pooled[name] = GroupScore(n=n, mean=total / n if n else None)
    return pooled


def measure_groups(scores: Sequence[GroupScore]) -> PositionMeasures:
    """Computes the measures over groups in the order of their positions, leaving out empty groups.

    Raises:
        ValueError: There are no groups.
    """
    if not scores:
        raise ValueError("scores: expected at least one position group, got none")
    places = [(index + 0.5) / len(scores) for index in range(len(scores))]
    filled = [(place, score.mean) for place, score in zip(places, scores, strict=True) if score.mean is not None]
    if not filled:
        return PositionMeasures(mean=None, psi=None, harmonic_mean=None, slope=None)
    means = [mean for _, mean in filled]
    return PositionMeasures(
        mean=math.fsum(means) / len(means),
        psi=position_sensitivity_index(means),
        harmonic_mean=harmonic_mean(means),
        slope=slope([place for place, _ in filled], means),
    )


def to_entry(grouping: Grouping, scores: Mapping[str, GroupScore]) -> dict[str, float | int | None]:
    """Writes groups and their measures as the flat scores of an MTEB result; `from_entry` reads them back."""
    entry: dict[str, float | int | None] = {}
    for name in grouping.groups:
        entry[f"{name}_{SCORE}"] = scores[name].mean
        entry[f"{name}_n"] = scores[name].n
    measures = measure_groups([scores[name] for name in grouping.groups])
    entry[grouping.key(f"position_mean_{SCORE}")] = measures.mean
    entry[grouping.key("psi")] = measures.psi
    entry[grouping.key("harmonic_mean")] = measures.harmonic_mean
    entry[grouping.key("slope")] = measures.slope
    return entry


def from_entry(grouping: Grouping, entry: Mapping[str, Any]) -> dict[str, GroupScore]:
    """Reads the groups from the flat scores of an MTEB result.

    Raises:
        ValueError: The entry does not hold these groups.
    """
    scores = {}
    for name in grouping.groups:
        score_key, n_key = f"{name}_{SCORE}", f"{name}_n"
        if n_key not in entry or score_key not in entry:
            raise ValueError(
                f"entry: expected the scores {score_key!r} and {n_key!r}; the result belongs to another task, or to "
                "another version of the task"
            )
        scores[name] = GroupScore(n=int(entry[n_key]), mean=entry[score_key])
    return scores
