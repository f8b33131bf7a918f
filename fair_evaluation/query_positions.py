"""Positions by query, in the forms that they come in, joined to scores by query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

_NAMED = 5  # how many records an error names
Positions = Mapping[str, Any] | pd.Series | pd.DataFrame


def join_positions(
    scores: pd.DataFrame, positions: Positions, *, position: str, length: str | None, unit: str | None, what: str
) -> pd.DataFrame:
    """Adds the position, length and unit of each query to its score.

    Args:
        scores: ``qid`` and ``score``, each query once.
        positions: By query: a mapping or a series of positions, or a frame with ``qid`` and the columns named next; a
            query in several rows of it is in several groups.
        position: The column of positions.
        length: The column of document lengths, if any.
        unit: The column of units, if any.
        what: What was scored, for errors.

    Raises:
        ValueError: A column is missing, a query has a score but no position, or a position but no score.
    """
    table = _to_frame(positions, position, [c for c in (length, unit) if c is not None])
    scored, placed = set(scores["qid"]), set(table["qid"])
    if bare := [q for q in scores["qid"] if q not in placed]:
        kinds = {type(q).__name__ for q in placed}
        raise ValueError(
            f"positions: {len(bare)} of {len(scored)} queries of {what} have no position, such as {bare[:_NAMED]} "
            f"(positions have ids of {'/'.join(sorted(kinds)) or 'no query'}); add them, or leave the queries out"
        )
    if bare := [q for q in dict.fromkeys(table["qid"]) if q not in scored]:
        raise ValueError(
            f"positions: {len(bare)} queries have no score in {what}, such as {bare[:_NAMED]}; give the positions of "
            "the queries evaluated"
        )
    return table.merge(scores[["qid", "score"]], on="qid")


def _to_frame(positions: Positions, position: str, others: list[str]) -> pd.DataFrame:
    if isinstance(positions, pd.DataFrame):
        columns = ["qid", position, *others]
        if missing := [column for column in columns if column not in positions.columns]:
            raise ValueError(f"positions: the columns {missing} are missing, there are {list(positions.columns)}")
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
