"""Faults at every file operation: a full disk, or kill -9, at the n-th write, fsync, rename or removal."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


class Moments:
    """Counts file operations, and acts at one of them."""

    def __init__(self, at: int | None, act: Callable[[], None]) -> None:
        self.at = at
        self.act = act
        self.count = 0
        self.lock = threading.Lock()

    def reached(self) -> bool:
        """Counts one more; returns whether it is the one to act at."""
        with self.lock:
            self.count += 1
            return self.count - 1 == self.at


class _TornFile:
    """A file whose write is cut in half when its moment has come."""

    def __init__(self, file: Any, moments: Moments) -> None:
        self._file = file
        self._moments = moments

    def write(self, data: Any) -> int:
        if self._moments.reached():
            self._file.write(bytes(data)[: len(bytes(data)) // 2])
            self._file.flush()
            self._moments.act()
        return int(self._file.write(data))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __enter__(self) -> _TornFile:
        self._file.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self._file.__exit__(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def fault_at(moment: int | None, act: Callable[[], None]) -> Iterator[Moments]:
    """Acts before the file operation of a number; yields the counter of the operations. None acts never."""
    moments = Moments(moment, act)

    def patched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if moments.reached():
                moments.act()
            return real(*args, **kwargs)

        return call

    real_open = Path.open

    def open_(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = real_open(path, mode, *args, **kwargs)
        return _TornFile(file, moments) if mode == "xb" else file

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "rename", "replace", "rmdir"):
            patch.setattr(os, name, patched(getattr(os, name)))
        patch.setattr(Path, "open", open_)
        yield moments


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def tree(folder: Path) -> dict[str, bytes]:
    """Returns all files of a folder that are no locks: their bytes by their relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".lock")
    }
