"""Reads files of JSON lines and Parquet."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

_KINDS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".ndjson", ".parquet")
_NAMED = 5
_ROWS_AT_ONCE = 1024
_SHOWN = 40  # characters


class Fields(NamedTuple):
    """The fields of a record that are read, and those that it must not have, with the reason."""

    docno: str
    text: str
    refused: Mapping[str, str]

    def pair(self, record: Any, where: Callable[[], str]) -> tuple[Any, Any]:
        """Returns the docno and the text of a record; ``where`` names it in errors."""
        if not isinstance(record, Mapping):
            raise TypeError(f"{where()}: expected a record with {_listed(self[:2])}, got {shown(record)}")
        self.check_refused(record, where)
        try:
            return record[self.docno], record[self.text]
        except KeyError:
            missing = [field for field in self[:2] if field not in record]
            docno = f" (docno {shown(record[self.docno])})" if self.docno in record else ""
            raise ValueError(
                f"{where()}{docno}: expected {_listed(missing)}, the record has {sorted(map(str, record))[:10]}"
            ) from None

    def check_refused(self, names: Container[str], where: Callable[[], str]) -> None:
        """Checks that none of the names of a record or a table is refused."""
        for name, reason in self.refused.items():
            if name in names:
                raise ValueError(f"{where()}: {name}: {reason}")


def source_files(path: Path) -> list[Path]:
    """Returns the files of a source; those of a folder are sorted by name.

    Hidden files and files whose names begin with "_" (such as Spark's _SUCCESS) are skipped.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: The file is of another kind, or the folder holds no such files, or other files beside them.
    """
    if not path.exists():
        raise FileNotFoundError(f"source: no such file: {path}")
    kinds = ", ".join(_KINDS)
    if not path.is_dir():
        if not path.name.lower().endswith(_KINDS):
            raise ValueError(f"source: expected a file named {kinds}, got {path}")
        return [path]
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith((".", "_")))
    if odd := [e.name for e in entries if not (e.name.lower().endswith(_KINDS) and e.is_file())]:
        raise ValueError(
            f"source: expected a folder of files named {kinds}, {path} also holds {', '.join(map(repr, odd[:_NAMED]))}"
            f"{f' and {len(odd) - _NAMED} more' if len(odd) > _NAMED else ''}, which would be left out; move them "
            "away, or begin their names with '_'"
        )
    if not entries:
        raise ValueError(f"source: the folder {path} holds no files named {kinds}")
    return entries


def read_json_lines(path: Path, fields: Fields) -> Iterator[tuple[Any, Any]]:
    """Yields the docno and the text of each line of a file, which may be compressed with gzip.

    Raises:
        ValueError: A line is not a JSON object with both fields, or the file is damaged; the line is named.
        TypeError: A line is JSON, but not an object.
    """
    number = blank = 0
    with cast(BinaryIO, gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")) as file:
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
                        f"{path}, line {number}: expected a JSON object, got {shown(line.decode(errors='replace'))} "
                        f"({error})"
                    ) from error
                yield fields.pair(record, lambda number=number: f"{path}, line {number}")  # type: ignore[misc]
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: the file is damaged after line {number} ({error})") from error


def parquet_rows(path: Path, fields: Fields) -> int:
    """Checks the columns of a Parquet file and returns the number of its rows.

    Raises:
        ImportError: pyarrow is not installed.
        ValueError: A column is missing, ambiguous or refused, or the file is damaged.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet needs pyarrow: pip install 'fair-calibration[indexing]'") from error
    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: the file is damaged or not Parquet ({error})") from error
    columns = list(metadata.schema.to_arrow_schema().names)
    fields.check_refused(columns, lambda: str(path))
    if missing := [field for field in fields[:2] if field not in columns]:
        raise ValueError(f"{path}: expected the columns {_listed(missing)}, got {columns[:10]}")
    for field in fields[:2]:
        if (n := columns.count(field)) > 1:
            raise ValueError(f"{path}: {field}: expected one column of this name, got {n}; rename the others")
    return int(metadata.num_rows)


def read_parquet(path: Path, fields: Fields) -> Iterator[tuple[Any, Any]]:
    """Yields the docno and the text of each row of a file that `parquet_rows` has checked.

    Raises:
        ValueError: The file is damaged; the row is named.
    """
    import pyarrow.parquet

    row = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        batches = file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=list(dict.fromkeys(fields[:2])))
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


def shown(value: object) -> str:
    """Returns a value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _listed(fields: Sequence[str]) -> str:
    return " and ".join(map(repr, fields))
