"""What a model's Pooling modules do, in the terms of `FairConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import Pooling

_MODES = {"cls": "cls", "lasttoken": "last", "mean": "mean", "mean_sqrt_len_tokens": "mean"}


def mode_names(poolings: Sequence[Pooling]) -> list[str]:
    """Returns their modes, in the config's terms where there are any."""
    return [_MODES.get(str(pooling.pooling_mode), str(pooling.pooling_mode)) for pooling in poolings]


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


def excluded_prompt(poolings: Sequence[Pooling], features: dict[str, Any]) -> int:
    """Returns the number of leading tokens that pooling leaves out."""
    if all(pooling.include_prompt for pooling in poolings) or "prompt_length" not in features:
        return 0
    length = features["prompt_length"]
    return int(length.reshape(-1)[0]) if torch.is_tensor(length) else int(length or 0)
