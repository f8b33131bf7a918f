"""Reads columns of texts, checks that texts are texts, and names the records where they are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import pandas as pd

_NAMED = 5  # how many records an error names


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
    check_texts(texts, ids, column=column, id_column=id_column if named else "row")
    return texts


def check_columns(frame: pd.DataFrame, *columns: str) -> None:
    """Raises a ValueError where a frame has two columns of one of these names."""
    for column in columns:
        if (n := list(frame.columns).count(column)) > 1:
            raise ValueError(f"{column}: expected one column of this name, got {n}; rename the others")


def check_texts(texts: Sequence[object], ids: Iterable[object], *, column: str, id_column: str) -> None:
    """Checks that every text is a string.

    Args:
        texts: The texts.
        ids: What the record of each is called.
        column: What the texts are called.
        id_column: What the ids are called.

    Raises:
        ValueError: A text is missing (None, NaN, NA).
        TypeError: A text is something else than a string.
    """
    missing, odd, kinds = [], [], set()
    for text, record in zip(texts, ids, strict=True):
        if isinstance(text, str):
            try:
                text.encode()
            except UnicodeEncodeError:  # tokenizers take no lone surrogates
                odd.append(record)
                kinds.add("str with a lone surrogate, which is no text")
            continue
        if pd.api.types.is_scalar(text) and pd.isna(cast(Any, text)):
            missing.append(record)
        else:
            odd.append(record)
            kinds.add(type(text).__name__)
    if missing:
        raise ValueError(
            f"{column}: {len(missing)} of {len(texts)} rows have no text ({id_column} {_first(missing)}); "
            "drop them, or fill them with '' before encoding"
        )
    if odd:
        raise TypeError(f"{column}: expected str, got {', '.join(sorted(kinds))} ({id_column} {_first(odd)})")


def _first(records: list[object]) -> str:
    return ", ".join(repr(record) for record in records[:_NAMED]) + (", ..." if len(records) > _NAMED else "")
