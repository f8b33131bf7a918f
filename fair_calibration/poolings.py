"""Reads a model's Pooling modules in the terms of the settings: "cls", "last" or "mean"."""

from __future__ import annotations

from collections.abc import Sequence

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
        ValueError: Another module is in between, there is another Pooling module, or the pooling is another one.
    """
    found = poolings_of(followers)
    if len(found) != 1 or followers[0] is not found[0]:
        raise ValueError(
            f"{setting}: expected one Pooling module, directly after the transformer, got "
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
