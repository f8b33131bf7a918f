"""Reads a model's Pooling modules in the terms of the settings: "cls", "last" or "mean"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

_MODES = {"cls": "cls", "lasttoken": "last", "mean": "mean", "mean_sqrt_len_tokens": "mean"}


def poolings_of(modules: Sequence[nn.Module]) -> list[Pooling]:
    """Returns the Pooling modules among ``modules``."""
    return [module for module in modules if isinstance(module, Pooling)]


def single_mode(followers: Sequence[nn.Module]) -> str:
    """Returns how a model pools: "cls", "last" or "mean"; ``followers`` are the modules after the transformer.

    Raises:
        ValueError: There is not exactly one Pooling module, or its mode has no name in the settings.
    """
    modes = [pooling.pooling_mode for pooling in poolings_of(followers)]
    if len(modes) == 1 and isinstance(modes[0], str) and modes[0] in _MODES:
        return _MODES[modes[0]]
    found = f"its pooling is {modes[0]!r}" if len(modes) == 1 else f"it has {len(modes)} Pooling modules"
    raise ValueError(
        f"pooling: 'auto' needs a model with one Pooling module of {sorted(_MODES)}, but {found}; "
        "choose the rows to calibrate with FairConfig(pooling='cls', 'last' or 'mean')"
    )


def check_pooled_directly(followers: Sequence[nn.Module], *poolings: str, setting: str) -> Pooling:
    """Returns the Pooling module, which must follow the transformer directly, be the only one, and pool as expected.

    ``poolings`` are the possible ones, "cls", "last" or "mean", and ``setting`` is the setting that needs this.

    Raises:
        ValueError: Another module stands in between, there is another Pooling module, or the pooling differs.
    """
    found = poolings_of(followers)
    if len(found) != 1 or followers[0] is not found[0]:
        raise ValueError(
            f"{setting}: expected one Pooling module, right behind the transformer, got "
            f"{[type(module).__name__ for module in followers]}; leave {setting} out"
        )
    mode = found[0].pooling_mode
    expected = [{"cls": "cls", "last": "lasttoken", "mean": "mean"}[pooling] for pooling in poolings]
    if mode not in expected:
        raise ValueError(
            f"{setting}: expected a model that pools by {' or '.join(map(repr, expected))}, got {mode!r}; leave "
            f"{setting} out"
        )
    return found[0]


def excluded_prompt(followers: Sequence[nn.Module], features: dict[str, Any]) -> int:
    """Returns the number of leading tokens, those of the prompt, that pooling leaves out."""
    if all(pooling.include_prompt for pooling in poolings_of(followers)) or "prompt_length" not in features:
        return 0
    length = features["prompt_length"]
    return int(length.reshape(-1)[0]) if torch.is_tensor(length) else int(length or 0)
