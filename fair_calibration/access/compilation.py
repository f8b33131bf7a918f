"""Runs compiled models uncompiled while a forward pass is calibrated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_stances: list[Any] = []  # one for each pass that is running, in any thread


@contextmanager
def run_uncompiled() -> Iterator[None]:
    """Makes models and functions of torch.compile run uncompiled, as their graphs were compiled without calibration.

    torch has one setting ("stance") for all threads, so compiled models in other threads run uncompiled as well.

    Raises:
        ValueError: This is called inside a compiled function.
    """
    with _lock:
        try:
            stance = torch.compiler.set_stance("force_eager")
        except RuntimeError as error:
            raise ValueError(
                "a SentenceTransformer that is compiled as a whole cannot be calibrated; compile its transformer "
                "alone: model[0].model = torch.compile(model[0].model)"
            ) from error
        _stances.append(stance)
    try:
        yield
    finally:
        with _lock:
            # Passes may end in any order. The last one that ends restores what the first one found.
            stance = _stances.pop()
            if not _stances:
                stance.__exit__(None, None, None)
