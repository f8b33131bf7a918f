"""The position of each query's answer, in any of the forms that users have it in, joined to the query's score."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

_SHOWN = 5  # queries named in an error
Positions = Mapping[str, Any] | pd.Series | pd.DataFrame


def choose_position_column(columns: Iterable[Any], name: str | None) -> str:
    """Returns the column of positions: the one named, or "position", or "place", as our own topics call it."""
    if name is not None:
        return name
    columns = list(columns)
    return "place" if "place" in columns and "position" not in columns else "position"


def join_positions(
    scores: pd.DataFrame, positions: Positions, *, position: str, length: str | None, unit: str | None, what: str
) -> pd.DataFrame:
    """Adds the position, length and unit of each query to its score.

    Args:
        scores: The columns ``qid`` and ``score``, one row per query.
        positions: A mapping or series of positions by query id, or a frame with ``qid`` and the columns named next. A
            query in several rows of the frame counts in several groups.
        position: The column of positions.
        length: The column of document lengths, or None.
        unit: The column of units of resampling, or None.
        what: What was scored, for error messages.

    Raises:
        TypeError: ``positions`` has another type.
        ValueError: A column is missing, or a query has a score and no position, or a position and no score.
    """
    table = _to_frame(positions, position, [c for c in (length, unit) if c is not None])
    scored, placed = set(scores["qid"]), set(table["qid"])
    if missing := [q for q in scores["qid"] if q not in placed]:
        kinds = {type(q).__name__ for q in placed}
        raise ValueError(
            f"positions: {len(missing)} of {len(scored)} queries of {what} have no position, such as "
            f"{missing[:_SHOWN]} (ids with a position are of type {'/'.join(sorted(kinds)) or '-'}); add their "
            "positions, or leave the queries out"
        )
    if missing := [q for q in dict.fromkeys(table["qid"]) if q not in scored]:
        raise ValueError(
            f"positions: {len(missing)} queries have no score in {what}, such as {missing[:_SHOWN]}; give positions of "
            "the evaluated queries only"
        )
    return table.merge(scores[["qid", "score"]], on="qid")


def _to_frame(positions: Positions, position: str, others: list[str]) -> pd.DataFrame:
    if isinstance(positions, pd.DataFrame):
        columns = ["qid", position, *others]
        if missing := [column for column in columns if column not in positions.columns]:
            raise ValueError(
                f"positions: the columns {missing} are missing, there are {list(positions.columns)}; "
                "position=, length= and unit= name them"
            )
        return positions[columns]
    if not isinstance(positions, Mapping | pd.Series):
        raise TypeError(f"positions: expected a mapping, a series or a frame, got {type(positions).__name__}")
    if others:
        raise ValueError(f"positions: expected a frame with the columns {others}, got a {type(positions).__name__}")
    if isinstance(positions, pd.Series):
        # Categories keep their order.
        return pd.DataFrame({"qid": positions.index, position: positions.array})
    values = pd.Series(list(positions.values()), dtype=object)  # lists stay lists
    return pd.DataFrame({"qid": list(positions), position: values})
