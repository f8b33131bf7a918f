"""Encodes windows of documents on several devices, with sentence-transformers' pool of processes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from fair_indexing.encoding import (
    DocumentEncoder,
    Vectors,
    check_finite,
    default_tokens_per_batch,
    is_out_of_memory,
    show_names,
)
from fair_indexing.window import Window

_CHUNKS = 4  # per process and class, so that they end at about the same time


def check_devices(devices: Sequence[str], *, name: str = "devices") -> None:
    """Raises a ValueError, which calls them ``name``, where there are none, or one is not here."""
    if isinstance(devices, str) or not devices:
        raise ValueError(f"{name}: expected a list such as ['cuda:0', 'cuda:1'], got {devices!r}")
    for device in devices:
        try:
            kind = torch.device(device)
            if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():  # no context in this process
                raise ValueError(f"there are {torch.cuda.device_count()} CUDA devices")
            if kind.type != "cuda":
                torch.empty(0, device=kind)
        except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{name}: expected devices of this machine, such as 'cpu' or 'cuda:0', got {device!r} ({reason})"
            ) from error


class PoolEncoder(DocumentEncoder):
    """Encodes windows in one process per device; a context manager that stops them at its end.

    The processes tokenize for themselves, and batch by numbers of documents, as sentence-transformers' do. So they are
    given documents of like length together, by classes, and for each class the number that the budget of tokens holds
    of its longest. Lengths are estimated, at three bytes per token, so the budget is kept roughly.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        devices: Sequence[str],
        *,
        tokens_per_batch: int | None = None,
        max_documents: int | None = None,
        normalize: bool | None = None,
        strength: float | None = None,
    ) -> None:
        """Starts the processes. The model is on the CPU until they are stopped, as they copy or share its weights.

        Args:
            model: A calibrated or a plain model.
            devices: The devices, such as ["cuda:0", "cuda:1"], one process for each.
            tokens_per_batch: As all settings see `encode_documents`.
            max_documents: See `encode_documents`.
            normalize: See `encode_documents`.
            strength: See `encode_documents`.

        Raises:
            ValueError: There are no devices, one is not here, or a setting is out of range.
        """
        check_devices(devices)
        if tokens_per_batch is None:
            tokens_per_batch = default_tokens_per_batch(torch.device(devices[0]))
        super().__init__(
            model,
            tokens_per_batch=tokens_per_batch,
            max_documents=max_documents,
            normalize=normalize,
            strength=strength,
        )
        self._tokenizer = None
        self._home = model.device
        self._n_processes = len(devices)
        self._pool: Any = model.start_multi_process_pool(list(devices))

    def __enter__(self) -> PoolEncoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.stop_multi_process_pool(self._pool)
        self.model.to(self._home)

    def encode(self, window: Window, *, progress: Callable[[int], object] | None = None) -> Vectors:
        """Encodes a window; see `DocumentEncoder.encode`."""
        classes = defaultdict(list)  # by powers of two
        for i in sorted(range(len(window.texts)), key=lambda i: -window.lengths[i]):
            classes[window.lengths[i].bit_length()].append(i)
        vectors = np.empty((len(window.texts), self.model.get_embedding_dimension() or 0), dtype=np.float32)
        for numbers in classes.values():
            part = None
            while part is None:
                size = len(self._batches(window, numbers)[0])
                counts = self._counts()
                part = self._try_class(window, numbers, size)
                if part is None:
                    self._uncount(counts)
                    self._halve(window, numbers[:size])
            vectors[numbers] = part
            if progress is not None:
                progress(len(numbers))
        check_finite(vectors, window.names)
        return vectors

    def _try_class(self, window: Window, numbers: list[int], size: int) -> Vectors | None:
        """Encodes documents in batches of ``size``; None where one does not fit into memory."""
        try:
            vectors: Vectors = self.model.encode_document(
                [window.texts[i] for i in numbers],
                pool=self._pool,
                batch_size=size,
                chunk_size=max(size, math.ceil(len(numbers) / (_CHUNKS * self._n_processes))),
                normalize_embeddings=self.normalize,
                show_progress_bar=False,
                **self._settings,
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if size > 1:
                return None
            raise MemoryError(
                f"one of the documents {show_names(window.names[i] for i in numbers)} (about "
                f"{window.lengths[numbers[0]]} tokens) does not fit into memory by itself; lower "
                "model.max_seq_length, or leave it out"
            ) from error
        return vectors
