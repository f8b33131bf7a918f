"""Reads text columns of frames, and names the rows whose text cannot be encoded."""

from __future__ import annotations

import pandas as pd

from fair_calibration.texts import check_texts


def read_texts(frame: pd.DataFrame, column: str, *, id_column: str = "docno") -> list[str]:
    """Returns a text column.

    Args:
        frame: A frame with the column.
        column: The column.
        id_column: What names its rows in errors, where the frame has it.

    Raises:
        ValueError: There are two columns of a name, or a text is missing (None, NaN, NA).
        TypeError: A text is something else than a string.
    """
    check_columns(frame, column, id_column)
    texts: list[str] = frame[column].tolist()
    named = id_column in frame.columns
    ids = frame[id_column].tolist() if named else frame.index.tolist()
    check_texts(texts, ids, what=column, named=id_column if named else "row")
    return texts


def check_columns(frame: pd.DataFrame, *columns: str) -> None:
    """Raises a ValueError where a frame has two columns of one of these names."""
    for column in columns:
        if (n := list(frame.columns).count(column)) > 1:
            raise ValueError(f"{column}: expected one column of this name, got {n}; rename the others")
