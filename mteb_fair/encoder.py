"""`FairEncoder`: an encoder for MTEB that encodes documents position-fairly and queries as the plain model does."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from mteb.models import ModelMeta
from mteb.models.abs_encoder import get_prompt
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer

from fair_calibration import DocumentCounts, EvenChunks, FairConfig, Summary, calibrate
from fair_calibration.even_chunks.report import EvenChunksSummary
from fair_calibration.fingerprint import changeable_settings
from fair_calibration.query import task_of_call
from fair_calibration.settings import Settings, choose_settings, setting_names, settings_from_dict
from fair_calibration.validation import validate_positive_int
from fair_indexing.stream import encode_stream
from mteb_fair.loading import (
    commit_of,
    describe_base,
    is_folder,
    load_base,
    registered_loading,
    registered_prompts,
    revision_of,
)
from mteb_fair.variant import OVERRIDES, PROMPTS_DIGEST, Variant

if TYPE_CHECKING:
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.types import Array, BatchedInput
    from torch.utils.data import DataLoader

logger = logging.getLogger("mteb_fair")
_SETTINGS = {*setting_names(FairConfig), *setting_names(EvenChunks)}
_LOADING = sorted(
    {*inspect.signature(SentenceTransformer.__init__).parameters, "tokenizer_kwargs", "pooled_row_only"}
    - {"self", "model_name_or_path", "modules", "prompts"}
)
_IDENTIFYING = {"strength", "truncate_dim", "normalize_embeddings", "prompt", "prompt_name"}
_ENCODE_KWARGS = ("batch_size", "tokens_per_batch", "devices", "show_progress_bar")
_UNKNOWN_REVISION = "no_revision_available"  # MTEB's word
_COMPRESSION = ("output_dtypes", "clipping_margin")  # what MTEB's CompressionWrapper adds to the experiment settings
_revisions: dict[str, str] = {}  # of the base names used in this process, other than those of hub models


class FairEncoder:
    """An MTEB encoder of a sentence-transformers model that also finds what stands late in a document.

    Documents are encoded with the calibration, queries by the plain model. Texts of tasks that have neither, such as
    STS, classification and clustering, are encoded like documents unless ``calibrate_untyped`` is False; a warning says
    which, once per task. Texts shorter than one basket, or than one chunk, get the vectors of the plain model.

    Prompts, ``max_seq_length``, revision and similarity are those of the base model. `mteb_model_meta` names the base
    model and all settings, so that MTEB keeps the results of different settings and weights apart (see `Variant`).
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | SentenceTransformer,
        revision: str | None = None,
        *,
        config: Settings | str | None = None,
        calibrate_untyped: bool = True,
        max_seq_length: int | None = None,
        embed_dim: int | None = None,
        model_prompts: Mapping[str, str] | None = None,
        base_name: str | None = None,
        device: str | int | None = None,
        **kwargs: Any,
    ) -> None:
        """Loads the model and calibrates it.

        Args:
            model: A Hugging Face name, a local folder, or a loaded SentenceTransformer, which is not changed.
            revision: The commit of a Hugging Face model; None means the commit that MTEB's registry has, or the newest.
            config: A `FairConfig`, an `EvenChunks` or the name of a preset; None means the settings that the model was
                calibrated or saved with, or else the defaults.
            calibrate_untyped: Whether texts that are neither queries nor documents are encoded as documents.
            max_seq_length: The number of tokens at which texts are truncated; None means the model's own.
            embed_dim: The number of dimensions kept of each vector; None means all.
            model_prompts: MTEB's prompts by task name, task type, "query" or "document"; None means those that MTEB's
                registry has for the name, or else the model's own.
            base_name: The name of a local model as "organization/name"; None means "local/<folder>".
            device: The device; a number is that GPU.
            **kwargs: Single settings of ``config``, such as ``strength=0.3``, and arguments for loading a name or a
                folder with SentenceTransformer, which are added to those that MTEB's registry has for the name.

        Raises:
            TypeError: ``model`` is not a model name, a path or a SentenceTransformer, or there is no such argument.
            ValueError: A setting is out of range, there is no such model, it cannot be calibrated, or another local
                model was used by the same name in this process.
        """
        settings = {name: kwargs.pop(name) for name in _SETTINGS & set(kwargs)}
        for argument in kwargs:
            if argument not in _LOADING:
                raise TypeError(_unknown_argument(argument))
        if config is not None:
            config, settings = choose_settings(config, settings, default=FairConfig()), {}
        if not isinstance(calibrate_untyped, bool):
            raise TypeError(f"calibrate_untyped: expected True or False, got {calibrate_untyped!r}")
        device = f"cuda:{device}" if isinstance(device, int) else device
        from_hub = isinstance(model, (str, os.PathLike)) and not is_folder(model)
        registered, loading = registered_loading(model)
        revision = revision or registered
        if from_hub:
            # Branches move, commits do not.
            revision = commit_of(os.fspath(cast(str, model)), revision, token=kwargs.get("token"))
        base, name = load_base(model, revision, device, {**loading, **kwargs}, config)
        origin = name if from_hub else base_name or name  # the name by which MTEB may have prompts and metadata
        name = base_name or name
        if "/" not in name:
            raise ValueError(f"base_name: expected 'organization/name', got {name!r}")
        chosen = choose_settings(config, settings, default=base.fair_config)
        self.model = base if chosen == base.fair_config else calibrate(base, chosen)
        # Arguments that MTEB's registry has as well do not make another model of the same commit.
        changed = {key: value for key, value in kwargs.items() if key not in loading or loading[key] != value}
        self._revision = revision_of(self.model, model, revision, changed)
        if not isinstance(model, SentenceTransformer) and (prompts := registered_prompts(origin)) is not None:
            self.model.prompts = dict(prompts)
        self.variant = Variant(
            base_name=name,
            config=chosen,
            calibrate_untyped=calibrate_untyped,
            **self._override(max_seq_length=max_seq_length, embed_dim=embed_dim, model_prompts=model_prompts),
        )
        if isinstance(chosen, EvenChunks):
            self.model.preprocess([""], task="document")  # a chunk that does not fit is reported now
        self._settings = changeable_settings(self.model)
        self._announced: set[str] = set()
        self._origin = origin
        self._meta = self._identify(describe_base(origin, self.model, loader=load_variant))
        if not from_hub and _revisions.setdefault(name, self._revision) != self._revision:
            raise ValueError(
                f"base_name: {name!r} was the name of another model before (other weights, prompts or loading "
                "arguments), and their results would be mixed up; give one of the two another base_name, such as "
                "'me/second'"
            )

    def _override(
        self, *, max_seq_length: int | None, embed_dim: int | None, model_prompts: Mapping[str, str] | None
    ) -> dict[str, Any]:
        """Sets what is given on the model, and returns what of it differs from the model's own values."""
        model = self.model
        overrides: dict[str, Any] = {}
        if max_seq_length is not None and max_seq_length != model.max_seq_length:
            model.max_seq_length = overrides["max_seq_length"] = validate_positive_int("max_seq_length", max_seq_length)
        dimension = model.get_embedding_dimension()
        if embed_dim is not None and embed_dim != dimension:
            validate_positive_int("embed_dim", embed_dim)
            if dimension is not None and embed_dim > dimension:
                raise ValueError(f"embed_dim: expected at most the model's {dimension} dimensions, got {embed_dim}")
            model.truncate_dim = overrides["embed_dim"] = embed_dim
        if model_prompts is not None and dict(model_prompts) != dict(model.prompts):
            model.prompts = overrides["model_prompts"] = dict(model_prompts)
        return overrides

    def __repr__(self) -> str:
        return (
            f"FairEncoder({self.variant.name!r}, max_seq_length={self.model.max_seq_length}, "
            f"device={str(self.model.device)!r})"
        )

    @property
    def fair_config(self) -> Settings:
        """The settings, a `FairConfig` or an `EvenChunks`."""
        return self.variant.config

    @property
    def counts(self) -> DocumentCounts:
        """The number of documents calibrated, too short or truncated so far."""
        return self.model.counts

    def summary(self) -> Summary | EvenChunksSummary:
        """Returns which layers, rows and mechanism are in use and what became of the documents; print it."""
        return self.model.summary()

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """MTEB's metadata of the model: its name, revision and experiment settings among them.

        Raises:
            ValueError: ``model`` was changed since the encoder was made.
        """
        self._check_unchanged()  # here as well, as MTEB looks for results before it encodes anything
        return self._meta

    @mteb_model_meta.setter
    def mteb_model_meta(self, meta: ModelMeta) -> None:
        # MTEB sets it when it loads a registered model, with the arguments of that call.
        if any(f"{name}=" in str(meta.name) and f"{name}=" not in self.variant.name for name in OVERRIDES):
            logger.warning(
                "%s names a value that its base model has by itself, so its results are kept under %s",
                meta.name,
                self.variant.name,
            )
        self._meta = self._identify(meta)

    def _identify(self, meta: ModelMeta) -> ModelMeta:
        given = meta.experiment_kwargs or {}
        compression = {name: given[name] for name in _COMPRESSION if name in given}
        return meta.model_copy(
            update={
                "name": self.variant.name + "".join(f",{name}={value}" for name, value in compression.items()),
                "revision": self._revision,
                "adapted_from": self._origin,
                "experiment_kwargs": {**self.variant.experiment_kwargs, **compression},
                "max_tokens": self.model.max_seq_length,
                "embed_dim": self.model.get_embedding_dimension(),
            }
        )

    def encode(
        self,
        inputs: DataLoader[BatchedInput],
        *,
        task_metadata: TaskMetadata,
        hf_split: str,  # noqa: ARG002
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **kwargs: Any,
    ) -> Array:
        """Encodes texts with the prompts that MTEB's own wrapper of SentenceTransformers chooses.

        Args:
            inputs: The texts in MTEB's batches. They are encoded in batches of texts of similar length.
            task_metadata: The task, which chooses the prompt.
            hf_split: The split.
            hf_subset: The subset.
            prompt_type: Whether the texts are documents, queries, or neither.
            **kwargs: ``batch_size``, ``tokens_per_batch``, ``devices`` and ``show_progress_bar`` of
                `fair_indexing.stream.encode_stream`, and ``convert_to_tensor``.

        Returns:
            float32 vectors of shape (n, D).

        Raises:
            TypeError: There is no such argument, or a text is not a string.
            ValueError: An argument is out of range or would change the vectors, a text is missing, a vector has NaN
                or infinite values, or ``model`` was changed since the encoder was made.
        """
        self._check_unchanged()
        as_tensor = bool(kwargs.pop("convert_to_tensor", False))
        kwargs.pop("convert_to_numpy", None)  # the default
        self._check_encode_kwargs(kwargs)
        prompt = get_prompt(self.model.prompts, task_metadata, prompt_type)  # type: ignore[arg-type]
        task: Any = PromptType(prompt_type).value if prompt_type is not None else None
        strength = None
        if task is None:
            self._announce(task_metadata)
            strength = None if self.variant.calibrate_untyped else 0.0
            task = task_of_call(self.model, task=None, prompt_name=None, prompt=prompt)
            if task == "query":  # the default prompt of the model is one for queries
                prompt = self.model.prompts[str(self.model.default_prompt_name)]
        try:
            windows = encode_stream(
                self.model,
                _records(inputs),
                task=task,
                prompt=prompt,
                normalize=False,  # as in MTEB's wrapper
                strength=strength,
                total=len(inputs.dataset),  # type: ignore[arg-type]
                **{"show_progress_bar": True, **kwargs},
            )
            parts = [window.vectors for window in windows]
        except ValueError as error:
            raise ValueError(f"{task_metadata.name}, {hf_subset}: {error}") from error
        dimension = self.model.get_embedding_dimension() or 0
        vectors = np.concatenate(parts) if parts else np.empty((0, dimension), dtype=np.float32)
        return torch.from_numpy(vectors) if as_tensor else vectors

    def _check_encode_kwargs(self, kwargs: dict[str, Any]) -> None:
        if (precision := kwargs.pop("precision", "float32")) != "float32":
            raise ValueError(
                f"encode_kwargs: precision={precision!r} quantizes queries and documents on different scales, so that "
                "they cannot be compared; evaluate mteb.models.CompressionWrapper(encoder, OutputDType.INT8) instead"
            )
        if given := sorted(_IDENTIFYING & set(kwargs)):
            raise ValueError(
                f"encode_kwargs: {given} would give results of other settings than the name {self.variant.name!r} "
                "tells; give FairEncoder strength, embed_dim or model_prompts"
            )
        for name in kwargs:
            if name not in _ENCODE_KWARGS:
                raise TypeError(
                    f"encode_kwargs: {name!r} is not supported, only {[*_ENCODE_KWARGS, 'convert_to_tensor']}"
                )

    def _check_unchanged(self) -> None:
        now = changeable_settings(self.model)
        if changed := sorted(name for name, value in self._settings.items() if now[name] != value):
            raise ValueError(
                f"encoder.model: {changed} were changed after {self.variant.name!r} was made, so its results would "
                "be kept under wrong settings; change the model before making a FairEncoder of it"
            )

    def _announce(self, task: TaskMetadata) -> None:
        if task.name not in self._announced:
            self._announced.add(task.name)
            logger.warning(
                "%s (%s) has no queries and documents: all its texts are encoded %s (calibrate_untyped=%s).",
                task.name,
                task.type,
                "as documents, with calibration" if self.variant.calibrate_untyped else "plainly, without calibration",
                self.variant.calibrate_untyped,
            )

    def similarity(self, embeddings1: Array, embeddings2: Array) -> Array:
        """Computes the model's similarity of all pairs of vectors, of shapes (n, D) and (m, D): (n, m)."""
        return self.model.similarity(*_as_floats(embeddings1, embeddings2))

    def similarity_pairwise(self, embeddings1: Array, embeddings2: Array) -> Array:
        """Computes the model's similarity of corresponding vectors, both of shape (n, D): (n,)."""
        return self.model.similarity_pairwise(*_as_floats(embeddings1, embeddings2))


def load_variant(
    name: str,
    revision: str | None = None,
    *,
    base_model: str | os.PathLike[str],
    settings: Mapping[str, Any],
    **kwargs: Any,
) -> FairEncoder:
    """Loads a registered variant for MTEB.

    Args:
        name: The name of the variant.
        revision: The revision of the base model.
        base_model: The name or the folder of the base model.
        settings: The registered settings, as ``to_dict`` gives them.
        **kwargs: Further arguments of `FairEncoder`, which replace registered ones.

    Raises:
        ValueError: As `FairEncoder`, also if the base model is a folder that holds another model than when it was
            registered.
    """
    logger.info("%s: calibrating %s", name, base_model)
    kwargs.pop(PROMPTS_DIGEST, None)  # MTEB passes the experiment settings on as well
    config = settings_from_dict(settings)
    # So those that are as registered are not given by the caller.
    for key in [key for key in kwargs if key in setting_names(config) and kwargs[key] == settings.get(key)]:
        del kwargs[key]
    if kwargs.get("config") is None:
        kwargs["config"] = config
    known = None if is_folder(base_model) or revision == _UNKNOWN_REVISION else revision
    return FairEncoder(base_model, known, **kwargs)


def _unknown_argument(name: str) -> str:
    nearest = difflib.get_close_matches(name, [*sorted(_SETTINGS), *_OWN_ARGUMENTS, *_LOADING], n=1)
    return f"{name}: not an argument of FairEncoder, a setting or an argument of SentenceTransformer" + (
        f"; did you mean {nearest[0]!r}?" if nearest else ""
    )


def _records(inputs: DataLoader[BatchedInput]) -> Iterator[tuple[str, str]]:
    """Yields the texts of MTEB's batches with their ids, or else their positions, for error messages."""
    position = 0
    for batch in inputs:
        texts: Any = batch["text"]
        ids: Any = batch.get("id") or range(position, position + len(texts))
        for identifier, text in zip(ids, texts, strict=True):
            yield str(identifier), text
        position += len(texts)


def _as_floats(*embeddings: Array) -> Iterator[torch.Tensor]:
    return (torch.as_tensor(each).float() for each in embeddings)


_OWN_ARGUMENTS = [name for name in inspect.signature(FairEncoder.__init__).parameters if name not in ("self", "kwargs")]
