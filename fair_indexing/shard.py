"""One shard on disk: a folder with vectors, docnos and an entry with checksums of both, written whole."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fair_indexing.files import (
    DamagedFileError,
    digest_bytes,
    digest_strings,
    new_folder,
    read_record,
    seal,
    synced_file,
)

_VECTORS, _DOCNOS, _ENTRY = "vectors.npy", "docnos.json", "entry.json"
_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """What a shard holds.

    Attributes:
        start: The place of its first document in the source, from 0.
        count: How many documents.
        dimension: D of the vectors.
        docnos: The `digest_strings` of the docnos.
        texts: The `digest_strings` of the texts that were encoded.
        vectors_file: A hash of the file of the vectors.
        docnos_file: A hash of the file of the docnos.
    """

    start: int
    count: int
    dimension: int
    docnos: str
    texts: str
    vectors_file: str
    docnos_file: str


class Shard(NamedTuple):
    """A shard in memory: its entry, ``count`` docnos, and vectors, float32 (count, D)."""

    entry: ShardEntry
    docnos: list[str]
    vectors: npt.NDArray[np.float32]


def write_shard(
    path: Path, start: int, docnos: Sequence[str], vectors: npt.NDArray[np.float32], *, texts: Sequence[str]
) -> ShardEntry:
    """Writes a shard into a new folder; arguments and errors are those of `ShardFolder.write`."""
    _check(docnos, vectors, texts)
    files = {_VECTORS: _npy(vectors), _DOCNOS: json.dumps(list(docnos), ensure_ascii=False).encode()}
    entry = ShardEntry(
        start=start,
        count=len(docnos),
        dimension=int(vectors.shape[1]),
        docnos=digest_strings(docnos),
        texts=digest_strings(texts),
        vectors_file=digest_bytes(files[_VECTORS]),
        docnos_file=digest_bytes(files[_DOCNOS]),
    )
    try:
        with new_folder(path) as part:
            for name, data in {**files, _ENTRY: seal(asdict(entry))}.items():
                with synced_file(part / name) as file:
                    file.write(data)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            error.add_note(f"{path} is not safely written; run the build again to go on after those that are")
            raise
        there = read_shard(path).entry  # written by another worker meanwhile
        if (there.docnos, there.texts) != (entry.docnos, entry.texts):
            raise ValueError(f"start: {path} holds other documents; remove the folder to build anew") from None
        return there
    return entry


def read_shard(path: Path) -> Shard:
    """Reads and verifies a shard.

    Raises:
        DamagedFileError: A file of it is not what was written.
    """
    entry = read_entry(path)
    vectors = np.load(io.BytesIO(_read(path / _VECTORS, entry.vectors_file)), allow_pickle=False)
    return Shard(entry, read_docnos(path, entry), vectors)


def read_entry(path: Path) -> ShardEntry:
    """Reads the entry of a shard; its vectors and docnos are not verified.

    Raises:
        DamagedFileError: It is not what was written.
    """
    try:
        entry = ShardEntry(**read_record(path / _ENTRY))
    except FileNotFoundError as error:
        raise DamagedFileError(f"{path}: the shard is damaged, it has no {_ENTRY}") from error
    if entry.start != int(path.name):
        raise DamagedFileError(f"{path}: the shard is another one's, it starts at {entry.start}")
    return entry


def read_docnos(path: Path, entry: ShardEntry) -> list[str]:
    """Reads and verifies the docnos of a shard.

    Raises:
        DamagedFileError: They are not what was written.
    """
    docnos: list[str] = json.loads(_read(path / _DOCNOS, entry.docnos_file))
    return docnos


def _check(docnos: Sequence[str], vectors: Any, texts: Sequence[str]) -> None:
    if not isinstance(vectors, np.ndarray) or vectors.dtype != np.float32:
        raise TypeError(f"vectors: expected a float32 array, got {getattr(vectors, 'dtype', type(vectors))}")
    if vectors.ndim != 2 or not len(vectors) == len(docnos) == len(texts):
        raise ValueError(
            f"vectors: expected (n, D) with a docno and a text each, got shape {vectors.shape}, "
            f"{len(docnos)} docnos and {len(texts)} texts"
        )
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        named = [docnos[i] for i in np.flatnonzero(~finite)[:_NAMED]]
        raise ValueError(
            f"vectors: {int((~finite).sum())} of {len(docnos)} documents have NaN or infinite values "
            f"(docno {', '.join(map(repr, named))}); use float32 or bfloat16 if the model is in float16"
        )


def _npy(vectors: npt.NDArray[np.float32]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(vectors), allow_pickle=False)
    return buffer.getvalue()


def _read(path: Path, digest: str) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DamagedFileError(f"{path}: the file is missing") from error
    if digest_bytes(data) != digest:
        raise DamagedFileError(f"{path}: the file is damaged, its checksum is not that of its entry")
    return data
