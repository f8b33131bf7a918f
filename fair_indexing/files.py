"""Files and folders that are whole or not there: written beside their place, synced to the disk, then renamed."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_PART = ".part"


class DamagedFileError(ValueError):
    """A file is not what was written: torn, changed or missing."""


def digest_bytes(data: Any) -> str:
    """Returns a 128-bit hash of bytes, or of anything that holds contiguous ones."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_strings(strings: Iterable[str]) -> str:
    """Returns a 128-bit hash of a sequence of strings; where one ends and the next begins matters."""
    digest = hashlib.blake2b(digest_size=16)
    for string in strings:
        data = string.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


@contextmanager
def synced_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file for writing; it is on the disk at the end."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Forces a file, or the names in a folder, to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Gives an empty folder that takes ``target``'s name at the end, or is removed after an error.

    What is written into it must be synced (`synced_file`, `sync`).

    Raises:
        OSError: ``target`` is a file or a folder with something in it (checked at the end: another may have been
            faster), or the disk is full.
    """
    part = _part_of(target)
    part.mkdir(parents=True)
    try:
        yield part
        sync(part)
        os.rename(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync(target.parent)


def write_record(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON object with a checksum, in the place of what is there."""
    part = _part_of(path)
    try:
        with synced_file(part) as file:
            file.write(seal(values))
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync(path.parent)


def seal(values: Mapping[str, Any]) -> bytes:
    """Returns a JSON object with a checksum, as `read_record` reads it."""
    sealed = {**values, "checksum": digest_bytes(_canonical(values))}
    return (json.dumps(sealed, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_record(path: Path) -> dict[str, Any]:
    """Reads what `write_record` wrote.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedFileError: It is not what was written.
    """
    try:
        values = json.loads(path.read_bytes())
        if isinstance(values, dict) and values.pop("checksum", None) == digest_bytes(_canonical(values)):
            return values
    except (UnicodeError, ValueError):
        pass
    raise DamagedFileError(f"{path}: the file is damaged, its checksum is not that of what stands in it")


def remove_parts(folder: Path, name: str | None = None) -> None:
    """Removes what killed writers of a file or folder, or of all, have left half-written; none may be at work there."""
    for part in folder.glob(f".*{_PART}" if name is None else f".{glob.escape(name)}~*{_PART}"):
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink()


def _part_of(path: Path) -> Path:
    # Writers on several machines may write the same file at once.
    return path.with_name(f".{path.name}~{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}{_PART}")


def _canonical(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, allow_nan=False).encode()
