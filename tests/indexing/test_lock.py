from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from fair_indexing.lock import FolderInUseError, locked


def test_one_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(FolderInUseError) as error, locked(tmp_path):
            pass
        assert str(error.value) == (
            f"folder: {tmp_path} is being written by process {os.getpid()} on {socket.gethostname()}; "
            "wait until it has ended, or use another folder"
        )
    with locked(tmp_path):
        pass


def test_one_thread_at_a_time(tmp_path: Path) -> None:
    errors = []

    def try_it() -> None:
        try:
            with locked(tmp_path):
                pass
        except FolderInUseError as error:
            errors.append(error)

    with locked(tmp_path):
        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join()
    assert len(errors) == 1


def test_an_error_frees_it_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    with locked(tmp_path):
        assert caplog.text == ""


def test_a_killed_process_leaves_no_lock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with locked(tmp_path):
            os.write(write, b"x")
            signal.pause()
        os._exit(1)
    try:
        assert os.read(read, 1) == b"x"
        with pytest.raises(FolderInUseError, match=f"being written by process {pid} on"), locked(tmp_path):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with locked(tmp_path):
        assert f"resuming after process {pid} on {socket.gethostname()}, which was killed" in caplog.text


def test_a_lock_without_a_name(tmp_path: Path) -> None:
    with locked(tmp_path):
        (tmp_path / ".lock-owner.json").write_bytes(b"{")  # killed while it wrote it
        with pytest.raises(FolderInUseError, match="a process that left no name"), locked(tmp_path):
            pass
