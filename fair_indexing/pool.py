"""Encodes texts on several devices, with sentence-transformers' pool of processes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from fair_calibration.texts import show_names
from fair_indexing.checkpoints import Checkpoint
from fair_indexing.text_encoder import TextEncoder, Vectors, default_tokens_per_batch, is_out_of_memory
from fair_indexing.tokenized import TokenizedTexts

_CHUNKS = 4  # per process and class, so that all processes end at about the same time


def check_devices(devices: Sequence[str], *, name: str = "devices") -> None:
    """Raises a ValueError, in which the devices are called ``name``, if there are none or one does not exist here."""
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


class PoolEncoder(TextEncoder):
    """Encodes texts in one process per device; a context manager that stops the processes at its end.

    The processes tokenize for themselves and batch by numbers of texts, as sentence-transformers' pools do. So they get
    texts of similar length together, in classes, and for each class the batch size that fits its longest text into the
    token budget. Lengths are estimated at three bytes per token, so the budget is kept only roughly.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        devices: Sequence[str],
        *,
        tokens_per_batch: int | None = None,
        **settings: Any,
    ) -> None:
        """Starts the processes. The model stays on the CPU until they are stopped, as they copy or share its weights.

        Args:
            model: A calibrated or a plain model.
            devices: The devices, such as ["cuda:0", "cuda:1"], one process for each.
            tokens_per_batch: The most tokens of a forward pass; None for the default of the first device.
            **settings: The other settings of `TextEncoder`.

        Raises:
            ValueError: No device is given, a device does not exist, or a setting is out of range.
        """
        check_devices(devices)
        if tokens_per_batch is None:
            tokens_per_batch = default_tokens_per_batch(torch.device(devices[0]))
        super().__init__(model, tokens_per_batch=tokens_per_batch, **settings)
        self._tokenizer = None
        self._home = model.device
        self._n_processes = len(devices)
        self._pool: Any = model.start_multi_process_pool(list(devices))

    def __enter__(self) -> PoolEncoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.stop_multi_process_pool(self._pool)
        self.model.to(self._home)

    def _encode_batches(
        self, tokenized: TokenizedTexts, progress: Callable[[int], object] | None, checkpoint: Checkpoint | None
    ) -> Vectors:
        """Encodes texts in the processes, class by class."""
        classes = defaultdict(list)  # by powers of two
        for i in sorted(range(len(tokenized.texts)), key=lambda i: -tokenized.lengths[i]):
            classes[tokenized.lengths[i].bit_length()].append(i)
        vectors = np.empty((len(tokenized.texts), self.model.get_embedding_dimension() or 0), dtype=np.float32)
        for indices in classes.values():
            part = None if checkpoint is None else checkpoint.get(indices)
            is_new = part is None
            while part is None:
                size = len(self._batches(tokenized, indices)[0])
                counts = self._counts()
                part = self._try_class(tokenized, indices, size)
                if part is None:
                    self._take_back(counts)
                    self._halve(tokenized, indices[:size])
            if checkpoint is not None and is_new:
                checkpoint.add(indices, torch.from_numpy(part))
            vectors[indices] = part
            if progress is not None:
                progress(len(indices))
        return vectors

    def _try_class(self, tokenized: TokenizedTexts, indices: list[int], size: int) -> Vectors | None:
        """Encodes texts in batches of ``size``; returns None if a batch does not fit into memory."""
        try:
            vectors: Vectors = self._encode_texts(
                [tokenized.texts[i] for i in indices],
                pool=self._pool,
                batch_size=size,
                chunk_size=max(size, math.ceil(len(indices) / (_CHUNKS * self._n_processes))),
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if size > 1:
                return None
            raise MemoryError(
                f"one of the texts {show_names([tokenized.names[i] for i in indices])} (about "
                f"{tokenized.lengths[indices[0]]} tokens) does not fit into memory by itself; lower "
                "model.max_seq_length, or leave it out"
            ) from error
        return vectors
