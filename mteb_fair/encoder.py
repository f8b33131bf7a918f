"""`FairEncoder`: an encoder for MTEB that encodes documents position-fairly and queries as the plain model does."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mteb.models import ModelMeta
from mteb.models.abs_encoder import get_prompt
from mteb.models.model_implementations import MODEL_REGISTRY
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer

from fair_calibration import DocumentCounts, EvenChunks, FairConfig, Summary, calibrate
from fair_calibration.even_chunks.report import EvenChunksSummary
from fair_calibration.fingerprint import changeable_settings
from fair_calibration.nearest_names import nearest_names
from fair_calibration.query import task_of_call
from fair_calibration.settings import Settings, choose_settings, setting_names
from fair_indexing.pool import check_devices
from fair_indexing.stream import encode_stream
from mteb_fair.instructions import instructions_of
from mteb_fair.loading import load_base
from mteb_fair.prompt_names import check_prompt_names
from mteb_fair.variant import Variant, compression_of

if TYPE_CHECKING:
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.types import Array, BatchedInput
    from torch.utils.data import DataLoader

logger = logging.getLogger("mteb_fair")
SETTINGS = {*setting_names(FairConfig), *setting_names(EvenChunks)}
_MODEL_ARGUMENTS = sorted(
    {*inspect.signature(SentenceTransformer.__init__).parameters, "tokenizer_kwargs", "pooled_row_only"}
    - {"self", "model_name_or_path", "modules", "prompts"}
)
_ENCODE_KWARGS = ("batch_size", "tokens_per_batch", "devices", "show_progress_bar")


class FairEncoder:
    """An MTEB encoder of a sentence-transformers model that also finds what stands late in a document.

    Documents are encoded with the calibration, queries by the plain model. Texts of tasks that have neither, such as
    STS, classification and clustering, are encoded like documents unless ``calibrate_untyped`` is False; a warning says
    which, once per task. Texts shorter than one basket, or than one chunk, get the vectors of the plain model.

    Prompts, ``max_seq_length``, revision and similarity are those of the base model, and by its name in MTEB's registry
    also the instructions that MTEB has for each task. `mteb_model_meta` names the base
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
                registry has for the name, or its instructions for each task, or else the model's own.
            base_name: The name of a local model as "organization/name"; None means "local/<folder>".
            device: The device; a number is that GPU.
            **kwargs: Single settings of ``config``, such as ``strength=0.3``, and arguments for loading a name or a
                folder with SentenceTransformer, which are added to those that MTEB's registry has for the name.

        Raises:
            TypeError: ``model`` is not a model name, a path or a SentenceTransformer, or there is no such argument.
            ValueError: A setting is out of range, there is no such model, it cannot be calibrated, or another local
                model was used by the same name in this process.
        """
        settings = {name: kwargs.pop(name) for name in SETTINGS & set(kwargs)}
        for argument in kwargs:
            if argument == "passage_size":
                raise TypeError(
                    "passage_size: not an argument of FairEncoder; give FairPassageSearch the encoder and it"
                )
            if argument not in _MODEL_ARGUMENTS:
                own = inspect.signature(FairEncoder).parameters
                near = nearest_names(argument, [*SETTINGS, *own, *_MODEL_ARGUMENTS], n=1)
                raise TypeError(
                    f"{argument}: not an argument of FairEncoder, a setting or an argument of SentenceTransformer"
                    + (f"; did you mean {near[0]!r}?" if near else "")
                )
        chosen = None if config is None else choose_settings(config, settings, default=FairConfig())
        device = f"cuda:{device}" if isinstance(device, int) else device
        if device is not None:
            check_devices([device], name="device")
        # What can be checked is checked before a model is downloaded, which may have been saved with other settings.
        saved = FairConfig() if set(setting_names(FairConfig)).issuperset(settings) else EvenChunks()
        self.variant = Variant(
            base_name=base_name or "local/model",
            config=chosen or choose_settings(None, settings, default=saved),
            calibrate_untyped=calibrate_untyped,
            max_seq_length=max_seq_length,
            embed_dim=embed_dim,
            model_prompts=model_prompts,
        )
        check_prompt_names(model_prompts or {})
        base, self._base = load_base(model, revision, config=chosen, base_name=base_name, device=device, loading=kwargs)
        chosen = chosen or choose_settings(None, settings, default=base.fair_config)
        self.model = base if chosen == base.fair_config else calibrate(base, chosen)
        self.variant = replace(self.variant, base_name=str(self._base.name), config=chosen)
        if max_seq_length is not None:
            self.model.max_seq_length = max_seq_length
        if embed_dim is not None:
            if (dimension := self.model.get_embedding_dimension()) is not None and embed_dim > dimension:
                raise ValueError(f"embed_dim: expected at most the model's {dimension} dimensions, got {embed_dim}")
            self.model.truncate_dim = embed_dim
        self._instructions = None
        if model_prompts is not None:
            self.model.prompts = dict(model_prompts)
        elif not isinstance(model, SentenceTransformer) and self._base.adapted_from in MODEL_REGISTRY:
            self._instructions = instructions_of(MODEL_REGISTRY[self._base.adapted_from])
        if isinstance(chosen, EvenChunks):
            self.model.preprocess([""], task="document", counted=False)  # a chunk that does not fit is reported now
        self._settings = changeable_settings(self.model)
        self.mteb_model_meta = self._base

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
        # MTEB sets it when it loads a registered model, and when CompressionWrapper adds experiment settings.
        added, present = compression_of(meta), compression_of(getattr(self, "_meta", meta))
        if present and added != present:
            raise ValueError(
                f"CompressionWrapper: this encoder is in another one with {present}, whose results would be kept under "
                f"the name of {added}; make a FairEncoder for each"
            )
        facts: dict[str, Any] = {"revision": self._base.revision, "adapted_from": self._base.adapted_from}
        facts |= {"max_tokens": self.model.max_seq_length, "embed_dim": self.model.get_embedding_dimension()}
        self._meta = self.variant.identify(meta.model_copy(update=facts))

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
                `fair_indexing.stream.encode_stream`.

        Returns:
            float32 vectors of shape (n, D).

        Raises:
            TypeError: There is no such argument, or a text is not a string.
            ValueError: An argument is out of range or would change the vectors, a text is missing, a vector has NaN
                or infinite values, or ``model`` was changed since the encoder was made.
        """
        self._check_unchanged()
        if (precision := kwargs.pop("precision", "float32")) != "float32":
            raise ValueError(
                f"encode_kwargs: precision={precision!r} quantizes queries and documents on different scales, so that "
                "they cannot be compared; evaluate mteb.models.CompressionWrapper(encoder, OutputDType.INT8) instead"
            )
        if unknown := sorted(set(kwargs) - set(_ENCODE_KWARGS)):
            raise TypeError(
                f"encode_kwargs: {unknown} are not supported, only {list(_ENCODE_KWARGS)}; what changes the "
                "vectors, such as strength, embed_dim or model_prompts, is an argument of FairEncoder"
            )
        prompt: str | None
        if self._instructions is not None:
            prompt = self._instructions.prompt(task_metadata, prompt_type)
        else:
            prompt = get_prompt(self.model.prompts, task_metadata, prompt_type)  # type: ignore[arg-type]
        task: Any = PromptType(prompt_type).value if prompt_type is not None else None
        strength = None
        if task is None:
            calibrated = self.variant.calibrate_untyped
            _warn_once(
                f"{task_metadata.name} ({task_metadata.type}) has no queries and documents: all its texts are encoded "
                f"{'as documents, with calibration' if calibrated else 'plainly, without calibration'} "
                f"(calibrate_untyped={calibrated})."
            )
            strength = None if calibrated else 0.0
            task = task_of_call(self.model, task=None, prompt_name=None, prompt=prompt)
            if task == "query":  # the default prompt of the model is one for queries
                prompt = self.model.prompts[str(self.model.default_prompt_name)]
        try:
            stream = encode_stream(
                self.model,
                _records(inputs),
                task=task,
                prompt=prompt,
                normalize=False,  # as in MTEB's wrapper
                strength=strength,
                total=len(inputs.dataset),  # type: ignore[arg-type]
                **{"show_progress_bar": True, **kwargs},
            )
            parts = [window.vectors for window in stream]
        except ValueError as error:
            raise ValueError(f"{task_metadata.name}, {hf_subset}: {error}") from error
        dimension = self.model.get_embedding_dimension() or 0
        return np.concatenate(parts) if parts else np.empty((0, dimension), dtype=np.float32)

    def _check_unchanged(self) -> None:
        now = changeable_settings(self.model)
        if changed := sorted(name for name, value in self._settings.items() if now[name] != value):
            raise ValueError(
                f"encoder.model: {changed} were changed after {self.variant.name!r} was made, so its results would "
                "be kept under wrong settings; change the model before making a FairEncoder of it"
            )

    def similarity(self, embeddings1: Array, embeddings2: Array) -> Array:
        """Computes the model's similarity of all pairs of vectors, of shapes (n, D) and (m, D): (n, m)."""
        return self.model.similarity(torch.as_tensor(embeddings1).float(), torch.as_tensor(embeddings2).float())

    def similarity_pairwise(self, embeddings1: Array, embeddings2: Array) -> Array:
        """Computes the model's similarity of corresponding vectors, both of shape (n, D): (n,)."""
        first, second = torch.as_tensor(embeddings1).float(), torch.as_tensor(embeddings2).float()
        return self.model.similarity_pairwise(first, second)


def _records(inputs: DataLoader[BatchedInput]) -> Iterator[tuple[str, str]]:
    """Yields the texts of MTEB's batches with their ids, or else their positions, for error messages."""
    position = 0
    for batch in inputs:
        texts: Any = batch["text"]
        ids: Any = batch.get("id") or range(position, position + len(texts))
        for identifier, text in zip(ids, texts, strict=True):
            yield str(identifier), text
        position += len(texts)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
