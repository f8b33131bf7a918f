"""Calls in another thread that leave no thread behind."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Background:
    """Calls functions one after the other, each in a thread of its own, while this one goes on; leaving it waits.

    A thread that has used torch keeps a team of OpenMP threads until it ends. As long as there are more of them than
    cores, libgomp lets every team sleep where it would wait awake, the one at work in another thread too: with an idle
    thread that had tokenized, building an index took a sixth longer on two cores.
    """

    def __init__(self) -> None:
        self._last: Future[Any] | None = None

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Calls a function once the call before has ended, which is waited for here."""
        self._wait()
        executor = ThreadPoolExecutor(max_workers=1)
        future = executor.submit(function, *args, **kwargs)
        executor.shutdown(wait=False)  # its thread ends with the call
        self._last = future
        return future

    def _wait(self) -> None:
        if self._last is not None:
            wait([self._last])


def call_apart(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function in a thread of its own and returns what it returns, or raises what it raises."""
    return Background().submit(function, *args, **kwargs).result()
