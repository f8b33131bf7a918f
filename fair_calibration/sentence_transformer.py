"""`FairSentenceTransformer`: a SentenceTransformer whose documents are calibrated and whose queries are plain."""

from __future__ import annotations

import inspect
import threading
from typing import Any, cast

from sentence_transformers import SentenceTransformer

from fair_calibration.adoption import adopt, find_transformer, why_unsupported
from fair_calibration.config import FairConfig
from fair_calibration.document_transformer import DocumentTransformer
from fair_calibration.even_chunks.report import EvenChunksSummary
from fair_calibration.even_chunks.transformer import EvenChunksTransformer
from fair_calibration.method.calibrated_pass import KernelName
from fair_calibration.model_source import find_model
from fair_calibration.query import is_query_route, task_of_call
from fair_calibration.report import DocumentCounts, Summary
from fair_calibration.routes import check_route, document_path
from fair_calibration.settings import Settings, choose_settings
from fair_calibration.transformer import FairTransformer
from fair_calibration.validation import validate_strength

_ENCODE = inspect.signature(SentenceTransformer.encode)


class FairSentenceTransformer(SentenceTransformer):
    """A SentenceTransformer that encodes documents with calibrated attention, and queries as the plain model does.

    `encode_document`, and `encode` without a task, calibrate; `encode_query` does not. ``encode(..., strength=0.3)``
    overrides the strength for one call. Everything else is as in SentenceTransformer.
    """

    _module_classes = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in (FairTransformer, EvenChunksTransformer)}

    def __init__(
        self,
        model_name_or_path: str | None = None,
        *,
        config: Settings | str | None = None,
        pooled_row_only: bool = False,
        kernel: KernelName = "torch",
        max_seq_length: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Loads a model and calibrates it.

        Args:
            model_name_or_path: A Hugging Face name or a local folder, also one of a saved calibrated model.
            config: A `FairConfig`, an `EvenChunks` or the name of a preset; None means the settings that the model was
                saved with, or else the defaults.
            pooled_row_only: As in `calibrate`. It is not saved with the model.
            kernel: As in `calibrate`. It is not saved with the model.
            max_seq_length: As in `calibrate`.
            **kwargs: Further arguments of SentenceTransformer.

        Raises:
            TypeError: ``config`` has another type, the model is not a SentenceTransformer, or the first module that
                documents pass through is not a transformer.
            ValueError: The model cannot be calibrated, or not with these settings, or it has fewer positions than
                ``max_seq_length``.
            ModelNotFoundError: (`fair_calibration.model_source`, a ValueError) There is no such folder or model.
        """
        choose_settings(config, default=FairConfig())  # wrong settings are reported before anything is loaded
        if model_name_or_path is not None:
            if not kwargs.get("local_files_only"):
                where = {name: kwargs.get(name) for name in ("revision", "cache_folder", "token")}
                kwargs["local_files_only"] = find_model(model_name_or_path, **where)
            model_name_or_path = str(model_name_or_path)
        super().__init__(model_name_or_path, **kwargs)
        transformer = find_transformer(self)
        saved = transformer.fair_config if isinstance(transformer, DocumentTransformer) else None
        chosen = choose_settings(config, default=saved or FairConfig())
        if chosen != saved:
            adopt(transformer, chosen, max_seq_length=max_seq_length).on_model_ready(self)
        elif max_seq_length is not None:
            self.max_seq_length = max_seq_length
        self.fair.use_kernel(kernel, self)
        if pooled_row_only:
            self.fair.use_pooled_row_only(self)

    def _load_converted_modules(
        self, model_name_or_path: str, *_: Any, model_type: str | None = None, **__: Any
    ) -> Any:
        # sentence-transformers would drop the modules after the transformer and put an untrained mean pooling there.
        raise TypeError(
            f"model_name_or_path: expected a SentenceTransformer, {model_name_or_path} is a {model_type}"
            + why_unsupported(str(model_type))
        )

    def _load_default_modules(self, model_name_or_path: str, *args: Any, **kwargs: Any) -> Any:
        # Likewise for a folder without modules.json, whose weights may be those of any kind of model.
        modules, module_kwargs = super()._load_default_modules(model_name_or_path, *args, **kwargs)
        for name in cast(Any, modules)[0].config.architectures or ():
            if name.endswith(("ColBERT", "ForRetrieval", "ForSequenceClassification")):
                raise TypeError(
                    f"model_name_or_path: expected a SentenceTransformer, {model_name_or_path} is a {name} without a "
                    "modules.json; if pooled vectors of it are what you want, use calibrate(SentenceTransformer(...))"
                )
        return modules, module_kwargs

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Encodes documents with calibrated attention, and queries as the plain model does (`fair_calibration.query`).

        The arguments are those of `SentenceTransformer.encode`, and ``strength``, which overrides that of the settings
        for this call.

        Raises:
            ValueError: ``strength`` is outside [0, 1], or ``task`` is unknown.
        """
        if kwargs.get("strength") is not None:
            kwargs["strength"] = validate_strength(kwargs["strength"])  # here rather than in every worker process
        # The arguments are passed on unchanged, so that every call that the plain model accepts is accepted here.
        given = _ENCODE.bind_partial(self, *args, **kwargs).arguments
        prompt_name, prompt = given.get("prompt_name"), given.get("prompt")
        task = task_of_call(self, task=kwargs.get("task"), prompt_name=prompt_name, prompt=prompt)
        if task is not None:
            kwargs["task"] = task
        output_value = given.get("output_value", "sentence_embedding")
        if output_value != "sentence_embedding" and task != "query":
            self._check_output_value(output_value)
        return super().encode(*args, **kwargs)

    def _check_output_value(self, output_value: Any) -> None:
        """Raises a ValueError if the settings leave no token embeddings of documents."""
        if self.fair.is_pooled_row_only:
            raise ValueError(
                f"output_value: with pooled_row_only there is only the sentence_embedding, got {output_value!r}; "
                "calibrate without it, or use the plain model"
            )
        if output_value == "token_embeddings" and isinstance(self.fair, EvenChunksTransformer):
            raise ValueError(
                "output_value: documents in even chunks have no token embeddings, only one joined vector; calibrate "
                "with a FairConfig, or use the plain model"
            )

    def forward(self, input: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Runs all modules.

        Raises:
            ValueError: A Router sends a document past the module that calibrates.
        """
        fair = self.fair
        fair.look_up(self)
        task, modality = (kwargs.get(name) or input.get(name) for name in ("task", "modality"))  # as Router does
        if is_query_route(self, task, modality):
            kwargs["task"] = "query"
        elif task != "query":
            check_route(self, fair, task, modality)
        output: dict[str, Any] = super().forward(input, **kwargs)
        return output

    @property
    def fair(self) -> FairTransformer | EvenChunksTransformer:
        """The module that encodes documents with the calibration."""
        return cast("FairTransformer | EvenChunksTransformer", next(iter(document_path(self))))

    @property
    def max_seq_length(self) -> int | None:
        """The number of tokens at which documents are truncated.

        Setting it beyond the positions of the model raises a ValueError. With a Router, setting it leaves the
        transformers of other routes as they are.
        """
        return self.fair.max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int | None) -> None:
        self.fair.max_seq_length = value

    @property
    def fair_config(self) -> Settings:
        """The settings as given; the property ``config`` is the transformer's own."""
        return self.fair.fair_config

    @property
    def counts(self) -> DocumentCounts:
        """The number of documents calibrated, too short or truncated so far, in worker processes as well."""
        return self.fair.counter.counts

    def summary(self) -> Summary | EvenChunksSummary:
        """Returns how documents are encoded and how many were; print it."""
        self.fair.look_up(self)
        return self.fair.summary()

    def _multi_process(self, inputs: Any, *, pool: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        if pool is None:
            return super()._multi_process(inputs, pool=pool, **kwargs)
        # Threads that share a pool would take each other's results out of its queue.
        lock = pool.setdefault("in_use", threading.Lock())
        if not lock.acquire(blocking=False):
            raise ValueError(
                "pool: another thread is encoding with this pool of processes; wait for it, or start a pool per thread"
            )
        try:
            return super()._multi_process(inputs, pool=pool, **kwargs)
        finally:
            lock.release()

    # Each worker process counts its own documents; the counts are sent back with each chunk of embeddings.
    @classmethod
    def _multi_process_worker(cls, target_device: str, model: Any, input_queue: Any, results_queue: Any) -> None:
        super()._multi_process_worker(
            target_device, model, input_queue, cast(Any, _CountingQueue(results_queue, model))
        )

    def _get_worker_result(self, pool: Any, poll_interval: float = 1.0) -> Any:  # type: ignore[override]
        received = super()._get_worker_result(pool, poll_interval)
        if not isinstance(received, tuple):
            raise ValueError(
                "pool: it was started by another model; start one with this model's start_multi_process_pool()"
            )
        result, counts = received
        self.fair.counter.add(counts, max_seq_length=self.max_seq_length)
        return result


class _CountingQueue:
    """A queue of results that sends with every result the counts of the documents encoded for it."""

    def __init__(self, queue: Any, model: FairSentenceTransformer) -> None:
        self._queue = queue
        self._model = model
        model.fair.counter.mute()  # the process that owns the pool warns for all workers

    def put(self, result: Any) -> None:
        self._queue.put((result, self._model.fair.counter.take()))
