"""Encodes a collection into shards, resumes where an interrupted run ended, and marks the build as complete."""

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
from fair_indexing.lock import Part, exclusive, locked, other_parts_at_work
from fair_indexing.manifest import Manifest, check_same, describe_environment, environment_differences
from fair_indexing.pending import PendingShards, check_source
from fair_indexing.pool import PoolEncoder, check_devices
from fair_indexing.records import Source, Window, open_source
from fair_indexing.shard import ShardEntry
from fair_indexing.shards import Completion, ShardFolder
from fair_indexing.stream import cut_windows, encode_windows
from fair_indexing.text_encoder import TextEncoder, Vectors, default_tokens_per_batch
from fair_indexing.tokenized import TokenizedTexts

logger = logging.getLogger("fair_indexing")
SHARD_SIZE = 4096


class Build(NamedTuple):
    """What `build` has done.

    Attributes:
        shards: The folder of the build.
        completion: The size of the complete build; None after a part of it.
        encoded: The number of documents in the shards that this run has encoded; the others existed before.
    """

    shards: ShardFolder
    completion: Completion | None
    encoded: int


def build(
    model: SentenceTransformer,
    source: Any,
    folder: str | os.PathLike[str],
    *,
    part: Part | None = None,
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
        part: (i, n) encodes only every n-th shard, from shard number i (0 to n - 1) on, so that n processes or
            machines can encode one folder at the same time. Each of them reads the whole source. The build is complete
            after a last call without ``part``, which verifies all shards and encodes those that are missing.
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
        FolderInUseError: Another process is writing the folder, or this part of the build.
        ValueError: There are no documents, a record cannot be indexed, or a setting is out of range.
        TypeError: A docno or a text is not a string.
        OSError: The disk is full, or cannot be written. What is complete is kept.
        KeyboardInterrupt: The user interrupted the build; a note says how much is kept.
    """
    path = Path(folder)
    _check_part(part, resume)
    if devices is not None:
        check_devices(devices)
        if tokens_per_batch is None:
            tokens_per_batch = default_tokens_per_batch(torch.device(devices[0]))
    shard_size = resolve_shard_size(path, shard_size)
    records = open_source(source, docno_field=docno_field, text_field=text_field).started()
    settings: dict[str, Any] = {
        "tokens_per_batch": tokens_per_batch,
        "normalize": normalize,
        "strength": strength,
    }
    encoder = TextEncoder(model, **settings)
    manifest = Manifest(
        encoder=EncoderIdentity.of(model, name=model_name, strength=strength, normalize=normalize),
        shard_size=shard_size,
        source={"name": records.name, "documents": records.documents},
        environment=describe_environment(model, devices, tokens_per_batch=encoder.tokens_per_batch),
    )
    try:
        with _open_build(path, manifest, records, part, resume=resume, show_progress_bar=show_progress_bar) as opened:
            shards, existing = opened
            pending = PendingShards(records, shard_size, existing, lambda start: shards.belongs(start, part))
            bar = tqdm(
                total=shards.manifest.source["documents"] if part is None else None,
                initial=sum(entry.count for entry in existing.values() if shards.belongs(entry.start, part)),
                desc="Encoding",
                unit="doc",
                smoothing=0,
                disable=not show_progress_bar,
            )
            pool = nullcontext(encoder) if devices is None else PoolEncoder(model, devices, **settings)
            # Closed before the folder is unlocked, as an error's traceback would keep the generator and its thread.
            with bar, pool as used, closing(_encode(used, pending, shards.folder, bar)) as encoded:
                n_encoded = _write(shards, encoded)
            return Build(shards, shards.finish(pending.documents) if part is None else None, n_encoded)
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(describe_kept(path))
        raise


def finish_build(folder: str | os.PathLike[str], source: Source, *, timeout: float = 0) -> Completion:
    """Verifies all shards of a build whose parts were encoded, compares them with the source, and marks it as complete.

    Args:
        folder: The folder of the build.
        source: The documents, which must be readable twice.
        timeout: Seconds to wait for other processes to end.

    Raises:
        IncompleteBuildError: Shards are missing, or were damaged and removed.
        SourceChangedError: The source is not the one that the shards were encoded from.
        FolderInUseError: Another process is writing the folder.
    """
    shards = ShardFolder(folder)
    with locked(shards.folder, timeout=timeout):
        existing = _repair(shards, None)
        return shards.finish(check_source(source, shards.shard_size, existing))


def describe_kept(folder: str | os.PathLike[str]) -> str:
    """Returns a sentence that says how many documents an interrupted build has encoded, and how to resume it."""
    n, total = 0, None
    if ShardFolder.exists(folder):
        shards = ShardFolder(folder)
        n = sum(entry.count for entry in shards.entries()) + count_checkpointed(shards.folder)
        total = shards.manifest.source.get("documents")
    of = "" if total is None else f" of {total}"
    return f"{n}{of} documents are kept in {os.fspath(folder)}; the same command resumes"


def resolve_shard_size(folder: str | os.PathLike[str], shard_size: int | None) -> int:
    """Returns the shard size of a build; None is that of the build in the folder, or the default for a new one."""
    if shard_size is not None:
        return shard_size
    return ShardFolder(folder).shard_size if ShardFolder.exists(folder) else SHARD_SIZE


def _check_part(part: Part | None, resume: bool) -> None:
    if part is None:
        return
    is_pair = isinstance(part, Sequence) and len(part) == 2 and all(isinstance(n, int) for n in part)
    if not is_pair or not 0 <= part[0] < part[1]:
        raise ValueError(f"part: expected (i, n) with 0 <= i < n, such as (0, 4), got {part!r}")
    if not resume:
        raise ValueError("resume: parts share the build in the folder; leave resume=False out")


@contextmanager
def _open_build(
    path: Path, manifest: Manifest, source: Source, part: Part | None, *, resume: bool, show_progress_bar: bool
) -> Iterator[tuple[ShardFolder, Mapping[int, ShardEntry]]]:
    """Begins or resumes a build, and keeps its folder locked; yields it and its undamaged shards.

    A source that can be read twice is checked completely and compared with these shards, before a new folder is made.
    """
    if ShardFolder.exists(path):
        _check_manifest(ShardFolder(path), manifest, resume=resume)  # before waiting for anything
    elif source.rereadable:
        documents = check_source(source, manifest.shard_size, {}, show_progress_bar=show_progress_bar)
        manifest = replace(manifest, source={**manifest.source, "documents": documents})
    path.mkdir(parents=True, exist_ok=True)
    with locked(path, part=part):
        with exclusive(path):  # the parts of a build begin one after the other
            if is_new := not ShardFolder.exists(path):
                shards = ShardFolder.create(path, manifest)
            else:
                shards = ShardFolder(path)
                at_work = part is not None and other_parts_at_work(path, part)
                if not _check_manifest(shards, manifest, resume=resume, at_work=at_work):
                    shards.replace_manifest(manifest)
        for line in environment_differences(shards.manifest, manifest):
            logger.warning("%s: the build is resumed in another environment, so last bits may differ: %s", path, line)
        existing = {} if is_new else _repair(shards, part)
        if source.rereadable and not is_new:
            n = check_source(source, manifest.shard_size, existing, show_progress_bar=show_progress_bar)
            shards.note_documents(n)
        yield shards, existing


def _check_manifest(shards: ShardFolder, manifest: Manifest, *, resume: bool, at_work: bool = False) -> bool:
    """Checks that a build can be resumed; returns False if its manifest may be replaced, as it holds no vectors."""
    if not resume:
        raise ValueError(f"folder: {shards.folder} holds a build; remove it, use another folder, or resume")
    if holds_vectors := bool(shards.starts()) or at_work:
        check_same(shards.manifest, manifest, what=f"the build in {shards.folder}")
    return holds_vectors


def _repair(shards: ShardFolder, part: Part | None) -> dict[int, ShardEntry]:
    """Removes damaged shards of a part with a warning; returns all existing shards, those of other parts unverified."""
    existing, damaged = shards.repair(part)
    for line in damaged:
        logger.warning("%s; its documents are encoded again", line)
    others = {} if part is None else shards.readable_entries()
    return existing | {start: entry for start, entry in others.items() if not shards.belongs(start, part)}


def _encode(
    encoder: TextEncoder, pending: PendingShards, folder: Path, bar: tqdm[Any]
) -> Generator[tuple[Window, Vectors]]:
    """Encodes shard by shard; no batch holds documents of two shards, so shards do not depend on each other."""
    # For each piece that is being encoded: the number of its first document, and the shard if this is its last piece.
    ends: deque[tuple[int, Window | None]] = deque()

    def pieces() -> Iterator[tuple[list[str], list[str]]]:
        for shard in pending:
            start = shard.start
            for docnos, texts in cut_windows(zip(shard.docnos, shard.texts, strict=True), len(shard.docnos)):
                ends.append((start, shard if start + len(docnos) == shard.start + len(shard.docnos) else None))
                yield docnos, texts
                start += len(docnos)

    vectors: list[Vectors] = []
    current: Checkpoint | None = None

    def checkpoint(tokenized: TokenizedTexts) -> Checkpoint:
        nonlocal current
        current = Checkpoint(folder, ends[0][0], tokenized.texts)
        return current

    for _, encoded in encode_windows(encoder, pieces(), progress=bar.update, checkpoint=checkpoint):
        vectors.append(encoded)
        if (shard := ends.popleft()[1]) is None:
            if current is not None:
                current.save()
        else:
            yield shard, np.concatenate(vectors)
            vectors = []


def _write(shards: ShardFolder, encoded: Iterable[tuple[Window, Vectors]]) -> int:
    """Writes each shard while the next one is encoded; returns the number of documents."""
    n = 0
    with Background() as background:
        writing: Future[None] | None = None
        for window, vectors in encoded:
            if writing is not None:
                writing.result()
            writing = background.submit(shards.write, window.start, window.docnos, vectors, texts=window.texts)
            n += len(window.docnos)
        if writing is not None:
            writing.result()
    return n
