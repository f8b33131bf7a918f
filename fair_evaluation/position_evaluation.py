"""Evaluation by position: group means, PSI, harmonic mean and slope, with bootstrap intervals.

Intervals come from resampling queries, or units of queries (`fair_evaluation.resampling`). Those of group means, mean,
harmonic mean and slope are percentile intervals. PSI is computed from a minimum and a maximum, which sampling error
alone drives apart: it is biased upward, and in resamples twice as much. So its interval is the basic (reverse
percentile) one, clipped to [0, 1], which corrects for some of the bias; it may lie below PSI itself. docs/evaluation.md
has the bias of PSI and the coverage of the intervals in simulations.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import numpy as np
import pandas as pd

from fair_evaluation.measures import harmonic_mean, position_sensitivity_index, slope
from fair_evaluation.position_groups import Grouped, LengthClasses, group_lengths, group_positions
from fair_evaluation.position_result import PositionEvaluation
from fair_evaluation.resampling import UnitTotals, add_up_units, check_bootstrap, draw_weights, is_biased

Positions = Mapping[str, Any] | pd.Series | pd.DataFrame
_SHOWN = 5  # records named in an error


class EvaluationOptions(TypedDict, total=False):
    """The settings that `from_run` and `from_experiment` pass on to `evaluate_positions`."""

    position: str | None
    length: str | None
    unit: str | None
    bins: int | Sequence[float]
    order: Sequence[Hashable] | None
    length_classes: LengthClasses
    confidence: float
    n_resamples: int
    seed: int


def evaluate_positions(
    rows: pd.DataFrame | Iterable[Mapping[str, Any]],
    *,
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
        rows: A frame, or mappings, with the query id ``qid``, a nonnegative ``score``, and the columns named next.
        position: The column of positions: labels, or relative positions in [0, 1]. A query with a list of positions
            counts in the group of each (as in FineWeb-PosQ). None means the column "position", or "place" without it.
        length: The column of the lengths of the relevant documents; None evaluates without classes of length.
        unit: The column of units of resampling: queries of one unit are resampled together, such as one question asked
            at several places (``question`` in the topics of probes). None treats all queries as independent.
        bins: The number of bins of equal width for relative positions (PosIR has 20), or the edges of the bins. Bins
            include their upper edge.
        order: All labels, from the beginning of documents to their end; groups without queries are allowed. Not needed
            for the labels "beginning", "middle" and "end" and for a categorical column.
        length_classes: "posir" for the classes of PosIR, (0, 512], (512, 1024], (1024, 1536] and over 1536, or the
            bounds. The results are in the attribute ``lengths``.
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
    check_bootstrap(confidence, n_resamples)
    rows = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(list(rows))
    if len(rows) == 0:
        raise ValueError("rows: expected at least one, got none")
    columns = {"qid": "qid", "score": "score", "position": position or _position_column(rows)}
    columns |= {ours: theirs for ours, theirs in {"length": length, "unit": unit}.items() if theirs is not None}
    table = _read(rows, columns)
    grouped = group_positions(table["position"], bins=bins, order=order)
    table = table.assign(group=np.array(grouped.names, dtype=object)[grouped.codes], code=grouped.codes)
    # Sorted, so that sums are rounded in the same way whatever the order of the rows.
    table = table.iloc[np.lexsort([grouped.codes, *(pd.factorize(table[c], sort=True)[0] for c in ("qid", "unit"))])]
    if (twice := table.duplicated(["qid", "code"])).any():
        found = [f"{query!r} in {group}" for query, group in table.loc[twice, ["qid", "group"]].to_numpy()]
        raise ValueError(
            f"qid: expected a query once in a group, got {len(found)} rows too many, such as "
            f"{', '.join(found[:_SHOWN])}; give the rows of one system and one measure, and queries asked several "
            "times ids of their own (see unit)"
        )

    def evaluate(part: pd.DataFrame, name: str) -> PositionEvaluation:
        blank = PositionEvaluation(
            name=name,
            measure=measure,
            groups=pd.DataFrame({"group": list(grouped.names), "position": grouped.places}),
            n_queries=int(part["qid"].nunique()),
            confidence=float(confidence),
            n_resamples=int(n_resamples),
            seed=seed,
            rows=part[["qid", "unit", "group", "score"]],
        )
        return _resample(blank, part, grouped)

    result = evaluate(table, name)
    if length is None:
        return result
    codes, classes = group_lengths(table["length"], length_classes)
    lengths = {c: evaluate(table[codes == i], f"{name} {c}".strip()) for i, c in enumerate(classes) if i in codes}
    empty = [c for c in classes if c not in lengths]
    notes = (f"no queries with documents of length {', '.join(empty)}",) if empty else ()
    return replace(result, lengths=lengths, notes=result.notes + notes)


def evaluate_scores(
    scores: pd.DataFrame,
    positions: Positions,
    *,
    what: str,
    name: str,
    measure: str,
    **options: Unpack[EvaluationOptions],
) -> PositionEvaluation:
    """Evaluates scores whose positions are given apart.

    Args:
        scores: The columns ``qid`` and ``score``, one row per query.
        positions: The positions by query id, or a frame with ``qid`` and the columns that the options name. A query in
            several rows of the frame counts in several groups.
        what: What was scored, for error messages.
        name: The name of the system.
        measure: The name of the measure.
        **options: The options of `evaluate_positions`.

    Raises:
        TypeError: ``positions`` has another type.
        ValueError: A column is missing, or a query has a score and no position, or a position and no score.
    """
    if isinstance(positions, Mapping):
        positions = pd.Series(list(positions.values()), index=list(positions), dtype=object)  # lists stay lists
    if isinstance(positions, pd.Series):  # categories keep their order
        positions = pd.DataFrame({"qid": positions.index, "position": positions.array})
    if not isinstance(positions, pd.DataFrame):
        raise TypeError(f"positions: expected a mapping, a series or a frame, got {type(positions).__name__}")
    position = options["position"] = options.get("position") or _position_column(positions)
    columns = ["qid", position, *(c for c in (options.get("length"), options.get("unit")) if c is not None)]
    if missing := [column for column in columns if column not in positions]:
        raise ValueError(
            f"positions: the columns {missing} are missing, there are {list(positions.columns)}; position=, length= "
            "and unit= name the columns of a frame"
        )
    scored, placed = set(scores["qid"]), set(positions["qid"])
    if absent := [q for q in scores["qid"] if q not in placed]:
        kinds = {type(q).__name__ for q in placed}
        raise ValueError(
            f"positions: {len(absent)} of {len(scored)} queries of {what} have no position, such as "
            f"{absent[:_SHOWN]} (ids with a position are of type {'/'.join(sorted(kinds)) or '-'}); add their "
            "positions, or leave the queries out"
        )
    if absent := [q for q in positions["qid"].unique() if q not in scored]:
        raise ValueError(
            f"positions: {len(absent)} queries have no score in {what}, such as {absent[:_SHOWN]}; give positions of "
            "the evaluated queries only"
        )
    rows = positions[columns].merge(scores[["qid", "score"]], on="qid")
    return evaluate_positions(rows, name=name, measure=measure, **options)


def _position_column(rows: pd.DataFrame) -> str:
    return "place" if "place" in rows and "position" not in rows else "position"  # our own topics have "place"


def _read(rows: pd.DataFrame, columns: Mapping[str, str]) -> pd.DataFrame:
    """Returns the checked rows with the column names of this module, one row per query and position."""
    if missing := [column for column in columns.values() if column not in rows]:
        raise ValueError(f"rows: the columns {missing} are missing, there are {list(rows.columns)}")
    table = pd.DataFrame({ours: rows[theirs] for ours, theirs in columns.items()}).reset_index(drop=True)
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
        raise TypeError(f"score: expected numbers, got a column of {table['score'].dtype}")
    scores = table["score"].to_numpy(dtype=np.float64, na_value=np.nan)
    if not (right := np.isfinite(scores) & (scores >= 0)).all():
        raise ValueError(
            f"score: expected finite numbers from 0 on, without which there is no PSI, got "
            f"{scores[~right][:_SHOWN].tolist()} for the queries {table.loc[~right, 'qid'].tolist()[:_SHOWN]} "
            f"({int((~right).sum())} of {len(table)} rows)"
        )
    return table.assign(score=scores, unit=table["unit"] if "unit" in table else table["qid"])


def _resample(blank: PositionEvaluation, table: pd.DataFrame, grouped: Grouped) -> PositionEvaluation:
    """Returns the evaluation of checked rows with its means, intervals and notes."""
    scores, codes = table["score"].to_numpy(dtype=np.float64), table["code"].to_numpy(dtype=np.int64)
    unit = pd.factorize(table["unit"], sort=True)[0].astype(np.int64)
    units = add_up_units(unit, codes, scores, len(grouped.names))
    n = units.counts.sum(axis=0)
    filled = np.flatnonzero(n)
    units = UnitTotals(units.sums[:, filled], units.counts[:, filled])
    weights = draw_weights(len(units.sums), n_resamples=blank.n_resamples, seed=blank.seed)
    drawn = np.concatenate([units.group_means(w) for w in weights])
    tails = [(1 - blank.confidence) / 2, (1 + blank.confidence) / 2]
    varied = (units.counts > 0).sum(axis=0) > 1
    groups = blank.groups.assign(n=n.astype(np.int64), mean=np.nan, low=np.nan, high=np.nan)
    groups.loc[filled, "mean"] = units.group_means()
    groups.loc[filled[varied], ["low", "high"]] = np.quantile(drawn[:, varied], tails, axis=0).T
    result = replace(blank, groups=groups)
    measures = {"mean": drawn.mean(axis=-1), "harmonic_mean": harmonic_mean(drawn)}
    notes = []
    if empty := groups.loc[groups["n"] == 0, "group"].tolist():
        notes.append(f"no queries in {', '.join(empty)}: the measures leave these groups out")
    if len(filled) == 1:
        notes.append("there is only one group with queries, so PSI is 0 whatever its score")
    else:
        psi = position_sensitivity_index(drawn)
        measures |= {"psi": psi, "slope": slope(grouped.places[filled], drawn)}
        if is_biased(bias := float(psi.mean() - result.psi), float(psi.std())):
            smallest = groups.loc[filled, "n"].min()
            notes.append(
                f"PSI is biased upward, here by about {bias:.3f} or more; the smallest group has {smallest} queries"
            )
        if len(lone := filled[~varied]):
            names = ", ".join(groups.loc[lone, "group"])
            notes.append(
                f"only one query or unit in {names}, which does not vary in resamples: intervals are too narrow"
            )
    bounds = {key: np.quantile(values, tails).tolist() for key, values in measures.items()} if varied.any() else {}
    intervals = {key: (low, high) for key, (low, high) in bounds.items()}
    if "psi" in intervals and result.psi is not None:  # the basic interval
        low, high = intervals["psi"]
        intervals["psi"] = min(1.0, max(0.0, 2 * result.psi - high)), min(1.0, max(0.0, 2 * result.psi - low))
    return replace(result, intervals=intervals, notes=tuple(notes))
