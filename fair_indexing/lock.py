"""Locks that keep a folder, or one part of a build in it, for one process at a time."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger("fair_indexing")
Part = tuple[int, int]
"""A part (i, n) of a build: every n-th shard, from number i on."""
_WAIT = 60  # seconds; other processes keep the lock that is waited for only for a moment


class FolderInUseError(ValueError):
    """Another process is writing the folder."""


@contextmanager
def locked(folder: Path, *, part: Part | None = None, timeout: float = 0) -> Iterator[None]:
    """Keeps a folder, or one part of a build in it, until the end or the death of this process.

    The n parts of a build can be kept at the same time, by one process each. The whole folder, or a part of another
    division, can be kept only when there is no other.

    Args:
        folder: The folder.
        part: The part, or None for the whole folder.
        timeout: Seconds to wait for other processes.

    Raises:
        FolderInUseError: Another process, or another thread, keeps what is asked for; it is named.
    """
    lock = FileLock(_path(folder, part), timeout=timeout, thread_local=False)
    owner = _owner(Path(lock.lock_file))
    with exclusive(folder):
        for rival in [Path(lock.lock_file), *_rivals(folder, part)]:
            if _is_held(rival, timeout):
                raise FolderInUseError(
                    f"folder: {folder} is being written by {_name(_owner(rival))}; wait until it has ended, or use "
                    "another folder"
                )
        lock.acquire()
    try:
        if owner.exists():
            logger.warning("%s: resuming after %s, which was killed", folder, _name(owner))
        owner.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), encoding="utf-8")
        yield
        owner.unlink(missing_ok=True)
    except Exception:
        owner.unlink(missing_ok=True)  # the user has seen the error
        raise
    finally:
        lock.release()


def exclusive(folder: Path) -> FileLock:
    """Returns the lock for the moments in which a build is begun or a lock is taken."""
    return FileLock(folder / ".lock-begin", timeout=_WAIT, thread_local=False)


def other_parts_at_work(folder: Path, part: Part) -> bool:
    """Returns whether another part of a build is being encoded. The caller keeps `exclusive`."""
    own = _path(folder, part)
    return any(_is_held(path, 0) for path in folder.glob(".lock-part-*.lock") if path != own)


def _path(folder: Path, part: Part | None) -> Path:
    return folder / (".lock" if part is None else f".lock-part-{part[0]}-of-{part[1]}.lock")


def _rivals(folder: Path, part: Part | None) -> list[Path]:
    """Returns the locks that no other process may hold beside the one that is asked for."""
    parts = folder.glob(".lock-part-*.lock")
    if part is None:
        return list(parts)
    return [_path(folder, None), *(path for path in parts if not path.stem.endswith(f"-of-{part[1]}"))]


def _is_held(path: Path, timeout: float) -> bool:
    if not path.exists():
        return False
    try:
        with FileLock(path, timeout=timeout, thread_local=False):
            return False
    except Timeout:
        return True


def _owner(lock: Path) -> Path:
    return lock.with_name(f"{lock.stem}-owner.json")


def _name(owner: Path) -> str:
    try:
        values = json.loads(owner.read_text(encoding="utf-8"))
        return f"process {values['pid']} on {values['host']}"
    except (OSError, KeyError, TypeError, ValueError):  # killed while it wrote the file
        return "a process that left no name"
