"""Finds the files of a source and opens them."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import BinaryIO, cast

JSON_LINES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".ndjson")
PARQUET = (".parquet",)
GZIP_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)
"""What reading a damaged gzip file raises."""

_NAMED = 5


def source_files(path: Path) -> list[Path]:
    """Returns the files of a source; those of a folder are sorted by name.

    Hidden files and files whose names begin with "_" (such as Spark's _SUCCESS) are skipped.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: The file is of another kind, or the folder holds no such files, or other files beside them.
    """
    if not path.exists():
        raise FileNotFoundError(f"source: no such file: {path}")
    kinds = ", ".join(JSON_LINES + PARQUET)
    if not path.is_dir():
        if not _is_read(path):
            raise ValueError(f"source: expected a file named {kinds}, got {path}")
        return [path]
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith((".", "_")))
    if odd := [entry.name for entry in entries if not (_is_read(entry) and entry.is_file())]:
        raise ValueError(
            f"source: expected a folder of files named {kinds}, {path} also holds {', '.join(map(repr, odd[:_NAMED]))}"
            f"{f' and {len(odd) - _NAMED} more' if len(odd) > _NAMED else ''}, which would be left out; move them "
            "away, or begin their names with '_'"
        )
    if not entries:
        raise ValueError(f"source: the folder {path} holds no files named {kinds}")
    return entries


def is_parquet(file: Path) -> bool:
    """Returns whether the name of a file says that it is Parquet; otherwise it holds JSON lines."""
    return file.name.lower().endswith(PARQUET)


def open_lines(file: Path) -> BinaryIO:
    """Opens a file of JSON lines; reading a damaged one raises one of `GZIP_ERRORS`."""
    return cast(BinaryIO, gzip.open(file, "rb") if file.suffix.lower() == ".gz" else file.open("rb"))


def _is_read(file: Path) -> bool:
    return file.name.lower().endswith(JSON_LINES + PARQUET)
