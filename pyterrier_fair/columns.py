"""Reads the texts of frames and streams, and encodes every distinct text once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np
import pandas as pd
import pyterrier as pt

from fair_calibration.texts import check_texts
from fair_indexing.stream import WINDOW, cut_windows, encode_windows
from fair_indexing.text_encoder import TextEncoder

Records = list[dict[str, Any]]


def read_texts(frame: pd.DataFrame, column: str, *, id_column: str = "docno") -> list[str]:
    """Returns a text column after checking it; errors name rows by ``id_column``, or else by the frame's index.

    Raises:
        ValueError: Two columns have the same name, or a text is missing (None, NaN, NA) or has a lone surrogate.
        TypeError: A text is not a string.
    """
    check_columns(frame, column, id_column)
    texts: list[str] = frame[column].tolist()
    named = id_column in frame.columns
    ids = frame[id_column].tolist() if named else frame.index.tolist()
    check_texts(texts, ids, what=column, named=id_column if named else "row")
    return texts


def check_columns(frame: pd.DataFrame, *columns: str) -> None:
    """Raises a ValueError if a frame has two columns with one of these names."""
    for column in columns:
        if (n := list(frame.columns).count(column)) > 1:
            raise ValueError(f"{column}: expected one column of this name, got {n}; rename the others")


def read_records(inp: Iterable[dict[str, Any]] | pd.DataFrame, text_field: str) -> Iterable[dict[str, Any]]:
    """Returns the rows of a frame as records; other iterables are returned as they are."""
    if not isinstance(inp, pd.DataFrame):
        return inp
    check_columns(inp, "docno", text_field)
    return cast(Records, inp.to_dict(orient="records"))


def encode_column(
    frame: pd.DataFrame, column: str, id_column: str, encode: Callable[[list[str]], np.ndarray]
) -> list[np.ndarray]:
    """Encodes a text column, every distinct text once, and returns one vector for each row."""
    texts = read_texts(frame, column, id_column=id_column)
    place = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    vectors = encode(list(place))
    return [vectors[place[text]] for text in texts]


def encode_records(
    encoder: TextEncoder, records: Iterable[dict[str, Any]], text_field: str, progress: Callable[[int], object]
) -> Iterator[tuple[Records, list[np.ndarray]]]:
    """Encodes a stream of records in windows of 4096, every distinct text of a window once; reads one window ahead.

    ``progress`` is called with the number of records encoded since the last call. Yields the records of each window
    with their vectors. Raises the errors of `read_texts`.
    """
    read: deque[tuple[Records, list[int]]] = deque()

    def windows() -> Iterator[tuple[list[object], list[str]]]:
        pairs = ((record, cast(str, record.get(text_field))) for record in records)
        for window, texts in cut_windows(pairs, WINDOW):
            with pt.validate.any(pd.DataFrame(window[:1])) as v:
                v.document_frame(extra_columns=[text_field])
                v.columns(includes=[text_field])
            names = [record.get("docno", number) for number, record in enumerate(window)]
            check_texts(texts, names, what=text_field, named="docno" if "docno" in window[0] else "row")
            first = dict(zip(reversed(texts), reversed(names), strict=True))  # the first document of each text
            place = {text: i for i, text in enumerate(first)}
            read.append((window, [place[text] for text in texts]))
            yield list(first.values()), list(first)

    for _, vectors in encode_windows(encoder, windows(), progress=progress):
        window, places = read.popleft()
        progress(len(window) - len(vectors))
        yield window, [vectors[i] for i in places]
