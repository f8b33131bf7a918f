"""Calibration of attention weights that a model makes by a softmax: rows overwritten, in blocks, from its logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fair_calibration.config import FairConfig
from fair_calibration.method.baskets import Baskets
from fair_calibration.method.pooled_row import blended_weights, see_keys
from fair_calibration.method.shares import MASKED, blended_shares

_CPU_BYTES = 2**21  # of float32 logits held at once: few enough to stay in cache
_DEVICE_BYTES = 256 * 2**20
_LEAST_MASS = 1e-20  # of a basket that float32 weights hold as well as logits would


def calibrate_weights(
    weights: Tensor,
    logits: Tensor,
    baskets: Baskets,
    *,
    hidden_below: float,
    config: FairConfig,
    strength: float,
) -> None:
    """Overwrites the pooled row, or for mean pooling every valid row, of every calibrated sequence in ``weights``.

    The rows are computed from the logits, in float32 and log space, a block of rows at a time. So there is no L x L
    matrix beside the model's own two, and weights that underflow to 0 in the model's softmax count all the same.

    Args:
        weights: (B, H, L, L), the softmax of the logits, changed in place.
        logits: (B, H, L, L), with biases and masks.
        baskets: The batch's geometry, on the same device.
        hidden_below: Logits up to this one hide a key from a row. Keys of padding are hidden whatever their logits.
        config: A resolved config.
        strength: In [0, 1].
    """
    if config.pooling != "mean":
        pooled = torch.arange(weights.shape[0], device=weights.device), slice(None), baskets.pooled
        row = _gathered_rows(logits[pooled], baskets, hidden_below, config, strength)
        weights[pooled] = torch.where(baskets.calibrated[:, None, None], row.to(weights.dtype), weights[pooled])
        return
    n_sequences, n_heads, length, _ = weights.shape
    calibrated = [i for i, is_calibrated in enumerate(baskets.is_calibrated) if is_calibrated]
    together = all(baskets.content[i] is not None for i in calibrated)
    if weights.device.type == "cpu" and together and not weights.requires_grad:
        # One sequence at a time: no padding is computed, and a basket is a slice of the keys.
        n_rows = max(1, _CPU_BYTES // (4 * n_heads * length))
        for i in calibrated:
            for rows in _blocks(*baskets.valid[i], n_rows):
                _calibrate_block(weights[i, :, rows], logits[i, :, rows], baskets, i, hidden_below, config, strength)
        return
    # All at once: elsewhere many small launches would cost more than the padding does.
    n_rows = max(1, _DEVICE_BYTES // (4 * n_sequences * n_heads * length))
    for rows in _blocks(0, length, n_rows):
        block = logits[:, :, rows]
        new = _gathered_rows(block.flatten(1, 2), baskets, hidden_below, config, strength).view(block.shape)
        keep = ~baskets.calibrated[:, None, None, None]
        weights[:, :, rows] = torch.where(keep, weights[:, :, rows], new.to(weights.dtype))


def _blocks(start: int, stop: int, n_rows: int) -> list[slice]:
    return [slice(first, min(first + n_rows, stop)) for first in range(start, stop, n_rows)]


def _gathered_rows(
    logits: Tensor, baskets: Baskets, hidden_below: float, config: FairConfig, strength: float
) -> Tensor:
    """Returns the blended weights, float32 (B, R, L), of R rows of any heads per sequence, given their logits."""
    logits = logits.float()
    seen = see_keys(~(logits <= hidden_below), baskets)  # NaN hides no key
    return blended_weights(logits.masked_fill(~seen.keys, MASKED), seen, baskets, config, strength)


def _calibrate_block(
    weights: Tensor,
    logits: Tensor,
    baskets: Baskets,
    sequence: int,
    hidden_below: float,
    config: FairConfig,
    strength: float,
) -> None:
    """Overwrites some rows (H, l, L) of a sequence whose content stands together: each basket's softmax, rescaled."""
    positions, filled = baskets.isolated[sequence], baskets.isolated_filled[sequence]
    isolated = logits[..., positions].float()
    seen = filled & ~(isolated <= hidden_below)
    first, stop = baskets.content[sequence] or (0, 0)
    statistics = _of_weights(_cut(weights, first, stop, baskets.basket_size), config)
    block = weights
    if statistics is not None:
        isolated = weights[..., positions].log()  # as the baskets' are of weights too
    else:
        if weights.dtype != torch.float32:
            block = torch.empty_like(weights, dtype=torch.float32)
        block[..., first:stop] = logits[..., first:stop]
        statistics = _of_logits(_cut(block, first, stop, baskets.basket_size), hidden_below)
    shares = blended_shares(
        torch.cat([part.lse for part in statistics], -1).movedim(-1, 0),
        isolated.where(seen, MASKED).movedim(-1, 0),
        torch.cat([part.size for part in statistics], -1).movedim(-1, 0),
        seen.movedim(-1, 0),
        n_kept=baskets.n_kept,
        config=config,
        strength=strength,
    )
    of_part = torch.split(shares.baskets.movedim(0, -1), [part.lse.shape[-1] for part in statistics], dim=-1)
    for part, share in zip(statistics, of_part, strict=True):
        part.keys.mul_((share / part.total)[..., None])
    if block is not weights:
        weights[..., first:stop] = block[..., first:stop]
    weights[..., positions[filled]] = shares.isolated[filled].movedim(0, -1).to(weights.dtype)


class _Part(NamedTuple):
    """Consecutive baskets of one size.

    Attributes:
        keys: (H, l, n, S), a view, in every basket in proportion to the weights.
        total: (H, l, n), the sum over a basket.
        lse: The log-sum-exp of its logits; all parts of a block may be off by the same.
        size: int64 (H, l, n), how many of its keys the row sees.
    """

    keys: Tensor
    total: Tensor
    lse: Tensor
    size: Tensor


def _cut(block: Tensor, first: int, stop: int, size: int) -> list[Tensor]:
    """Cuts the content of (H, l, L) into full baskets and the remainder: views (H, l, n, S), one or two."""
    n_full, n_rest = divmod(stop - first, size)
    full = [block[..., first : stop - n_rest].view(*block.shape[:2], n_full, size)] if n_full else []
    return full + ([block[..., None, stop - n_rest : stop]] if n_rest else [])


def _of_weights(parts: list[Tensor], config: FairConfig) -> list[_Part] | None:
    """Takes the plain weights as they are, which is faster; None where something of them would be lost.

    That is where a basket has next to no mass, or the weights are of low precision; and where it has to be known how
    many keys of a basket are hidden.
    """
    if config.last_basket == "proportional" or parts[0].dtype != torch.float32:
        return None
    totals = [keys.sum(-1) for keys in parts]
    if not all(total.amin() > _LEAST_MASS for total in totals):  # NaN as well
        return None
    sizes = [
        torch.full_like(total, keys.shape[-1], dtype=torch.int64) for keys, total in zip(parts, totals, strict=True)
    ]
    return [_Part(*part) for part in zip(parts, totals, [total.log() for total in totals], sizes, strict=True)]


def _of_logits(parts: list[Tensor], hidden_below: float) -> list[_Part]:
    """Turns logits into exponentials, in place."""
    statistics = []
    for keys in parts:
        size = torch.full(keys.shape[:3], keys.shape[3])
        if not keys.amin() > hidden_below:  # hidden keys or NaN
            hidden = keys <= hidden_below
            keys.masked_fill_(hidden, MASKED)
            size -= hidden.sum(-1)
        peak = keys.amax(-1, keepdim=True)
        total = keys.sub_(peak).exp_().sum(-1)
        statistics.append(_Part(keys, total, total.log() + peak.squeeze(-1), size))
    return statistics
