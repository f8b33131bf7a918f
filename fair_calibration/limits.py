"""The longest input that a model can take, and the check of ``max_seq_length``."""

from __future__ import annotations

import re

from torch import nn

from fair_calibration.validation import validate_positive_int

NO_LIMIT = 10**9
"""Tokenizers without a limit have a ``model_max_length`` above this, such as 10 ** 30."""
_POSITION_TABLE = re.compile(r"(^|\.)(position_embeddings?|positions_embed|embed_positions|wpe)$")


def position_limit(network: nn.Module) -> int | None:
    """Returns the number of tokens for which a network has learned positions, or None if it has no table of positions.

    RoBERTa and its relatives (XLM-RoBERTa, MPNet, ...) number positions from ``padding_idx + 1``, and OPT and BART from
    an ``offset``, so their tables have rows that no token uses.
    """
    limits = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Embedding) and _POSITION_TABLE.search(name):
            first = getattr(module, "offset", None) or (0 if module.padding_idx is None else module.padding_idx + 1)
            limits.append(module.num_embeddings - first)
    return min(limits, default=None)


def validate_max_seq_length(value: int | None, limit: int | None) -> int | None:
    """Returns a ``max_seq_length`` for a model with positions for ``limit`` tokens; None means no limit.

    Raises:
        TypeError: ``value`` is not an integer.
        ValueError: ``value`` is below 1 or above ``limit``, or is None although there is a limit.
    """
    if value is None:
        if limit is not None:
            raise ValueError(
                f"max_seq_length: the model has positions for {limit} tokens, so it needs a limit, got None"
            )
        return None
    value = validate_positive_int("max_seq_length", value)
    if limit is not None and value > limit:
        raise ValueError(
            f"max_seq_length: the model has positions for {limit} tokens, got {value}; longer documents need a model "
            "with more positions, several passages per document, or EvenChunks"
        )
    if value > NO_LIMIT:
        raise ValueError(f"max_seq_length: expected at most {NO_LIMIT} tokens, or None for no limit, got {value}")
    return value


def has_limit(max_seq_length: int | None) -> bool:
    """Returns whether a model's ``max_seq_length`` is a limit, and not one of the values that mean "no limit"."""
    return max_seq_length is not None and max_seq_length <= NO_LIMIT
