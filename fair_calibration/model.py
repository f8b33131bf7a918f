"""Calibrated models: `calibrate` a loaded SentenceTransformer, or load one as `FairSentenceTransformer`."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from typing import Any, TypeVar, cast

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import nn

from fair_calibration.config import FairConfig, validate_strength
from fair_calibration.report import DocumentCounts, Summary
from fair_calibration.routes import check_route, document_path, has_one_route, is_query_route, replace_module
from fair_calibration.transformer import FairTransformer

ModelT = TypeVar("ModelT", bound=SentenceTransformer)
_TRANSFORMERS = (Transformer, FairTransformer)  # exactly these: what a subclass adds would be lost
_LATE_INTERACTION = "a late-interaction model keeps one vector per token, so it has no pooled token to calibrate"
_UNPOOLED = {
    "MultiVectorEncoder": _LATE_INTERACTION,
    "ColBERT": _LATE_INTERACTION,  # PyLate's
    "SparseEncoder": "a sparse encoder weighs the words of a vocabulary, so it has no pooled token to calibrate",
    "CrossEncoder": "a cross-encoder reads query and document together, so it encodes no documents to calibrate",
}


class FairSentenceTransformer(SentenceTransformer):
    """A SentenceTransformer that encodes documents with calibrated attention, and queries as the plain model does.

    `encode_document` and `encode` without a task calibrate, `encode_query` does not. ``encode(..., strength=0.3)``
    overrides the strength for one call. Everything else is SentenceTransformer's.
    """

    _module_classes = {f"{FairTransformer.__module__}.{FairTransformer.__qualname__}": FairTransformer}

    def __init__(
        self,
        model_name_or_path: str | None = None,
        *,
        config: FairConfig | None = None,
        pooled_row_only: bool = False,
        **kwargs: Any,
    ) -> None:
        """Loads a model and calibrates it.

        Args:
            model_name_or_path: A Hugging Face name or a local folder, also of a saved calibrated model.
            config: The settings; None for those the model was saved with, or else the defaults.
            pooled_row_only: As of `calibrate`; it is not saved.
            **kwargs: SentenceTransformer's.

        Raises:
            TypeError: ``config`` is no FairConfig, the model of another kind than a SentenceTransformer, or the first
                module that documents pass no transformer.
            ValueError: The model cannot be calibrated, or not with these settings.
        """
        _check_config(config)
        super().__init__(None if model_name_or_path is None else str(model_name_or_path), **kwargs)
        transformer = _find_transformer(self)
        saved = transformer.fair_config if isinstance(transformer, FairTransformer) else None
        if saved is None or config not in (None, saved):  # else it is loaded as it was saved
            fair = FairTransformer.from_transformer(transformer, config or FairConfig())
            replace_module(self._modules, transformer, fair)
            fair.on_model_ready(self)
        if pooled_row_only:
            self.fair.use_pooled_row_only(self)

    def _load_converted_modules(
        self, model_name_or_path: str, *_: Any, model_type: str | None = None, **__: Any
    ) -> Any:
        # sentence-transformers would drop what follows the transformer and put an untrained mean pooling there.
        raise TypeError(
            f"model_name_or_path: expected a SentenceTransformer, {model_name_or_path} is a {model_type}"
            + _reason(str(model_type))
        )

    def _load_default_modules(self, model_name_or_path: str, *args: Any, **kwargs: Any) -> Any:
        # Likewise for a folder without modules.json, where the weights may be of anything.
        modules, module_kwargs = super()._load_default_modules(model_name_or_path, *args, **kwargs)
        for name in cast(Any, modules)[0].config.architectures or ():
            if name.endswith(("ColBERT", "ForRetrieval", "ForSequenceClassification")):
                raise TypeError(
                    f"model_name_or_path: expected a SentenceTransformer, {model_name_or_path} is a {name} without a "
                    "modules.json; if pooled vectors of it are what you want, use calibrate(SentenceTransformer(...))"
                )
        return modules, module_kwargs

    def encode(self, inputs: Any, prompt_name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Encodes documents with calibrated attention; see `SentenceTransformer.encode` for the arguments.

        Texts with ``task="query"``, or without a task but with a prompt that is named for queries, are encoded plainly.
        Where a Router sends queries and documents different ways, the way decides: texts without a task are what its
        default route is for.

        Raises:
            ValueError: ``strength`` is outside [0, 1], or ``task`` is unknown.
        """
        if kwargs.get("strength") is not None:
            kwargs["strength"] = validate_strength(kwargs["strength"])  # here rather than in every worker
        is_named = prompt_name is not None and prompt_name.lower().endswith("query")
        if is_named and kwargs.get("task") is None and has_one_route(self):
            kwargs["task"] = "query"
        output_value = kwargs.get("output_value", args[3] if len(args) > 3 else "sentence_embedding")
        if output_value != "sentence_embedding" and self.fair.is_pooled_row_only and kwargs.get("task") != "query":
            raise ValueError(
                f"output_value: with pooled_row_only there is only the sentence_embedding, got {output_value!r}; "
                "calibrate without it, or use the plain model"
            )
        if output_value == "token_embeddings" and self.fair_config.chunk_size and kwargs.get("task") != "query":
            raise ValueError(
                "output_value: documents in chunks (chunk_size) have no token embeddings, only a joined vector; "
                "calibrate with chunk_size=None, or use the plain model"
            )
        return super().encode(inputs, prompt_name, *args, **kwargs)

    def forward(self, input: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Runs all modules.

        Raises:
            ValueError: A Router sends the input, which is no query, past the module that calibrates.
        """
        fair = self.fair
        fair.use_poolings(self)
        task, modality = (kwargs.get(name) or input.get(name) for name in ("task", "modality"))  # as Router does
        if is_query_route(self, task, modality):
            kwargs["task"] = "query"
        elif task != "query":
            check_route(self, fair, task, modality)
        output: dict[str, Any] = super().forward(input, **kwargs)
        return output

    @property
    def fair(self) -> FairTransformer:
        """The module that calibrates."""
        return cast(FairTransformer, next(iter(document_path(self))))

    @property
    def max_seq_length(self) -> int | None:
        """Where documents are truncated, in tokens. With a Router, setting it leaves other transformers as they are."""
        return self.fair.max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int | None) -> None:
        self.fair.max_seq_length = value

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


def calibrate(
    model: SentenceTransformer, config: FairConfig | None = None, *, pooled_row_only: bool | None = None
) -> FairSentenceTransformer:
    """Returns a calibrated model that shares the given model's weights; the given one stays plain and usable.

    Args:
        model: A SentenceTransformer whose first module is a transformer, also behind a Router: the one that documents
            pass is calibrated. A calibrated model gets the new settings.
        config: The settings; None for those that it was calibrated with before, or else the defaults.
        pooled_row_only: Whether documents leave out what is not read of the last layer, for cls and last-token pooling:
            attention and linear layers of all rows but the pooled one. Vectors are the same up to rounding; there are
            no token embeddings. It is tried on the model first. None for what it was before, or else False.

    Returns:
        A FairSentenceTransformer with the same prompts, modules, similarity and dimensions. Weights are shared, so that
        casting or moving one model casts or moves both; settings such as ``max_seq_length`` are not.

    Raises:
        TypeError: ``model`` is no SentenceTransformer, ``config`` no FairConfig, or the first module that documents
            pass no transformer.
        ValueError: The model cannot be calibrated, or not with these settings.
    """
    if type(model) not in (SentenceTransformer, FairSentenceTransformer):
        raise TypeError(
            f"model: expected a SentenceTransformer, got {type(model).__name__}"
            + (
                _reason(*(cls.__name__ for cls in type(model).__mro__))
                or "; load names and paths with FairSentenceTransformer(name, config=...)"
            )
        )
    _check_config(config)
    modules = _share_modules(model)
    transformer = _find_transformer(modules.values())
    own_kwargs = (model.module_kwargs or {}).get(next(iter(modules)), ())
    config = config or (transformer.fair_config if isinstance(transformer, FairTransformer) else FairConfig())
    if pooled_row_only is None:
        pooled_row_only = isinstance(transformer, FairTransformer) and transformer.is_pooled_row_only
    fair = FairTransformer.from_transformer(transformer, config, own_kwargs=own_kwargs)
    replace_module(modules, transformer, fair)
    calibrated = _assemble(FairSentenceTransformer, model, modules)
    if pooled_row_only:
        calibrated.fair.use_pooled_row_only(calibrated)
    return calibrated


def uncalibrate(model: FairSentenceTransformer) -> SentenceTransformer:
    """Returns the plain model again, sharing the weights of the calibrated one, which stays as it is.

    Raises:
        TypeError: ``model`` is not calibrated.
    """
    if not isinstance(model, FairSentenceTransformer):
        raise TypeError(f"model: expected a FairSentenceTransformer, got {type(model).__name__}")
    modules = _share_modules(model)
    fair = cast(FairTransformer, _find_transformer(modules.values()))
    replace_module(modules, fair, fair.into_transformer())
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


def _find_transformer(modules: Iterable[nn.Module]) -> Transformer:
    """Returns the transformer that documents pass.

    Raises:
        TypeError: Documents do not start with one, or pass two.
    """
    modules = list(modules)
    path = document_path(modules)
    if not path or type(path[0]) not in _TRANSFORMERS:
        where = "the first module that its Router has for documents" if path[:1] != modules[:1] else "its first module"
        got = f"{type(path[0]).__module__}.{type(path[0]).__name__}" if path else "none"
        raise TypeError(
            f"model: {where} must be a sentence-transformers Transformer to be calibrated (other modules have no "
            f"attention, or run it in their own way: use the model as it is), got {got}"
        )
    if len(transformers := [module for module in path if isinstance(module, Transformer)]) > 1:
        raise TypeError(
            f"model: its documents pass {len(transformers)} Transformers one after the other, of which none can be "
            "calibrated alone; calibrate a model with one"
        )
    return cast(Transformer, path[0])


def _reason(*names: str) -> str:
    """Returns why a kind of model cannot be calibrated, by the names of its class and the bases, if it is known."""
    return next((f": {_UNPOOLED[name]}" for name in names if name in _UNPOOLED), "")
