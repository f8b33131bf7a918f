"""Calls in another thread that leave no thread behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Background:
    """Calls functions one after the other, each in a thread of its own, while this one goes on; leaving it waits.

    A thread that has used torch keeps a team of OpenMP threads until it ends. As long as there are more of them than
    cores, libgomp lets every team sleep where it would wait awake, the one at work in another thread too: with an idle
    thread that had tokenized, building an index took a sixth longer on two cores.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Calls a function once the thread of the call before has ended, which is waited for here."""
        self._wait()
        future: Future[R] = Future()

        def call() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:  # whoever asks for the result gets it
                future.set_exception(error)

        self._thread = threading.Thread(target=call, name=f"background {getattr(function, '__name__', function)}")
        self._thread.start()
        return future

    def _wait(self) -> None:
        # The garbage collector may leave a forgotten generator's `with` in any thread, this one's own too.
        if self._thread is not None and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()


def call_apart(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function in a thread of its own and returns what it returns, or raises what it raises."""
    with Background() as background:
        return background.submit(function, *args, **kwargs).result()
