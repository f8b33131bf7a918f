"""Checks the files of an assembled index against the sizes and checksums that were recorded when it was written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fair_indexing.files import DamagedFileError, read_record

RECORD = "fair_index.json"
"""The file of an assembled index that describes what made its vectors: a `Manifest`, and its files."""
_BLOCK = 2**16  # bytes
_BLOCKS = 64  # of a file that are read for the sampled checksum
_REMEDY = "restore the file, or remove the index and build it again"


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns the size, the checksum and the sampled checksum of each file."""
    return {
        name: {
            "size": (folder / name).stat().st_size,
            "sampled": _digest(folder / name, full=False),
            "full": _digest(folder / name, full=True),
        }
        for name in names
    }


def check_index(path: str | os.PathLike[str], *, full: bool = False) -> None:
    """Checks that the files of an assembled index are those that were written.

    Args:
        path: The folder of the index.
        full: Whether to read every byte. Otherwise sizes are compared, and at most 4 MiB of each file are read, spread
            over its length: so cut, zeroed, missing and exchanged files are found in no time, single bytes may not be.

    Raises:
        DamagedFileError: A file is missing or is not what was written; it is named.
        ValueError: The folder has no record of its files: it is not an index, or another tool made it.
    """
    for name, expected in _recorded(Path(path)).items():
        file = Path(path) / name
        if not file.is_file():
            raise DamagedFileError(f"{file}: the file is missing; {_REMEDY}")
        if (size := file.stat().st_size) != expected["size"]:
            raise DamagedFileError(
                f"{file}: the file is damaged, expected {expected['size']} bytes, got {size}; {_REMEDY}"
            )
        if _digest(file, full=full) != expected["full" if full else "sampled"]:
            raise DamagedFileError(
                f"{file}: the file is damaged or another index's, as its checksum is not the recorded one; {_REMEDY}"
            )


def _recorded(path: Path) -> Mapping[str, Any]:
    try:
        files: Mapping[str, Any] | None = read_record(path / RECORD).get("files")
    except DamagedFileError as error:
        raise DamagedFileError(f"{error}; {_REMEDY}") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"index: {path} has no {RECORD}, so its files cannot be checked") from error
    if files is None:
        raise ValueError(f"index: {path / RECORD} records no checksums, so its files cannot be checked")
    return files


def _digest(file: Path, *, full: bool) -> str:
    digest = hashlib.blake2b(digest_size=16)
    size = file.stat().st_size
    with file.open("rb") as opened:
        if full or size <= _BLOCK * _BLOCKS:
            while block := opened.read(2**20):
                digest.update(block)
        else:
            for i in range(_BLOCKS):
                opened.seek((size - _BLOCK) * i // (_BLOCKS - 1))
                digest.update(opened.read(_BLOCK))
    return digest.hexdigest()
