"""What a model computes with: its weights and settings, as facts and as a hash, and what may change in place."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module

_VALUES = 8  # of each tensor: those of all weights take seconds for a billion


def fingerprint_model(model: SentenceTransformer) -> str:
    """Returns a hash of what a plain model computes with: weights, configurations, tokenizer, prompts, dimensions.

    Models that are loaded from copies of one folder get the same one; the calibration is not part of it.
    """
    digest = hashlib.blake2b(digest_size=8)
    _add_weights(digest, model)
    digest.update(json.dumps(model_facts(model), sort_keys=True, default=str).encode())
    return digest.hexdigest()


def fingerprint_weights(model: SentenceTransformer) -> str:
    """Returns a hash of the weights alone: names, types, shapes and values."""
    digest = hashlib.blake2b(digest_size=16)
    _add_weights(digest, model)
    return digest.hexdigest()


def model_facts(model: SentenceTransformer) -> dict[str, Any]:
    """Returns what beside its weights a plain model's vectors depend on: modules, tokenizer, prompts, dimensions."""
    return {
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


def changeable_settings(model: SentenceTransformer) -> dict[str, Any]:
    """Returns what of a model can be changed in place, and changes its vectors; cheap to compare.

    Of the weights these are their types, PyTorch's counts of changes, and, as changes by way of ``.data`` are not
    counted, a few values of each tensor; of the tokenizer all but its vocabulary, of which it is the size.
    """
    return {
        "max_seq_length": model.max_seq_length,
        "truncate_dim": model.truncate_dim,
        "prompts": dict(model.prompts),
        "default_prompt_name": model.default_prompt_name,
        "similarity_fn_name": model.similarity_fn_name,
        "fair_config": getattr(model, "fair_config", None),
        "modules": [_module_config(module) for module in model.children()],
        "tokenizer": _tokenizer_settings(model.tokenizer),
        "sides": _sides(model.tokenizer),
        "adapters": _active_adapters(model),
        # Changed in place, as by training; moving a model to another device changes neither.
        "weights": (
            {name: (tensor.dtype, _version(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()},
            _some_values(model),
        ),
    }


def digest_text(text: str) -> str:
    """Returns a short hash of a text, for names."""
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _add_weights(digest: hashlib.blake2b, model: SentenceTransformer) -> None:
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _some_values(model: SentenceTransformer) -> bytes:
    """Returns a few values of every tensor, with one transfer from each device."""
    parts = defaultdict(list)
    for tensor in model.state_dict().values():
        values = tensor.reshape(-1)  # a view, but of the rare tensors that are not contiguous
        values = values[:: max(1, len(values) // _VALUES)][: _VALUES + 1]
        parts[tensor.device].append(values.contiguous().view(torch.uint8))
    return b"".join(torch.cat(own).cpu().numpy().tobytes() for own in parts.values())


def _active_adapters(model: SentenceTransformer) -> list[str]:
    """Returns the adapters (PEFT's) in use, layer by layer."""
    return [str(module.active_adapters) for module in model.modules() if hasattr(module, "lora_A")]


def _sides(tokenizer: Any) -> list[Any]:
    return [getattr(tokenizer, side, None) for side in ("truncation_side", "padding_side")]


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


def _tokenizer_settings(tokenizer: Any) -> Any:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    parts = ("normalizer", "pre_tokenizer", "post_processor")
    steps = [None if (part := getattr(fast, name, None)) is None else part.__getstate__() for name in parts]
    added = {number: str(token) for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    return len(tokenizer) if hasattr(tokenizer, "__len__") else None, steps, added


def _tokenizer_state(tokenizer: Any) -> Any:
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        # Truncation and padding are set anew for every batch.
        state = {k: v for k, v in json.loads(fast.to_str()).items() if k not in ("truncation", "padding")}
        return digest_text(json.dumps(state, sort_keys=True))
    if hasattr(tokenizer, "get_vocab"):
        return digest_text(json.dumps(tokenizer.get_vocab(), sort_keys=True))
    return type(tokenizer).__name__
