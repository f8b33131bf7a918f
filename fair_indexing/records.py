"""Reads documents from files, data sets and iterables, and names the record where one cannot be indexed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from fair_indexing.duplicates import DocnoHashes
from fair_indexing.source_files import GZIP_ERRORS, is_parquet, open_lines, source_files

_ROWS_AT_ONCE = 1024
_SHOWN = 40


class Window(NamedTuple):
    """Consecutive documents: the place of the first one in the source, docnos and texts."""

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
            ValueError: A docno or text is missing, empty (the docno) or no text, a docno comes twice, or a record
                cannot be read; the record is named.
            TypeError: A docno or text is no string.
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
        """Returns the source after reading its first ``n`` documents, which are not lost.

        Args:
            n: How many there must be.
            reason: Why, for the error.

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
        if self.rereadable:
            return self
        return replace(self, read=lambda: chain(first, records))

    def _check(self, number: int, docno: object, text: object) -> None:
        for field, value, fix in (
            (self.docno_field, docno, "write docnos as strings"),
            (self.text_field, text, "drop the document, or give it the text ''"),
        ):
            if isinstance(value, str):
                if not value.isascii():
                    try:
                        value.encode()
                    except UnicodeEncodeError as error:
                        raise ValueError(
                            f"{self._at(number, docno)}: {field}: a lone surrogate is no text ({error.reason})"
                        ) from error
                continue
            if value is None or (isinstance(value, float) and math.isnan(value)):
                raise ValueError(f"{self._at(number, docno)}: {field} is missing ({value}); {fix}")
            raise TypeError(
                f"{self._at(number, docno)}: {field}: expected str, got {_shown(value)} ({type(value).__name__}); {fix}"
            )
        if "\0" in cast(str, docno):
            raise ValueError(
                f"{self._at(number, docno)}: {self.docno_field}: an index cannot hold docnos with a NUL character"
            )
        if not docno:
            raise ValueError(f"{self._at(number, docno)}: {self.docno_field}: expected at least one character, got ''")

    def _at(self, number: int, docno: object) -> str:
        where = self.locate(number)
        return f"{where} (docno {_shown(docno)})" if isinstance(docno, str) and docno else where


class _Fields(NamedTuple):
    """What is read of a record, and what it must not have, with the reason."""

    docno: str
    text: str
    refused: Mapping[str, str]

    @property
    def read(self) -> list[str]:
        return list(dict.fromkeys(self[:2]))


def open_source(
    source: Any, *, docno_field: str = "docno", text_field: str = "text", refused: Mapping[str, str] | None = None
) -> Source:
    """Opens the documents of a collection, in any of the supported forms.

    Args:
        source: A file of JSON lines (.jsonl, .ndjson, .json, also .gz) or Parquet; a folder of such files and no
            others, read in the order of their names (names that begin with "." or "_" are skipped); a Hugging Face
            ``Dataset``; a pandas DataFrame; or an iterable of dicts. A file may end with blank lines.
        docno_field: The column or key of the docnos.
        text_field: The column or key of the texts.
        refused: Columns or keys that no record may have, each with the text of the error.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: ``source`` is not a file, a folder, a data set or an iterable of dicts.
        ValueError: The file is of another kind, the folder holds no such files or other files beside them, or a column
            is missing, ambiguous or refused.
    """
    fields = _Fields(docno_field, text_field, refused or {})
    if isinstance(source, Source):
        return source
    if isinstance(source, (str, os.PathLike)):
        return _open_files(Path(source), fields)
    if isinstance(source, Mapping) or not hasattr(source, "__iter__"):
        raise TypeError(
            f"source: expected a file, a folder, a data set or an iterable of dicts, got {type(source).__name__}"
        )
    documents = len(source) if hasattr(source, "__len__") else None
    if hasattr(source, "column_names") and hasattr(source, "features"):  # Hugging Face's
        _check_columns(fields, source.column_names, "source")
        records, name = (
            source.select_columns(fields.read),
            f"{type(source).__name__} {getattr(source, 'builder_name', None) or ''}".strip(),
        )
        unit, rereadable = "row", documents is not None
    elif hasattr(source, "to_dict") and hasattr(source, "columns"):  # pandas'
        _check_columns(fields, list(source.columns), "source")
        rows = zip(*(source[field] for field in fields.read), strict=True)
        records = [dict(zip(fields.read, row, strict=True)) for row in rows]
        name, unit, rereadable = "DataFrame", "row", True
    else:
        records, name, unit, rereadable = source, type(source).__name__, "record", isinstance(source, Sequence)

    def read() -> Iterator[tuple[Any, Any]]:
        for number, record in enumerate(records):
            yield _pair(record, fields, lambda number=number: f"{name}, {unit} {number}")  # type: ignore[misc]

    return Source(
        name=name,
        read=read,
        locate=lambda number: f"{name}, {unit} {number}",
        rereadable=rereadable,
        documents=documents,
        docno_field=docno_field,
        text_field=text_field,
    )


def _open_files(path: Path, fields: _Fields) -> Source:
    files = source_files(path)
    sizes = [_parquet_rows(file, fields) if is_parquet(file) else None for file in files]
    documents = None if None in sizes else sum(cast(list[int], sizes))
    begins: list[int] = []  # of each file read so far, the number of its first document

    def read() -> Iterator[tuple[Any, Any]]:
        number = 0
        begins.clear()
        for file in files:
            begins.append(number)
            for pair in (_read_parquet if is_parquet(file) else _read_json_lines)(file, fields):
                yield pair
                number += 1

    def locate(number: int) -> str:
        i = max((i for i, begin in enumerate(begins) if begin <= number), default=0)
        row = number - (begins[i] if begins else 0)
        return f"{files[i]}, row {row}" if is_parquet(files[i]) else f"{files[i]}, line {row + 1}"

    return Source(
        name=str(path),
        read=read,
        locate=locate,
        rereadable=True,
        documents=documents,
        docno_field=fields.docno,
        text_field=fields.text,
    )


def _read_json_lines(path: Path, fields: _Fields) -> Iterator[tuple[Any, Any]]:
    number = blank = 0
    with open_lines(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    blank = blank or number
                    continue
                if blank:
                    raise ValueError(f"{path}, line {blank}: expected a JSON object, got a blank line before others")
                try:
                    record = json.loads(line.decode())
                except (RecursionError, ValueError) as error:
                    raise ValueError(
                        f"{path}, line {number}: expected a JSON object, got {_shown(line.decode(errors='replace'))} "
                        f"({error})"
                    ) from error
                yield _pair(record, fields, lambda number=number: f"{path}, line {number}")  # type: ignore[misc]
        except GZIP_ERRORS as error:
            raise ValueError(f"{path}: the file is damaged after line {number} ({error})") from error


def _parquet_rows(path: Path, fields: _Fields) -> int:
    parquet = _pyarrow_parquet()
    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(fields, file.schema_arrow.names, str(path))
            return int(file.metadata.num_rows)
    except ValueError as error:
        if type(error) is ValueError:  # its own, not pyarrow's
            raise
        raise ValueError(f"{path}: the file is damaged or no Parquet ({error})") from error


def _read_parquet(path: Path, fields: _Fields) -> Iterator[tuple[Any, Any]]:
    import pyarrow

    row = 0
    with _pyarrow_parquet().ParquetFile(path) as file:
        batches = file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=fields.read)
        while True:
            try:
                batch = next(batches, None)
                columns = [] if batch is None else [batch.column(field).to_pylist() for field in fields[:2]]
            except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
                raise ValueError(f"{path}: the file is damaged after row {row} ({error})") from error
            if not columns:
                return
            yield from zip(*columns, strict=True)
            row += len(columns[0])


def _pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet needs pyarrow: pip install 'fair-calibration[indexing]'") from error
    return pyarrow.parquet


def _pair(record: Any, fields: _Fields, where: Callable[[], str]) -> tuple[Any, Any]:
    if not isinstance(record, Mapping):
        raise TypeError(f"{where()}: expected a record with {_listed(fields[:2])}, got {_shown(record)}")
    _check_refused(fields, record, where)
    try:
        return record[fields.docno], record[fields.text]
    except KeyError:
        missing = [field for field in fields[:2] if field not in record]
        docno = f" (docno {_shown(record[fields.docno])})" if fields.docno in record else ""
        raise ValueError(
            f"{where()}{docno}: expected {_listed(missing)}, the record has {sorted(map(str, record))[:10]}"
        ) from None


def _check_columns(fields: _Fields, columns: Sequence[str] | None, where: str) -> None:
    if columns is None:
        return
    _check_refused(fields, columns, lambda: where)
    if missing := [field for field in fields[:2] if field not in columns]:
        raise ValueError(f"{where}: expected the columns {_listed(missing)}, got {list(columns)[:10]}")
    for field in fields.read:
        if (n := list(columns).count(field)) > 1:
            raise ValueError(f"{where}: {field}: expected one column of this name, got {n}; rename the others")


def _check_refused(fields: _Fields, names: Container[str], where: Callable[[], str]) -> None:
    for name, reason in fields.refused.items():
        if name in names:
            raise ValueError(f"{where()}: {name}: {reason}")


def _listed(fields: Sequence[str]) -> str:
    return " and ".join(map(repr, fields))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
