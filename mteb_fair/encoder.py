"""`FairEncoder`: an MTEB encoder whose documents are encoded with calibrated attention."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mteb.models import ModelMeta
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer

from fair_calibration import DocumentCounts, FairConfig, Summary, calibrate
from fair_calibration.config import validate_positive_int
from fair_calibration.fingerprint import changeable_settings
from mteb_fair.identity import OVERRIDES, PROMPTS_DIGEST, Variant
from mteb_fair.loading import commit_of, default_prompts, describe_base, load_base, pinned, revision_of

if TYPE_CHECKING:
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.types import Array, BatchedInput
    from torch.utils.data import DataLoader

logger = logging.getLogger("mteb_fair")
_NAMED = 5
_IDENTIFYING = {"strength", "truncate_dim", "normalize_embeddings", "prompt", "prompt_name"}
_UNKNOWN_REVISION = "no_revision_available"  # MTEB's word


class FairEncoder:
    """A sentence-transformers model for MTEB that finds what stands late in a document.

    Documents (``prompt_type`` document) are calibrated; queries are encoded by the plain model, bit for bit. Texts of
    tasks that know neither, such as STS, classification and clustering, are calibrated like documents unless
    ``calibrate_untyped`` is False; which it is, is logged once per task. Texts shorter than one basket never change.

    Prompts, max_seq_length, revision and similarity are the base model's. `mteb_model_meta` names the base model and
    all settings, so that results of different settings or weights are kept apart (`mteb_fair.identity`).
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | SentenceTransformer,
        revision: str | None = None,
        *,
        config: FairConfig | None = None,
        strength: float | None = None,
        basket_size: int | None = None,
        layers: float | int | str | Sequence[int] | None = None,
        pooling: str | None = None,
        isolate: str | None = None,
        isolated_share: str | float | None = None,
        last_basket: str | None = None,
        min_content: int | None = None,
        chunk_size: int | None = None,
        unit_size: int | None = None,
        ridge: float | None = None,
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
            model: A Hugging Face name, a local folder, or a loaded SentenceTransformer, which stays as it is.
            revision: The commit of a Hugging Face model; None is the one that MTEB's registry has, or else the newest.
            config: All settings at once, instead of those down to ``ridge``.
            strength: As the settings down to ``ridge`` see `FairConfig`. None is what the model was calibrated
                or saved with, if it was, and else the default.
            basket_size: See `FairConfig`.
            layers: See `FairConfig`.
            pooling: See `FairConfig`.
            isolate: See `FairConfig`.
            isolated_share: See `FairConfig`.
            last_basket: See `FairConfig`.
            min_content: See `FairConfig`.
            chunk_size: See `FairConfig`.
            unit_size: See `FairConfig`.
            ridge: See `FairConfig`.
            calibrate_untyped: Whether texts that are neither queries nor documents are calibrated.
            max_seq_length: Where texts are truncated, in tokens; None is the model's.
            embed_dim: How many dimensions are kept; None is all.
            model_prompts: MTEB's prompts, by task name, task type, "query" or "document". None is those that
                MTEB's registry has for the name, or else the model's own.
            base_name: What to call a local model, as "organization/name"; None is "local/<folder's name>".
            device: Where to run; a number is that GPU.
            **kwargs: SentenceTransformer's, for names and folders, beside those that MTEB's registry has for the name.

        Raises:
            TypeError: ``model`` is none of these.
            ValueError: A setting is out of range, or the model cannot be calibrated.
        """
        settings: dict[str, Any] = {
            "strength": strength,
            "basket_size": basket_size,
            "layers": layers,
            "pooling": pooling,
            "isolate": isolate,
            "isolated_share": isolated_share,
            "last_basket": last_basket,
            "min_content": min_content,
            "chunk_size": chunk_size,
            "unit_size": unit_size,
            "ridge": ridge,
        }
        if config is not None and (given := [name for name, value in settings.items() if value is not None]):
            raise ValueError(f"config: expected a config or single settings, got both a config and {sorted(given)}")
        if not isinstance(calibrate_untyped, bool):
            raise TypeError(f"calibrate_untyped: expected True or False, got {calibrate_untyped!r}")
        device = f"cuda:{device}" if isinstance(device, int) else device
        listed, loading = pinned(model)
        revision = revision or listed
        is_hub = isinstance(model, (str, os.PathLike)) and not Path(model).exists()
        if is_hub:
            revision = commit_of(str(model), revision)  # a branch moves, and older results would be handed out for it
        loaded, name = load_base(model, revision, device, {**loading, **kwargs})
        self.model = calibrate(loaded, config or loaded.fair_config.updated(**settings))
        origin = name if is_hub else base_name or name  # what MTEB has prompts and facts of
        name = base_name or name
        if "/" not in name:
            raise ValueError(f"base_name: expected 'organization/name', got {name!r}")
        # What MTEB loads the commit with is no change of it.
        changed = {key: value for key, value in kwargs.items() if key not in loading or loading[key] != value}
        self._revision = revision_of(self.model, model, revision, changed)
        if not isinstance(model, SentenceTransformer):
            self._set_prompts(default_prompts(origin))
        max_seq_length, embed_dim = (
            value if value is None else validate_positive_int(name, value)
            for name, value in (("max_seq_length", max_seq_length), ("embed_dim", embed_dim))
        )
        # What is given as it is anyway makes no other variant.
        if max_seq_length == self.model.max_seq_length:
            max_seq_length = None
        dimension = self.model.get_embedding_dimension()
        if embed_dim is not None and dimension is not None and embed_dim > dimension:
            raise ValueError(f"embed_dim: expected at most the model's {dimension} dimensions, got {embed_dim}")
        if embed_dim == dimension:
            embed_dim = None
        if model_prompts is not None and dict(model_prompts) == dict(self.model.prompts):  # MTEB's, if it has any
            model_prompts = None
        self.variant = Variant(
            base_name=name,
            config=self.model.fair_config,
            calibrate_untyped=calibrate_untyped,
            max_seq_length=max_seq_length,
            embed_dim=embed_dim,
            model_prompts=model_prompts,
        )
        if max_seq_length is not None:
            self.model.max_seq_length = max_seq_length
        if embed_dim is not None:
            self.model.truncate_dim = embed_dim
        self._set_prompts(model_prompts)
        if self.model.fair_config.chunk_size is not None:
            self.model.preprocess([""], task="document")  # chunks that do not fit the model are said now
        self._wrapper = SentenceTransformerEncoderWrapper(self.model)
        self._settings = changeable_settings(self.model)
        self._announced: set[str] = set()
        self._origin = origin
        self._meta = self._identify(describe_base(origin, self.model, loader=load_variant))

    def _set_prompts(self, prompts: Mapping[str, str] | None) -> None:
        if prompts is not None:
            self.model.prompts = dict(prompts)

    @property
    def fair_config(self) -> FairConfig:
        """The settings."""
        return self.variant.config

    @property
    def counts(self) -> DocumentCounts:
        """How many documents were calibrated, too short or truncated so far."""
        return self.model.counts

    def summary(self) -> Summary:
        """Returns which layers, rows and mechanism are in use and what became of the documents; print it."""
        return self.model.summary()

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """What MTEB knows the model by.

        Raises:
            ValueError: ``model`` was changed in the meantime.
        """
        self._check_unchanged()  # here as well: MTEB looks for results before it encodes anything
        return self._meta

    @mteb_model_meta.setter
    def mteb_model_meta(self, meta: ModelMeta) -> None:
        # MTEB sets it when it loads a registered model, with the arguments of that call as it sees them.
        if any(f"{name}=" in str(meta.name) and f"{name}=" not in self.variant.name for name in OVERRIDES):
            logger.warning("%s has what its model has anyway: it is %s by another name", meta.name, self.variant.name)
        self._meta = self._identify(meta)

    def _identify(self, meta: ModelMeta) -> ModelMeta:
        return meta.model_copy(
            update={
                "name": self.variant.name,
                "revision": self._revision,
                "adapted_from": self._origin,
                "experiment_kwargs": self.variant.experiment_kwargs,
                "max_tokens": self.model.max_seq_length,
                "embed_dim": self.model.get_embedding_dimension(),
            }
        )

    def encode(
        self,
        inputs: DataLoader[BatchedInput],
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **kwargs: Any,
    ) -> Array:
        """Encodes texts as MTEB encodes those of a SentenceTransformer.

        Args:
            inputs: The texts.
            task_metadata: The task, which chooses the prompt.
            hf_split: The split.
            hf_subset: The subset.
            prompt_type: Whether they are documents, queries, or neither.
            **kwargs: SentenceTransformer's.

        Returns:
            One vector per text, (n, D).

        Raises:
            ValueError: A vector has NaN or infinite values, or ``model`` was changed in the meantime.
        """
        self._check_unchanged()
        if given := sorted(_IDENTIFYING & set(kwargs)):
            raise ValueError(
                f"encode_kwargs: {given} would give results of other settings than {self.variant.name!r} says; give "
                "FairEncoder strength, embed_dim or model_prompts"
            )
        if prompt_type is None:
            self._announce(task_metadata)
            if not self.variant.calibrate_untyped:
                kwargs["strength"] = 0.0
        vectors = self._wrapper.encode(
            inputs,
            task_metadata=task_metadata,
            hf_split=hf_split,
            hf_subset=hf_subset,
            prompt_type=prompt_type,
            **kwargs,
        )
        _check_finite(vectors, f"{task_metadata.name}, {hf_subset}", prompt_type.value if prompt_type else "text")
        return vectors

    def _check_unchanged(self) -> None:
        now = changeable_settings(self.model)
        if changed := sorted(name for name, value in self._settings.items() if now[name] != value):
            raise ValueError(
                f"encoder.model: {changed} were changed after {self.variant.name!r} was made, and results would stand "
                "under settings that they are not of; change the model before FairEncoder is made of it"
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
        """Computes the model's similarity of all pairs: (n, m)."""
        return self._wrapper.similarity(embeddings1, embeddings2)

    def similarity_pairwise(self, embeddings1: Array, embeddings2: Array) -> Array:
        """Computes the model's similarity of corresponding vectors: (n,)."""
        vectors = (torch.as_tensor(embeddings).float() for embeddings in (embeddings1, embeddings2))
        return self.model.similarity_pairwise(*vectors)


def load_variant(
    name: str,
    revision: str | None = None,
    *,
    base_model: str | os.PathLike[str],
    settings: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> FairEncoder:
    """Loads a registered variant for MTEB.

    Args:
        name: The variant's.
        revision: The base model's.
        base_model: The base model's name, or its folder.
        settings: All of the calibration's, as registered; None is what the model was saved with, or the default.
        **kwargs: `FairEncoder`'s.
    """
    logger.info("%s: calibrating %s", name, base_model)
    # MTEB passes the experiment settings on as well; the revision of a local model is the hash of its weights.
    kwargs.pop(PROMPTS_DIGEST, None)
    if settings is not None:
        single = {field.name: kwargs.pop(field.name) for field in fields(FairConfig) if field.name in kwargs}
        given = {key: value for key, value in single.items() if value != settings.get(key)}
        if kwargs.get("config") is None:
            kwargs["config"] = FairConfig.from_dict({**settings, **given})
        else:
            kwargs |= given  # which `FairEncoder` refuses beside a config
    known = revision if revision != _UNKNOWN_REVISION else None
    if not Path(base_model).exists():
        return FairEncoder(base_model, known, **kwargs)
    encoder = FairEncoder(base_model, **kwargs)
    is_as_registered = not set(kwargs) - set(inspect.signature(FairEncoder).parameters)
    if known is not None and is_as_registered and known != encoder.mteb_model_meta.revision:
        raise ValueError(
            f"{name}: {base_model} was registered at {known}, and is another model by now "
            f"({encoder.mteb_model_meta.revision}); register it again, by another base_name"
        )
    return encoder


def _check_finite(vectors: Any, where: str, kind: str) -> None:
    array = vectors.float().numpy() if isinstance(vectors, torch.Tensor) else np.asarray(vectors)
    if not np.issubdtype(array.dtype, np.floating):
        return
    bad = np.flatnonzero(~np.isfinite(array).all(axis=tuple(range(1, array.ndim))))
    if len(bad):
        raise ValueError(
            f"{where}: {len(bad)} of {len(array)} {kind} vectors have NaN or infinite values, at the positions "
            f"{bad[:_NAMED].tolist()}{'...' if len(bad) > _NAMED else ''} of the texts encoded; a model in half "
            "precision may need float32 or bfloat16"
        )
