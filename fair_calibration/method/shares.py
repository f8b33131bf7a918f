"""How much attention every basket and isolated token gets: the target shares, blended with the plain masses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fair_calibration.config import FairConfig

MASKED = torch.finfo(torch.float32).min / 2
"""The logit of a key that a row cannot see: finite, so that a row or basket without visible keys gives no NaN."""


class Shares(NamedTuple):
    """The attention of each basket, float32 (N, ...), and of each isolated token, float32 (I, ...)."""

    baskets: Tensor
    isolated: Tensor


def blended_shares(
    basket_lse: Tensor,
    isolated_logits: Tensor,
    basket_sizes: Tensor,
    isolated_visible: Tensor,
    *,
    n_kept: int,
    config: FairConfig,
    strength: float,
) -> Shares:
    """Computes ``(1 - strength) * plain mass + strength * target share`` for every row (arXiv 2606.02737).

    All of it happens in log space, so that it stays right where the plain weights underflow to 0. Baskets and isolated
    tokens come first in the shapes: "..." are the rows.

    Args:
        basket_lse: float32 (N, ...), log-sum-exp of the logits of the keys in each basket; any finite value where the
            row sees none of them.
        isolated_logits: float32 (I, ...), the logits of the isolated tokens.
        basket_sizes: (N, ...), broadcastable: the number of keys of the basket that the row can see.
        isolated_visible: bool (I, ...), broadcastable: which isolated tokens the row can see.
        n_kept: How many isolated tokens, the last ones, keep their own mass whatever the config says.
        config: The settings; only ``isolated_share`` and ``last_basket`` are read.
        strength: In [0, 1].

    Returns:
        The shares, which sum to 1 over baskets and isolated tokens. A row that sees no content keeps its plain masses.
    """
    visible = basket_sizes > 0
    n_baskets, n_isolated = len(basket_lse), len(isolated_logits) - n_kept
    logits = torch.cat([basket_lse.where(visible, MASKED), isolated_logits.where(isolated_visible, MASKED)])
    mass = logits.softmax(0)

    target_isolated = mass[n_baskets:]
    if config.isolated_share != "preserve" and n_isolated:
        kept = target_isolated[n_isolated:]
        left = 1.0 - kept.sum(0)
        seen = isolated_visible[:n_isolated].to(mass.dtype)
        if config.isolated_share == "equal":
            share = left / (visible.sum(0) + seen.sum(0)).clamp(min=1)
        else:
            share = left * float(config.isolated_share)
        target_isolated = torch.cat([share * seen, kept])
    weights = (basket_sizes if config.last_basket == "proportional" else visible).to(mass.dtype)
    # Where a row sees no content there is nothing to share out: it keeps its plain masses.
    sees_content = visible.any(0).to(mass.dtype)
    per_weight = (1.0 - target_isolated.sum(0)) / weights.sum(0).clamp(min=1)
    target = torch.cat([per_weight * weights, target_isolated])
    blended = mass.lerp(target, strength * sees_content)
    return Shares(baskets=blended[:n_baskets], isolated=blended[n_baskets:])
