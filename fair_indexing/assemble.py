"""Assembles the shards of a complete build into one index: a pyterrier_dr FlexIndex, a .npy file, or Parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fair_indexing.check import RECORD, describe_files
from fair_indexing.files import new_folder, read_record, remove_parts, seal, sync, synced_file
from fair_indexing.lock import locked
from fair_indexing.manifest import Manifest
from fair_indexing.shards import Completion, ShardFolder

NO_SINGLE = "a FlexIndex cannot hold a single one, as its format of docnos (npids) divides by zero"


def assemble_flex(build: str | os.PathLike[str] | ShardFolder, out: str | os.PathLike[str]) -> Path:
    """Assembles an index that `pyterrier_dr.FlexIndex` opens. The folder appears when it is complete.

    Args:
        build: A complete build, or its folder.
        out: The new folder of the index.

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
    lookup = _npids()
    with _assembled(build, out) as (shards, completion, folder):
        if completion.documents < 2:
            raise ValueError(f"build: expected at least 2 documents, {shards.folder} has 1; {NO_SINGLE}")
        with synced_file(folder / "vecs.f4") as vectors, lookup.builder(folder / "docnos.npids") as docnos:
            for shard in shards.read_all():
                vectors.write(np.ascontiguousarray(shard.vectors, dtype="<f4").data)
                for docno in shard.docnos:
                    docnos.add(docno)
        _check_lookup(lookup, folder / "docnos.npids", shards)
        meta = {
            "type": "dense_index",
            "format": "flex",
            "vec_size": completion.dimension,
            "doc_count": completion.documents,
        }
        with synced_file(folder / "pt_meta.json") as file:
            file.write(json.dumps(meta).encode())
    return Path(out)


def assemble_npy(build: str | os.PathLike[str] | ShardFolder, out: str | os.PathLike[str]) -> Path:
    """Assembles ``vectors.npy``, float32 (n, D), and ``docnos.jsonl`` with one JSON string per line, in that order.

    Arguments, result and errors are those of `assemble_flex`, except that npids and its limit play no role.
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


def assemble_parquet(build: str | os.PathLike[str] | ShardFolder, out: str | os.PathLike[str]) -> Path:
    """Assembles ``vectors.parquet`` with the columns ``docno`` and ``vector`` (D float32), one row group per shard.

    Arguments, result and errors are those of `assemble_flex`, except that npids and its limit play no role.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet needs pyarrow: pip install 'fair-calibration[indexing]'") from error
    with _assembled(build, out) as (shards, completion, folder):
        kind = pyarrow.list_(pyarrow.float32(), completion.dimension)
        schema = pyarrow.schema([("docno", pyarrow.string()), ("vector", kind)])
        path = folder / "vectors.parquet"
        with pyarrow.parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for shard in shards.read_all():
                values = pyarrow.array(shard.vectors.reshape(-1))
                vectors = pyarrow.FixedSizeListArray.from_arrays(values, type=kind)
                writer.write_table(pyarrow.table([pyarrow.array(shard.docnos), vectors], schema=schema))
        sync(path)
    return Path(out)


FORMATS: dict[str, Callable[..., Path]] = {"flex": assemble_flex, "npy": assemble_npy, "parquet": assemble_parquet}


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
        raise ValueError(f"out: expected a new folder, {target} exists; remove it or take another one")
    with locked(shards.folder):
        remove_parts(target.parent, target.name)
        with new_folder(target) as folder:
            yield shards, shards.completion(), folder  # again: another process may have gone on with the build
            files = describe_files(folder, sorted(path.name for path in folder.iterdir()))
            with synced_file(folder / RECORD) as file:
                file.write(seal({**shards.manifest.to_dict(), "files": files}))


def _check_lookup(lookup: Any, path: Path, shards: ShardFolder) -> None:
    sync(path)
    with lookup(path) as stored:
        found = iter(stored)
        for docnos in shards.all_docnos():
            for docno in docnos:
                if (got := next(found, None)) != docno:
                    raise ValueError(f"docno: npids gave back {got!r} for {docno!r}, so a FlexIndex cannot hold it")


def _npids() -> Any:
    try:
        from npids import Lookup
    except ImportError as error:
        raise ImportError("a FlexIndex needs npids: pip install 'fair-calibration[pyterrier]'") from error
    return Lookup
