"""Checks that texts are texts, and names the records where they are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import pandas as pd

_NAMED = 5  # how many records an error names


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
