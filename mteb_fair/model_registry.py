"""Adds models with settings to MTEB's registry, and loads them for MTEB."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mteb.models.model_implementations import MODEL_REGISTRY

from fair_calibration import FairConfig
from fair_calibration.settings import Settings, choose_settings, settings_from_dict
from mteb_fair.encoder import SETTINGS, FairEncoder
from mteb_fair.loading import check_listed, commit_of, describe_base, is_folder
from mteb_fair.passage_search import FairPassageSearch
from mteb_fair.variant import PROMPTS_DIGEST, Variant

_OPTIONS = ("calibrate_untyped", "max_seq_length", "embed_dim", "model_prompts", "passage_size")


def register_model(
    base_model: str | os.PathLike[str],
    *,
    config: Settings | str | None = None,
    base_name: str | None = None,
    revision: str | None = None,
    **options: Any,
) -> str:
    """Adds a base model with settings to MTEB's registry, and returns the name by which MTEB then loads it.

    Hub models are not loaded for that; local models are, to learn their identity.

    Args:
        base_model: A Hugging Face name or a local folder.
        config: A `FairConfig`, an `EvenChunks` or the name of a preset; None means the defaults, or the settings that a
            local model was saved with.
        base_name: The name of a local model as "organization/name".
        revision: The commit of a Hugging Face model; None means the commit that MTEB has, or else the newest.
        **options: Single settings of ``config``, and ``calibrate_untyped``, ``max_seq_length``, ``embed_dim`` and
            ``model_prompts`` of `FairEncoder`. With ``passage_size``, the model is a `FairPassageSearch`.

    Raises:
        TypeError: There is no such option.
        ModelNotFoundError: There is no such folder or model.
        ValueError: A setting is out of range, the model gives texts no dense vector each, or another model or revision
            is registered by the name.
    """
    if not isinstance(base_model, (str, os.PathLike)):
        raise TypeError(f"base_model: expected a model name or a folder, got {type(base_model).__name__}")
    if revision is not None and not isinstance(revision, str):
        raise TypeError(f"revision: expected str, got {revision!r}")
    known = {*SETTINGS, *_OPTIONS}
    for option in options:
        if option not in known:
            raise TypeError(f"{option}: not an option of register_model, which has {sorted(known)}")
    if is_folder(base_model):
        source = str(Path(base_model).resolve())  # found again from any working directory
        if revision is not None:
            raise ValueError(f"revision: folders have none, got {revision!r} for {source!r}")
        model = _load(source, config=config, base_name=base_name, device="cpu", **options)
        variant, meta = model.variant, model.mteb_model_meta
    else:
        source = os.fspath(base_model)
        check_listed(source)
        if source not in MODEL_REGISTRY:
            revision = commit_of(source, revision)
        given = {name: options.pop(name) for name in SETTINGS & set(options)}
        chosen = choose_settings(config, given, default=FairConfig())
        variant = Variant(base_name=base_name or source, config=chosen, **options)
        meta = describe_base(source)
        facts = {"revision": revision or meta.revision, "adapted_from": source}
        meta = variant.identify(meta.model_copy(update=facts))
    other = MODEL_REGISTRY.get(variant.name)
    if other is not None and (other.adapted_from, other.revision) != (meta.adapted_from, meta.revision):
        raise ValueError(
            f"register_model: {variant.name!r} is registered for {other.adapted_from} at the revision "
            f"{other.revision}, now {meta.adapted_from} at {meta.revision} was given; give one of them another "
            "base_name"
        )
    arguments: dict[str, Any] = {"base_model": source, "settings": variant.config.to_dict(), "base_name": base_name}
    arguments |= {name: getattr(variant, name) for name in _OPTIONS}
    MODEL_REGISTRY[variant.name] = meta.model_copy(update={"loader": load_variant, "loader_kwargs": arguments})
    return variant.name


def load_variant(
    name: str,  # noqa: ARG001
    revision: str | None = None,
    *,
    base_model: str,
    settings: Mapping[str, Any],
    config: Settings | str | None = None,
    **kwargs: Any,
) -> FairEncoder | FairPassageSearch:
    """Loads a registered variant for MTEB, with the arguments that `register_model` keeps and those of the caller.

    Args:
        name: The name of the variant.
        revision: The revision of the base model.
        base_model: The name or the folder of the base model.
        settings: The registered settings, as ``to_dict`` gives them.
        config: Settings instead of the registered ones.
        **kwargs: Further arguments of `FairEncoder`, the registered ones among them, and ``passage_size``.
    """
    # MTEB passes the experiment settings on as well: those that are as registered were not given by the caller.
    given = {key: value for key, value in kwargs.items() if key not in settings or value != settings[key]}
    given.pop(PROMPTS_DIGEST, None)
    config = settings_from_dict(settings) if config is None else config
    return _load(base_model, None if is_folder(base_model) else revision, config=config, **given)


def _load(*args: Any, passage_size: int | None = None, **kwargs: Any) -> FairEncoder | FairPassageSearch:
    encoder = FairEncoder(*args, **kwargs)
    return encoder if passage_size is None else FairPassageSearch(encoder, passage_size=passage_size)
