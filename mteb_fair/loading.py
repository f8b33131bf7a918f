"""Loads base models, and says what they are called and which weights they have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mteb.models.model_implementations import MODEL_REGISTRY
from sentence_transformers import SentenceTransformer

from fair_calibration import FairSentenceTransformer, calibrate
from mteb_fair.identity import fingerprint_model
from mteb_fair.names import nearest


class UnknownModelError(ValueError):
    """A name is neither a folder's nor, as far as can be told, a model's."""


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
        return (fair if device is None else fair.to(device)), _name_of(model)
    if isinstance(model, (str, os.PathLike)):
        path = os.fspath(model)
        is_local = Path(path).exists()
        try:
            fair = FairSentenceTransformer(path, revision=revision, device=device, **kwargs)
        except OSError as error:
            if is_local:
                raise
            reason = " ".join(str(error).split())
            raise UnknownModelError(
                f"model: {path!r} is no folder, and could not be loaded by that name ({reason}); the nearest names "
                f"that MTEB knows are {nearest(path, MODEL_REGISTRY)}"
            ) from error
        return fair, f"local/{Path(path).resolve().name}" if is_local else path
    raise TypeError(f"model: expected a name, a path or a SentenceTransformer, got {type(model).__name__}")


def _name_of(model: SentenceTransformer) -> str:
    network = getattr(next(model.children()), "model", None)
    source = str(getattr(getattr(network, "config", None), "_name_or_path", "") or "")
    if not source:
        return f"local/{type(network).__name__}"
    return f"local/{Path(source).resolve().name}" if Path(source).exists() or source.count("/") != 1 else source


def revision_of(fair: FairSentenceTransformer, model: object, revision: str | None, kwargs: Mapping[str, Any]) -> str:
    """Returns the commit of a hub model, as it is there, and else a hash of what the model computes with."""
    commit = None
    if isinstance(model, (str, os.PathLike)) and not Path(model).exists():
        network = getattr(next(fair.children()), "model", None)
        commit = revision or getattr(getattr(network, "config", None), "_commit_hash", None)
        if commit and not set(kwargs) - _NEUTRAL:
            return str(commit)
    digest = fingerprint_model(fair)
    return f"{commit}-{digest}" if commit else digest
