"""What a model's Pooling modules do, in the terms of `FairConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

from fair_calibration.config import FairConfig

_MODES = {"cls": "cls", "lasttoken": "last", "mean": "mean", "mean_sqrt_len_tokens": "mean"}


def single_mode(poolings: Sequence[Pooling]) -> str:
    """Returns the mode of a model's only Pooling module, in the config's terms.

    Raises:
        ValueError: There are more modules or modes, or one that the config has no term for.
    """
    modes = [pooling.pooling_mode for pooling in poolings]
    if len(modes) == 1 and isinstance(modes[0], str) and modes[0] in _MODES:
        return _MODES[modes[0]]
    found = f"its pooling is {modes[0]!r}" if len(modes) == 1 else f"it has {len(modes)} Pooling modules"
    raise ValueError(
        f"pooling: 'auto' needs a model with one Pooling module of {sorted(_MODES)}, but {found}; "
        "choose the rows to calibrate with FairConfig(pooling='cls', 'last' or 'mean')"
    )


def check_pooled_directly(followers: Sequence[nn.Module], config: FairConfig, *, setting: str) -> Pooling:
    """Returns the Pooling module right behind the transformer, if it is the only one and pools as the config says.

    Args:
        followers: The modules that documents pass behind the transformer.
        config: A resolved config.
        setting: What needs it, for the error.

    Raises:
        ValueError: There is another module in between, another Pooling module, or it pools otherwise.
    """
    poolings: list[Pooling] = [module for module in followers if isinstance(module, Pooling)]
    if len(poolings) != 1 or followers[0] is not poolings[0]:
        raise ValueError(
            f"{setting}: expected one Pooling module, right behind the transformer, got "
            f"{[type(module).__name__ for module in followers]}; leave {setting} out"
        )
    (pooling,) = poolings
    mode = pooling.pooling_mode
    expected = {"cls": "cls", "last": "lasttoken", "mean": "mean"}[config.pooling]
    if mode != expected:
        raise ValueError(
            f"{setting}: expected a model that pools by {expected!r} (pooling={config.pooling!r}), got {mode!r}; leave "
            f"{setting} out"
        )
    return pooling


def excluded_prompt(poolings: Sequence[Pooling], features: dict[str, Any]) -> int:
    """Returns the number of leading tokens that pooling leaves out."""
    if all(pooling.include_prompt for pooling in poolings) or "prompt_length" not in features:
        return 0
    length = features["prompt_length"]
    return int(length.reshape(-1)[0]) if torch.is_tensor(length) else int(length or 0)
