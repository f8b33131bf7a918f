"""The result of an evaluation by position: group means, measures over the groups, and their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from fair_evaluation.measures import harmonic_mean, position_sensitivity_index, slope

Interval = tuple[float, float]
MEASURES = {"mean": "mean of the groups", "psi": "PSI", "harmonic_mean": "harmonic mean", "slope": "slope"}
"""The measures over groups, and their names in print."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PositionEvaluation:
    """One system's scores by position; print it for a table.

    Undefined values are None, or NaN in the frames. The measures leave out groups without queries.

    Attributes:
        name: The name of the system.
        measure: The name of the measure that the scores are of.
        groups: One row per group, from the beginning of documents to their end: ``group``, ``position`` in [0, 1],
            ``n`` (number of queries), ``mean``, and the bounds ``low`` and ``high`` of the mean's interval, which are
            NaN with fewer than two units of resampling.
        n_queries: The number of different queries; None if only group means are known.
        intervals: The bootstrap interval of each measure that has one, by the measure's name.
        confidence: The confidence level of the intervals.
        n_resamples: The number of resamples of the bootstrap; 0 if there are no intervals.
        seed: Seed of the bootstrap.
        lengths: The evaluation of each class of document length, by the name of the class.
        notes: Warnings about the result, as sentences.
        rows: The evaluated rows: ``qid``, ``unit``, ``group`` and ``score``; None if only group means are known.
    """

    name: str = ""
    measure: str = "score"
    groups: pd.DataFrame
    n_queries: int | None
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    confidence: float = 0.95
    n_resamples: int = 0
    seed: int = 0
    lengths: Mapping[str, PositionEvaluation] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    rows: pd.DataFrame | None = field(default=None, repr=False)

    @property
    def mean(self) -> float | None:
        """The unweighted mean of the group means."""
        return float(means.mean()) if len(means := self._filled["mean"].to_numpy()) else None

    @property
    def psi(self) -> float | None:
        """The position sensitivity index, ``1 - min / max`` of the group means: 0 is position-fair.

        It is also 0 if all group means are 0.
        """
        return position_sensitivity_index(means) if len(means := self._filled["mean"]) else None

    @property
    def harmonic_mean(self) -> float | None:
        """The harmonic mean of the group means; 0 if one of them is 0."""
        return harmonic_mean(means) if len(means := self._filled["mean"]) else None

    @property
    def slope(self) -> float | None:
        """The slope of the least-squares line of group mean over position; None with fewer than two groups.

        It is negative if the beginning is favoured.
        """
        filled = self._filled
        return slope(filled["position"], filled["mean"]) if len(filled) else None

    @property
    def _filled(self) -> pd.DataFrame:
        return self.groups[self.groups["n"] > 0]

    def to_dict(self) -> dict[str, Any]:
        """Returns all but the rows as a dict that `json.dumps` accepts, with None for NaN."""
        groups = self.groups.astype(object).where(self.groups.notna(), None)
        return {
            "name": self.name,
            "measure": self.measure,
            "n_queries": self.n_queries,
            "groups": groups.to_dict("records"),
            **{name: getattr(self, name) for name in MEASURES},
            "intervals": {name: list(interval) for name, interval in self.intervals.items()},
            "confidence": self.confidence,
            "n_resamples": self.n_resamples,
            "seed": self.seed,
            "lengths": {name: result.to_dict() for name, result in self.lengths.items()},
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        queries = "" if self.n_queries is None else f"{self.n_queries} queries in "
        head = f"{self.name or 'scores'}, {self.measure}: {queries}{len(self.groups)} groups"
        table = self.groups[["group", "n"]].assign(mean=[_three(value) for value in self.groups["mean"]])
        if self.n_resamples:
            head += f"; {100 * self.confidence:g} % intervals of {self.n_resamples} resamples"
            bounds = zip(self.groups["low"], self.groups["high"], strict=True)
            table["interval"] = ["" if math.isnan(low) else _brackets((low, high)) for low, high in bounds]
        measures = [
            f"{title:<18} {_three(getattr(self, name)):>6}"
            + (f"  {_brackets(self.intervals[name])}" if name in self.intervals else "")
            for name, title in MEASURES.items()
        ]
        parts = [head, table.to_string(index=False), "\n".join(measures)]
        if self.lengths:
            rows = [
                {"length": name, "n": int(result.groups["n"].sum())}
                | {measure: _three(getattr(result, measure)) for measure in MEASURES}
                for name, result in self.lengths.items()
            ]
            parts.append(pd.DataFrame(rows).to_string(index=False))
        return "\n".join([*parts, *(f"note: {note}" for note in self.notes)])


def _three(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def _brackets(interval: Interval) -> str:
    return f"[{interval[0]:.3f}, {interval[1]:.3f}]"
