"""The folder of a build: the vectors of a collection in shards, each of which is either complete or absent.

A build folder holds ``manifest.json``, in ``shards`` a folder for each shard, named by the number of its first
document, and at the end ``complete.json``. `fair_indexing.shard` describes the files of a shard.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fair_indexing import checkpoints
from fair_indexing.duplicates import DocnoHashes
from fair_indexing.files import DamagedFileError, read_record, remove_temporary, sync, write_record
from fair_indexing.lock import Part
from fair_indexing.manifest import Manifest
from fair_indexing.shard import Shard, ShardEntry, read_docnos, read_entry, read_shard, write_shard

_MANIFEST, _COMPLETE, _SHARDS = "manifest.json", "complete.json", "shards"
_NAMED = 5
_RESUME = "run it again to resume it"


class IncompleteBuildError(ValueError):
    """Shards are missing, or the build has not been finished."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The size of a complete build: ``documents`` vectors with ``dimension`` values each, in ``shards`` shards."""

    documents: int
    dimension: int
    shards: int


class ShardFolder:
    """Reads and writes the folder of a build. Several processes and machines may write shards at the same time."""

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
        """Begins a build in an empty or a new folder. No other process may write the folder.

        Raises:
            ValueError: The folder is not empty.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        remove_temporary(path, lambda name: name == _MANIFEST)
        if names := sorted(p.name for p in path.iterdir() if not p.name.startswith(".")):
            raise ValueError(f"folder: expected an empty or a new one, {path} holds {names[:_NAMED]}")
        write_record(path / _MANIFEST, manifest.to_dict())
        return cls(path)

    @staticmethod
    def exists(folder: str | os.PathLike[str]) -> bool:
        """Returns whether a folder holds a build, complete or not."""
        return (Path(folder) / _MANIFEST).exists()

    def replace_manifest(self, manifest: Manifest) -> None:
        """Replaces the manifest of a build that has no shards yet. No other process may write the folder.

        Raises:
            ValueError: There are shards, which were encoded with the present manifest.
        """
        if starts := self.starts():
            raise ValueError(f"manifest: {self.folder} holds {_shards(starts)} of the present one; remove them")
        if replace(self.manifest, source=manifest.source) != manifest:
            self._remove_checkpoints()
        self._reopen()
        self._write_manifest(manifest)

    def note_documents(self, documents: int | None) -> None:
        """Writes the number of documents of the source, None if it is unknown, into the manifest.

        A complete build becomes incomplete if the number changes.
        """
        if self.manifest.source.get("documents") != documents:
            self._reopen()
            source = {**self.manifest.source, "documents": documents}
            self._write_manifest(replace(self.manifest, source=source))

    @property
    def shard_size(self) -> int:
        """The number of documents in a shard; only the last one may have fewer."""
        return self.manifest.shard_size

    def write(
        self, start: int, docnos: Sequence[str], vectors: npt.NDArray[np.float32], *, texts: Sequence[str]
    ) -> None:
        """Writes one shard, which is on the disk when this returns, and never visible before it is complete.

        A shard of the same documents that exists already is kept. A new shard makes a complete build incomplete, as
        its documents were not known before.

        Args:
            start: The number of its first document in the source, a multiple of the shard size.
            docnos: The docnos.
            vectors: float32 (n, D).
            texts: The texts that were encoded.

        Raises:
            ValueError: The arguments do not fit together, a vector is not finite, or the shard exists with other
                documents.
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
        write_shard(self._path(start), start, docnos, vectors, texts=texts)
        checkpoints.remove_checkpoints(self.folder, start, self.shard_size)

    def read(self, start: int) -> Shard:
        """Reads and verifies one shard.

        Raises:
            IncompleteBuildError: It does not exist.
            DamagedFileError: It is not what was written.
        """
        return read_shard(self._existing(start))

    def starts(self) -> list[int]:
        """Returns the first document of each existing shard in ascending order, without verifying the shards."""
        shards = self.folder / _SHARDS
        return sorted(int(path.name) for path in shards.iterdir() if path.name.isdecimal()) if shards.exists() else []

    def entry(self, start: int) -> ShardEntry:
        """Reads the entry of one shard, without verifying its vectors; errors are those of `read`."""
        return read_entry(self._existing(start))

    def entries(self) -> Iterator[ShardEntry]:
        """Yields the entries of the existing shards in order, as `entry` reads them."""
        return map(self.entry, self.starts())

    def readable_entries(self) -> dict[int, ShardEntry]:
        """Returns the entries by their first document, without those that are damaged or just being replaced."""
        entries = {}
        for start in self.starts():
            with suppress(DamagedFileError, IncompleteBuildError):
                entries[start] = self.entry(start)
        return entries

    def verify(self, part: Part | None = None) -> tuple[dict[int, ShardEntry], list[str]]:
        """Reads and verifies the shards.

        Args:
            part: The part of the build whose shards are read; None for all.

        Returns:
            The entries of the undamaged shards by their first document, and for each damaged shard a line that says
            what is wrong.
        """
        undamaged, damaged = {}, []
        for start in self.starts():
            if self.belongs(start, part):
                try:
                    undamaged[start] = self.read(start).entry
                except DamagedFileError as error:
                    damaged.append(str(error))
        return undamaged, damaged

    def belongs(self, start: int, part: Part | None) -> bool:
        """Returns whether the shard from document ``start`` on belongs to a part (i, n) of the build."""
        return part is None or start // self.shard_size % part[1] == part[0]

    def repair(self, part: Part | None = None) -> tuple[dict[int, ShardEntry], list[str]]:
        """Removes damaged shards and what killed processes have left. The caller has locked the folder or the part.

        Args:
            part: The part of the build to repair; None for all.

        Returns:
            The same as `verify`.
        """
        shards, unfinished = self.folder / _SHARDS, self.folder / checkpoints.FOLDER
        if part is None:
            remove_temporary(self.folder)
        for folder in (shards, unfinished):
            remove_temporary(folder, lambda name: self.belongs(int(name.partition("-")[0]), part))
        undamaged, damaged = self.verify(part)
        if part is None:
            try:
                self.completion()
            except IncompleteBuildError:
                self._reopen()
            except DamagedFileError as error:
                damaged.append(str(error))
        if damaged:
            self._reopen()
            for start in self.starts():
                if self.belongs(start, part) and start not in undamaged:
                    shutil.rmtree(self._path(start))
                    sync(shards)
        for entry in undamaged.values():
            checkpoints.remove_checkpoints(self.folder, entry.start, entry.count)
        return undamaged, damaged

    def finish(self, documents: int) -> Completion:
        """Marks the build as complete.

        Args:
            documents: The number of documents of the source.

        Raises:
            IncompleteBuildError: Shards are missing, or do not fit the number of documents.
            ValueError: There are no documents, two documents have the same docno, or the dimensions differ.
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
            raise IncompleteBuildError(f"{self.folder}: {_shards(odd)} have another size than the source requires")
        if len(dimensions := {entry.dimension for entry in entries.values()}) > 1:
            raise ValueError(f"{self.folder}: expected vectors of one dimension, got {sorted(dimensions)}")
        hashes = DocnoHashes()
        for entry in entries.values():
            docnos = read_docnos(self._path(entry.start), entry)
            hashes.add(docnos, entry.start, locate=lambda number: f"{self.folder}, document {number}")
        self.note_documents(documents)
        self._remove_checkpoints()
        completion = Completion(documents=documents, dimension=dimensions.pop(), shards=len(expected))
        write_record(self.folder / _COMPLETE, asdict(completion))
        return completion

    def completion(self) -> Completion:
        """Returns the size of the complete build.

        Raises:
            IncompleteBuildError: The build has not been finished, or shards were added or removed since then.
            DamagedFileError: The file that marks the build as complete is damaged.
        """
        starts = self.starts()
        try:
            completion = Completion(**read_record(self.folder / _COMPLETE))
        except FileNotFoundError:
            total = self.manifest.source.get("documents")
            of = f" of {-(-total // self.shard_size)}" if total else ""
            raise IncompleteBuildError(
                f"{self.folder}: the build is not complete, {len(starts)}{of} shards exist; {_RESUME}"
            ) from None
        expected = range(0, completion.documents, self.shard_size)
        for odd, what in (
            (sorted(set(expected) - set(starts)), "missing"),
            (sorted(set(starts) - set(expected)), f"beyond the {completion.documents} documents that it ended with"),
        ):
            if odd:
                raise IncompleteBuildError(
                    f"{self.folder}: the build is not complete, {_shards(odd)} {what}; {_RESUME}"
                )
        return completion

    def read_all(self) -> Iterator[Shard]:
        """Yields the shards of a complete build in the order of the source, verified.

        Raises:
            IncompleteBuildError: The build is not complete.
            DamagedFileError: A shard is not what was written.
        """
        for start in range(0, self.completion().documents, self.shard_size):
            yield self.read(start)

    def all_docnos(self) -> Iterator[list[str]]:
        """Yields the docnos of each shard of a complete build, as `read_all` yields the shards."""
        for start in range(0, self.completion().documents, self.shard_size):
            yield read_docnos(self._path(start), self.entry(start))

    def _remove_checkpoints(self) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self.folder / checkpoints.FOLDER)

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
