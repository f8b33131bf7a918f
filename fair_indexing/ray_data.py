"""Builds an index on a Ray cluster: workers read, encode and write one shard after the other.

Ray Data schedules a data set of shards, one row with the place of a shard's documents each, over a pool of actors.
Its readers (``read_parquet``, ``read_json``) are not used: their blocks follow files and row groups and come in any
order, while a shard is a fixed range of documents in the order of the source. So

- a shard is encoded from the same documents in the same batches as by `build`, on whatever worker, and is the same;
- a task is its row alone, so that Ray repeats one whose worker died, and a resumed build is the rows left over;
- texts and vectors never leave the worker. Two shards at a time are in a worker's memory, one encoded while the other
  is read, tokenized or written; all others are rows, which is the back-pressure.

Folder and source must be on a file system that all nodes see under the same paths.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from fair_calibration.identity import EncoderIdentity
from fair_calibration.validation import validate_positive_int
from fair_indexing.build import Build, SourceChangedError, open_build, resolve_shard_size
from fair_indexing.files import DamagedFileError, digest_strings, remove_parts
from fair_indexing.manifest import Manifest
from fair_indexing.records import Source, Window, open_source
from fair_indexing.shard_worker import LoadModel, ShardWorker, describe_encoder
from fair_indexing.shards import ShardFolder
from fair_indexing.slices import DatasetSlices, FileSlices, open_slices

logger = logging.getLogger("fair_indexing")
_AT_ONCE = 2  # shards in a worker: one is encoded, one is read, tokenized or written


def build_on_ray(
    load_model: LoadModel,
    source: Any,
    folder: str | os.PathLike[str],
    *,
    workers: int | tuple[int, int] = 2,
    num_cpus: float = 1,
    num_gpus: float = 0,
    strength: float | None = None,
    normalize: bool | None = None,
    shard_size: int | None = None,
    resume: bool = True,
    docno_field: str = "docno",
    text_field: str = "text",
    model_name: str | None = None,
    tokens_per_batch: int | None = None,
    show_progress_bar: bool = True,
) -> Build:
    """Encodes a collection into the shards of a folder, as `build` does, with the workers of a Ray cluster.

    The folder is that of ``build(load_model(), ...)``, byte for byte if workers compute as one machine does (the same
    kind of device, versions and number of threads, which Ray sets to ``num_cpus``), and each goes on with what the
    other began. This process checks the source, holds the folder's lock, verifies all shards in the end and only then
    marks the build as complete; it loads no model. A worker that dies is replaced and its shards are encoded anew.

    Ray is started on this machine if it is not: call ``ray.init(address=...)`` before for a cluster.

    Args:
        load_model: A function that loads the model, called once in every worker. It is pickled, so it should hold the
            name of the model, as ``functools.partial(FairSentenceTransformer, "BAAI/bge-m3")`` does, not the model.
        source: A file of JSON lines or Parquet, a folder of them, or a Hugging Face ``Dataset``; see `open_source`.
        folder: The output folder: new, empty, or holding an interrupted build.
        workers: The number of workers, or the least and the most for a cluster that grows.
        num_cpus: CPUs of each worker.
        num_gpus: GPUs of each worker; a fraction lets several share one.
        strength: This and the following settings are those of `build`.
        normalize: See `build`.
        shard_size: See `build`; also what a worker does at a time. Fewer shards than workers leave some idle.
        resume: See `build`.
        docno_field: See `build`.
        text_field: See `build`.
        model_name: See `build`.
        tokens_per_batch: See `build`.
        show_progress_bar: Whether to show a bar with documents per second and the time left, moved on by whole shards.

    Raises:
        ImportError: Ray is not installed.
        DifferentEncoderError: The folder's build has another encoder, other settings or another shard size; or a
            worker's model has other weights or settings than the first one's.
        SourceChangedError: The source is not the one that the folder's shards were encoded from, or not the same in a
            worker.
        FolderInUseError: Another process is writing the folder.
        WorkerDiedError: (`fair_indexing.shard_worker`) A shard ended its worker again and again.
        ValueError: There are no documents, a record cannot be indexed, or a setting is out of range.
        TypeError: A docno or a text is not a string, or workers cannot read the source.
        OSError: The disk is full, or cannot be written. What is complete is kept.
    """
    ray = _import_ray()
    size = _pool_size(workers)
    if isinstance(load_model, SentenceTransformer) or not callable(load_model):
        raise TypeError(
            "load_model: expected a function that loads the model in a worker, such as functools.partial("
            f"FairSentenceTransformer, 'BAAI/bge-m3'), got {type(load_model).__name__}"
        )
    opened = open_source(source, docno_field=docno_field, text_field=text_field)
    slices = open_slices(source, docno_field=docno_field, text_field=text_field)
    records = _CheckedSource(**vars(opened.started()))
    settings = {"strength": strength, "normalize": normalize, "tokens_per_batch": tokens_per_batch}
    resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    if not ray.is_initialized():
        ray.init()
    _warn_of_too_little(ray.cluster_resources(), resources)
    with _own_errors():
        describe = ray.remote(describe_encoder).options(**resources)
        encoder, environment = ray.get(describe.remote(load_model, model_name, settings))
    manifest = Manifest(
        encoder=EncoderIdentity.from_dict(encoder),
        shard_size=resolve_shard_size(folder, shard_size),
        source={"name": records.name, "documents": records.documents},
        environment=environment,
    )
    with open_build(folder, manifest, records, resume=resume) as shards:
        rows = _rows(records, slices, shards)
        worker = {
            "load_model": load_model,
            "manifest": manifest.to_dict(),
            "folder": str(shards.folder.resolve()),
            "slices": slices,
            "settings": settings,
        }
        n = records.n_documents
        encoded = sum(row["count"] for row in rows)
        bar = tqdm(
            total=n, initial=n - encoded, desc="Encoding", unit="doc", smoothing=0, disable=not show_progress_bar
        )
        noted: set[str] = set()
        with bar:
            for result in _encode_rows(rows, worker, size, resources):
                bar.update(result["count"])
                for line in result["notes"].splitlines():
                    if line not in noted:
                        logger.warning("%s", line)
                    noted.add(line)
        _, damaged = shards.verify()
        if damaged:
            raise DamagedFileError(f"{'; '.join(damaged)}; run the build again to encode these documents anew")
        remove_parts(shards.folder / "shards")  # what workers that died have left there
        return Build(shards, shards.finish(n), encoded)


@dataclass(frozen=True, kw_only=True)
class _CheckedSource(Source):
    """A source that keeps what each shard is of while `open_build` checks it: no second pass over the texts is needed.

    Attributes:
        shards: Of each shard its row for the workers, without the slices.
    """

    shards: dict[int, dict[str, Any]] = field(default_factory=dict)

    def windows(self, size: int) -> Iterator[Window]:
        self.shards.clear()
        for window in super().windows(size):
            self.shards[window.start] = {
                "start": window.start,
                "count": len(window.docnos),
                "docnos": digest_strings(window.docnos),
                "texts": digest_strings(window.texts),
            }
            yield window

    @property
    def n_documents(self) -> int:
        return sum(row["count"] for row in self.shards.values())


def _rows(records: _CheckedSource, slices: FileSlices | DatasetSlices, shards: ShardFolder) -> list[dict[str, Any]]:
    """Returns the rows of the shards that are not there yet."""
    places = slices.cut(shards.shard_size)
    if len(places) != len(records.shards):
        raise SourceChangedError(f"source: {records.name} has changed while it was read")
    there = set(shards.starts())
    return [
        {**row, "slices": json.dumps(place)}
        for row, place in zip(records.shards.values(), places, strict=True)
        if row["start"] not in there
    ]


def _encode_rows(
    rows: list[dict[str, Any]], worker: Mapping[str, Any], size: tuple[int, int], resources: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    """Runs workers over the rows of shards, and yields what they return, in any order."""
    import ray.data

    if not rows:
        return
    data: Any = ray.data.from_items(rows, override_num_blocks=len(rows))  # a block, and so a task, is a shard
    data.context.raise_original_map_exception = True
    data.context.max_errored_blocks = 0
    data.context.enable_progress_bars = data.context.print_on_execution_start = False
    pool = ray.data.ActorPoolStrategy(
        min_size=size[0],
        max_size=size[1],
        max_tasks_in_flight_per_actor=_AT_ONCE,
        max_concurrent_calls_per_actor=_AT_ONCE,
        enable_true_multi_threading=True,
    )
    results = data.map(ShardWorker, fn_constructor_kwargs=dict(worker), compute=pool, **resources)
    with _own_errors():
        yield from results.iter_rows()


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raises the errors of workers as they were raised there."""
    import ray

    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise


def _import_ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError("build_on_ray needs Ray Data: pip install 'fair-calibration[ray]'") from error
    return ray


def _pool_size(workers: int | tuple[int, int]) -> tuple[int, int]:
    least, most = workers if isinstance(workers, tuple) else (workers, workers)
    validate_positive_int("workers", least)
    validate_positive_int("workers", most)
    if least > most:
        raise ValueError(f"workers: expected the least and the most of them, got {workers}")
    return least, most


def _warn_of_too_little(there: Mapping[str, float], resources: Mapping[str, float]) -> None:
    for name, unit in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        if resources[name] > there.get(unit, 0):
            logger.warning(
                "%s: a worker needs %g, the cluster has %g: unless it grows, Ray waits for ever",
                name,
                resources[name],
                there.get(unit, 0),
            )
