"""A worker of a cluster: reads, encodes and writes shards, and has no need of Ray itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from fair_calibration.identity import DifferentEncoderError, EncoderIdentity
from fair_indexing.background import call_apart
from fair_indexing.build import SourceChangedError, text_parts
from fair_indexing.files import digest_strings
from fair_indexing.manifest import Manifest, describe_environment, environment_differences
from fair_indexing.records import Window
from fair_indexing.shards import ShardFolder
from fair_indexing.slices import DatasetSlices, FileSlices, Slice
from fair_indexing.source_files import GZIP_ERRORS
from fair_indexing.text_encoder import TextEncoder, Vectors

_ATTEMPTS = 4  # at a shard whose worker died

LoadModel = Callable[[], SentenceTransformer]


class WorkerDiedError(ChildProcessError):
    """Workers died again and again over the same shard."""


class ShardWorker:
    """Encodes shards; Ray Data makes one in each worker process, and calls it with two rows at a time, in threads."""

    def __init__(
        self,
        *,
        load_model: LoadModel,
        manifest: Mapping[str, Any],
        folder: str,
        slices: FileSlices | DatasetSlices,
        settings: Mapping[str, Any],
    ) -> None:
        self._load_model = load_model
        self._manifest = Manifest.from_dict(manifest)
        self._folder = Path(folder)
        self._slices = slices
        self._settings = settings
        self._loading, self._tokenizing, self._encoding = Lock(), Lock(), Lock()
        self._encoder: TextEncoder | None = None
        self._notes: list[str] = []

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Reads, encodes and writes the shard of a row; returns its place, size, and what the user should know."""
        start, count = int(row["start"]), int(row["count"])
        try:
            with self._attempt(start):
                window = self._read(row)
                vectors = self._encode(self._load(), window)
                ShardFolder(self._folder).write(start, window.docnos, vectors, texts=window.texts)
        except Exception as error:
            error.add_note(f"In the worker on {socket.gethostname()}, with documents {start} to {start + count - 1}.")
            raise
        return {"start": start, "count": count, "notes": "\n".join(self._notes)}

    @contextmanager
    def _attempt(self, start: int) -> Iterator[None]:
        """Counts, on the disk, how often workers died over a shard, as Ray would try it for ever."""
        for number in range(_ATTEMPTS):
            path = self._folder / "shards" / f".{start:012d}~attempt-{number}.part"
            try:
                path.open("xb").close()
            except FileExistsError:  # its worker died
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
        raise WorkerDiedError(
            f"{_ATTEMPTS} workers died while they were at these documents, and perhaps at others; most often memory "
            "has run out: give workers more of it (num_cpus, so that a node has fewer), or lower shard_size"
        )

    def _load(self) -> TextEncoder:
        # Not in __init__, where Ray Data would take a worker that dies or raises for one that never will start.
        with self._loading:
            if self._encoder is None:
                encoder, record, environment = call_apart(
                    _load_encoder, self._load_model, self._manifest.encoder.model, self._settings
                )
                host = socket.gethostname()
                if lines := self._manifest.encoder.document_differences(record):
                    raise DifferentEncoderError(
                        f"load_model: the model in the worker on {host} is not the one of the build in {self._folder}: "
                        f"{'; '.join(lines)}. Give every node the same files and versions"
                    )
                here = replace(self._manifest, environment=environment)
                self._notes = [
                    f"The worker on {host} computes in another environment than the build began in, so last bits may "
                    f"differ: {line}"
                    for line in environment_differences(self._manifest, here)
                ]
                self._encoder = encoder
            return self._encoder

    def _read(self, row: Mapping[str, Any]) -> Window:
        try:
            docnos, texts = self._slices.read([Slice(*values) for values in json.loads(row["slices"])])
            same = (digest_strings(docnos), digest_strings(texts)) == (row["docnos"], row["texts"])
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError, *GZIP_ERRORS) as error:
            raise SourceChangedError(f"source: it is not as it was when it was checked: {error}") from error
        if not same:
            raise SourceChangedError(
                "source: these documents are not those that were checked before: it has changed, or the node has other "
                "files under the same names"
            )
        return Window(int(row["start"]), docnos, texts)

    def _encode(self, encoder: TextEncoder, window: Window) -> Vectors:
        """Encodes a shard in the parts in which `build` does, while another call may tokenize the next one.

        Torch is used in threads that end: those that Ray calls from stay (see `Background`).
        """
        vectors = []
        for part in text_parts(window.texts):
            with self._tokenizing:
                tokens = call_apart(encoder.prepare, window.texts[part], window.docnos[part])
            with self._encoding:
                vectors.append(call_apart(encoder.encode, tokens))
        return np.concatenate(vectors)


def _load_encoder(
    load_model: LoadModel, name: str | None, settings: Mapping[str, Any]
) -> tuple[TextEncoder, EncoderIdentity, dict[str, Any]]:
    """Loads the model; returns what encodes with it, what its vectors depend on, and what their last bits depend on."""
    model = load_model()
    encoder = TextEncoder(model, **settings)
    record = EncoderIdentity.of(model, name=name, strength=settings["strength"], normalize=settings["normalize"])
    return encoder, record, describe_environment(model, tokens_per_batch=encoder.tokens_per_batch)


def describe_encoder(load_model: LoadModel, name: str | None, settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns an `EncoderIdentity` as a dict, and what `describe_environment` says, where this is run."""
    _, record, environment = _load_encoder(load_model, name, settings)
    return record.to_dict(), environment
