"""Keeps the encoded batches of an unfinished shard on disk, so that an interruption costs less than a minute."""

from __future__ import annotations

import io
import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fair_indexing.files import DamagedFileError, digest_strings, read_record, read_verified, write_folder
from fair_indexing.shard import npy_bytes

logger = logging.getLogger("fair_indexing")
INTERVAL = 30.0
"""Seconds of encoding after which batches are written to the disk."""
FOLDER = "unfinished"
"""The folder of the checkpoints in the folder of a build; their names begin with the number of a document."""
_VECTORS, _RECORD = "vectors.npy", "batches.json"


class Checkpoint:
    """The batches of consecutive documents that were encoded so far; those of an interrupted run are read back.

    A batch is used again only if it holds the same documents with the same texts: its vectors are then those that
    encoding it again would give.
    """

    def __init__(self, build: Path, start: int, texts: Sequence[str]) -> None:
        """Reads what an interrupted run has kept.

        Args:
            build: The folder of the build.
            start: The number of the first document in the source.
            texts: The texts of the documents.
        """
        self._folder = build / FOLDER
        self._start = start
        self._texts = digest_strings(texts)
        self._known: dict[tuple[int, ...], npt.NDArray[np.float32]] = {}
        self._pending: list[tuple[list[int], torch.Tensor]] = []
        self._saved = time.monotonic()
        for path in self._paths():
            self._read(path)

    def get(self, batch: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """Returns the vectors of a batch, (B, D), in its order, or None if it has to be encoded."""
        return self._known.get(tuple(batch))

    def add(self, batch: Sequence[int], vectors: torch.Tensor) -> None:
        """Takes the vectors of a batch, (B, D), and writes all new batches to the disk if the last time is long ago."""
        self._pending.append((list(batch), vectors))
        if time.monotonic() - self._saved >= INTERVAL:
            self.save()

    def save(self) -> None:
        """Writes the new batches to the disk. Vectors with NaN or infinite values are left out.

        Raises:
            OSError: The disk is full, or cannot be written.
        """
        kept = [(batch, vectors.cpu().numpy()) for batch, vectors in self._pending if bool(vectors.isfinite().all())]
        self._pending, self._saved = [], time.monotonic()
        if kept:
            number = len(self._paths())
            record = {"texts": self._texts, "batches": [batch for batch, _ in kept]}
            files = {_VECTORS: npy_bytes(np.concatenate([vectors for _, vectors in kept]))}
            write_folder(self._folder / f"{self._start:012d}-{number:06d}", files, _RECORD, record)

    def _paths(self) -> list[Path]:
        return [path for path in _paths(self._folder) if _first_document(path) == self._start]

    def _read(self, path: Path) -> None:
        try:
            record = read_record(path / _RECORD)
            data = read_verified(path / _VECTORS, record["files"][_VECTORS])
        except (DamagedFileError, OSError):
            logger.warning("%s: the checkpoint is damaged; its documents are encoded again", path)
            return
        if record["texts"] == self._texts:
            vectors, first = np.load(io.BytesIO(data), allow_pickle=False), 0
            for batch in record["batches"]:
                self._known[tuple(batch)] = vectors[first : first + len(batch)]
                first += len(batch)


def remove_checkpoints(build: Path, start: int, count: int) -> None:
    """Removes the checkpoints of ``count`` documents from number ``start`` on, whose shard is complete."""
    for path in _paths(build / FOLDER):
        if start <= _first_document(path) < start + count:
            shutil.rmtree(path)


def count_checkpointed(build: Path) -> int:
    """Returns the number of documents in the checkpoints of a build."""
    n = 0
    for path in _paths(build / FOLDER):
        with suppress(DamagedFileError, OSError):
            n += sum(map(len, read_record(path / _RECORD)["batches"]))
    return n


def _paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name[0].isdecimal()) if folder.exists() else []


def _first_document(path: Path) -> int:
    return int(path.name.partition("-")[0])
