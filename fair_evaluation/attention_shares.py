"""Measures the share of attention that each part of a document gets in one forward pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fair_calibration.method.shares import MASKED, blended_shares
from fair_evaluation.observation import Batch, Call, count_heads, row_logits

_BLOCK_LOGITS = 4 * 2**20  # logits in memory at once

Array = NDArray[np.float64]


class ShareObserver:
    """Records how the pooled rows distribute their attention over baskets and isolated tokens in one forward pass.

    Attributes:
        shares: One float64 array of shape (B, H, N + I) per layer: the baskets, then the isolated tokens.
    """

    def __init__(self, batch: Batch, strength: float) -> None:
        """Prepares for a pass over ``batch`` at ``strength``; 0 means the plain model."""
        self.batch = batch
        self.strength = strength
        self.shares: list[Array] = []

    def __call__(self, layer: int, call: Call) -> None:
        """Records the shares of one layer."""
        shares = [self._mean_shares(layer, call, i) for i in range(len(self.batch.baskets.valid))]
        self.shares.append(torch.stack(shares).cpu().numpy())

    def of_document(self, sequence: int) -> Array:
        """Returns the shares of one document, shape (layers, H, N + I)."""
        return np.stack([layer[sequence] for layer in self.shares])

    def _mean_shares(self, layer: int, call: Call, sequence: int) -> Tensor:
        """Returns the mean shares over the rows, float64, shape (H, N + I)."""
        baskets = self.batch.baskets
        is_calibrated = layer in self.batch.layers and baskets.is_calibrated[sequence]
        strength = self.strength if is_calibrated else 0.0
        first, stop = baskets.valid[sequence]
        if self.batch.config.pooling == "mean":
            step = max(1, _BLOCK_LOGITS // (count_heads(call) * (stop - first)))
            blocks = [slice(start, min(start + step, stop)) for start in range(first, stop, step)]
        else:
            row = int(baskets.pooled[sequence])
            blocks = [slice(row, row + 1)]
        sums = [self._block_shares(call, sequence, rows, strength).double().sum(-1) for rows in blocks]
        n_rows = sum(rows.stop - rows.start for rows in blocks)
        return torch.stack(sums).sum(0).T / n_rows

    def _block_shares(self, call: Call, sequence: int, rows: slice, strength: float) -> Tensor:
        """Returns the shares of some rows, float32, shape (N + I, H, l)."""
        baskets = self.batch.baskets
        first, stop = baskets.valid[sequence]
        logits, visible = row_logits(call, sequence, rows, slice(first, stop))
        logits = logits.masked_fill(~visible, MASKED)
        segment = baskets.segment_of_key[sequence, first:stop]
        lse = [logits[..., segment == n].logsumexp(-1) for n in range(baskets.n_baskets)]
        sizes = [visible[..., segment == n].sum(-1) for n in range(baskets.n_baskets)]
        isolated = (baskets.isolated[sequence] - first).clamp(min=0)
        shares = blended_shares(
            torch.stack(lse),
            logits[..., isolated].movedim(-1, 0),
            torch.stack(sizes),
            (visible[..., isolated] & baskets.isolated_filled[sequence]).movedim(-1, 0),
            n_kept=baskets.n_kept,
            config=replace(self.batch.config, strength=strength),
        )
        return torch.cat([shares.baskets, shares.isolated])
