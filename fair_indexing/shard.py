"""One shard: a folder with vectors, docnos, and an entry that describes both with their checksums."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fair_indexing.files import DamagedFileError, digest_strings, read_record, read_verified, write_folder

_VECTORS, _DOCNOS, _ENTRY = "vectors.npy", "docnos.json", "entry.json"
_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """Describes a shard.

    Attributes:
        start: The number of its first document in the source, from 0.
        count: The number of its documents.
        dimension: D, the dimension of the vectors.
        docnos: The `digest_strings` of the docnos.
        texts: The `digest_strings` of the texts that were encoded.
        files: The checksum of each file.
    """

    start: int
    count: int
    dimension: int
    docnos: str
    texts: str
    files: Mapping[str, str]


class Shard(NamedTuple):
    """A shard in memory: its entry, ``count`` docnos, and vectors, float32 (count, D)."""

    entry: ShardEntry
    docnos: list[str]
    vectors: npt.NDArray[np.float32]


def write_shard(
    path: Path, start: int, docnos: Sequence[str], vectors: npt.NDArray[np.float32], *, texts: Sequence[str]
) -> None:
    """Writes a shard into a new folder; arguments and errors are those of `ShardFolder.write`."""
    _check(docnos, vectors, texts)
    entry = {
        "start": start,
        "count": len(docnos),
        "dimension": int(vectors.shape[1]),
        "docnos": digest_strings(docnos),
        "texts": digest_strings(texts),
    }
    files = {_VECTORS: npy_bytes(vectors), _DOCNOS: json.dumps(list(docnos), ensure_ascii=False).encode()}
    try:
        write_folder(path, files, _ENTRY, entry)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            error.add_note(f"{path} could not be written; run the build again to resume it")
            raise
        existing = asdict(read_shard(path).entry)  # another process has written it meanwhile
        if any(existing[key] != entry[key] for key in ("docnos", "texts")):
            raise ValueError(f"start: {path} holds other documents; remove the folder to start again") from None


def read_shard(path: Path) -> Shard:
    """Reads and verifies a shard.

    Raises:
        DamagedFileError: One of its files is missing, or is not what was written.
    """
    entry = read_entry(path)
    vectors = np.load(io.BytesIO(read_verified(path / _VECTORS, entry.files[_VECTORS])), allow_pickle=False)
    return Shard(entry, read_docnos(path, entry), vectors)


def read_entry(path: Path) -> ShardEntry:
    """Reads the entry of a shard, without verifying its vectors and docnos.

    Raises:
        DamagedFileError: The entry is missing, or is not what was written.
    """
    try:
        entry = ShardEntry(**read_record(path / _ENTRY))
    except FileNotFoundError as error:
        raise DamagedFileError(f"{path}: the shard is damaged, it has no {_ENTRY}") from error
    if entry.start != int(path.name):
        raise DamagedFileError(f"{path}: the folder holds another shard, which starts at {entry.start}")
    return entry


def read_docnos(path: Path, entry: ShardEntry) -> list[str]:
    """Reads and verifies the docnos of a shard.

    Raises:
        DamagedFileError: The file is missing, or is not what was written.
    """
    docnos: list[str] = json.loads(read_verified(path / _DOCNOS, entry.files[_DOCNOS]))
    return docnos


def npy_bytes(vectors: npt.NDArray[np.float32]) -> bytes:
    """Returns the content of a ``.npy`` file."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(vectors), allow_pickle=False)
    return buffer.getvalue()


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
