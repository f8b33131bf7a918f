"""What tells one result from another: the name, revision and experiment settings of a calibrated model in MTEB.

`mteb.evaluate` keeps results by name, revision and experiment settings, `MTEB(...).run` by name and revision alone. So
the settings stand in the name and in the experiment settings, and the weights in the revision.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module

from fair_calibration import FairConfig, FairSentenceTransformer
from fair_calibration.config import validate_positive_int

PREFIX = "mteb_fair/"
PROMPTS_DIGEST = "prompts_digest"
OVERRIDES = ("max_seq_length", "embed_dim", PROMPTS_DIGEST)
"""What a name says beside the calibration, where it is not the base model's own."""
_DEFAULTS = FairConfig()
_MAX_LENGTH = 200  # MTEB makes folders of names, and file systems take 255 bytes


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A base model with settings; equal settings make equal names, whether defaults were given or left out.

    Attributes:
        base_name: The base model, such as "BAAI/bge-m3"; "local/<folder>" for local ones.
        config: The calibration.
        calibrate_untyped: Whether texts that are neither queries nor documents are calibrated.
        max_seq_length: Where texts are truncated, in tokens; None is the base model's.
        embed_dim: The dimensions kept of each vector; None is the base model's.
        model_prompts: The prompts; None is the base model's.
    """

    base_name: str
    config: FairConfig
    calibrate_untyped: bool = True
    max_seq_length: int | None = None
    embed_dim: int | None = None
    model_prompts: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name in ("max_seq_length", "embed_dim"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, validate_positive_int(name, value))

    def _overrides(self) -> dict[str, Any]:
        overrides: dict[str, Any] = {"max_seq_length": self.max_seq_length, "embed_dim": self.embed_dim}
        if self.model_prompts is not None:
            overrides[PROMPTS_DIGEST] = _digest(json.dumps(dict(self.model_prompts), sort_keys=True))
        return {name: value for name, value in overrides.items() if value is not None}

    @property
    def name(self) -> str:
        """The name in MTEB, with the strength and every setting that is not the default, hashed where they are many."""
        settings = {"strength": self.config.strength}
        for field in fields(FairConfig):
            if (value := getattr(self.config, field.name)) != getattr(_DEFAULTS, field.name):
                settings[field.name] = value
        if not self.calibrate_untyped:
            settings["calibrate_untyped"] = False
        settings |= self._overrides()
        listed = ",".join(f"{name}={_short(value)}" for name, value in settings.items())
        name = f"{PREFIX}{self.base_name.replace('/', '__')}@"
        if len(name + listed) > _MAX_LENGTH:
            listed = f"strength={self.config.strength},settings={_digest(listed)}"
        return name + listed

    @property
    def experiment_kwargs(self) -> dict[str, Any]:
        """All settings, defaults included, so that results stay apart even if a default changes some day."""
        settings = {**self.config.to_dict(), "calibrate_untyped": self.calibrate_untyped, **self._overrides()}
        return {name: value for name, value in settings.items() if value is not None}

    @property
    def loader_kwargs(self) -> dict[str, Any]:
        """The arguments of `load_variant` that make this variant, in JSON's types."""
        settings = {
            "settings": self.config.to_dict(),  # whole: None is not what a model was saved with
            "calibrate_untyped": self.calibrate_untyped,
            "max_seq_length": self.max_seq_length,
            "embed_dim": self.embed_dim,
            "model_prompts": None if self.model_prompts is None else dict(self.model_prompts),
        }
        return {name: value for name, value in settings.items() if value is not None}


def changeable_settings(model: FairSentenceTransformer) -> dict[str, Any]:
    """Returns what of a model can be changed by setting an attribute, and changes its vectors."""
    return {
        "max_seq_length": model.max_seq_length,
        "truncate_dim": model.truncate_dim,
        "prompts": dict(model.prompts),
        "default_prompt_name": model.default_prompt_name,
        "similarity_fn_name": model.similarity_fn_name,
        "fair_config": model.fair_config,
        "modules": [_module_config(module) for module in model.children()],
        "sides": _sides(model.tokenizer),
        "adapters": _active_adapters(model),
        # Changed in place, as by training; moving a model to another device changes neither.
        "weights": {
            name: (tensor.dtype, _version(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()
        },
    }


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _active_adapters(model: SentenceTransformer) -> list[str]:
    """Returns the adapters (PEFT's) in use, layer by layer."""
    return [str(module.active_adapters) for module in model.modules() if hasattr(module, "lora_A")]


def _sides(tokenizer: Any) -> list[Any]:
    return [getattr(tokenizer, side, None) for side in ("truncation_side", "padding_side")]


def fingerprint_model(model: SentenceTransformer) -> str:
    """Returns a hash of what a plain model computes with: weights, configurations, tokenizer, prompts, dimensions.

    Models that are loaded from copies of one folder get the same one; the calibration is not part of it.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    facts: dict[str, Any] = {
        "modules": [  # also those in the routes of a Router
            (name, type(module).__name__.removeprefix("Fair"), _module_config(module))
            for name, module in model.named_modules()
            if isinstance(module, Module)
        ],
        "tokenizer": _tokenizer_state(model.tokenizer),
        "sides": _sides(model.tokenizer),
        "adapters": _active_adapters(model),
        "prompts": dict(model.prompts),
        "default_prompt_name": model.default_prompt_name,
        "similarity": model.similarity_fn_name,
        "truncate_dim": model.truncate_dim,
        "max_seq_length": model.max_seq_length,
    }
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _module_config(module: Any) -> dict[str, Any]:
    get = getattr(module, "get_config_dict", None)
    config = dict(get()) if callable(get) else {}
    config.pop("fair_config", None)
    if "route_mappings" in config:  # its keys are tuples
        config["route_mappings"] = sorted(map(str, config["route_mappings"].items()))
    network = getattr(getattr(module, "model", None), "config", None)
    if network is not None:
        config["network"] = {
            k: v for k, v in network.to_dict().items() if not k.startswith("_") and k != "transformers_version"
        }
    return config


def _tokenizer_state(tokenizer: Any) -> Any:
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        # Truncation and padding are set anew for every batch.
        state = {k: v for k, v in json.loads(fast.to_str()).items() if k not in ("truncation", "padding")}
        return _digest(json.dumps(state, sort_keys=True))
    if hasattr(tokenizer, "get_vocab"):
        return _digest(json.dumps(tokenizer.get_vocab(), sort_keys=True))
    return type(tokenizer).__name__


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _short(value: Any) -> str:
    # The layer 6 is not 6 layers.
    return "at" + "+".join(str(item) for item in value) if isinstance(value, (list, tuple)) else str(value)
