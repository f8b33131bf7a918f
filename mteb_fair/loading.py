"""Loads base models, and says what they are called and which weights they have."""

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
from mteb_fair.names import nearest


class UnknownModelError(ValueError):
    """A name is neither a folder's nor, as far as can be told, a model's."""


_SIMILARITIES = {"cosine": ScoringFunction.COSINE, "dot": ScoringFunction.DOT_PRODUCT}

# What of SentenceTransformer's arguments changes no vector.
_NEUTRAL = {"cache_folder", "local_files_only", "token", "trust_remote_code"}

# What of SentenceTransformer's arguments MTEB's registry gives for names.
_LOADING = {
    "trust_remote_code", "model_kwargs", "processor_kwargs", "tokenizer_kwargs", "config_kwargs", "backend",
    "similarity_fn_name", "truncate_dim", "default_prompt_name",
}  # fmt: skip


def pinned(model: object) -> tuple[str | None, dict[str, Any]]:
    """Returns the revision of a name and SentenceTransformer's arguments that MTEB's registry has for it."""
    name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else ""
    if name not in MODEL_REGISTRY or Path(name).exists():
        return None, {}
    meta = MODEL_REGISTRY[name]
    return meta.revision, {key: value for key, value in meta.loader_kwargs.items() if key in _LOADING}


def default_prompts(name: str) -> Mapping[str, str] | None:
    """Returns the prompts that MTEB's registry has for a name; None is the model's own."""
    if name not in MODEL_REGISTRY:
        return None
    prompts: Mapping[str, str] | None = MODEL_REGISTRY[name].loader_kwargs.get("model_prompts")
    return prompts


def load_base(
    model: object, revision: str | None, device: str | None, kwargs: Mapping[str, Any]
) -> tuple[FairSentenceTransformer, str]:
    """Returns the calibrated model and the name of its base.

    Raises:
        TypeError: ``model`` is none.
        UnknownModelError: There is none of that name.
        ValueError: A loaded model comes with arguments for loading one.
    """
    if isinstance(model, SentenceTransformer):
        if kwargs or revision is not None:
            unused = sorted([*kwargs, *(["revision"] if revision is not None else [])])
            raise ValueError(f"model: {unused} are for loading a name or a folder, got a loaded {type(model).__name__}")
        config = model.fair_config if isinstance(model, FairSentenceTransformer) else None
        fair = calibrate(model, config)
        return (fair if device is None else fair.to(device)), _name_of(fair)
    if isinstance(model, (str, os.PathLike)):
        path = os.fspath(model)
        is_local = Path(path).exists()
        try:
            fair = FairSentenceTransformer(path, revision=revision, device=device, **kwargs)
        except OSError as error:
            if is_local:
                raise
            raise _unknown(path, error) from error
        return fair, f"local/{Path(path).resolve().name}" if is_local else path
    raise TypeError(f"model: expected a name, a path or a SentenceTransformer, got {type(model).__name__}")


def describe_base(name: str, model: SentenceTransformer | None = None, *, loader: Callable[..., Any]) -> ModelMeta:
    """Returns what is known of a base model: MTEB's own metadata if it has any, else what the loaded model tells."""
    facts: dict[str, Any] = {"loader": loader, "loader_kwargs": {"base_model": name, **pinned(name)[1]}}
    if name in MODEL_REGISTRY:
        return MODEL_REGISTRY[name].model_copy(update=facts, deep=True)
    facts |= {"name": name, "framework": ["Sentence Transformers", "PyTorch"]}
    if model is not None:
        facts["n_parameters"] = sum(parameter.numel() for parameter in model.parameters())
        facts["similarity_fn_name"] = _SIMILARITIES.get(str(model.similarity_fn_name))
        facts["use_instructions"] = any(model.prompts.values())
    return ModelMeta.create_empty(overwrites=facts)


def commit_of(name: str, revision: str | None) -> str:
    """Returns the commit that a Hugging Face model is at, or a branch or tag of it: as the hub says, or its cache.

    Raises:
        UnknownModelError: It is on neither.
    """
    from huggingface_hub import model_info, try_to_load_from_cache

    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    try:
        return str(model_info(name, revision=revision).sha)
    except Exception as error:  # the hub raises OSErrors, ValueErrors and errors of its HTTP client
        try:
            cached = try_to_load_from_cache(name, "config.json", revision=revision)
        except ValueError:  # no name that the hub could have
            cached = None
        if isinstance(cached, str):
            return Path(cached).parent.name
        raise _unknown(name, error) from error


def _unknown(name: str, error: Exception) -> UnknownModelError:
    reason = " ".join(str(error).split())
    hint = "" if name in MODEL_REGISTRY else f"; the nearest names that MTEB knows are {nearest(name, MODEL_REGISTRY)}"
    return UnknownModelError(f"model: {name!r} is no folder, and could not be loaded by that name ({reason}){hint}")


def _name_of(fair: FairSentenceTransformer) -> str:
    network = fair.fair.model
    source = str(getattr(getattr(network, "config", None), "_name_or_path", "") or "")
    if not source:
        return f"local/{type(network).__name__}"
    return f"local/{Path(source).resolve().name}" if Path(source).exists() or source.count("/") != 1 else source


def revision_of(fair: FairSentenceTransformer, model: object, revision: str | None, kwargs: Mapping[str, Any]) -> str:
    """Returns the commit of a hub model, as it is there, and else a hash of what the model computes with.

    A model that was loaded from the hub elsewhere may have been changed since: it has both.
    """
    if isinstance(model, SentenceTransformer):
        commit = model.model_card_data.base_model_revision
    else:
        commit = None if Path(str(model)).exists() else revision
        if commit and not set(kwargs) - _NEUTRAL:
            return commit
    digest = fingerprint_model(fair)
    return f"{commit}-{digest}" if commit else digest
