"""Encodes a collection into shards, goes on where an earlier run ended, and says when it is complete."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from fair_calibration.identity import EncoderIdentity
from fair_indexing.background import Background
from fair_indexing.checkpoints import Checkpoint, count_checkpointed
from fair_indexing.files import digest_strings
from fair_indexing.lock import locked
from fair_indexing.manifest import Manifest, check_same, describe_environment, environment_differences
from fair_indexing.pool import PoolEncoder, check_devices
from fair_indexing.records import Source, Window, open_source
from fair_indexing.shard import ShardEntry
from fair_indexing.shards import Completion, ShardFolder
from fair_indexing.stream import encode_windows
from fair_indexing.text_encoder import TextEncoder, Vectors, default_tokens_per_batch
from fair_indexing.tokenized import TokenizedTexts

logger = logging.getLogger("fair_indexing")
SHARD_SIZE = 4096
_PART_CHARACTERS = 2**24  # what bounds the memory of the tokens of very long documents


class SourceChangedError(ValueError):
    """The source no longer holds the documents that were encoded from it."""


class Build(NamedTuple):
    """A complete build.

    Attributes:
        shards: Its folder.
        completion: How much it holds.
        encoded: How many documents are in the shards that this run wrote; the other shards were there.
    """

    shards: ShardFolder
    completion: Completion
    encoded: int


def build(
    model: SentenceTransformer,
    source: Any,
    folder: str | os.PathLike[str],
    *,
    strength: float | None = None,
    normalize: bool | None = None,
    shard_size: int | None = None,
    resume: bool = True,
    docno_field: str = "docno",
    text_field: str = "text",
    model_name: str | None = None,
    tokens_per_batch: int | None = None,
    devices: Sequence[str] | None = None,
    show_progress_bar: bool = True,
) -> Build:
    """Encodes a collection into the shards of a folder, or resumes an interrupted build.

    The same call resumes a build, however it was interrupted: complete shards are verified and compared with the
    source, and damaged ones are encoded again. Batches of an unfinished shard are written to the disk every 30 seconds,
    so that an interruption costs less than a minute of work. The result is that of an uninterrupted build, byte for
    byte on the same machine with the same versions, since no batch holds documents of two shards.

    Args:
        model: A calibrated or a plain model.
        source: The documents, in any form that `open_source` reads. A source that can be read twice is checked
            completely before anything is encoded.
        folder: The output folder: new, empty, or holding an interrupted build.
        strength: Overrides the strength of a calibrated model's settings.
        normalize: Whether vectors are scaled to unit length, so that the dot product is the cosine; None does so if
            the model's similarity is the cosine.
        shard_size: The number of documents in a shard; memory holds a few shards at a time. None for that of the
            build in the folder, or 4096 for a new build.
        resume: Whether to resume a build in the folder; False raises an error if there is one.
        docno_field: The column or key of the docnos.
        text_field: The column or key of the texts.
        model_name: The name of the model in the index; None for the name that the model was loaded by.
        tokens_per_batch: The most tokens of a forward pass, padding included; None for a default by device.
        devices: Devices such as ["cuda:0", "cuda:1"], each of which encodes in a process of its own; None for the
            model's device.
        show_progress_bar: Whether to show a bar with documents per second and the time left.

    Raises:
        DifferentEncoderError: The build in the folder has another encoder, other settings or another shard size.
        SourceChangedError: The source is not the one that the shards in the folder were encoded from.
        FolderInUseError: Another process is writing the folder.
        ValueError: There are no documents, a record cannot be indexed, or a setting is out of range.
        TypeError: A docno or a text is not a string.
        OSError: The disk is full, or cannot be written. What is complete is kept.
        KeyboardInterrupt: The user interrupted the build; a note says how much is kept.
    """
    try:
        return _build(
            model,
            source,
            Path(folder),
            settings={"tokens_per_batch": tokens_per_batch, "normalize": normalize, "strength": strength},
            shard_size=shard_size,
            resume=resume,
            docno_field=docno_field,
            text_field=text_field,
            model_name=model_name,
            devices=devices,
            show_progress_bar=show_progress_bar,
        )
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(describe_kept(folder))
        raise


def describe_kept(folder: str | os.PathLike[str]) -> str:
    """Returns a sentence that says how many documents an interrupted build has encoded, and how to resume it."""
    n, total = count_encoded(folder)
    of = "" if total is None else f" of {total}"
    return f"{n}{of} documents are kept in {os.fspath(folder)}; the same command resumes"


def count_encoded(folder: str | os.PathLike[str]) -> tuple[int, int | None]:
    """Returns how many documents a build holds, unfinished shards included, and how many its source has, if known."""
    if not ShardFolder.exists(folder):
        return 0, None
    shards = ShardFolder(folder)
    n = sum(entry.count for entry in shards.entries()) + count_checkpointed(shards.folder)
    return n, shards.manifest.source.get("documents")


def _build(
    model: SentenceTransformer,
    source: Any,
    folder: Path,
    *,
    settings: dict[str, Any],
    shard_size: int | None,
    resume: bool,
    docno_field: str,
    text_field: str,
    model_name: str | None,
    devices: Sequence[str] | None,
    show_progress_bar: bool,
) -> Build:
    if devices is not None:
        check_devices(devices)
        if settings["tokens_per_batch"] is None:
            settings["tokens_per_batch"] = default_tokens_per_batch(torch.device(devices[0]))
    shard_size = resolve_shard_size(folder, shard_size)
    records = open_source(source, docno_field=docno_field, text_field=text_field).started()
    encoder = TextEncoder(model, **settings)
    manifest = Manifest(
        encoder=EncoderIdentity.of(
            model, name=model_name, strength=settings["strength"], normalize=settings["normalize"]
        ),
        shard_size=shard_size,
        source={"name": records.name, "documents": records.documents},
        environment=describe_environment(model, devices, tokens_per_batch=encoder.tokens_per_batch),
    )
    with open_build(folder, manifest, records, resume=resume, show_progress_bar=show_progress_bar) as shards:
        pending = PendingShards(records, shard_size, {entry.start: entry for entry in shards.entries()})
        bar = tqdm(
            total=shards.manifest.source["documents"],
            initial=sum(entry.count for entry in pending.whole.values()),
            desc="Encoding",
            unit="doc",
            smoothing=0,
            disable=not show_progress_bar,
        )
        pool = nullcontext(encoder) if devices is None else PoolEncoder(model, devices, **settings)
        # Closed before the folder is unlocked: an error that is kept would keep what it is read from, and its thread.
        with bar, pool as used, closing(_encode(used, pending, shards.folder, bar)) as encoded:
            n_encoded = _write(shards, encoded)
        return Build(shards, shards.finish(pending.documents), n_encoded)


def resolve_shard_size(folder: str | os.PathLike[str], shard_size: int | None) -> int:
    """Returns the shard size of a build; None is that of the build in the folder, or the default for a new one."""
    if shard_size is not None:
        return shard_size
    return ShardFolder(folder).shard_size if ShardFolder.exists(folder) else SHARD_SIZE


@contextmanager
def open_build(
    folder: str | os.PathLike[str],
    manifest: Manifest,
    source: Source,
    *,
    resume: bool = True,
    show_progress_bar: bool = False,
) -> Iterator[ShardFolder]:
    """Begins a build or goes on with one, keeping its folder locked.

    What killed runs and damaged disks have left there is removed, so that every shard that is there is whole. A source
    that can be read twice is checked whole and compared with these shards. A build that has no shard yet takes the
    manifest.

    Raises:
        DifferentEncoderError: The shards that are there are of another manifest.
        SourceChangedError: See `PendingShards`.
        FolderInUseError: Another process is writing the folder.
        ValueError: There is a build and ``resume`` is False, something else is in the folder, or a record cannot be
            indexed.
        TypeError: A docno or text is no string.
    """
    path = Path(folder)
    held = ValueError(f"folder: {path} holds a build; remove it, take another folder, or resume")
    if ShardFolder.exists(path):
        if not resume:
            raise held
        if (there := ShardFolder(path)).starts():  # else nothing was encoded with the manifest that is there
            check_same(there.manifest, manifest, what=f"the build in {path}")
    elif source.rereadable:  # before the folder is made
        documents = _check(source, manifest.shard_size, {}, show_progress_bar)
        manifest = replace(manifest, source={**manifest.source, "documents": documents})
    path.mkdir(parents=True, exist_ok=True)
    with locked(path):
        if not ShardFolder.exists(path):
            yield ShardFolder.create(path, manifest)
            return
        if not resume:
            raise held
        shards = ShardFolder(path)
        if shards.starts():
            check_same(shards.manifest, manifest, what=f"the build in {path}")
            for line in environment_differences(shards.manifest, manifest):
                logger.warning(
                    "%s: going on with a build of another environment, so last bits may differ: %s", path, line
                )
        else:
            shards.begin_anew(manifest)
        whole, damaged = shards.repair()
        for line in damaged:
            logger.warning("%s; its documents are encoded anew", line)
        if source.rereadable:
            shards.note_documents(_check(source, manifest.shard_size, whole, show_progress_bar))
        yield shards


class PendingShards:
    """The shards of a source that are not there yet, in the order of the source, one pass.

    Attributes:
        documents: How many the source has, once all were read.
    """

    def __init__(self, source: Source, shard_size: int, whole: Mapping[int, ShardEntry]) -> None:
        """Takes a source.

        Args:
            source: The documents.
            shard_size: Documents per shard.
            whole: The shards that are there, by place.
        """
        self.source = source
        self.shard_size = shard_size
        self.whole = whole
        self.documents = 0

    def __iter__(self) -> Iterator[Window]:
        """Yields them.

        Raises:
            SourceChangedError: A shard that is there is of other documents than the source has in its place.
            ValueError: A record cannot be indexed; it is named.
            TypeError: A docno or text is no string.
        """
        self.documents = 0
        for window in self.source.windows(self.shard_size):
            self.documents += len(window.docnos)
            entry = self.whole.get(window.start)
            if entry is None:
                yield window
            elif changed := _changed(entry, window):
                first, last = (self.source.locate(n) for n in (window.start, window.start + len(window.docnos) - 1))
                raise SourceChangedError(
                    f"source: {changed} from {first} to {last} are not those that were encoded before: the source has "
                    "changed. Use it as it was, or build into another folder"
                )
        if beyond := [start for start in self.whole if start >= self.documents]:
            raise SourceChangedError(
                f"source: {self.source.name} has {self.documents} documents, but those from number {min(beyond)} on "
                "were encoded before: the source has changed. Use it as it was, or build into another folder"
            )


def _changed(entry: ShardEntry, window: Window) -> str:
    if len(window.docnos) != entry.count:
        return f"the {len(window.docnos)} documents (there were {entry.count})"
    names = [
        name
        for name, old, now in (("docnos", entry.docnos, window.docnos), ("texts", entry.texts, window.texts))
        if digest_strings(now) != old
    ]
    return " and ".join(names)


def _check(source: Source, shard_size: int, whole: Mapping[int, ShardEntry], show_progress_bar: bool) -> int:
    """Reads all documents, compares them with the shards that are there, and returns their number."""
    pending = PendingShards(source, shard_size, whole)
    with tqdm(total=source.documents, desc="Checking", unit="doc", disable=not show_progress_bar) as bar:
        for _ in pending:
            bar.update(pending.documents - bar.n)
    return pending.documents


def _encode(
    encoder: TextEncoder, pending: PendingShards, folder: Path, bar: tqdm[Any]
) -> Generator[tuple[Window, Vectors]]:
    """Encodes shard by shard; no batch holds documents of two shards, so shards do not depend on each other."""
    # Of each part that is being encoded: the place of its first document, and the shard if this is its last part.
    ends: deque[tuple[int, Window | None]] = deque()

    def parts() -> Iterator[tuple[list[str], list[str]]]:
        for shard in pending:
            slices = list(text_parts(shard.texts))
            for part in slices:
                ends.append((shard.start + part.start, shard if part is slices[-1] else None))
                yield shard.docnos[part], shard.texts[part]

    vectors: list[Vectors] = []
    current: Checkpoint | None = None

    def checkpoint(tokenized: TokenizedTexts) -> Checkpoint:
        nonlocal current
        current = Checkpoint(folder, ends[0][0], tokenized.texts)
        return current

    for _, encoded in encode_windows(encoder, parts(), progress=bar.update, checkpoint=checkpoint):
        vectors.append(encoded)
        if (shard := ends.popleft()[1]) is None:
            if current is not None:
                current.save()
        else:
            yield shard, np.concatenate(vectors)
            vectors = []


def text_parts(texts: Sequence[str]) -> Iterator[slice]:
    """Cuts a shard where it has so much text that its tokens would not fit into memory together."""
    start = n_characters = 0
    for i, text in enumerate(texts):
        n_characters += len(text)
        if n_characters >= _PART_CHARACTERS:
            yield slice(start, i + 1)
            start, n_characters = i + 1, 0
    if start < len(texts):
        yield slice(start, len(texts))


def _write(shards: ShardFolder, encoded: Iterable[tuple[Window, Vectors]]) -> int:
    """Writes each shard while the next one is encoded; returns the number of documents."""
    n = 0
    with Background() as background:
        writing: Future[ShardEntry] | None = None
        for window, vectors in encoded:
            if writing is not None:
                writing.result()
            writing = background.submit(shards.write, window.start, window.docnos, vectors, texts=window.texts)
            n += len(window.docnos)
        if writing is not None:
            writing.result()
    return n
