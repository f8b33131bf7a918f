"""Runs functions in a second thread that ends after each call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Background:
    """A context manager that runs functions one after the other, each in a new thread, and waits for the last one.

    `ThreadPoolExecutor` keeps its thread, and a thread that has used torch keeps OpenMP threads until it ends. If there
    are more of these than cores, libgomp slows all of them down: with an idle thread that had tokenized, building an
    index took a sixth longer on two cores.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Waits until the previous call has ended, and runs a function in a new thread."""
        self._wait()
        future: Future[R] = Future()

        def call() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:  # raised by Future.result
                future.set_exception(error)

        self._thread = threading.Thread(target=call, name=f"background {getattr(function, '__name__', function)}")
        self._thread.start()
        return future

    def _wait(self) -> None:
        # The garbage collector may close an abandoned generator, and so this context, in the background thread itself.
        if self._thread is not None and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
