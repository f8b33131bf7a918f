"""Reads documents from files and iterables of dicts, and names the record that cannot be indexed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from fair_indexing.duplicates import DocnoHashes
from fair_indexing.source_files import Fields, parquet_rows, read_json_lines, read_parquet, shown, source_files


class Window(NamedTuple):
    """Consecutive documents: the number of the first one in the source, docnos and texts."""

    start: int
    docnos: list[str]
    texts: list[str]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A collection of documents that can be read.

    Attributes:
        name: The name of the collection, for messages.
        read: Begins a pass over (docno, text), which are not checked.
        locate: Returns where a document stands, such as "corpus.jsonl, line 17", by its number; for documents that
            were read before.
        rereadable: Whether `read` may be called more than once.
        documents: The number of documents, None if it is unknown.
        docno_field: The column or key of the docnos.
        text_field: The column or key of the texts.
    """

    name: str
    read: Callable[[], Iterator[tuple[Any, Any]]]
    locate: Callable[[int], str]
    rereadable: bool
    documents: int | None
    docno_field: str
    text_field: str

    def windows(self, size: int) -> Iterator[Window]:
        """Reads and checks the documents, ``size`` at a time, the last window with fewer.

        Raises:
            ValueError: A docno or a text is missing or not valid, a docno is empty or occurs twice, or a record cannot
                be read; the record is named.
            TypeError: A docno or a text is not a string.
        """
        hashes, records, start = DocnoHashes(), self.read(), 0
        while pairs := list(islice(records, size)):
            for number, (docno, text) in enumerate(pairs, start=start):
                self._check(number, docno, text)
            window = Window(start, [docno for docno, _ in pairs], [text for _, text in pairs])
            hashes.add(window.docnos, start, locate=self.locate)
            yield window
            start += len(pairs)

    def started(self, n: int = 1, *, reason: str = "") -> Source:
        """Returns the source after checking that it has at least ``n`` documents, none of which is lost.

        Args:
            n: The least number of documents.
            reason: Why they are needed, for the error.

        Raises:
            ValueError: There are fewer.
        """
        records = self.read()
        first = list(islice(records, n))
        if len(first) < n:
            raise ValueError(
                f"source: expected at least {n} document{'s' * (n > 1)}, {self.name} has {len(first)}"
                + (f"; {reason}" if reason else "")
            )
        return self if self.rereadable else replace(self, read=lambda: chain(first, records))

    def _check(self, number: int, docno: object, text: object) -> None:
        for field, value, fix in (
            (self.docno_field, docno, "write docnos as strings"),
            (self.text_field, text, "drop the document, or give it the text ''"),
        ):
            if isinstance(value, str):
                try:
                    value.isascii() or value.encode()
                except UnicodeEncodeError as error:
                    raise ValueError(
                        f"{self._at(number, docno)}: {field}: a lone surrogate is not valid text ({error.reason})"
                    ) from error
            elif value is None or (isinstance(value, float) and math.isnan(value)):
                raise ValueError(f"{self._at(number, docno)}: {field} is missing ({value}); {fix}")
            else:
                raise TypeError(
                    f"{self._at(number, docno)}: {field}: expected str, got {shown(value)} ({type(value).__name__}); "
                    f"{fix}"
                )
        if "\0" in cast(str, docno):
            raise ValueError(
                f"{self._at(number, docno)}: {self.docno_field}: an index cannot hold docnos with a NUL character"
            )
        if not docno:
            raise ValueError(f"{self._at(number, docno)}: {self.docno_field}: expected at least one character, got ''")

    def _at(self, number: int, docno: object) -> str:
        where = self.locate(number)
        return f"{where} (docno {shown(docno)})" if isinstance(docno, str) and docno else where


def open_source(
    source: Any, *, docno_field: str = "docno", text_field: str = "text", refused: Mapping[str, str] | None = None
) -> Source:
    """Opens the documents of a collection.

    Args:
        source: A file of JSON lines (.jsonl, .ndjson, .json, also .gz) or Parquet; a folder of such files and no
            others, read in the order of their names (names that begin with "." or "_" are skipped); or an iterable of
            dicts, such as a list or a Hugging Face ``Dataset``, or a DataFrame. What has a length and access by
            index can be read twice, as files can. A file may end with blank lines.
        docno_field: The column or key of the docnos.
        text_field: The column or key of the texts.
        refused: Columns or keys that no record may have, each with the text of the error.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: ``source`` is not a file, a folder or an iterable of dicts.
        ValueError: The file is of another kind, the folder holds no such files or other files beside them, or a column
            is missing, ambiguous or refused.
    """
    if isinstance(source, Source):
        return source
    fields = Fields(docno_field, text_field, refused or {})
    if isinstance(source, (str, os.PathLike)):
        return _open_files(Path(source), fields)
    name = type(source).__name__
    if hasattr(source, "to_dict") and hasattr(source, "columns"):  # a DataFrame
        if not source.columns.is_unique:
            raise ValueError(f"source: expected one column of each name, got {list(source.columns)[:10]}; rename some")
        source = source.to_dict("records")
    if isinstance(source, Mapping) or not hasattr(source, "__iter__"):
        raise TypeError(f"source: expected a file, a folder or an iterable of dicts, got {name}")

    def locate(number: int) -> str:
        return f"{name}, record {number}"

    def read() -> Iterator[tuple[Any, Any]]:
        for number, record in enumerate(source):
            yield fields.pair(record, lambda number=number: locate(number))  # type: ignore[misc]

    return Source(
        name=name,
        read=read,
        locate=locate,
        rereadable=hasattr(source, "__len__") and hasattr(source, "__getitem__"),  # progress bars have only a length
        documents=len(source) if hasattr(source, "__len__") else None,
        docno_field=docno_field,
        text_field=text_field,
    )


def _open_files(path: Path, fields: Fields) -> Source:
    files = source_files(path)
    sizes = [parquet_rows(file, fields) if _is_parquet(file) else None for file in files]
    begins: list[int] = []  # of each file read so far, the number of its first document

    def read() -> Iterator[tuple[Any, Any]]:
        number = 0
        begins.clear()
        for file in files:
            begins.append(number)
            for pair in (read_parquet if _is_parquet(file) else read_json_lines)(file, fields):
                yield pair
                number += 1

    def locate(number: int) -> str:
        i = max((i for i, begin in enumerate(begins) if begin <= number), default=0)
        row = number - (begins[i] if begins else 0)
        return f"{files[i]}, row {row}" if _is_parquet(files[i]) else f"{files[i]}, line {row + 1}"

    return Source(
        name=str(path),
        read=read,
        locate=locate,
        rereadable=True,
        documents=None if None in sizes else sum(cast(list[int], sizes)),
        docno_field=fields.docno,
        text_field=fields.text,
    )


def _is_parquet(file: Path) -> bool:
    return file.name.lower().endswith(".parquet")
