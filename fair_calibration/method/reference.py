"""Attention calibration written out plainly: for teaching, and what the fast paths are tested against."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fair_calibration.config import FairConfig
from fair_calibration.method.baskets import Baskets


class ReferenceAttention(NamedTuple):
    """The output (B, H, L, D_v) and the attention weights (B, H, L, K)."""

    output: Tensor
    weights: Tensor


def calibrated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    baskets: Baskets,
    *,
    visible: Tensor,
    bias: Tensor | None = None,
    scale: float | None = None,
    config: FairConfig,
    strength: float | None = None,
) -> ReferenceAttention:
    """Computes calibrated attention with the whole L x K matrix at hand (arXiv 2601.16934; strength: 2606.02737).

    Args:
        query: (B, H, L, D).
        key: (B, H_kv, K, D); H is a multiple of H_kv.
        value: (B, H_kv, K, D_v).
        baskets: From `build_baskets`.
        visible: bool, broadcastable to (B, H, L, K): which keys each row may see; padding must be excluded.
        bias: Added to the scaled logits, broadcastable to (B, H, L, K).
        scale: What the products of query and key are multiplied by; None is 1 / sqrt(D).
        config: A resolved config.
        strength: None is the config's.

    Returns:
        The output and the weights, float32 (float64 for float64 input).
    """
    strength = config.strength if strength is None else strength
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    n_groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(n_groups, dim=1).to(dtype)
    value = value.repeat_interleave(n_groups, dim=1).to(dtype)
    logits = query.to(dtype) @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias.to(dtype)
    plain = _masked_softmax(logits, visible.expand_as(logits), dim=-1)

    # Where each row gets its mass from: one column per basket, then one per isolated token.
    in_segment = torch.nn.functional.one_hot(
        baskets.segment_of_key, baskets.n_baskets + baskets.isolated.shape[1] + 1
    ).bool()[..., :-1]  # (B, K, N + I); padding belongs to none
    seen = (visible[..., None] & in_segment[:, None, None]).expand(*logits.shape, -1)  # (B, H, L, K, N + I)
    n_seen = seen.sum(-2)  # (B, H, L, N + I)
    mass = plain @ in_segment[:, None].to(dtype)  # (B, H, L, N + I)

    n_baskets, n_segments = baskets.n_baskets, in_segment.shape[-1]
    is_basket = torch.arange(n_segments, device=query.device) < n_baskets
    is_kept = torch.arange(n_segments, device=query.device) >= n_segments - baskets.n_kept
    keeps_mass = is_kept if config.isolated_share != "preserve" else ~is_basket
    kept = torch.where(keeps_mass, mass, 0)
    left = 1 - kept.sum(-1, keepdim=True)
    takes_fixed = ~is_basket & ~keeps_mass & (n_seen > 0)
    if isinstance(config.isolated_share, float):
        fixed = torch.where(takes_fixed, left * config.isolated_share, 0)
        left = left - fixed.sum(-1, keepdim=True)
        parts = torch.where(is_basket & (n_seen > 0), 1.0, 0.0).to(dtype)
    else:
        fixed = torch.zeros_like(mass)
        parts = torch.where((is_basket & (n_seen > 0)) | takes_fixed, 1.0, 0.0).to(dtype)
    if config.last_basket == "proportional":
        # The isolated tokens' equal shares are those of plain baskets; the rest is split by size.
        per_part = left / parts.sum(-1, keepdim=True).clamp(min=1)
        fixed = fixed + torch.where(takes_fixed & ~is_basket, per_part * parts, 0)
        left = 1 - kept.sum(-1, keepdim=True) - fixed.sum(-1, keepdim=True)
        parts = torch.where(is_basket, n_seen, 0).to(dtype)
    target = kept + fixed + left * parts / parts.sum(-1, keepdim=True).clamp(min=1)

    # Within a segment the plain weights are kept in proportion: a softmax over its keys alone.
    within = _masked_softmax(logits[..., None].expand_as(seen), seen, dim=-2)  # (B, H, L, K, N + I)
    calibrated = (within * target[..., None, :]).sum(-1)

    sees_content = (n_seen[..., :n_baskets] > 0).any(-1, keepdim=True)
    change = sees_content & baskets.calibrated[:, None, None, None] & _calibrated_rows(baskets, config, logits)
    weights = torch.where(change, (1 - strength) * plain + strength * calibrated, plain)
    return ReferenceAttention(output=weights @ value, weights=weights)


def _masked_softmax(logits: Tensor, visible: Tensor, dim: int) -> Tensor:
    """Softmax over the visible entries; where there are none, as in rows of padding, every weight is 0."""
    return logits.masked_fill(~visible, torch.finfo(logits.dtype).min).softmax(dim) * visible


def _calibrated_rows(baskets: Baskets, config: FairConfig, logits: Tensor) -> Tensor:
    """Returns bool (B, 1, L, 1): the pooled token's row, or every row for mean pooling."""
    n_sequences, _, n_rows, _ = logits.shape
    if config.pooling == "mean":
        return torch.ones(n_sequences, 1, n_rows, 1, dtype=torch.bool, device=logits.device)
    rows = torch.arange(n_rows, device=logits.device)
    return (rows == baskets.pooled[:, None])[:, None, :, None]
