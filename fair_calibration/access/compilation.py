"""Running what was compiled with torch.compile as it was written, for as long as a forward pass is calibrated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_running: list[Any] = []  # the stances of the passes under way


@contextmanager
def run_uncompiled() -> Iterator[None]:
    """Has compiled models and functions run uncompiled: their graphs know nothing of calibration.

    torch has one such stance for all threads, so that in the meantime those of other threads run uncompiled too.

    Raises:
        ValueError: This runs inside of something compiled.
    """
    with _lock:
        try:
            stance = torch.compiler.set_stance("force_eager")
        except RuntimeError as error:
            raise ValueError(
                "a SentenceTransformer that is compiled as a whole cannot be calibrated; compile its transformer "
                "alone: model[0].model = torch.compile(model[0].model)"
            ) from error
        _running.append(stance)
    try:
        yield
    finally:
        with _lock:
            stance = _running.pop()  # whichever pass ends last, the first one's is left for it
            if not _running:
                stance.__exit__(None, None, None)
