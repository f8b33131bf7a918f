"""The fast implementation for cls and last-token pooling, where only the pooled token's row is calibrated.

The model's own attention runs unchanged. Then this one row is recomputed in O(L) and written into the output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.access.attention_call import FusedCall
from fair_calibration.access.unpadded import pad_sequences
from fair_calibration.config import FairConfig
from fair_calibration.method.baskets import Baskets
from fair_calibration.method.shares import MASKED, blended_shares

_STEP_BYTES = 64 * 2**20  # of keys or values converted to float32 at once on accelerators, where small steps are slow


class VisibleKeys(NamedTuple):
    """Which keys some rows see: R rows of each sequence, or one for all heads."""

    keys: Tensor  # bool (B, 1 or R, K), by key position
    slots: Tensor  # bool (B, 1 or R, N, S), by slot of each basket; False for empty slots
    sizes: Tensor  # int64 (N, B, 1 or R), the number of keys seen in each basket
    isolated: Tensor  # bool (I, B, 1 or R), by isolated token


def calibrate_pooled_row(output: Tensor, call: FusedCall, baskets: Baskets, config: FairConfig) -> None:
    """Overwrites the pooled row of every calibrated sequence in ``output`` with its calibrated one.

    In addition to the plain attention this takes B x H x K logits in float32, but no L x K matrix.

    Args:
        output: (B, L, H, D_v), the output of the plain attention, changed in place; (1, T, H, D_v) for a batch without
            padding, whose keys and values are padded here.
        call: The attention call.
        baskets: The roles of the tokens, on the same device.
        config: The settings, with "auto" resolved.
    """
    key, value = call.key, call.value
    if call.offsets is None:
        rows = torch.arange(len(call.query), device=call.query.device), baskets.pooled
    else:
        begin = call.offsets[:-1]
        rows = torch.zeros_like(begin), begin + baskets.pooled
        length = baskets.segment_of_key.shape[1]
        key, value = (pad_sequences(t.transpose(1, 2), call.offsets, length).transpose(1, 2) for t in (key, value))
    row_bias, visible = call.bias.cached("pooled", lambda: _read_row(call.bias, baskets))
    # The logits are as large as the weights. No variable here refers to them, so that they can be freed early.
    weights = blended_weights(
        _row_logits(call.query[rows[0], :, rows[1]], key, row_bias, visible.keys, call.scale),
        visible,
        baskets,
        config,
    )
    row = _weighted_values(weights, value)  # (B, H, D_v)
    plain = output[rows]
    output[rows] = torch.where(baskets.calibrated[:, None, None], row.to(output.dtype), plain)


def _read_row(bias: AttentionBias, baskets: Baskets) -> tuple[Tensor | None, VisibleKeys]:
    """Reads the bias of the pooled rows, broadcastable to (B, H, K), and which keys they see."""
    row_bias, visible = bias.rows(baskets.pooled, baskets.segment_of_key.shape[1])
    return row_bias, find_visible_keys(visible, baskets)


def find_visible_keys(visible: Tensor | None, baskets: Baskets) -> VisibleKeys:
    """Sorts the keys that some rows see by basket.

    ``visible`` is bool (B or 1, 1 or R, K), or None if they see all keys. Padding is never visible.
    """
    in_sequence = (baskets.segment_of_key < baskets.n_baskets + baskets.isolated.shape[1])[:, None]
    keys = in_sequence if visible is None else visible & in_sequence
    n_sequences, n_rows, _ = keys.shape
    slots, isolated = (index[:, None].expand(-1, n_rows, -1) for index in (baskets.slots, baskets.isolated))
    visible_slots = keys.gather(2, slots) & baskets.filled[:, None]
    by_basket = visible_slots.view(n_sequences, n_rows, baskets.n_baskets, -1)
    return VisibleKeys(
        keys=keys,
        slots=by_basket,
        sizes=by_basket.sum(-1).movedim(-1, 0),
        isolated=(keys.gather(2, isolated) & baskets.isolated_filled[:, None]).movedim(-1, 0),
    )


def blended_weights(logits: Tensor, visible: VisibleKeys, baskets: Baskets, config: FairConfig) -> Tensor:
    """Turns logits into attention weights of the same shape, calibrated and blended with the plain ones.

    The logits are float32 (B, H, K), one row per sequence and head, or (B, R, K), any R rows per sequence. Those of
    keys that a row does not see are `MASKED`.
    """
    n_sequences, n_heads, _ = logits.shape
    slots = baskets.slots[:, None].expand(-1, n_heads, -1)
    by_basket = logits.gather(2, slots).view(n_sequences, n_heads, baskets.n_baskets, baskets.basket_size)
    by_basket.masked_fill_(~visible.slots, MASKED)
    # The same as torch.logsumexp, but in place, which halves the peak memory.
    peak = by_basket.detach().amax(-1, keepdim=True)
    lse = by_basket.sub_(peak).exp_().sum(-1).log() + peak.squeeze(-1)
    del by_basket

    isolated_logits = logits.gather(2, baskets.isolated[:, None].expand(-1, n_heads, -1))
    shares = blended_shares(
        lse.movedim(-1, 0),
        isolated_logits.movedim(-1, 0),
        visible.sizes,
        visible.isolated,
        n_kept=baskets.n_kept,
        config=config,
    )
    # The weight of a key is its weight within its basket, exp(logit - lse), times the basket's share.
    nothing = torch.zeros_like(lse[..., :1])  # for the segment of padding
    segment = baskets.segment_of_key[:, None].expand(-1, n_heads, -1)
    share = torch.cat([shares.baskets.movedim(0, -1), shares.isolated.movedim(0, -1), nothing], dim=-1)
    total = torch.cat([lse, isolated_logits, nothing], dim=-1)
    # Hidden keys are masked before exp, since exp(logit - total) could overflow for them.
    within = total.neg().gather(2, segment).add_(logits).masked_fill_(~visible.keys, -torch.inf).exp_()
    del logits
    return share.gather(2, segment).mul_(within)


def _row_logits(query_row: Tensor, key: Tensor, bias: Tensor | None, visible: Tensor, scale: float) -> Tensor:
    """Computes the logits, float32 (B, H, K), of one row (B, H, D) per sequence; `MASKED` for keys not visible."""
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
    """Sums values (B, H_kv, K, D_v) with weights, float32 (B, H, K), into outputs, float32 (B, H, D_v)."""
    n_sequences, n_heads, n_keys = weights.shape
    n_kv = value.shape[1]
    grouped = weights.view(n_sequences, n_kv, n_heads // n_kv, n_keys)
    rows = torch.cat([grouped[step] @ value[step].float() for step in _steps(value)])
    return rows.view(n_sequences, n_heads, value.shape[-1])


def _steps(tensor: Tensor) -> list[slice]:
    """Cuts the batch into slices whose float32 copies stay small."""
    # On CPUs one sequence at a time, since then float32 keys and values are multiplied without any copy.
    n_sequences = tensor.shape[0]
    per_step = 1
    if tensor.device.type != "cpu":
        per_step = max(1, _STEP_BYTES // max(1, tensor[0].numel() * 4))
    return [slice(i, min(i + per_step, n_sequences)) for i in range(0, n_sequences, per_step)]
