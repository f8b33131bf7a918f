"""Calibrated models: `calibrate` a loaded SentenceTransformer, or load one as `FairSentenceTransformer`."""

from __future__ import annotations

import copy
from collections import OrderedDict
from itertools import chain
from typing import Any, TypeVar, cast

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import nn

from fair_calibration.config import FairConfig, validate_strength
from fair_calibration.report import DocumentCounts, Summary
from fair_calibration.transformer import FairTransformer

ModelT = TypeVar("ModelT", bound=SentenceTransformer)


class FairSentenceTransformer(SentenceTransformer):
    """A SentenceTransformer that encodes documents with calibrated attention, and queries as the plain model does.

    `encode_document` and `encode` without a task calibrate, `encode_query` does not. ``encode(..., strength=0.3)``
    overrides the strength for one call. Everything else is SentenceTransformer's.
    """

    _module_classes = {f"{FairTransformer.__module__}.{FairTransformer.__qualname__}": FairTransformer}

    def __init__(
        self, model_name_or_path: str | None = None, *, config: FairConfig | None = None, **kwargs: Any
    ) -> None:
        """Loads a model and calibrates it.

        Args:
            model_name_or_path: A Hugging Face name or a local folder, also of a saved calibrated model.
            config: The settings; None for those the model was saved with, or else the defaults.
            **kwargs: SentenceTransformer's.

        Raises:
            TypeError: ``config`` is no FairConfig, or the model's first module is no transformer.
            ValueError: The model cannot be calibrated, or not with these settings.
        """
        _check_config(config)
        super().__init__(None if model_name_or_path is None else str(model_name_or_path), **kwargs)
        name, first = next(iter(self.named_children()), ("", None))
        if not isinstance(first, FairTransformer):
            _check_transformer(first)
            fair = FairTransformer.from_transformer(cast(Transformer, first), config or FairConfig())
        elif config is not None and config != first.fair_config:
            fair = FairTransformer.from_transformer(first, config)
        else:
            return  # loaded as it was saved
        self._modules[name] = fair
        fair.on_model_ready(self)

    def encode(self, inputs: Any, prompt_name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Encodes documents with calibrated attention; see `SentenceTransformer.encode` for the arguments.

        Texts with ``task="query"``, or without a task but with a prompt that is named for queries, are encoded plainly.

        Raises:
            ValueError: ``strength`` is outside [0, 1], or ``task`` is unknown.
        """
        if kwargs.get("strength") is not None:
            kwargs["strength"] = validate_strength(kwargs["strength"])  # here rather than in every worker
        if kwargs.get("task") is None and prompt_name is not None and prompt_name.lower().endswith("query"):
            kwargs["task"] = "query"
        return super().encode(inputs, prompt_name, *args, **kwargs)

    def forward(self, input: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Runs all modules."""
        self.fair.use_poolings(self)
        output: dict[str, Any] = super().forward(input, **kwargs)
        return output

    @property
    def fair(self) -> FairTransformer:
        """The module that calibrates."""
        return cast(FairTransformer, self[0])

    @property
    def fair_config(self) -> FairConfig:
        """The settings as given; `config` is the transformer's own."""
        return self.fair.fair_config

    @property
    def counts(self) -> DocumentCounts:
        """How many documents were calibrated, too short or truncated so far, worker processes included."""
        return self.fair.counter.counts

    def summary(self) -> Summary:
        """Returns which layers, rows and mechanism are in use and what became of the documents; print it."""
        self.fair.use_poolings(self)
        return self.fair.summary()

    # Worker processes count for themselves; their counts travel back with each chunk of embeddings.
    @classmethod
    def _multi_process_worker(cls, target_device: str, model: Any, input_queue: Any, results_queue: Any) -> None:
        super()._multi_process_worker(
            target_device, model, input_queue, cast(Any, _CountingQueue(results_queue, model))
        )

    def _get_worker_result(self, pool: Any, poll_interval: float = 1.0) -> Any:  # type: ignore[override]
        received = super()._get_worker_result(pool, poll_interval)
        if not isinstance(received, tuple):
            raise ValueError("pool: it was started by another model; start one with this model's method")
        result, counts = received
        self.fair.counter.add(counts, max_seq_length=self.max_seq_length)
        return result


class _CountingQueue:
    """A results queue that adds to every result the counts that led to it."""

    def __init__(self, queue: Any, model: FairSentenceTransformer) -> None:
        self._queue = queue
        self._model = model
        model.fair.counter.mute()  # the process that owns the pool warns for all

    def put(self, result: Any) -> None:
        self._queue.put((result, self._model.fair.counter.take()))


def calibrate(model: SentenceTransformer, config: FairConfig | None = None) -> FairSentenceTransformer:
    """Returns a calibrated model that shares the given model's weights; the given one stays plain and usable.

    Args:
        model: A SentenceTransformer whose first module is a transformer. A calibrated one gets the new settings.
        config: The settings; None for those that it was calibrated with before, or else the defaults.

    Returns:
        A FairSentenceTransformer with the same prompts, modules, similarity and dimensions. Weights are shared, so that
        casting or moving one model casts or moves both; settings such as ``max_seq_length`` are not.

    Raises:
        TypeError: ``model`` is no SentenceTransformer, ``config`` no FairConfig, or the first module no transformer.
        ValueError: The model cannot be calibrated, or not with these settings.
    """
    if type(model) not in (SentenceTransformer, FairSentenceTransformer):
        raise TypeError(
            f"model: expected a SentenceTransformer, got {type(model).__name__}; load names and paths with "
            "FairSentenceTransformer(name, config=...)"
        )
    _check_config(config)
    modules = _share_modules(model)
    name, first = next(iter(modules.items()), ("", None))
    _check_transformer(first)
    own_kwargs = (model.module_kwargs or {}).get(name, ())
    config = config or (first.fair_config if isinstance(first, FairTransformer) else FairConfig())
    modules[name] = FairTransformer.from_transformer(cast(Transformer, first), config, own_kwargs=own_kwargs)
    return _assemble(FairSentenceTransformer, model, modules)


def uncalibrate(model: FairSentenceTransformer) -> SentenceTransformer:
    """Returns the plain model again, sharing the weights of the calibrated one, which stays as it is.

    Raises:
        TypeError: ``model`` is not calibrated.
    """
    if not isinstance(model, FairSentenceTransformer):
        raise TypeError(f"model: expected a FairSentenceTransformer, got {type(model).__name__}")
    modules = _share_modules(model)
    name, first = next(iter(modules.items()))
    modules[name] = cast(FairTransformer, first).into_transformer()
    return _assemble(SentenceTransformer, model, modules)


def _share_modules(model: SentenceTransformer) -> OrderedDict[str, nn.Module]:
    """Copies a model's modules with everything but the weights: a second model at the cost of one."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    for module in model.modules():
        # The dicts too: casting or moving one model puts new buffers into them, and the other must see the same ones.
        for shared in (module._parameters, module._buffers):
            memo[id(shared)] = shared
    return OrderedDict((name, copy.deepcopy(module, memo)) for name, module in model.named_children())


def _assemble(cls: type[ModelT], model: SentenceTransformer, modules: OrderedDict[str, nn.Module]) -> ModelT:
    new = cls(
        modules=modules,  # type: ignore[arg-type]
        device=str(model.device),
        prompts=cast(dict[str, str], dict(model.prompts)),
        default_prompt_name=model.default_prompt_name,
        trust_remote_code=model.trust_remote_code,
        model_card_data=copy.copy(model.model_card_data),
        similarity_fn_name=model.similarity_fn_name,
        truncate_dim=model.truncate_dim,
    )
    new.prompts = dict(model.prompts)  # without the empty defaults that a new model gets
    new.module_kwargs = copy.deepcopy(model.module_kwargs)
    new._model_card_text = model._model_card_text
    return new


def _check_config(config: FairConfig | None) -> None:
    if config is not None and not isinstance(config, FairConfig):
        raise TypeError(f"config: expected a FairConfig, got {type(config).__name__}")


def _check_transformer(module: nn.Module | None) -> None:
    if type(module) not in (Transformer, FairTransformer):
        raise TypeError(
            f"the model's first module must be a sentence-transformers Transformer to be calibrated, "
            f"got {'none' if module is None else f'{type(module).__module__}.{type(module).__name__}'}"
        )
