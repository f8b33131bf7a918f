"""Reads documents from files, data sets and iterables, and names the record where one cannot be indexed."""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from fair_indexing.duplicates import DocnoHashes

JSON_LINES = (".jsonl", ".jsonl.gz", ".json.gz", ".ndjson")
PARQUET = (".parquet",)
_ROWS_AT_ONCE = 1024
_SHOWN = 40


class Window(NamedTuple):
    """Consecutive documents: the place of the first one in the source, docnos and texts."""

    start: int
    docnos: list[str]
    texts: list[str]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Documents to be read.

    Attributes:
        name: What they are called.
        read: Begins a pass over (docno, text), not checked.
        locate: Says of a document's number where it stands, such as "corpus.jsonl, line 17"; for those read so far.
        rereadable: Whether `read` may be called again.
        documents: How many there are, None if that is not known.
        docno_field: Where docnos stand.
        text_field: Where texts stand.
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
        if not docno:
            raise ValueError(f"{self._at(number, docno)}: {self.docno_field}: expected at least one character, got ''")

    def _at(self, number: int, docno: object) -> str:
        where = self.locate(number)
        return f"{where} (docno {_shown(docno)})" if isinstance(docno, str) and docno else where


def open_source(source: Any, *, docno_field: str = "docno", text_field: str = "text") -> Source:
    """Makes a `Source` of what documents come in.

    Args:
        source: A file of JSON lines (.jsonl, .ndjson, also .gz) or Parquet, a folder of such files (read in the order
            of their names), a Hugging Face ``Dataset``, a pandas DataFrame, or an iterable of dicts.
        docno_field: The column or key of the docnos.
        text_field: The column or key of the texts.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: It is none of these.
        ValueError: The folder holds no such files, the file is of another kind, or has no such columns.
    """
    fields = docno_field, text_field
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
            source.select_columns(list(dict.fromkeys(fields))),
            f"{type(source).__name__} {getattr(source, 'builder_name', None) or ''}".strip(),
        )
        unit, rereadable = "row", documents is not None
    elif hasattr(source, "to_dict") and hasattr(source, "columns"):  # pandas'
        _check_columns(fields, list(source.columns), "source")
        records = [dict(zip(fields, row, strict=True)) for row in zip(*(source[f] for f in fields), strict=True)]
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


def count_documents(source: Source) -> int:
    """Reads and checks all documents of a source, before hours are spent on them; returns their number."""
    return sum(len(window.docnos) for window in source.windows(_ROWS_AT_ONCE))


def _open_files(path: Path, fields: tuple[str, str]) -> Source:
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.name.endswith(JSON_LINES + PARQUET))
        if not files:
            raise ValueError(f"source: the folder {path} holds no files named {', '.join(JSON_LINES + PARQUET)}")
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"source: no such file: {file}")
        if not file.name.endswith(JSON_LINES + PARQUET):
            raise ValueError(f"source: expected a file named {', '.join(JSON_LINES + PARQUET)}, got {file}")
    sizes = [_parquet_rows(file, fields) if file.name.endswith(PARQUET) else None for file in files]
    documents = None if None in sizes else sum(cast(list[int], sizes))
    begins: list[int] = []  # of each file read so far, the number of its first document

    def read() -> Iterator[tuple[Any, Any]]:
        number = 0
        begins.clear()
        for file in files:
            begins.append(number)
            for pair in (_read_parquet if file.name.endswith(PARQUET) else _read_json_lines)(file, fields):
                yield pair
                number += 1

    def locate(number: int) -> str:
        i = max((i for i, begin in enumerate(begins) if begin <= number), default=0)
        row = number - (begins[i] if begins else 0)
        return f"{files[i]}, row {row}" if files[i].name.endswith(PARQUET) else f"{files[i]}, line {row + 1}"

    return Source(
        name=str(path),
        read=read,
        locate=locate,
        rereadable=True,
        documents=documents,
        docno_field=fields[0],
        text_field=fields[1],
    )


def _read_json_lines(path: Path, fields: tuple[str, str]) -> Iterator[tuple[Any, Any]]:
    number = 0
    with cast(BinaryIO, gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")) as file:
        try:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line.decode())
                except ValueError as error:
                    raise ValueError(
                        f"{path}, line {number}: expected a JSON object, got {_shown(line.decode(errors='replace'))} "
                        f"({error})"
                    ) from error
                yield _pair(record, fields, lambda number=number: f"{path}, line {number}")  # type: ignore[misc]
        except (EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: the file is damaged after line {number} ({error})") from error


def _parquet_rows(path: Path, fields: tuple[str, str]) -> int:
    parquet = _pyarrow_parquet()
    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(fields, file.schema_arrow.names, str(path))
            return int(file.metadata.num_rows)
    except ValueError as error:
        if type(error) is ValueError:  # its own, not pyarrow's
            raise
        raise ValueError(f"{path}: the file is damaged or no Parquet ({error})") from error


def _read_parquet(path: Path, fields: tuple[str, str]) -> Iterator[tuple[Any, Any]]:
    import pyarrow

    row = 0
    with _pyarrow_parquet().ParquetFile(path) as file:
        batches = file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=list(dict.fromkeys(fields)))
        while True:
            try:
                batch = next(batches, None)
                columns = [] if batch is None else [batch.column(field).to_pylist() for field in fields]
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


def _pair(record: Any, fields: tuple[str, str], where: Callable[[], str]) -> tuple[Any, Any]:
    if not isinstance(record, Mapping):
        raise TypeError(f"{where()}: expected a record with {_listed(fields)}, got {_shown(record)}")
    try:
        return record[fields[0]], record[fields[1]]
    except KeyError:
        missing = [field for field in fields if field not in record]
        docno = f" (docno {_shown(record[fields[0]])})" if fields[0] in record else ""
        raise ValueError(
            f"{where()}{docno}: expected {_listed(missing)}, the record has {sorted(map(str, record))[:10]}"
        ) from None


def _check_columns(fields: Sequence[str], columns: Sequence[str] | None, where: str) -> None:
    if columns is not None and (missing := [field for field in fields if field not in columns]):
        raise ValueError(f"{where}: expected the columns {_listed(missing)}, got {list(columns)[:10]}")


def _listed(fields: Sequence[str]) -> str:
    return " and ".join(map(repr, fields))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
