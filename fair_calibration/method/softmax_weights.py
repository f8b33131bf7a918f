"""The implementation for models that compute attention themselves: it overwrites their softmax weights.

Such a model holds the logits and the weights of all rows in two matrices. The calibrated rows are computed from the
logits a block of rows at a time, so that no further matrix of this size is needed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fair_calibration.config import FairConfig
from fair_calibration.method.baskets import Baskets
from fair_calibration.method.pooled_row import blended_weights, find_visible_keys
from fair_calibration.method.shares import MASKED, blended_shares

_CPU_BYTES = 2**21  # the float32 logits held at once on CPUs, few enough to stay in cache
_DEVICE_BYTES = 256 * 2**20  # the same on other devices
_LEAST_MASS = 1e-20  # the least mass of a basket whose weights are as exact in float32 as its logits


def calibrate_weights(
    weights: Tensor, logits: Tensor, baskets: Baskets, *, hidden_below: float, config: FairConfig
) -> None:
    """Overwrites the weights of calibrated rows in every calibrated sequence.

    These are the pooled row or, for mean pooling, every row of a token. The computation is in float32 and uses
    log-sum-exps, so keys whose weights underflow to 0 in the model's softmax keep their part in their basket.

    Args:
        weights: (B, H, L, L), the softmax of the logits, changed in place.
        logits: (B, H, L, L), masks and biases included.
        baskets: The roles of the tokens, on the same device.
        hidden_below: A key whose logit is at most this is masked. Padding is masked whatever its logits are.
        config: The settings, with "auto" resolved.
    """
    if config.pooling != "mean":
        pooled = torch.arange(weights.shape[0], device=weights.device), slice(None), baskets.pooled
        row = _gathered_rows(logits[pooled], baskets, hidden_below, config)
        weights[pooled] = torch.where(baskets.calibrated[:, None, None], row.to(weights.dtype), weights[pooled])
        return
    n_sequences, n_heads, length, _ = weights.shape
    calibrated = [i for i, is_calibrated in enumerate(baskets.is_calibrated) if is_calibrated]
    together = all(baskets.content[i] is not None for i in calibrated)
    if weights.device.type == "cpu" and together and not weights.requires_grad:
        # One sequence at a time, so that no padding is computed and the baskets are slices of the keys.
        n_rows = max(1, _CPU_BYTES // (4 * n_heads * length))
        for i in calibrated:
            for rows in _blocks(*baskets.valid[i], n_rows):
                _calibrate_block(weights[i, :, rows], logits[i, :, rows], baskets, i, hidden_below, config)
        return
    # All sequences at once. On other devices many small kernel launches would cost more than the padding does.
    n_rows = max(1, _DEVICE_BYTES // (4 * n_sequences * n_heads * length))
    for rows in _blocks(0, length, n_rows):
        block = logits[:, :, rows]
        new = _gathered_rows(block.flatten(1, 2), baskets, hidden_below, config).view(block.shape)
        calibrated_sequences = baskets.calibrated[:, None, None, None]
        weights[:, :, rows] = torch.where(calibrated_sequences, new.to(weights.dtype), weights[:, :, rows])


def _blocks(start: int, stop: int, n_rows: int) -> list[slice]:
    """Cuts a range into slices of ``n_rows``; the last one takes the remainder."""
    return [slice(first, min(first + n_rows, stop)) for first in range(start, stop, n_rows)]


def _gathered_rows(logits: Tensor, baskets: Baskets, hidden_below: float, config: FairConfig) -> Tensor:
    """Returns the calibrated weights, float32 (B, R, L), of any R rows per sequence, given their logits (B, R, L)."""
    logits = logits.float()
    visible = find_visible_keys(~(logits <= hidden_below), baskets)  # written so that a logit of NaN is visible
    return blended_weights(logits.masked_fill(~visible.keys, MASKED), visible, baskets, config)


def _calibrate_block(
    weights: Tensor, logits: Tensor, baskets: Baskets, sequence: int, hidden_below: float, config: FairConfig
) -> None:
    """Overwrites some rows of one sequence, whose content tokens are consecutive.

    Within each basket the weights keep their proportions. So the weights of a basket, or the exponentials of its
    logits, only have to be scaled to the basket's share.
    """
    positions, filled = baskets.isolated[sequence], baskets.isolated_filled[sequence]
    isolated = logits[..., positions].float()
    isolated_visible = filled & ~(isolated <= hidden_below)
    first, stop = baskets.content[sequence] or (0, 0)
    parts = _parts_of_weights(_cut_content(weights, first, stop, baskets.sizes[sequence]), config)
    block = weights
    if parts is not None:
        # The log-sum-exps are those of log weights, which differ from the logits by a constant in each row. So the
        # logits of the isolated tokens have to be log weights, too.
        isolated = weights[..., positions].log()
    else:
        if weights.dtype != torch.float32:
            block = torch.empty_like(weights, dtype=torch.float32)
        block[..., first:stop] = logits[..., first:stop]
        parts = _parts_of_logits(_cut_content(block, first, stop, baskets.sizes[sequence]), hidden_below)
    shares = blended_shares(
        torch.cat([part.lse for part in parts], -1).movedim(-1, 0),
        isolated.where(isolated_visible, MASKED).movedim(-1, 0),
        torch.cat([part.size for part in parts], -1).movedim(-1, 0),
        isolated_visible.movedim(-1, 0),
        n_kept=baskets.n_kept,
        config=config,
    )
    part_shares = torch.split(shares.baskets.movedim(0, -1), [part.lse.shape[-1] for part in parts], dim=-1)
    for part, share in zip(parts, part_shares, strict=True):
        part.keys.mul_((share / part.total)[..., None])
    if block is not weights:
        weights[..., first:stop] = block[..., first:stop]
    weights[..., positions[filled]] = shares.isolated[filled].movedim(0, -1).to(weights.dtype)


class _Part(NamedTuple):
    """Consecutive baskets of the same size S: either all full ones, or the last one."""

    keys: Tensor  # (H, l, n, S), a view of the block of rows; within each basket, in proportion to the weights
    total: Tensor  # (H, l, n), the sum of ``keys`` over each basket
    lse: Tensor  # (H, l, n), the log-sum-exp of the logits in each basket, up to a constant of each row
    size: Tensor  # int64 (H, l, n), the number of keys in each basket that the row sees


def _cut_content(block: Tensor, first: int, stop: int, size: int) -> list[Tensor]:
    """Returns views (H, l, n, S) of the content of a block (H, l, L): the full baskets, and the shorter last one."""
    n_full, n_rest = divmod(stop - first, size)
    full = [block[..., first : stop - n_rest].view(*block.shape[:2], n_full, size)] if n_full else []
    return full + ([block[..., None, stop - n_rest : stop]] if n_rest else [])


def _parts_of_weights(baskets: list[Tensor], config: FairConfig) -> list[_Part] | None:
    """Takes the parts from the plain weights, so that the exponentials of the logits are not computed again.

    This is 2.7 times as fast (12 heads, 512 tokens). The result is None where the weights do not suffice: they are of
    low precision, a basket has next to no mass (its weights may have underflowed to 0), or hidden keys matter.
    """
    if config.last_basket == "proportional" or baskets[0].dtype != torch.float32:
        return None
    totals = [keys.sum(-1) for keys in baskets]
    if not all(total.amin() > _LEAST_MASS for total in totals):  # written so that NaN fails it
        return None
    sizes = [
        torch.full_like(total, keys.shape[-1], dtype=torch.int64) for keys, total in zip(baskets, totals, strict=True)
    ]
    return [_Part(*part) for part in zip(baskets, totals, [total.log() for total in totals], sizes, strict=True)]


def _parts_of_logits(baskets: list[Tensor], hidden_below: float) -> list[_Part]:
    """Computes the parts from the logits, which are replaced by their exponentials in place."""
    parts = []
    for keys in baskets:
        size = torch.full(keys.shape[:3], keys.shape[3])
        if not keys.amin() > hidden_below:  # some keys are hidden, or some logits are NaN
            hidden = keys <= hidden_below
            keys.masked_fill_(hidden, MASKED)
            size -= hidden.sum(-1)
        peak = keys.amax(-1, keepdim=True)
        total = keys.sub_(peak).exp_().sum(-1)
        parts.append(_Part(keys, total, total.log() + peak.squeeze(-1), size))
    return parts
