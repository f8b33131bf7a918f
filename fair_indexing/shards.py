"""The folder of a build: the vectors of a collection in shards, written in any order, each complete or absent.

A build folder holds ``manifest.json``, a folder per shard, named by the place of its first document in the source,
and at the end ``complete.json``. A shard holds ``vectors.npy`` (float32), ``docnos.json`` and, with checksums of both,
``entry.json``.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fair_indexing.checkpoints import remove_all_checkpoints, remove_checkpoints, repair_checkpoints
from fair_indexing.duplicates import DocnoHashes
from fair_indexing.files import DamagedFileError, read_record, remove_parts, sync, write_record
from fair_indexing.manifest import Manifest
from fair_indexing.shard import Shard, ShardEntry, read_docnos, read_entry, read_shard, write_shard

_MANIFEST, _COMPLETE, _SHARDS = "manifest.json", "complete.json", "shards"
_NAMED = 5
_GO_ON = "run it again to resume it"


class IncompleteBuildError(ValueError):
    """Shards are missing, or the build has not ended."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The size of a complete build: ``documents`` vectors with ``dimension`` values each, in ``shards`` shards."""

    documents: int
    dimension: int
    shards: int


class ShardFolder:
    """Reads and writes the folder of a build. Several processes and machines may write at the same time."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Opens the folder of a build, changing nothing.

        Raises:
            ValueError: The folder holds no build.
            DamagedFileError: The manifest of the build is damaged.
        """
        self.folder = Path(folder)
        try:
            self.manifest = Manifest.from_dict(read_record(self.folder / _MANIFEST))
        except FileNotFoundError as error:
            raise ValueError(f"folder: {self.folder} holds no build (no {_MANIFEST})") from error

    @classmethod
    def create(cls, folder: str | os.PathLike[str], manifest: Manifest) -> ShardFolder:
        """Begins a build in an empty or a new folder. The caller holds the folder's lock.

        Raises:
            ValueError: The folder is not empty.
        """
        path = Path(folder)
        remove_parts(path, _MANIFEST)
        if held := sorted(p.name for p in path.iterdir() if not p.name.startswith(".")) if path.exists() else []:
            raise ValueError(f"folder: expected an empty or a new one, {path} holds {held[:_NAMED]}")
        path.mkdir(parents=True, exist_ok=True)
        write_record(path / _MANIFEST, manifest.to_dict())  # first, as it makes the folder a build's
        (path / _SHARDS).mkdir()
        return cls(path)

    @staticmethod
    def exists(folder: str | os.PathLike[str]) -> bool:
        """Returns whether a folder holds a build, complete or not."""
        return (Path(folder) / _MANIFEST).exists()

    def begin_anew(self, manifest: Manifest) -> None:
        """Replaces the manifest while there are no shards. The caller holds the folder's lock.

        Raises:
            ValueError: There are shards, which were encoded with the present manifest.
        """
        if starts := self.starts():
            raise ValueError(f"manifest: {self.folder} holds {_shards(starts)} of the one that is there; remove them")
        self._reopen()
        old = self.manifest
        if (old.encoder, old.shard_size, old.environment) != (
            manifest.encoder,
            manifest.shard_size,
            manifest.environment,
        ):
            remove_all_checkpoints(self.folder)
        self._write_manifest(manifest)

    def note_documents(self, documents: int | None) -> None:
        """Writes the number of documents of the source, None if it is unknown, into the manifest.

        A complete build becomes incomplete if the number changes. The caller holds the folder's lock.
        """
        if self.manifest.source.get("documents") != documents:
            self._reopen()
            source = {**self.manifest.source, "documents": documents}
            self._write_manifest(replace(self.manifest, source=source))

    @property
    def shard_size(self) -> int:
        """Documents per shard; only the last one may have fewer."""
        return self.manifest.shard_size

    def write(
        self, start: int, docnos: Sequence[str], vectors: npt.NDArray[np.float32], *, texts: Sequence[str]
    ) -> ShardEntry:
        """Writes one shard, which is on the disk when this returns, and never there in part.

        If the shard exists already with the same records, it is kept, so that two workers may encode the same one. A
        new shard makes a complete build incomplete, as its documents were not known before.

        Args:
            start: The place of its first document in the source, a multiple of the shard size.
            docnos: The docnos.
            vectors: float32 (n, D).
            texts: The texts that were encoded.

        Raises:
            ValueError: They do not fit together, a vector is not finite, or there is a shard of other records.
            TypeError: ``vectors`` are not float32.
            OSError: The disk is full, or cannot be written.
        """
        if start < 0 or start % self.shard_size:
            raise ValueError(f"start: expected a multiple of the shard size {self.shard_size}, got {start}")
        if not 1 <= len(docnos) <= self.shard_size:
            raise ValueError(f"docnos: expected 1 to {self.shard_size} for a shard, got {len(docnos)}")
        if not self._path(start).exists():
            self._reopen()
        if start + len(docnos) > (self.manifest.source.get("documents") or math.inf):
            self.note_documents(None)  # a stream is longer than the source was
        entry = write_shard(self._path(start), start, docnos, vectors, texts=texts)
        remove_checkpoints(self.folder, start, self.shard_size)
        return entry

    def read(self, start: int) -> Shard:
        """Reads and verifies one shard.

        Raises:
            IncompleteBuildError: It is not there.
            DamagedFileError: It is not what was written.
        """
        return read_shard(self._existing(start))

    def starts(self) -> list[int]:
        """Returns the start of each existing shard in ascending order, without verifying them."""
        shards = self.folder / _SHARDS
        return sorted(int(path.name) for path in shards.iterdir() if path.name.isdecimal()) if shards.exists() else []

    def entries(self) -> Iterator[ShardEntry]:
        """Yields the entries of the existing shards in order, without verifying their vectors.

        Raises:
            DamagedFileError: An entry is not what was written.
        """
        for start in self.starts():
            yield read_entry(self._existing(start))

    def verify(self) -> tuple[dict[int, ShardEntry], list[str]]:
        """Reads and verifies every shard.

        Returns:
            The entries of the undamaged shards by their start, and for each damaged shard a line that says what is
            wrong.
        """
        whole, damaged = {}, []
        for start in self.starts():
            try:
                whole[start] = self.read(start).entry
            except DamagedFileError as error:
                damaged.append(str(error))
        return whole, damaged

    def repair(self) -> tuple[dict[int, ShardEntry], list[str]]:
        """Removes damaged shards and what killed writers left behind. The caller holds the folder's lock.

        Returns:
            The same as `verify`.
        """
        shards = self.folder / _SHARDS
        shards.mkdir(exist_ok=True)
        remove_parts(self.folder)
        remove_parts(shards)
        whole, damaged = self.verify()
        try:
            self.completion()
        except IncompleteBuildError:
            self._reopen()
        except DamagedFileError as error:
            damaged.append(str(error))
        if damaged:
            self._reopen()
        for start in set(self.starts()) - set(whole):
            shutil.rmtree(self._path(start))
        if damaged:
            sync(shards)
        repair_checkpoints(self.folder, ((entry.start, entry.count) for entry in whole.values()))
        return whole, damaged

    def finish(self, documents: int) -> Completion:
        """Marks the build as complete.

        Args:
            documents: The number of documents of the source.

        Raises:
            IncompleteBuildError: Shards are missing, too many, or of other sizes than the source asks for.
            ValueError: There are no documents, two shards share a docno, or the dimensions differ.
        """
        if documents < 1:
            raise ValueError(f"documents: expected at least one, got {documents}")
        size = self.shard_size
        expected = {start: min(size, documents - start) for start in range(0, documents, size)}
        entries = {entry.start: entry for entry in self.entries()}
        if missing := sorted(expected.keys() - entries.keys()):
            raise IncompleteBuildError(f"{self.folder}: {_shards(missing)} missing of {len(expected)}")
        if extra := sorted(entries.keys() - expected.keys()):
            raise IncompleteBuildError(f"{self.folder}: the source has {documents} documents, {_shards(extra)} beyond")
        if odd := [start for start, count in expected.items() if entries[start].count != count]:
            raise IncompleteBuildError(f"{self.folder}: {_shards(odd)} of another size than the source asks for")
        if len(dimensions := {entry.dimension for entry in entries.values()}) > 1:
            raise ValueError(f"{self.folder}: expected vectors of one dimension, got {sorted(dimensions)}")
        hashes = DocnoHashes()
        for entry in entries.values():
            docnos = read_docnos(self._path(entry.start), entry)
            hashes.add(docnos, entry.start, locate=lambda number: f"{self.folder}, document {number}")
        self.note_documents(documents)
        remove_all_checkpoints(self.folder)
        completion = Completion(documents=documents, dimension=dimensions.pop(), shards=len(expected))
        write_record(self.folder / _COMPLETE, asdict(completion))
        return completion

    def completion(self) -> Completion:
        """Returns the size of the complete build.

        Raises:
            IncompleteBuildError: The build has not ended, or shards were added or removed since then.
            DamagedFileError: The file that marks the build as complete is damaged.
        """
        starts = self.starts()
        try:
            completion = Completion(**read_record(self.folder / _COMPLETE))
        except FileNotFoundError:
            total = self.manifest.source.get("documents")
            of = f" of {-(-total // self.shard_size)}" if total else ""
            raise IncompleteBuildError(
                f"{self.folder}: the build is not complete, {len(starts)}{of} shards are there; {_GO_ON}"
            ) from None
        expected = range(0, completion.documents, self.shard_size)
        for odd, what in (
            (sorted(set(expected) - set(starts)), "missing"),
            (sorted(set(starts) - set(expected)), f"beyond the {completion.documents} documents that it ended with"),
        ):
            if odd:
                raise IncompleteBuildError(f"{self.folder}: the build is not complete, {_shards(odd)} {what}; {_GO_ON}")
        return completion

    def read_all(self) -> Iterator[Shard]:
        """Yields the shards of a complete build in the order of the source, verified.

        Raises:
            IncompleteBuildError: It is not complete, or a shard is missing.
            DamagedFileError: A shard is not what was written.
        """
        for start in range(0, self.completion().documents, self.shard_size):
            yield self.read(start)

    def all_docnos(self) -> Iterator[list[str]]:
        """Yields the docnos of the shards, as `read_all` does."""
        for start in range(0, self.completion().documents, self.shard_size):
            path = self._existing(start)
            yield read_docnos(path, read_entry(path))

    def _reopen(self) -> None:
        """Removes the marker of a complete build; it is gone from the disk when this returns."""
        try:
            (self.folder / _COMPLETE).unlink()
        except FileNotFoundError:
            return
        sync(self.folder)

    def _write_manifest(self, manifest: Manifest) -> None:
        write_record(self.folder / _MANIFEST, manifest.to_dict())
        self.manifest = manifest

    def _path(self, start: int) -> Path:
        return self.folder / _SHARDS / f"{start:012d}"

    def _existing(self, start: int) -> Path:
        if not (path := self._path(start)).exists():
            raise IncompleteBuildError(f"{self.folder}: {_shards([start])} missing; run the build again")
        return path


def _shards(starts: Iterable[int]) -> str:
    starts = list(starts)
    more = ", ..." if len(starts) > _NAMED else ""
    return f"{len(starts)} shards (those of document {', '.join(map(str, starts[:_NAMED]))}{more})"
