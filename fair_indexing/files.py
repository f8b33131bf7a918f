"""Files and folders that are either complete or absent: written under a temporary name, forced to the disk, renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_TEMPORARY = ".tmp"


class DamagedFileError(ValueError):
    """A file is not what was written: cut off, changed or missing."""


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
    """Opens a new file for writing, and forces it to the disk at the end."""
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
    """Yields an empty temporary folder, which is renamed to ``target`` at the end, or removed after an error.

    What is written into it must be synced (`synced_file`, `sync`).

    Raises:
        OSError: ``target`` is a file or a folder with something in it (checked at the end: another may have been
            faster), or the disk is full.
    """
    temporary = _temporary(target)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync(temporary)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(target.parent)


def write_folder(target: Path, files: Mapping[str, bytes], record_name: str, record: Mapping[str, Any]) -> None:
    """Writes a folder of files and a record, to which it adds the files' checksums for `read_verified` as ``files``."""
    record = {**record, "files": {name: digest_bytes(data) for name, data in files.items()}}
    with new_folder(target) as folder:
        for name, data in {**files, record_name: seal(record)}.items():
            with synced_file(folder / name) as file:
                file.write(data)


def read_verified(path: Path, checksum: str) -> bytes:
    """Reads a file whose checksum was recorded.

    Raises:
        DamagedFileError: The file is missing, or is not what was written.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DamagedFileError(f"{path}: the file is missing") from error
    if digest_bytes(data) != checksum:
        raise DamagedFileError(f"{path}: the file is damaged, its checksum is not the recorded one")
    return data


def write_record(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON object with a checksum, replacing the file if it exists."""
    temporary = _temporary(path)
    try:
        with synced_file(temporary) as file:
            file.write(seal(values))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def seal(values: Mapping[str, Any]) -> bytes:
    """Returns a JSON object with a checksum, as `read_record` reads it."""
    sealed = {**values, "checksum": digest_bytes(_canonical(values))}
    return (json.dumps(sealed, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_record(path: Path) -> dict[str, Any]:
    """Reads what `write_record` or `seal` wrote.

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
    raise DamagedFileError(f"{path}: the file is damaged, its checksum does not fit its contents")


def remove_temporary(folder: Path, is_ours: Callable[[str], bool] = lambda _: True) -> None:
    """Removes the temporary files and folders that killed processes have left in a folder.

    Args:
        folder: The folder.
        is_ours: Returns whether no other process can be writing the file or folder of this final name.
    """
    for path in folder.glob(f".*~*{_TEMPORARY}"):
        if is_ours(path.name[1:].rpartition("~")[0]):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _temporary(path: Path) -> Path:
    # Processes on several machines may write the same file at the same time.
    return path.with_name(f".{path.name}~{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}{_TEMPORARY}")


def _canonical(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, allow_nan=False).encode()
