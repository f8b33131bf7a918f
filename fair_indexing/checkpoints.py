"""Keeps the encoded batches of an unfinished shard on disk, so that an interruption costs less than a minute."""

from __future__ import annotations

import io
import logging
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fair_indexing.files import (
    DamagedFileError,
    digest_bytes,
    digest_strings,
    new_folder,
    read_record,
    remove_parts,
    seal,
    synced_file,
)

logger = logging.getLogger("fair_indexing")
INTERVAL = 30.0
"""Seconds of encoding after which batches are written to the disk."""
_FOLDER = "unfinished"
_VECTORS, _RECORD = "vectors.npy", "batches.json"


class Checkpoint:
    """The batches of a range of documents that were encoded so far; those of an interrupted run are read back.

    A batch is used again only if it holds the same documents with the same texts: its vectors are then those that
    encoding it again would give.
    """

    def __init__(self, build: Path, start: int, texts: Sequence[str]) -> None:
        """Reads what an interrupted run has kept.

        Args:
            build: The folder of the build.
            start: The place of the first document in the source.
            texts: The texts of the documents.
        """
        self._folder = build / _FOLDER
        self._start = start
        self._texts = texts
        self._known: dict[tuple[int, ...], npt.NDArray[np.float32]] = {}
        self._pending: list[tuple[list[int], torch.Tensor]] = []
        self._saved = time.monotonic()
        for path in _paths(self._folder, start):
            self._known |= _read(path, self._digest())

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
        kept = [(batch, part.cpu().numpy()) for batch, part in self._pending if bool(part.isfinite().all())]
        self._pending, self._saved = [], time.monotonic()
        if not kept:
            return
        buffer = io.BytesIO()
        np.save(buffer, np.concatenate([part for _, part in kept]), allow_pickle=False)
        record = {
            "texts": self._digest(),
            "batches": [batch for batch, _ in kept],
            "vectors": digest_bytes(buffer.getvalue()),
        }
        number = len(_paths(self._folder, self._start))
        with new_folder(self._folder / f"{self._start:012d}-{number:06d}") as part:
            for name, data in {_VECTORS: buffer.getvalue(), _RECORD: seal(record)}.items():
                with synced_file(part / name) as file:
                    file.write(data)

    def _digest(self) -> str:
        return digest_strings(self._texts)


def remove_checkpoints(build: Path, start: int, count: int) -> None:
    """Removes the checkpoints of ``count`` documents from ``start`` on, whose shard is complete."""
    folder = build / _FOLDER
    for path in _paths(folder):
        if start <= int(path.name.partition("-")[0]) < start + count:
            shutil.rmtree(path)
    with suppress(OSError):  # other shards have checkpoints, or none had any
        if folder.exists():
            folder.rmdir()


def remove_all_checkpoints(build: Path) -> None:
    """Removes all checkpoints of a build."""
    if (build / _FOLDER).exists():
        shutil.rmtree(build / _FOLDER)


def repair_checkpoints(build: Path, whole: Iterable[tuple[int, int]]) -> None:
    """Removes half-written checkpoints, and those of the shards (start, count) that are complete."""
    if (build / _FOLDER).exists():
        remove_parts(build / _FOLDER)
        for start, count in whole:
            remove_checkpoints(build, start, count)


def count_checkpointed(build: Path) -> int:
    """Returns the number of documents in the checkpoints of a build."""
    n = 0
    for path in _paths(build / _FOLDER):
        with suppress(DamagedFileError, OSError):
            n += sum(map(len, read_record(path / _RECORD)["batches"]))
    return n


def _paths(folder: Path, start: int | None = None) -> list[Path]:
    if not folder.exists():
        return []
    prefix = "" if start is None else f"{start:012d}-"
    return sorted(p for p in folder.iterdir() if p.name.startswith(prefix) and p.name[:1].isdecimal())


def _read(path: Path, texts: str) -> dict[tuple[int, ...], npt.NDArray[np.float32]]:
    """Returns the vectors of each batch, none if the checkpoint is damaged or belongs to other texts."""
    try:
        record = read_record(path / _RECORD)
        data = (path / _VECTORS).read_bytes()
    except (DamagedFileError, OSError):
        record, data = {}, b""
    if not record or digest_bytes(data) != record["vectors"]:
        logger.warning("%s: the checkpoint is damaged; its documents are encoded again", path)
        return {}
    if record["texts"] != texts:
        return {}
    vectors, batches, first = np.load(io.BytesIO(data), allow_pickle=False), {}, 0
    for batch in record["batches"]:
        batches[tuple(batch)] = vectors[first : first + len(batch)]
        first += len(batch)
    return batches
