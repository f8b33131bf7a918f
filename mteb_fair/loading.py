"""Loads base models, with MTEB's metadata: the name of a model, and the revision that stands for its weights."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mteb.models import ModelMeta
from mteb.models.model_implementations import MODEL_REGISTRY
from mteb.models.model_meta import ScoringFunction
from sentence_transformers import SentenceTransformer

from fair_calibration import FairSentenceTransformer, calibrate
from fair_calibration.fingerprint import fingerprint_model
from fair_calibration.model_source import ModelNotFoundError, find_commit, is_commit, is_hub_name
from fair_calibration.nearest_names import nearest_names
from fair_calibration.settings import Settings
from mteb_fair.instructions import instructions_of, loading_arguments
from mteb_fair.variant import PREFIX

_SIMILARITIES = {"cosine": ScoringFunction.COSINE, "dot": ScoringFunction.DOT_PRODUCT}
# Arguments of SentenceTransformer that change no vector.
_NEUTRAL = {"cache_folder", "local_files_only", "token", "trust_remote_code"}
# Arguments of SentenceTransformer that MTEB's registry may hold for a model.
_LOADING = {
    "trust_remote_code", "model_kwargs", "processor_kwargs", "tokenizer_kwargs", "config_kwargs", "backend",
    "similarity_fn_name", "truncate_dim", "default_prompt_name",
}  # fmt: skip
# Kinds of models in MTEB's registry that have no dense vector of a text to calibrate.
_REFUSED = {
    "late-interaction": "gives a text one vector for each token (late interaction)",
    "cross-encoder": "scores pairs of texts and gives no vectors",
    "sparse": "gives sparse vectors",
    "hybrid": "joins the results of other models",
}
# Folders that training scripts write: their names alone do not tell models apart.
_TRAINING_FOLDER = re.compile(r"(final|best|last|latest|checkpoints?|epoch|step)?[-_]?\d*", re.IGNORECASE)
_revisions: dict[str, str] = {}  # of the names used in this process, other than those of hub models


def is_folder(model: object) -> bool:
    """Returns whether ``model`` is a path that exists, and not the name of a model."""
    return isinstance(model, (str, os.PathLike)) and Path(model).exists()


def check_listed(name: str) -> None:
    """Checks that a model, if MTEB knows it, gives texts one dense vector each and can be downloaded.

    Raises:
        ValueError: It is another kind of model, its weights are not public, or it is the name of a `Variant`.
    """
    if name.startswith(PREFIX) and "@" in name:
        raise ValueError(
            f"model: {name!r} is the name of a base model with settings, under which MTEB keeps results; give the base "
            "model, such as 'BAAI/bge-m3', and its settings"
        )
    if (meta := MODEL_REGISTRY.get(name)) is None:
        return
    kinds = meta.model_type or []
    if kinds and not {"dense", "router"}.intersection(kinds):
        raise ValueError(
            f"model: {name!r} {_REFUSED.get(kinds[0], kinds[0])}: only models with one dense vector for each text can "
            "be calibrated; mteb.get_model loads the plain model"
        )
    if meta.open_weights is False:
        raise ValueError(f"model: the weights of {name!r} are not public, so it cannot be calibrated")


def load_base(
    model: object,
    revision: str | None = None,
    *,
    config: Settings | None = None,
    base_name: str | None = None,
    device: str | None = None,
    loading: Mapping[str, Any] | None = None,
) -> tuple[FairSentenceTransformer, ModelMeta]:
    """Loads and calibrates a model, and returns it with MTEB's metadata of its base model.

    Args:
        model: A Hugging Face name, a local folder, or a loaded SentenceTransformer, which is not changed.
        revision: The commit, branch or tag of a Hugging Face model; None means that of MTEB's registry, or the newest.
        config: The settings; None means those that the model was saved with, or else the defaults.
        base_name: The name to be used instead of the model's own, as "organization/name".
        device: The device.
        loading: Arguments of SentenceTransformer besides those that MTEB's registry has for the name.

    Returns:
        The model, and metadata with the name, the revision and, as ``adapted_from``, the name that MTEB may know, by
        which its prompts and instructions are found.

    Raises:
        TypeError: ``model`` is not a name, a path or a SentenceTransformer.
        ModelNotFoundError: There is no such folder or model.
        ValueError: ``revision`` or ``loading`` are given with a loaded model, the name of a Hugging Face model has no
            owner, it is not the name of a model with one dense vector for each text, or another local model was used
            by the same name in this process.
    """
    loading = dict(loading or {})
    commit: str | None = None
    from_hub = isinstance(model, (str, os.PathLike)) and not is_folder(model)
    if isinstance(model, SentenceTransformer):
        if loading or revision is not None:
            unused = sorted([*loading, *(["revision"] if revision is not None else [])])
            raise ValueError(f"model: {unused} are for loading a name or a folder, got a loaded {type(model).__name__}")
        fair = calibrate(model, config)
        fair = fair if device is None else fair.to(device)
        own_name = _name_of(fair)
        commit = model.model_card_data.base_model_revision
    elif isinstance(model, (str, os.PathLike)):
        path = os.fspath(model)
        own_name, listed = path if from_hub else local_name(path), {}
        if not from_hub and revision is not None:
            raise ValueError(f"revision: folders have none, got {revision!r} for {path!r}")
        if from_hub:
            if base_name is None and is_hub_name(path) and "/" not in path:
                raise ValueError(
                    f"model: MTEB names models by owner and model, got {path!r}; write for example "
                    f"'sentence-transformers/{path}', or give base_name"
                )
            check_listed(path)
            if path in MODEL_REGISTRY:
                known = MODEL_REGISTRY[path]
                revision = revision or known.revision
                listed = {k: v for k, v in known.loader_kwargs.items() if k in _LOADING}
                if instructions_of(known) is not None:
                    listed |= loading_arguments(known)
            revision = commit = commit_of(path, revision, token=loading.get("token"))  # branches move, commits do not
        changed = {k for k, v in loading.items() if k not in listed or listed[k] != v} - _NEUTRAL
        fair = FairSentenceTransformer(path, config=config, revision=revision, device=device, **{**listed, **loading})
    else:
        raise TypeError(f"model: expected a name, a path or a SentenceTransformer, got {type(model).__name__}")
    if commit is None or not from_hub or changed:  # a loaded model may have been changed since it came from the hub
        digest = fingerprint_model(fair)
        commit = f"{commit}-{digest}" if commit else digest
    name = base_name or own_name
    origin = own_name if from_hub else name
    if not from_hub and _revisions.setdefault(name, commit) != commit:
        raise ValueError(
            f"base_name: {name!r} was the name of another model before (other weights, prompts or loading arguments), "
            "and their results would be mixed up; give one of the two another base_name, such as 'me/second'"
        )
    if not isinstance(model, SentenceTransformer) and origin in MODEL_REGISTRY:
        fair.prompts = dict(MODEL_REGISTRY[origin].loader_kwargs.get("model_prompts", fair.prompts))
    meta = describe_base(origin, fair)
    return fair, meta.model_copy(update={"name": name, "revision": commit, "adapted_from": origin})


def describe_base(name: str, model: SentenceTransformer | None = None) -> ModelMeta:
    """Returns MTEB's metadata of a base model or, if MTEB does not know it, what the loaded model tells."""
    if name in MODEL_REGISTRY:
        return MODEL_REGISTRY[name].model_copy(update={"loader": None, "loader_kwargs": {}}, deep=True)
    facts: dict[str, Any] = {"name": name, "framework": ["Sentence Transformers", "PyTorch"]}
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
    if is_hub_name(name) and revision is not None and is_commit(revision):
        return revision
    try:
        return find_commit(name, revision=revision, token=token)
    except ModelNotFoundError as error:
        if name in MODEL_REGISTRY or not is_hub_name(name):
            raise
        near = nearest_names(name, MODEL_REGISTRY)
        raise ModelNotFoundError(f"{error}; the nearest names that MTEB knows are {near}") from error


def local_name(folder: str | os.PathLike[str]) -> str:
    """Returns the name of a local model, "local/<folder>".

    Folders such as "final" or "checkpoint-500" are joined with the folder around them: "local/run1-final".
    """
    first, *others = reversed(Path(folder).resolve().parts[1:] or ("model",))
    parts = [first]
    while others and _TRAINING_FOLDER.fullmatch(parts[0]):
        parts.insert(0, others.pop(0))
    return f"local/{'-'.join(parts)}"


def _name_of(fair: FairSentenceTransformer) -> str:
    network = fair.fair.model
    source = str(getattr(getattr(network, "config", None), "_name_or_path", "") or "")
    if not source:
        return f"local/{type(network).__name__}"
    return local_name(source) if is_folder(source) or source.count("/") != 1 else source
