"""Calls in other threads."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from fair_indexing.background import Background


def test_one_call_at_a_time_each_in_a_thread_that_ends() -> None:
    running: list[int] = []
    threads: list[threading.Thread] = []

    def work(number: int) -> int:
        assert not running
        running.append(number)
        threads.append(threading.current_thread())
        time.sleep(0.05)
        running.remove(number)
        return number

    with Background() as background:
        futures = [background.submit(work, number) for number in range(3)]
        assert not futures[2].done()  # it goes on beside this thread
    assert futures[2].done()  # and leaving waits for it
    assert [future.result() for future in futures] == [0, 1, 2]
    assert len(threads) == len(set(threads)) == 3
    assert not [thread for thread in threads if thread.is_alive()]


def test_an_error_is_that_of_its_call() -> None:
    def divide(number: int) -> float:
        return 6 / number

    with Background() as background:
        bad = background.submit(divide, 0)
        good = background.submit(divide, 2)
    assert good.result() == 3
    with pytest.raises(ZeroDivisionError):
        bad.result()


def test_leaving_because_of_an_error_waits() -> None:
    done = threading.Event()

    def work() -> None:
        time.sleep(0.1)
        done.set()

    with suppress(KeyError), Background() as background:
        background.submit(work)
        raise KeyError
    assert done.is_set()


def test_the_garbage_collector_may_leave_it_in_its_own_thread() -> None:
    def calls() -> Iterator[None]:
        with Background() as background:
            background.submit(work)
            yield

    def work() -> None:
        left.wait()
        gc.collect()  # closes the generator, which waits for this thread
        ended.set()

    left, ended = threading.Event(), threading.Event()
    gc.collect()
    forgotten: list[object] = []
    forgotten.append(forgotten)
    generator = calls()
    next(generator)
    forgotten.append(generator)
    del generator, forgotten
    left.set()
    ended.wait()
