"""What a model's vectors depend on: its weights as a hash, and its modules, tokenizer, prompts and dimensions.

A ``state_dict`` holds not only plain tensors, but also quantized, sparse, packed or offloaded ones, tuples and numbers.
`_parts` turns all of them into plain tensors and texts.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module
from torch import Tensor, nn

_VALUES = 8  # of each tensor, to notice changes: comparing all weights takes seconds for a billion


def fingerprint_model(model: SentenceTransformer) -> str:
    """Returns a hash of everything that a plain model computes with: weights, configurations, tokenizer, prompts.

    Models loaded from copies of one folder have the same hash. The calibration is not part of it.

    Raises:
        ValueError: The model holds a value that cannot be identified, or weights that were offloaded out of reach.
    """
    text = json.dumps([fingerprint_weights(model), model_facts(model)], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def fingerprint_weights(model: SentenceTransformer) -> str:
    """Returns a hash of the weights alone: names, types, shapes and values. It raises as `fingerprint_model` does."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(model.state_dict().items()):
        for part, content in _parts(name, value, model):
            if isinstance(content, Tensor):
                digest.update(f"{part} {content.dtype} {tuple(content.shape)}\n".encode())
                values: Any = content.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
                digest.update(values)
            else:
                digest.update(f"{part} {content}\n".encode())
    return digest.hexdigest()


def model_facts(model: SentenceTransformer) -> dict[str, Any]:
    """Returns what a plain model's vectors depend on besides its weights: modules, tokenizer, prompts, dimensions."""
    return {**_settings(model), "tokenizer": _tokenizer_state(model.tokenizer)}


def changeable_settings(model: SentenceTransformer) -> dict[str, Any]:
    """Returns what can be changed in a loaded model and changes its vectors, in a form that is cheap to compare.

    Of the weights it holds the types, PyTorch's counts of in-place changes, and a few values of each tensor, since
    changes by way of ``.data`` are not counted. Of the tokenizer it holds everything but the vocabulary, of which only
    the size is compared.
    """
    return {
        **_settings(model),
        "fair_config": getattr(model, "fair_config", None),
        "tokenizer": _tokenizer_settings(model.tokenizer),
        # Changed in place, as by training. Moving a model to another device changes neither of the two.
        "weights": (
            {name: _version(value) for name, value in model.state_dict(keep_vars=True).items()},
            _some_values(model),
        ),
    }


def _settings(model: SentenceTransformer) -> dict[str, Any]:
    """Returns what vectors depend on and what is cheap to read: all but the weights and the tokenizer's state."""
    return {
        "modules": [  # including those in the routes of a Router
            (name, _base_class(module), _module_config(module))
            for name, module in model.named_modules()
            if isinstance(module, Module)
        ],
        "sides": [getattr(model.tokenizer, side, None) for side in ("truncation_side", "padding_side")],
        # PEFT's active adapters, layer by layer
        "adapters": [str(module.active_adapters) for module in model.modules() if hasattr(module, "lora_A")],
        "prompts": dict(model.prompts),
        "default_prompt_name": model.default_prompt_name,
        "similarity_fn_name": model.similarity_fn_name,
        "truncate_dim": model.truncate_dim,
        "max_seq_length": model.max_seq_length,
    }


def digest_text(text: str) -> str:
    """Returns a short hash of a text, for use in names."""
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _parts(name: str, value: Any, model: nn.Module) -> Iterator[tuple[str, Tensor | str]]:
    """Turns a value of a ``state_dict`` into named plain tensors and texts; a ValueError if that is not possible."""
    if isinstance(value, Tensor):
        if value.device.type == "meta":
            value = _offloaded(name, model)
        if hasattr(value, "__tensor_flatten__"):  # the tensor subclasses of torchao, quanto and others
            inner, context = value.__tensor_flatten__()
            yield f"{name}:context", repr(context)
            for attribute in inner:
                yield from _parts(f"{name}:{attribute}", getattr(value, attribute), model)
        elif value.is_quantized:
            yield f"{name}:type", f"{value.dtype} {value.qscheme()}"
            yield f"{name}:values", value.int_repr()
            yield f"{name}:numbers", value.dequantize()  # depends on scales and zero points
        elif value.layout == torch.strided:
            yield name, value
        else:  # sparse
            yield f"{name}:layout", str(value.layout)
            yield name, value.to_dense()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _parts(f"{name}:{key}", item, model)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _parts(f"{name}:{number}", item, model)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        yield name, repr(value)
    elif isinstance(value, torch.ScriptObject):
        yield from _parts(name, value.__getstate__(), model)
    else:
        raise ValueError(
            f"model: {name!r} in its state_dict is a {type(value).__name__}, which cannot be identified, so indexes, "
            "caches and results cannot be told apart; encode with the model directly, or load it without this part"
        )


def _offloaded(name: str, model: nn.Module) -> Tensor:
    """Returns a tensor that accelerate keeps on disk or in main memory, while its module holds an empty one."""
    path, _, attribute = name.rpartition(".")
    modules = [model]
    for step in path.split(".") if path else []:
        modules.append(getattr(modules[-1], step))
    for module in reversed(modules):
        hook = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", [hook]):
            weights = getattr(one, "weights_map", None)
            if weights is not None and attribute in weights:
                found: Tensor = weights[attribute]
                return found
    raise ValueError(
        f"model: the weights {name!r} are on the meta device and cannot be read, so the model cannot be identified; "
        "load it without offloading"
    )


def _version(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return value.dtype, 0 if value.is_inference() else value._version


def _some_values(model: SentenceTransformer) -> tuple[bytes, tuple[str, ...]]:
    """Returns a few values of every tensor, with one transfer from each device, and all texts."""
    tensors = defaultdict(list)
    texts = []
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and value.device.type == "meta":
            continue  # offloaded weights are not changed in place, and reading them takes time
        for _, content in _parts(name, value, model):
            if isinstance(content, Tensor):
                flat = content.detach().reshape(-1)  # a view, except of the rare tensors that are not contiguous
                flat = flat[:: max(1, len(flat) // _VALUES)][: _VALUES + 1]
                tensors[content.device].append(flat.contiguous().view(torch.uint8))
            else:
                texts.append(content)
    values = b"".join(torch.cat(own).cpu().numpy().tobytes() for own in tensors.values())
    return values, tuple(texts)


def _base_class(module: nn.Module) -> str:
    """Returns the name of a module's class, or of the sentence-transformers class that a calibrated one replaces."""
    return next(cls.__name__ for cls in type(module).__mro__ if not cls.__module__.startswith("fair_calibration"))


def _module_config(module: Module) -> dict[str, Any]:
    config = dict(module.get_config_dict())
    config.pop("fair_config", None)
    if "route_mappings" in config:  # its keys are tuples, which JSON does not have
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
