"""Assembles the shards of a complete build into one index: a pyterrier_dr FlexIndex, or a .npy file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np

from fair_indexing.check import RECORD, describe_files
from fair_indexing.files import new_folder, read_record, remove_temporary, sync, synced_file, write_record
from fair_indexing.lock import locked
from fair_indexing.manifest import Manifest
from fair_indexing.shards import Completion, ShardFolder

NO_SINGLE = "a FlexIndex cannot hold a single one, as its format of docnos (npids) divides by zero"


def assemble_flex(
    build: str | os.PathLike[str] | ShardFolder,
    out: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Assembles an index that `pyterrier_dr.FlexIndex` opens. The folder appears when it is complete.

    Args:
        build: A complete build, or its folder.
        out: The new folder of the index.
        metadata: Other entries of ``pt_meta.json``. With a ``format`` other than "flex", `FlexIndex` does not open it.

    Returns:
        The folder.

    Raises:
        IncompleteBuildError: The build is not complete.
        DamagedFileError: A file of the build is not what was written.
        FolderInUseError: Another process is writing or assembling the build.
        ValueError: ``out`` exists, or the build holds a single document, which the format of docnos (npids) cannot
            store.
        ImportError: The package npids, which comes with pyterrier_dr, is not installed.
        OSError: The disk is full, or cannot be written.
    """
    try:
        from npids import Lookup
    except ImportError as error:
        raise ImportError("a FlexIndex needs npids: pip install 'fair-calibration[pyterrier]'") from error
    with _assembled(build, out) as (shards, completion, folder):
        if completion.documents < 2:
            raise ValueError(f"build: expected at least 2 documents, {shards.folder} has 1; {NO_SINGLE}")
        with synced_file(folder / "vecs.f4") as vectors, Lookup.builder(folder / "docnos.npids") as docnos:
            for shard in shards.read_all():
                vectors.write(np.ascontiguousarray(shard.vectors, dtype="<f4").data)
                for docno in shard.docnos:
                    docnos.add(docno)
        sync(folder / "docnos.npids")
        with Lookup(folder / "docnos.npids") as stored:
            for expected, docno in zip(chain.from_iterable(shards.all_docnos()), stored, strict=True):
                if docno != expected:
                    raise ValueError(f"docno: npids returned {docno!r} for {expected!r}, so a FlexIndex cannot hold it")
        meta = {
            "type": "dense_index",
            "format": "flex",
            "vec_size": completion.dimension,
            "doc_count": completion.documents,
            **(metadata or {}),
        }
        with synced_file(folder / "pt_meta.json") as file:
            file.write(json.dumps(meta).encode())
    return Path(out)


def assemble_npy(build: str | os.PathLike[str] | ShardFolder, out: str | os.PathLike[str]) -> Path:
    """Assembles ``vectors.npy``, float32 (n, D), and ``docnos.jsonl`` with one JSON string per line, in that order.

    Arguments, result and errors are those of `assemble_flex`, without those about npids.
    """
    with _assembled(build, out) as (shards, completion, folder):
        shape = (completion.documents, completion.dimension)
        with synced_file(folder / "vectors.npy") as vectors, synced_file(folder / "docnos.jsonl") as docnos:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(vectors, header)
            for shard in shards.read_all():
                vectors.write(np.ascontiguousarray(shard.vectors, dtype="<f4").data)
                docnos.writelines(f"{json.dumps(docno, ensure_ascii=False)}\n".encode() for docno in shard.docnos)
    return Path(out)


def read_manifest(index: str | os.PathLike[str]) -> Manifest:
    """Reads the manifest of an assembled index: the encoder and the settings that made its vectors.

    Raises:
        ValueError: The folder has no manifest: it is not an index, or another tool made it.
        DamagedFileError: The manifest is not what was written.
    """
    try:
        return Manifest.from_dict(read_record(Path(index) / RECORD))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"index: {os.fspath(index)} has no {RECORD}, so nothing tells which encoder made its vectors"
        ) from error


@contextmanager
def _assembled(
    build: str | os.PathLike[str] | ShardFolder, out: str | os.PathLike[str]
) -> Iterator[tuple[ShardFolder, Completion, Path]]:
    shards = build if isinstance(build, ShardFolder) else ShardFolder(build)
    target = Path(out)
    shards.completion()
    if target.exists():
        raise ValueError(f"out: expected a new folder, {target} exists; remove it or use another one")
    with locked(shards.folder):
        remove_temporary(target.parent, lambda name: name == target.name)
        with new_folder(target) as folder:
            yield shards, shards.completion(), folder  # another process may have changed it since
            files = describe_files(folder, sorted(path.name for path in folder.iterdir()))
            write_record(folder / RECORD, {**shards.manifest.to_dict(), "files": files})
