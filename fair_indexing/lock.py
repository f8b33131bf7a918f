"""One writer at a time per folder."""

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
_LOCK, _OWNER = ".lock", ".lock-owner.json"


class FolderInUseError(ValueError):
    """Another process is writing the folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps a folder for this process, until the end or its death: a killed process leaves no lock behind.

    Raises:
        FolderInUseError: Another process, or another thread, has it; it is named.
    """
    owner = folder / _OWNER
    lock = FileLock(folder / _LOCK, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise FolderInUseError(
            f"folder: {folder} is being written by {_named(owner)}; wait till it has ended, or take another folder"
        ) from error
    try:
        if owner.exists():
            logger.warning("%s: going on after %s, which ended before it was done", folder, _named(owner))
        owner.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), encoding="utf-8")
        yield
        owner.unlink(missing_ok=True)
    except Exception:
        owner.unlink(missing_ok=True)  # it has ended with an error that it said
        raise
    finally:
        lock.release()


def _named(owner: Path) -> str:
    try:
        values = json.loads(owner.read_text(encoding="utf-8"))
        return f"process {values['pid']} on {values['host']}"
    except (OSError, KeyError, TypeError, ValueError):  # it was killed while it wrote its name
        return "a process that left no name"
