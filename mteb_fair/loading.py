"""Loads base models, names them, and finds the revision that stands for their weights."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mteb.models import ModelMeta
from mteb.models.model_implementations import MODEL_REGISTRY
from mteb.models.model_meta import ScoringFunction
from sentence_transformers import SentenceTransformer

from fair_calibration import FairSentenceTransformer, calibrate
from fair_calibration.fingerprint import fingerprint_model
from fair_calibration.model_source import ModelNotFoundError, find_commit, is_hub_name
from fair_calibration.settings import Settings
from mteb_fair.nearest_names import nearest_names

_SIMILARITIES = {"cosine": ScoringFunction.COSINE, "dot": ScoringFunction.DOT_PRODUCT}
# Arguments of SentenceTransformer that change no vector.
_NEUTRAL = {"cache_folder", "local_files_only", "token", "trust_remote_code"}
# Arguments of SentenceTransformer that MTEB's registry may hold for a model.
_LOADING = {
    "trust_remote_code", "model_kwargs", "processor_kwargs", "tokenizer_kwargs", "config_kwargs", "backend",
    "similarity_fn_name", "truncate_dim", "default_prompt_name",
}  # fmt: skip
# Folders that training scripts write: their names alone do not tell models apart.
_TRAINING_FOLDER = re.compile(r"(final|best|last|latest|checkpoints?|epoch|step)?[-_]?\d*", re.IGNORECASE)


def is_folder(model: object) -> bool:
    """Returns whether ``model`` is a path that exists, and not the name of a model."""
    return isinstance(model, (str, os.PathLike)) and Path(model).exists()


def local_name(folder: str | os.PathLike[str]) -> str:
    """Returns the name of a local model, "local/<folder>".

    Folders such as "final" or "checkpoint-500" are joined with the folder around them: "local/run1-final".
    """
    first, *others = reversed(Path(folder).resolve().parts[1:] or ("model",))
    parts = [first]
    while others and _TRAINING_FOLDER.fullmatch(parts[0]):
        parts.insert(0, others.pop(0))
    return f"local/{'-'.join(parts)}"


def registered_loading(model: object) -> tuple[str | None, dict[str, Any]]:
    """Returns the revision and the arguments of SentenceTransformer that MTEB's registry has for a name."""
    name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else ""
    if name not in MODEL_REGISTRY or is_folder(name):
        return None, {}
    meta = MODEL_REGISTRY[name]
    return meta.revision, {key: value for key, value in meta.loader_kwargs.items() if key in _LOADING}


def registered_prompts(name: str) -> Mapping[str, str] | None:
    """Returns the prompts that MTEB's registry has for a name, or None if the model's own are used."""
    if name not in MODEL_REGISTRY:
        return None
    prompts: Mapping[str, str] | None = MODEL_REGISTRY[name].loader_kwargs.get("model_prompts")
    return prompts


def load_base(
    model: object,
    revision: str | None,
    device: str | None,
    kwargs: Mapping[str, Any],
    config: Settings | str | None = None,
) -> tuple[FairSentenceTransformer, str]:
    """Loads a model, calibrates it, and returns it with the name of its base model.

    ``kwargs`` are further arguments of SentenceTransformer; ``config`` is as in `calibrate`.

    Raises:
        TypeError: ``model`` is not a name, a path or a SentenceTransformer.
        ModelNotFoundError: There is no such folder or model.
        ValueError: ``revision`` or ``kwargs`` are given with a loaded model.
    """
    if isinstance(model, SentenceTransformer):
        if kwargs or revision is not None:
            unused = sorted([*kwargs, *(["revision"] if revision is not None else [])])
            raise ValueError(f"model: {unused} are for loading a name or a folder, got a loaded {type(model).__name__}")
        fair = calibrate(model, config)
        return (fair if device is None else fair.to(device)), _name_of(fair)
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"model: expected a name, a path or a SentenceTransformer, got {type(model).__name__}")
    path = os.fspath(model)
    fair = FairSentenceTransformer(path, config=config, revision=revision, device=device, **kwargs)
    return fair, local_name(path) if is_folder(path) else path


def describe_base(name: str, model: SentenceTransformer | None = None, *, loader: Callable[..., Any]) -> ModelMeta:
    """Returns MTEB's metadata of a base model or, if MTEB does not know it, what the loaded model tells."""
    facts: dict[str, Any] = {"loader": loader, "loader_kwargs": {"base_model": name, **registered_loading(name)[1]}}
    if name in MODEL_REGISTRY:
        return MODEL_REGISTRY[name].model_copy(update=facts, deep=True)
    facts |= {"name": name, "framework": ["Sentence Transformers", "PyTorch"]}
    if model is not None:
        facts["n_parameters"] = sum(parameter.numel() for parameter in model.parameters())
        facts["similarity_fn_name"] = _SIMILARITIES.get(str(model.similarity_fn_name))
        facts["use_instructions"] = any(model.prompts.values())
    return ModelMeta.create_empty(overwrites=facts)


def commit_of(name: str, revision: str | None, *, token: str | bool | None = None) -> str:
    """Returns the commit of a Hugging Face model, or of a branch or tag of it, as the hub or its local cache has it.

    Raises:
        ModelNotFoundError: There is no such model on the hub or in its cache.
    """
    if is_hub_name(name) and revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    try:
        return find_commit(name, revision=revision, token=token)
    except ModelNotFoundError as error:
        if name in MODEL_REGISTRY or not is_hub_name(name):
            raise
        near = nearest_names(name, MODEL_REGISTRY)
        raise ModelNotFoundError(f"{error}; the nearest names that MTEB knows are {near}") from error


def revision_of(fair: FairSentenceTransformer, model: object, revision: str | None, kwargs: Mapping[str, Any]) -> str:
    """Returns what identifies the weights: the commit of a model loaded from the hub, or else a hash of the model.

    A loaded model that came from the hub may have been changed since; it is identified by both.
    """
    if isinstance(model, SentenceTransformer):
        commit = model.model_card_data.base_model_revision
    else:
        commit = None if is_folder(model) else revision
        if commit and not set(kwargs) - _NEUTRAL:
            return commit
    digest = fingerprint_model(fair)
    return f"{commit}-{digest}" if commit else digest


def _name_of(fair: FairSentenceTransformer) -> str:
    network = fair.fair.model
    source = str(getattr(getattr(network, "config", None), "_name_or_path", "") or "")
    if not source:
        return f"local/{type(network).__name__}"
    return local_name(source) if is_folder(source) or source.count("/") != 1 else source
