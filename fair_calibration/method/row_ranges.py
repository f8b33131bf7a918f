"""Reads masks as one range of keys per row, which takes O(L) memory where the mask itself is L x K.

Causal attention, sliding windows and padding all let a row see the tokens of one range of positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.method.baskets import Baskets

_BLOCK_BYTES = 64 * 2**20  # of the mask, compared with the ranges at once


class RowRanges(NamedTuple):
    """The keys that rows see: those from ``lowest`` to below ``highest``, both int32 (B or 1, R or 1)."""

    lowest: Tensor
    highest: Tensor


def find_row_ranges(bias: AttentionBias, baskets: Baskets, pooled: Tensor | None) -> RowRanges | None:
    """Reads the masks of an attention call as ranges. The values of a mask, if there is one, are waited for.

    Args:
        bias: The masks.
        baskets: The roles of the tokens, on the device of the masks. Padding lies in no range that matters.
        pooled: The rows to read, int64 (B,), one per sequence; None for all L rows.

    Returns:
        The ranges, or None if every row sees all tokens of its sequence.

    Raises:
        ValueError: Something is added to the logits, heads see different keys, or a row sees tokens on both sides of
            others that it does not see.
    """
    if bias.is_additive:
        raise ValueError("a bias is added to its logits, or its mask is an additive one")
    if bias.is_per_head:
        raise ValueError("its heads see different keys")
    length = baskets.segment_of_key.shape[1]
    device = baskets.segment_of_key.device
    rows = torch.arange(length, device=device)[None] if pooled is None else pooled[:, None]  # (B or 1, R)
    lowest, highest = torch.zeros_like(rows), torch.full_like(rows, length)
    if bias.causal:
        highest = rows + 1
    if bias.window is not None:
        lowest, highest = rows - bias.window + 1, torch.minimum(highest, rows + bias.window)
    sees_all = not bias.causal and bias.window is None
    if bias.mask is not None:
        of_mask, sees_whole_mask = _ranges_of_mask(bias.mask, baskets, pooled)
        sees_all = sees_all and sees_whole_mask
        lowest, highest = torch.maximum(lowest, of_mask.lowest), torch.minimum(highest, of_mask.highest)
    return None if sees_all else RowRanges(lowest.int(), highest.int())


def _ranges_of_mask(mask: Tensor, baskets: Baskets, pooled: Tensor | None) -> tuple[RowRanges, bool]:
    """Returns the ranges of a bool mask (B or 1, 1, L or 1, K), and whether the rows of tokens see all tokens."""
    is_token = baskets.segment_of_key < baskets.n_baskets + baskets.isolated.shape[1]  # (B, K)
    n_sequences, n_keys = is_token.shape
    mask = mask.expand(n_sequences, -1, -1, -1)[:, 0]  # (B, L or 1, K)
    if mask.shape[1] > 1 and mask.stride(1) == 0:  # one row, broadcast to all
        mask = mask[:, :1]
    is_row = torch.ones_like(is_token[:, :1])
    if mask.shape[1] > 1 and pooled is not None:
        mask = mask[torch.arange(n_sequences, device=mask.device), pooled][:, None]
    elif mask.shape[1] > 1:
        is_row = is_token
    positions = torch.arange(n_keys, device=mask.device)
    n_rows = max(1, _BLOCK_BYTES // max(1, n_sequences * n_keys))
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, mask.shape[1], n_rows):
        seen = mask[:, start : start + n_rows] & is_token[:, None]  # (B, r, K)
        first = seen.to(torch.uint8).argmax(-1)
        stop = n_keys - seen.flip(-1).to(torch.uint8).argmax(-1)
        stop = torch.where(seen.any(-1), stop, 0)
        in_range = (positions >= first[..., None]) & (positions < stop[..., None]) & is_token[:, None]
        matters = is_row[:, start : start + n_rows, None]
        parts.append((first, stop, (seen != in_range) & matters, (seen != is_token[:, None]) & matters))
        parts[-1] = (first, stop, *(differs.any() for differs in parts[-1][2:]))
    first, stop = (torch.cat([part[i] for part in parts], 1) for i in (0, 1))
    has_gaps, hides_some = torch.stack([torch.stack([part[i] for part in parts]).any() for i in (2, 3)]).tolist()
    if has_gaps:
        raise ValueError("some of its rows see tokens on both sides of others that they do not see")
    return RowRanges(first, stop), not hides_some
