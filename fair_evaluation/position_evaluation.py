"""Evaluation by position: group means, PSI, harmonic mean, slope and rank correlation, with bootstrap intervals.

Intervals come from resampling queries, or units of queries (`fair_evaluation.resampling`).

- Group means, mean, harmonic mean, slope and rank correlation have percentile intervals.
- PSI is computed from a minimum and a maximum, which sampling error alone drives apart: it is biased upward, and in
  resamples twice as much. So its interval is the basic (reverse percentile) one, clipped to [0, 1], which corrects for
  some of the bias; it may lie below PSI itself. To decide whether two systems differ, use `psi_test`.

Bias of PSI (mean of the estimates minus the true value), simulated with nDCG@10 of independent queries:

    queries in each group                   25     50    100    200   1000
    fair, mean .93, 3 groups              .064   .044   .032   .022   .010
    fair, mean .93, 20 groups             .134   .097   .069   .049   .022
    fair, mean .62, 3 groups              .164   .116   .087   .061   .028
    fair, mean .62, 20 groups             .335   .245   .179   .128   .059
    true PSI .16, mean .89, 3 groups      .002  -.001   .004   .001   .000
    true PSI .16, mean .89, 20 groups     .070   .040   .023   .012   .002

So compare PSI only between systems with the same queries and groups and about the same mean. Coverage of the 95 %
intervals (300 simulations each): .88-.96 for group means, .87-.96 for mean, harmonic mean and slope; for PSI .88-.95 if
the true value is .16, .86-.88 if it is 0 with 3 groups, and only .47-.55 if it is 0 with 20 groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict

import numpy as np
import pandas as pd

from fair_evaluation.measures import Array, harmonic_mean_of_rows, psi_of_rows, slope_of_rows
from fair_evaluation.position_groups import Grouped, LengthClasses, group_lengths, group_positions
from fair_evaluation.position_result import Interval, PositionEvaluation
from fair_evaluation.query_positions import choose_position_column
from fair_evaluation.resampling import Codes, UnitTotals, add_up_units, draw_weights, rank_correlation

_SHOWN = 5  # records named in an error


class EvaluationOptions(TypedDict, total=False):
    """The settings that `from_run` and `from_experiment` pass on to `evaluate_positions`."""

    bins: int | Sequence[float]
    order: Sequence[Hashable] | None
    length_classes: LengthClasses
    confidence: float
    n_resamples: int
    seed: int


def evaluate_positions(
    rows: pd.DataFrame | Iterable[Sequence[Any] | Mapping[str, Any]],
    *,
    qid: str = "qid",
    score: str = "score",
    position: str | None = None,
    length: str | None = None,
    unit: str | None = None,
    bins: int | Sequence[float] = 20,
    order: Sequence[Hashable] | None = None,
    length_classes: LengthClasses = "posir",
    confidence: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
    name: str = "",
    measure: str = "score",
) -> PositionEvaluation:
    """Evaluates scores of queries by the position of each query's answer in its document.

    Args:
        rows: A frame, or an iterable of mappings, or of tuples (qid, score, position[, length][, unit]).
        qid: The column of query ids.
        score: The column of scores, nonnegative numbers.
        position: The column of positions: labels, or relative positions in [0, 1]. A query with a list of positions
            counts in the group of each (as in FineWeb-PosQ). None means the column "position", or "place" without it.
        length: The column of the lengths of the relevant documents; None evaluates without classes of length.
        unit: The column of units of resampling: queries of one unit are resampled together, such as one question asked
            at several places (``question`` in the topics of probes). None treats all queries as independent.
        bins: The number of bins of equal width for relative positions (PosIR has 20), or the edges of the bins. Bins
            include their upper edge.
        order: All labels, from the beginning of documents to their end; groups without queries are allowed. Not needed
            for the labels "beginning", "middle" and "end" and for a categorical column.
        length_classes: "posir" for the classes of PosIR, (0, 512], (512, 1024], (1024, 1536] and over 1536,
            "quartiles" for those of the data, or the bounds. The results are in the attribute ``lengths``.
        confidence: The confidence level of the intervals.
        n_resamples: The number of resamples of the bootstrap.
        seed: Seed of the bootstrap. The order of the rows does not change the result.
        name: The name of the system, for the printed result.
        measure: The name of the measure, for the printed result.

    Returns:
        The group means, the measures over the groups, and their intervals; print it for a table.

    Raises:
        TypeError: Scores are not numbers.
        ValueError: There are no rows, a column or a value is missing, a score is NaN, infinite or negative, a query
            occurs twice in one group, or a position belongs to no group.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected a number between 0 and 1, such as 0.95, got {confidence!r}")
    check_resamples(n_resamples)
    if not isinstance(rows, pd.DataFrame) and (rows := list(rows)) and isinstance(rows[0], Mapping):
        rows = pd.DataFrame(rows)
    position = choose_position_column(rows.columns if isinstance(rows, pd.DataFrame) else (), position)
    columns = {"qid": qid, "score": score, "position": position, "length": length, "unit": unit}
    table = _read({ours: theirs for ours, theirs in columns.items() if theirs is not None}, rows)
    grouped = group_positions(table["position"], bins=bins, order=order)
    names = np.array(grouped.names, dtype=object)
    table = table.assign(group=names[grouped.codes], place=grouped.values, code=grouped.codes)
    # Sorted, so that sums are rounded in the same way whatever the order of the rows.
    table = table.iloc[np.lexsort([grouped.codes, *(pd.factorize(table[c], sort=True)[0] for c in ("qid", "unit"))])]
    if (twice := table.duplicated(["qid", "code"])).any():
        found = [
            f"{query!r} in {group}" for query, group in zip(table["qid"][twice], table["group"][twice], strict=True)
        ]
        raise ValueError(
            f"{qid}: expected a query once in a group, got {len(found)} rows too many, such as "
            f"{', '.join(found[:_SHOWN])}; give the rows of one system and one measure, and queries asked several "
            "times ids of their own (see unit)"
        )
    evaluate = partial(
        _evaluate,
        grouped=grouped,
        confidence=float(confidence),
        n_resamples=int(n_resamples),
        seed=seed,
        measure=measure,
    )
    result = evaluate(table, name=name)
    if length is None:
        return result
    codes, classes = group_lengths(table["length"], length_classes)
    lengths = {c: evaluate(table[codes == i], name=f"{name} {c}".strip()) for i, c in enumerate(classes) if i in codes}
    empty = [c for c in classes if c not in lengths]
    notes = (f"no queries with documents of length {', '.join(empty)}",) if empty else ()
    return replace(result, lengths=lengths, notes=result.notes + notes)


def check_resamples(n_resamples: int) -> None:
    """Raises a ValueError if ``n_resamples`` is not an integer of at least 1."""
    if isinstance(n_resamples, bool) or not isinstance(n_resamples, int | np.integer) or n_resamples < 1:
        raise ValueError(f"n_resamples: expected an integer of at least 1, got {n_resamples!r}")


def is_biased(bias: float, standard_error: float) -> bool:
    """Returns whether a bias deserves a note: it exceeds a quarter of the standard error and shows in three digits."""
    return abs(bias) > max(
        0.25 * standard_error, 0.0005
    )  # Efron, Tibshirani (1993), An Introduction to the Bootstrap, 10.3


def _read(columns: Mapping[str, str], rows: pd.DataFrame | Iterable[Any]) -> pd.DataFrame:
    """Returns the checked rows with the column names of this module, one row per query and position."""
    table = _to_frame(columns, rows)
    if len(table) == 0:
        raise ValueError("rows: expected at least one, got none")
    if any(isinstance(value, list | tuple | set | frozenset | np.ndarray) for value in table["position"]):
        lists = [list(value) if isinstance(value, set | frozenset) else value for value in table["position"]]
        table = table.assign(position=pd.Series(lists, dtype=object)).explode("position", ignore_index=True)
    for ours in ("qid", "position", "unit"):
        if ours in table and (absent := table[ours].isna()).any():
            raise ValueError(
                f"{columns[ours]}: {int(absent.sum())} of {len(table)} values are missing (None, NaN, an empty list), "
                f"such as those of the queries {table.loc[absent, 'qid'].tolist()[:_SHOWN]}; leave these rows out"
            )
    if not pd.api.types.is_numeric_dtype(table["score"]):
        raise TypeError(f"{columns['score']}: expected numbers, got a column of {table['score'].dtype}")
    scores = table["score"].to_numpy(dtype=np.float64, na_value=np.nan)
    if not (right := np.isfinite(scores) & (scores >= 0)).all():
        raise ValueError(
            f"{columns['score']}: expected finite numbers from 0 on, without which there is no PSI, got "
            f"{scores[~right][:_SHOWN].tolist()} for the queries {table.loc[~right, 'qid'].tolist()[:_SHOWN]} "
            f"({int((~right).sum())} of {len(table)} rows)"
        )
    return table.assign(score=scores, unit=table["unit"] if "unit" in table else table["qid"])


def _to_frame(columns: Mapping[str, str], rows: pd.DataFrame | Iterable[Any]) -> pd.DataFrame:
    if not isinstance(rows, pd.DataFrame):
        records = list(rows)
        if widths := {len(record) for record in records} - {len(columns)}:
            raise ValueError(f"rows: expected tuples of {list(columns.values())}, got some of {sorted(widths)} values")
        rows = pd.DataFrame(records, columns=list(columns.values()))
    if missing := [column for column in columns.values() if column not in rows.columns]:
        raise ValueError(f"rows: the columns {missing} are missing, there are {list(rows.columns)}")
    return pd.DataFrame({ours: rows[theirs] for ours, theirs in columns.items()}).reset_index(drop=True)


def _evaluate(
    table: pd.DataFrame,
    *,
    grouped: Grouped,
    confidence: float,
    n_resamples: int,
    seed: int,
    name: str,
    measure: str,
) -> PositionEvaluation:
    """Evaluates checked rows; ``grouped`` gives the names and places of the groups, and may be of more rows."""
    x, y = table["place"].to_numpy(dtype=np.float64), table["score"].to_numpy(dtype=np.float64)
    unit = pd.factorize(table["unit"], sort=True)[0].astype(np.int64)
    units = add_up_units(unit, table["code"].to_numpy(dtype=np.int64), y, len(grouped.names))
    n = units.counts.sum(axis=0)
    filled = np.flatnonzero(n)
    units = UnitTotals(units.sums[:, filled], units.counts[:, filled])
    ones = np.ones((1, len(units.sums)))
    means, rho = units.group_means(ones)[0], rank_correlation(x, y, ones[:, unit])[0]
    resampled = [
        (units.group_means(weights), rank_correlation(x, y, weights[:, unit]))
        for weights in draw_weights(len(units.sums), n_resamples=n_resamples, seed=seed, width=len(y))
    ]
    drawn, drawn_rho = (np.concatenate(parts) for parts in zip(*resampled, strict=True))
    values: dict[str, tuple[Array, Array]] = {  # of the rows, and of the resamples
        "mean": (means.mean(axis=-1), drawn.mean(axis=-1)),
        "psi": (psi_of_rows(means), psi_of_rows(drawn)),
        "harmonic_mean": (harmonic_mean_of_rows(means), harmonic_mean_of_rows(drawn)),
        "rank_correlation": (rho, drawn_rho),
    }
    if len(filled) > 1:
        places = grouped.places[filled]
        values["slope"] = (slope_of_rows(places, means), slope_of_rows(places, drawn))
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    groups = pd.DataFrame({"group": list(grouped.names), "position": grouped.places, "n": n.astype(np.int64)})
    groups[["mean", "low", "high"]] = np.nan
    groups.loc[filled, "mean"] = means
    varied = (units.counts > 0).sum(axis=0) > 1
    groups.loc[filled[varied], ["low", "high"]] = np.quantile(drawn[:, varied], tails, axis=0).T
    points: dict[str, float | None] = {}
    intervals: dict[str, Interval] = {}
    for key, (value, in_resamples) in values.items():
        points[key] = float(value) if np.isfinite(value) else None
        if np.isfinite(value) and varied.any() and (key != "psi" or len(filled) > 1):
            low, high = (float(bound) for bound in np.quantile(in_resamples, tails))
            intervals[key] = _basic(float(value), low, high) if key == "psi" else (low, high)
    return PositionEvaluation(
        name=name,
        measure=measure,
        groups=groups,
        n_queries=int(table["qid"].nunique()),
        mean=points["mean"],
        psi=points["psi"],
        harmonic_mean=points["harmonic_mean"],
        slope=points.get("slope"),
        rank_correlation=points["rank_correlation"],
        intervals=intervals,
        confidence=confidence,
        n_resamples=n_resamples,
        seed=seed,
        notes=tuple(_notes(groups, filled[~varied], *values["psi"])),
        rows=table[["qid", "unit", "group", "place", "score"]],
    )


def _basic(value: float, low: float, high: float) -> Interval:
    """Returns the basic (reverse percentile) interval of PSI."""
    return min(1.0, max(0.0, 2 * value - high)), min(1.0, max(0.0, 2 * value - low))


def _notes(groups: pd.DataFrame, lone: Codes, psi: Array, drawn: Array) -> Iterator[str]:
    if empty := groups.loc[groups["n"] == 0, "group"].tolist():
        yield f"no queries in {', '.join(empty)}: the measures leave these groups out"
    if len(empty) == len(groups) - 1:
        yield "there is only one group with queries, so PSI is 0 whatever its score"
        return
    if is_biased(bias := float(drawn.mean() - psi), float(drawn.std())):
        smallest = groups.loc[groups["n"] > 0, "n"].min()
        yield f"PSI is biased upward, here by about {bias:.3f} or more; the smallest group has {smallest} queries"
    if len(lone):
        names = ", ".join(groups.loc[lone, "group"])
        yield f"only one query or unit in {names}, which does not vary in resamples: intervals are too narrow"
