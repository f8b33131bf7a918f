"""The fast path for cls and last-token pooling: recompute the pooled token's one row, O(L), and blend it in."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.config import FairConfig
from fair_calibration.method.baskets import Baskets
from fair_calibration.method.shares import MASKED, blended_shares

_STEP_BYTES = 64 * 2**20  # of float32 keys or values at once, on devices where many small steps cost more than memory


class SeenKeys(NamedTuple):
    """What one row per sequence, or R rows of any heads, sees.

    Attributes:
        keys: bool (B, 1 or R, K).
        places: bool (B, 1 or R, N, S), of the places in baskets.
        sizes: int64 (N, B, 1 or R), how many keys of each basket.
        isolated: bool (I, B, 1 or R), of the isolated tokens.
    """

    keys: Tensor
    places: Tensor
    sizes: Tensor
    isolated: Tensor


def calibrate_pooled_row(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: AttentionBias,
    baskets: Baskets,
    *,
    scale: float,
    config: FairConfig,
    strength: float,
) -> None:
    """Overwrites the pooled row of every calibrated sequence in ``output`` with its calibrated one.

    Beside the plain attention this takes B x H x K logits in float32; no L x L matrix exists.

    Args:
        output: (B, L, H, D_v), the plain attention's output, changed in place.
        query: (B, H, L, D).
        key: (B, H_kv, K, D).
        value: (B, H_kv, K, D_v).
        bias: The call's masks and biases.
        baskets: The batch's geometry, on the same device.
        scale: What the products of query and key are multiplied by.
        config: A resolved config.
        strength: In [0, 1].
    """
    sequences = torch.arange(query.shape[0], device=query.device)
    query_row = query[sequences, :, baskets.pooled]  # (B, H, D)
    row_bias, seen = bias.keep("pooled", lambda: _read_row(bias, baskets))
    # The logits are handed over, not kept: they are as large as the weights.
    weights = blended_weights(_row_logits(query_row, key, row_bias, seen.keys, scale), seen, baskets, config, strength)
    row = _weighted_values(weights, value)  # (B, H, D_v)
    plain = output[sequences, baskets.pooled]
    output[sequences, baskets.pooled] = torch.where(baskets.calibrated[:, None, None], row.to(output.dtype), plain)


def _read_row(bias: AttentionBias, baskets: Baskets) -> tuple[Tensor | None, SeenKeys]:
    """Reads the pooled rows: their bias, broadcastable to (B, H, K), and what they see."""
    row_bias, visible = bias.rows(baskets.pooled, baskets.segment_of_key.shape[1])
    return row_bias, see_keys(visible, baskets)


def see_keys(visible: Tensor | None, baskets: Baskets) -> SeenKeys:
    """Looks what rows see, given which keys of the sequences' own they may: bool (B or 1, 1 or R, K), None for all."""
    in_sequence = (baskets.segment_of_key < baskets.n_baskets + baskets.isolated.shape[1])[:, None]
    keys = in_sequence if visible is None else visible & in_sequence
    n_sequences, n_rows, _ = keys.shape
    slots, isolated = (index[:, None].expand(-1, n_rows, -1) for index in (baskets.slots, baskets.isolated))
    places = (keys.gather(2, slots) & baskets.filled[:, None]).view(n_sequences, n_rows, baskets.n_baskets, -1)
    return SeenKeys(
        keys=keys,
        places=places,
        sizes=places.sum(-1).movedim(-1, 0),
        isolated=(keys.gather(2, isolated) & baskets.isolated_filled[:, None]).movedim(-1, 0),
    )


def blended_weights(logits: Tensor, seen: SeenKeys, baskets: Baskets, config: FairConfig, strength: float) -> Tensor:
    """Turns the logits of one row per sequence, float32 (B, H, K), into its blended attention weights."""
    n_sequences, n_heads, _ = logits.shape
    slots = baskets.slots[:, None].expand(-1, n_heads, -1)
    places = logits.gather(2, slots).view(n_sequences, n_heads, baskets.n_baskets, baskets.basket_size)
    places.masked_fill_(~seen.places, MASKED)
    # logsumexp by hand: in place, it halves the peak of memory.
    peak = places.detach().amax(-1, keepdim=True)
    lse = places.sub_(peak).exp_().sum(-1).log() + peak.squeeze(-1)
    del places

    isolated_logits = logits.gather(2, baskets.isolated[:, None].expand(-1, n_heads, -1))
    shares = blended_shares(
        lse.movedim(-1, 0),
        isolated_logits.movedim(-1, 0),
        seen.sizes,
        seen.isolated,
        n_kept=baskets.n_kept,
        config=config,
        strength=strength,
    )
    # A key's weight is its share of its basket's softmax, exp(logit - lse), times what the basket gets.
    nothing = torch.zeros_like(lse[..., :1])  # the segment of padding
    segment = baskets.segment_of_key[:, None].expand(-1, n_heads, -1)
    share = torch.cat([shares.baskets.movedim(0, -1), shares.isolated.movedim(0, -1), nothing], dim=-1)
    total = torch.cat([lse, isolated_logits, nothing], dim=-1)
    # Hidden first: of a hidden key exp(logit - total) could overflow.
    within = total.neg().gather(2, segment).add_(logits).masked_fill_(~seen.keys, -torch.inf).exp_()
    del logits
    return share.gather(2, segment).mul_(within)


def _row_logits(query_row: Tensor, key: Tensor, bias: Tensor | None, visible: Tensor, scale: float) -> Tensor:
    """Multiplies (B, H, D) with the keys (B, H_kv, K, D) in float32, giving logits (B, H, K), `MASKED` where hidden."""
    n_sequences, n_heads, dim = query_row.shape
    n_kv, n_keys = key.shape[1:3]
    grouped = query_row.float().view(n_sequences, n_kv, n_heads // n_kv, dim) * scale
    logits = torch.cat(
        [grouped[step] @ key[step].float().transpose(-1, -2) for step in _steps(key)] or [grouped.new_zeros(0)]
    )
    logits = logits.view(n_sequences, n_heads, n_keys)
    if bias is not None:
        logits += bias
    return logits.masked_fill_(~visible, MASKED)


def _weighted_values(weights: Tensor, value: Tensor) -> Tensor:
    """Sums the values (B, H_kv, K, D_v) by the weights, float32 (B, H, K), giving float32 (B, H, D_v)."""
    n_sequences, n_heads, n_keys = weights.shape
    n_kv = value.shape[1]
    grouped = weights.view(n_sequences, n_kv, n_heads // n_kv, n_keys)
    rows = torch.cat([grouped[step] @ value[step].float() for step in _steps(value)])
    return rows.view(n_sequences, n_heads, value.shape[-1])


def _steps(tensor: Tensor) -> list[slice]:
    """Cuts the batch so that float32 copies stay small. One sequence at a time needs no copy at all in float32."""
    n_sequences = tensor.shape[0]
    per_step = 1
    if tensor.device.type != "cpu":
        per_step = max(1, _STEP_BYTES // max(1, tensor[0].numel() * 4))
    return [slice(i, min(i + per_step, n_sequences)) for i in range(0, n_sequences, per_step)]
