"""Batches without padding, in which sequences stand one after the other, as flash attention takes them.

sentence-transformers prepares such batches by itself for models with flash attention. Their features have cumulative
lengths (``cu_seq_lens_q``) instead of an attention mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fair_calibration.access.attention_call import FusedCall

OFFSETS = "cu_seq_lens_q"
"""The feature with the cumulative lengths: int32 (B + 1,), 0 and where each of the sequences ends."""


def attention_mask_of(features: Mapping[str, Any]) -> Tensor | None:
    """Returns the attention mask of a batch, (B, L), or None if its features do not have one.

    For a batch without padding it is the mask that the batch would have if it were padded on the right.
    """
    mask: Tensor | None = features.get("attention_mask")
    if mask is not None or features.get(OFFSETS) is None:
        return mask
    lengths: Tensor = features[OFFSETS].diff()
    length = features.get("max_length_q")
    positions = torch.arange(int(lengths.max()) if length is None else int(length), device=lengths.device)
    return positions < lengths[:, None]


def sequence_lengths(features: Mapping[str, Any]) -> Tensor:
    """Returns the number of tokens of each sequence of a batch, int64 (B,), of text that was tokenized."""
    lengths: Tensor = features["attention_mask"].sum(1) if "attention_mask" in features else features[OFFSETS].diff()
    return lengths.long()


def pad_sequences(tensor: Tensor, offsets: Tensor, length: int) -> Tensor:
    """Pads sequences on the right: (1, T, ...) becomes (B, L, ...), with values of other sequences as padding."""
    rows = offsets[:-1, None] + torch.arange(length, device=offsets.device)
    return tensor[0][rows.clamp(max=tensor.shape[1] - 1)]


def unpad_sequences(tensor: Tensor, offsets: Tensor, n_tokens: int) -> Tensor:
    """Takes the padding on the right away: (B, L, ...) becomes (1, T, ...)."""
    rows = torch.arange(n_tokens, device=offsets.device, dtype=offsets.dtype)
    sequence = torch.bucketize(rows, offsets[1:], right=True)
    return tensor[sequence, rows - offsets[sequence]][None]


def pad_call(call: FusedCall, offsets: Tensor, length: int) -> FusedCall:
    """Returns a call without padding as one of (B, L) positions. Nothing hides the padding from the other rows.

    Queries, keys and values are copied.
    """
    query, key, value = (
        pad_sequences(tensor.transpose(1, 2), offsets, length).transpose(1, 2)
        for tensor in (call.query, call.key, call.value)
    )

    def run_plain() -> tuple[Tensor, None]:
        return pad_sequences(call.run_plain()[0], offsets, length), None

    return replace(call, query=query, key=key, value=value, run_plain=run_plain, offsets=None)
