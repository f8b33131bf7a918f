"""Builds an index on a Ray cluster: each worker encodes one part of the build after the other."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from fair_calibration.validation import validate_positive_int
from fair_indexing.builder import Build, build, describe_kept, finish_build, resolve_shard_size
from fair_indexing.lock import FolderInUseError, Part, locked
from fair_indexing.pending import check_source
from fair_indexing.records import Source, open_source
from fair_indexing.shard import ShardEntry
from fair_indexing.shards import ShardFolder

logger = logging.getLogger("fair_indexing")
LoadModel = Callable[[], SentenceTransformer]
_PARTS_PER_WORKER = 4  # so that all workers end at about the same time
_ATTEMPTS = 4  # at a part whose workers die
_SECONDS = 5  # between updates of the progress bar, and for killed workers to end


class WorkerDiedError(ChildProcessError):
    """Several workers died while they encoded the same part."""


def build_on_ray(
    load_model: LoadModel,
    source: Any,
    folder: str | os.PathLike[str],
    *,
    workers: int = 2,
    num_cpus: float = 1,
    num_gpus: float = 0,
    shard_size: int | None = None,
    resume: bool = True,
    docno_field: str = "docno",
    text_field: str = "text",
    show_progress_bar: bool = True,
    **settings: Any,
) -> Build:
    """Encodes a collection into the shards of a folder, as `build` does, with the workers of a Ray cluster.

    The folder is that of ``build(load_model(), ...)``, byte for byte if workers compute as one machine does (the same
    kind of device, versions and number of threads, which Ray sets to ``num_cpus``), and each resumes what the other
    began. This process loads no model: it checks the source, hands out the parts of the build, and in the end verifies
    all shards and marks the build as complete. A worker that dies is replaced and resumes its part.

    Ray is started on this machine if it is not running: call ``ray.init(address=...)`` before for a cluster.

    Args:
        load_model: A function that loads the model, called once in every worker. It is pickled, so it should hold the
            name of the model, as ``functools.partial(FairSentenceTransformer, "BAAI/bge-m3")`` does, not the model.
        source: The documents as in `build`, if they can be read twice. Files and the folder must be on a file system
            that all nodes see under the same paths; anything else is pickled and sent to every worker.
        folder: The output folder: new, empty, or holding an interrupted build.
        workers: The number of workers; those that do not fit into the cluster wait for others to end.
        num_cpus: The CPUs of each worker.
        num_gpus: The GPUs of each worker; a fraction lets several share one.
        shard_size: As in `build`; more shards than workers balance the load.
        resume: As in `build`.
        docno_field: As in `build`.
        text_field: As in `build`.
        show_progress_bar: Whether to show a bar, which moves by whole shards.
        **settings: ``strength``, ``normalize``, ``model_name`` and ``tokens_per_batch`` of `build`.

    Raises:
        ImportError: Ray is not installed.
        WorkerDiedError: Several workers died while they encoded the same part.
        TypeError: ``load_model`` is not a function, or the source can be read only once.
        Exception: The errors of `build`, with their own type and a note that names the machine of the worker.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("build_on_ray needs Ray: pip install 'fair-calibration[ray]'") from error
    validate_positive_int("workers", workers)
    if isinstance(load_model, SentenceTransformer) or not callable(load_model):
        raise TypeError(
            "load_model: expected a function that loads the model in a worker, such as functools.partial("
            f"FairSentenceTransformer, 'BAAI/bge-m3'), got {type(load_model).__name__}"
        )
    fields: dict[str, Any] = {"docno_field": docno_field, "text_field": text_field}
    records = open_source(source, **fields).started()
    if not records.rereadable:
        raise TypeError(
            f"source: every worker reads the source, expected one that can be read twice, got {records.name}; write it "
            "to a file of JSON lines or Parquet first"
        )
    shard_size = resolve_shard_size(folder, shard_size)
    existing: Mapping[int, ShardEntry] = {}
    if ShardFolder.exists(folder):
        if not resume:
            raise ValueError(f"folder: {folder} holds a build; remove it, use another folder, or resume")
        if (shards := ShardFolder(folder)).shard_size == shard_size:  # else the workers refuse it
            existing = shards.readable_entries()
    documents = check_source(records, shard_size, existing, show_progress_bar=show_progress_bar)
    if not ray.is_initialized():
        ray.init()
    resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    cluster: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    _warn_of_too_little(cluster, resources)

    job = {
        "load_model": load_model,
        "source": Path(source).resolve() if isinstance(source, (str, os.PathLike)) else source,
        "folder": Path(folder).resolve(),
        "fields": fields,
        # This process has checked the source, so workers read it only once.
        "as_checked": {"name": records.name, "documents": documents, "rereadable": False},
        "settings": {**settings, "shard_size": shard_size},
    }
    worker_class = ray.remote(Worker).options(**resources)
    n_parts = min(math.ceil(documents / shard_size), _PARTS_PER_WORKER * workers)
    n_existing = sum(entry.count for entry in existing.values())
    with tqdm(
        total=documents, initial=n_existing, desc="Encoding", unit="doc", smoothing=0, disable=not show_progress_bar
    ) as bar:
        encoded = _encode_parts(lambda: worker_class.remote(**job), workers, n_parts, Path(folder), shard_size, bar)
    return Build(ShardFolder(folder), finish_build(folder, records), encoded)


class Worker:
    """Encodes parts of a build; Ray starts one in each worker process."""

    def __init__(
        self,
        *,
        load_model: LoadModel,
        source: Any,
        folder: Path,
        fields: Mapping[str, Any],
        as_checked: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        self._load_model = load_model
        self._source: Source = replace(open_source(source, **fields), **as_checked)
        self._folder = folder
        self._settings = settings
        self._model: SentenceTransformer | None = None

    def encode(self, part: Part) -> int:
        """Encodes a part, and returns the number of documents in its new shards."""
        try:
            if self._model is None:  # not in __init__, where Ray would hide the type of an error
                self._model = self._load_model()
            settings = {**self._settings, "part": part, "show_progress_bar": False}
            return build(self._model, self._source, self._folder, **settings).encoded
        except Exception as error:
            error.add_note(f"In the worker on {socket.gethostname()}, in part {part[0]} of {part[1]}.")
            raise


def _encode_parts(
    start_worker: Callable[[], Any], n_workers: int, n_parts: int, folder: Path, shard_size: int, bar: tqdm[Any]
) -> int:
    """Hands out the parts of a build to workers, and replaces workers that die; returns the number of documents."""
    import ray

    waiting = deque((i, n_parts) for i in range(n_parts))
    deaths: Counter[Part] = Counter()
    running: dict[Any, tuple[Any, Part]] = {}  # the worker and the part of each call

    def hand_out(worker: Any) -> None:
        part = waiting.popleft()
        running[worker.encode.remote(part)] = worker, part

    encoded = 0
    try:
        for _ in range(min(n_workers, n_parts)):
            hand_out(start_worker())
        while running:
            ended, _ = ray.wait(list(running), timeout=_SECONDS)
            if ShardFolder.exists(folder):
                bar.update(min(bar.total, len(ShardFolder(folder).starts()) * shard_size) - bar.n)
            for call in ended:
                worker, part = running.pop(call)
                try:
                    encoded += ray.get(call)
                except ray.exceptions.RayTaskError as error:
                    raise (error.cause if isinstance(error.cause, Exception) else error) from error
                except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
                    deaths[part] += 1
                    if deaths[part] == _ATTEMPTS:
                        raise WorkerDiedError(
                            f"{_ATTEMPTS} workers died while they encoded part {part[0]} of {part[1]}; most often "
                            "memory has run out: give workers more of it (num_cpus, so that a node has fewer of them), "
                            "or lower shard_size"
                        ) from error
                    waiting.append(part)
                    ray.kill(worker)
                    worker = start_worker()
                if waiting:
                    hand_out(worker)
                else:
                    ray.kill(worker)  # frees its place for a worker that waits for one
    except BaseException as error:
        for worker, _ in running.values():
            ray.kill(worker)
        with suppress(FolderInUseError, OSError), locked(folder, timeout=_SECONDS):
            pass  # the killed workers have ended, so the same call can resume at once
        if isinstance(error, KeyboardInterrupt):
            error.add_note(describe_kept(folder))
        raise
    return encoded


def _warn_of_too_little(cluster: Mapping[str, float], resources: Mapping[str, float]) -> None:
    for name, unit in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        if resources[name] > cluster.get(unit, 0):
            logger.warning(
                "%s: a worker needs %g, the cluster has %g: unless it grows, Ray waits forever",
                name,
                resources[name],
                cluster.get(unit, 0),
            )
