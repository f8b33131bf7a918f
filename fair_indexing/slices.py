"""Where the documents of each shard stand, so that any worker reads those of one shard without the others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from fair_indexing.source_files import is_parquet, open_lines, source_files


class Slice(NamedTuple):
    """Consecutive documents: the number of their file, the byte (JSON lines) or row of the first one, how many."""

    file: int
    begin: int
    n: int


class FileSlices:
    """Files of JSON lines and Parquet, in the order in which `open_source` reads them.

    Of Parquet the row groups that a slice touches are read, of JSON lines its bytes alone. A gzip file is decompressed
    from its beginning for every slice: several small ones do better than one large one.
    """

    def __init__(self, source: str | os.PathLike[str], fields: tuple[str, str]) -> None:
        """Takes a file or a folder that `open_source` has opened, and the names of docno and text."""
        self.files = source_files(Path(source).resolve())  # workers have another working directory
        self.fields = fields

    def cut(self, size: int) -> list[list[Slice]]:
        """Returns the slices of each shard of ``size`` documents; the lines of JSON files are counted for it."""
        shards: list[list[Slice]] = []
        room = 0  # how many documents the last shard still takes
        for number, file in enumerate(self.files):
            pieces = _parquet_pieces if is_parquet(file) else _json_pieces
            for begin, count in pieces(file, room or size, size):
                if not room:
                    shards.append([])
                    room = size
                shards[-1].append(Slice(number, begin, count))
                room -= count
        return shards

    def read(self, slices: Sequence[Slice]) -> tuple[list[Any], list[Any]]:
        """Returns docnos and texts; they are not checked.

        Raises:
            OSError: A file is not there, or cannot be read.
            ValueError: It is not as it was when it was cut.
        """
        pairs: list[tuple[Any, Any]] = []
        for number, begin, count in slices:
            file = self.files[number]
            pairs += (_read_parquet if is_parquet(file) else _read_json)(file, begin, count, self.fields)
        return [docno for docno, _ in pairs], [text for _, text in pairs]


class DatasetSlices:
    """A Hugging Face ``Dataset``. One with files (loaded, or from disk) is opened by workers under the same paths."""

    def __init__(self, dataset: Any, fields: tuple[str, str]) -> None:
        """Takes a data set and the names of docno and text."""
        self.dataset = dataset.select_columns(list(dict.fromkeys(fields)))
        self.fields = fields

    def cut(self, size: int) -> list[list[Slice]]:
        """Returns the slice of each shard of ``size`` documents."""
        n = len(self.dataset)
        return [[Slice(0, start, min(size, n - start))] for start in range(0, n, size)]

    def read(self, slices: Sequence[Slice]) -> tuple[list[Any], list[Any]]:
        """Returns docnos and texts; they are not checked."""
        docnos: list[Any] = []
        texts: list[Any] = []
        for _, begin, count in slices:
            rows = self.dataset[begin : begin + count]
            docnos += rows[self.fields[0]]
            texts += rows[self.fields[1]]
        return docnos, texts


def open_slices(source: Any, *, docno_field: str, text_field: str) -> FileSlices | DatasetSlices:
    """Opens a source for workers.

    Args:
        source: A file or folder on a file system that all workers see, or a Hugging Face ``Dataset``.
        docno_field: The column or key of the docnos.
        text_field: The column or key of the texts.

    Raises:
        TypeError: It is something else, which workers cannot read slices of.
    """
    fields = docno_field, text_field
    if isinstance(source, (str, os.PathLike)):
        return FileSlices(source, fields)
    if all(hasattr(source, name) for name in ("select_columns", "features", "__len__")):
        return DatasetSlices(source, fields)
    raise TypeError(
        f"source: workers read from a file, a folder or a Hugging Face Dataset, got {type(source).__name__}; write it "
        "to Parquet or JSON lines first"
    )


def _json_pieces(file: Path, first: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields (byte, lines) of pieces of ``first`` and then of ``size`` lines; the last one may have fewer.

    Blank lines are not counted: they stand at the end.
    """
    with open_lines(file) as lines:
        while True:
            begin = lines.tell()
            count = sum(1 for line in islice(lines, first) if line.strip())
            if not count:
                return
            yield begin, count
            first = size


def _parquet_pieces(file: Path, first: int, size: int) -> Iterator[tuple[int, int]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as parquet:
        rows = parquet.metadata.num_rows
    begin = 0
    while begin < rows:
        yield begin, min(first, rows - begin)
        begin, first = begin + first, size


def _read_json(file: Path, begin: int, count: int, fields: tuple[str, str]) -> list[tuple[Any, Any]]:
    with open_lines(file) as lines:
        lines.seek(begin)
        records = [json.loads(line) for line in islice(lines, count)]
    try:
        return [(record[fields[0]], record[fields[1]]) for record in records]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file}: a record has no {error}") from error


def _read_parquet(file: Path, begin: int, count: int, fields: tuple[str, str]) -> list[tuple[Any, Any]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as parquet:
        groups: list[int] = []
        skipped = row = 0
        for group in range(parquet.metadata.num_row_groups):
            end = row + parquet.metadata.row_group(group).num_rows
            if end <= begin:
                skipped = end
            elif row < begin + count:
                groups.append(group)
            row = end
        table = parquet.read_row_groups(groups, columns=list(dict.fromkeys(fields))).slice(begin - skipped, count)
    return list(zip(*(table.column(field).to_pylist() for field in fields), strict=True))
