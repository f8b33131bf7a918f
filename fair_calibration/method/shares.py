"""Computes how much of a row's attention every basket and every isolated token gets.

The mass of a basket is the sum of the model's own attention weights over its keys. Its target share is what it gets by
full calibration. The share used is a blend of the two, weighted by the strength.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fair_calibration.config import FairConfig

MASKED = torch.finfo(torch.float32).min / 2
"""The logit of a key that a row cannot see: finite, so that rows and baskets without visible keys do not give NaN."""


class Shares(NamedTuple):
    """The parts of a row's attention, which sum to 1 over baskets and isolated tokens."""

    baskets: Tensor  # float32 (N, ...)
    isolated: Tensor  # float32 (I, ...)


def blended_shares(
    basket_lse: Tensor,
    isolated_logits: Tensor,
    basket_sizes: Tensor,
    isolated_visible: Tensor,
    *,
    n_kept: int,
    config: FairConfig,
) -> Shares:
    """Computes ``(1 - strength) * plain mass + strength * target share`` for every row (arXiv 2606.02737).

    The masses are computed from log-sum-exps and not by summing weights, so they are right even where the plain weights
    underflow to 0. In the shapes "..." stands for the rows, whose dimensions come last.

    Args:
        basket_lse: float32 (N, ...), the log-sum-exp of the logits of the keys in each basket; any finite value where
            the row sees none of them.
        isolated_logits: float32 (I, ...), the logits of the isolated tokens.
        basket_sizes: int64, broadcastable to (N, ...), the number of keys in each basket that the row sees.
        isolated_visible: bool, broadcastable to (I, ...), which isolated tokens the row sees.
        n_kept: The last ``n_kept`` isolated tokens keep their own mass.
        config: The settings, of which ``strength``, ``isolated_share`` and ``last_basket`` are used.

    Returns:
        The shares. A row that sees no content keeps its plain masses.
    """
    visible = basket_sizes > 0
    n_baskets, n_isolated = len(basket_lse), len(isolated_logits) - n_kept
    logits = torch.cat([basket_lse.where(visible, MASKED), isolated_logits.where(isolated_visible, MASKED)])
    mass = logits.softmax(0)

    target_isolated = mass[n_baskets:]
    if config.isolated_share != "preserve" and n_isolated:
        kept = target_isolated[n_isolated:]
        left = 1.0 - kept.sum(0)
        takes_share = isolated_visible[:n_isolated].to(mass.dtype)
        if config.isolated_share == "equal":
            share = left / (visible.sum(0) + takes_share.sum(0)).clamp(min=1)
        else:
            share = left * float(config.isolated_share)
        target_isolated = torch.cat([share * takes_share, kept])
    weights = (basket_sizes if config.last_basket == "proportional" else visible).to(mass.dtype)
    sees_content = visible.any(0).to(mass.dtype)
    per_weight = (1.0 - target_isolated.sum(0)) / weights.sum(0).clamp(min=1)
    target = torch.cat([per_weight * weights, target_isolated])
    blended = mass.lerp(target, config.strength * sees_content)
    return Shares(baskets=blended[:n_baskets], isolated=blended[n_baskets:])
