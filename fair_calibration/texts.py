"""What stands before tokenizing: the check that texts can be tokenized, and a lock for the tokenizer."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence

tokenizer_lock = threading.RLock()
"""Held while a fast tokenizer is used: it keeps padding and truncation as state, which all threads would change."""
_NAMED = 5  # how many records an error names


def check_texts(
    texts: Sequence[object], names: Iterable[object] | None = None, *, what: str = "texts", named: str = "document"
) -> None:
    """Checks that every text is a string that can be encoded as UTF-8.

    Args:
        texts: The texts.
        names: The name of each text's record, such as its docno; None means its index in ``texts``.
        what: The argument or column that holds the texts, for the error message.
        named: The kind of ``names``, such as "docno" or "qid", for the error message.

    Raises:
        TypeError: ``texts`` is one string, or a text is neither a string nor missing.
        ValueError: A text is missing (None, NaN or NA) or contains a lone surrogate, which tokenizers do not accept,
            or there are not as many names as texts.
    """
    if isinstance(texts, str):
        raise TypeError(f"{what}: expected a list of str, got one str, {texts[:40]!r}")
    records = list(range(len(texts)) if names is None else names)
    if len(records) != len(texts):
        raise ValueError(f"names: expected one for each of {len(texts)} texts, got {len(records)}")
    missing: list[object] = []
    surrogates: list[object] = []
    others: list[object] = []
    kinds = set()
    for text, record in zip(texts, records, strict=True):
        if isinstance(text, str):
            try:
                text.encode()
            except UnicodeEncodeError:
                surrogates.append(record)
        elif _is_missing(text):
            missing.append(record)
        else:
            others.append(record)
            kinds.add(type(text).__name__)
    if missing:
        raise ValueError(
            f"{what}: {len(missing)} of {len(texts)} texts are missing ({named} {show_names(missing)}); drop these "
            "records, or give them the text ''"
        )
    if others:
        raise TypeError(f"{what}: expected str, got {', '.join(sorted(kinds))} ({named} {show_names(others)})")
    if surrogates:
        raise ValueError(
            f"{what}: {len(surrogates)} of {len(texts)} texts contain a lone surrogate, which UTF-8 cannot encode "
            f"({named} {show_names(surrogates)})"
        )


def show_names(names: Sequence[object]) -> str:
    """Returns the names of the first few records, for an error message."""
    return ", ".join(repr(name) for name in names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _is_missing(value: object) -> bool:
    # pandas.NA and pandas.NaT are recognized by the names of their classes, since the core does not need pandas.
    is_nan = isinstance(value, float) and math.isnan(value)
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")
