"""How much attention every basket and isolated token gets: the target shares, blended with the plain masses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fair_calibration.config import FairConfig

MASKED = torch.finfo(torch.float32).min / 2
"""The logit of a key that a row cannot see: finite, so that a row or basket without visible keys gives no NaN."""


class Shares(NamedTuple):
    """The attention of each basket, float32 (..., N), and of each isolated token, float32 (..., I)."""

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
    """Computes ``(1 - strength) * plain mass + strength * target share`` for every row (arXiv 2606.02737, section 3).

    All of it happens in log space, so that it stays right where the plain weights underflow to 0.

    Args:
        basket_lse: float32 (..., N), log-sum-exp of the logits of the keys in each basket; any finite value where the
            row sees none of them.
        isolated_logits: float32 (..., I), the logits of the isolated tokens.
        basket_sizes: (..., N), broadcastable: the number of keys of the basket that the row can see.
        isolated_visible: bool (..., I), broadcastable: which isolated tokens the row can see.
        n_kept: How many isolated tokens, the last ones, keep their own mass whatever the config says.
        config: The settings; only ``isolated_share`` and ``last_basket`` are read.
        strength: In [0, 1].

    Returns:
        The shares, which sum to 1 over baskets and isolated tokens. A row that sees no content keeps its plain masses.
    """
    visible = basket_sizes > 0
    lse = torch.where(visible, basket_lse, MASKED)
    logits = torch.where(isolated_visible, isolated_logits, MASKED)
    mass = torch.cat([lse, logits], dim=-1).softmax(dim=-1)
    n_baskets = lse.shape[-1]
    basket_mass, isolated_mass = mass[..., :n_baskets], mass[..., n_baskets:]
    n_isolated = logits.shape[-1] - n_kept

    target_isolated = isolated_mass
    if config.isolated_share != "preserve" and n_isolated:
        kept_mass = isolated_mass[..., n_isolated:].sum(-1, keepdim=True)
        seen = isolated_visible[..., :n_isolated].to(mass.dtype)
        if config.isolated_share == "equal":
            n_shares = visible.sum(-1, keepdim=True) + seen.sum(-1, keepdim=True)
            share = (1.0 - kept_mass) / n_shares.clamp(min=1)
        else:
            share = (1.0 - kept_mass) * float(config.isolated_share)
        target_isolated = torch.cat([(share * seen).expand_as(isolated_mass[..., :n_isolated]), isolated_mass[..., n_isolated:]], -1)
    rest = 1.0 - target_isolated.sum(-1, keepdim=True)
    weights = (basket_sizes if config.last_basket == "proportional" else visible).to(mass.dtype)
    target_baskets = rest * (weights / weights.sum(-1, keepdim=True).clamp(min=1))

    # Where a row sees no content there is nothing to share out: it keeps its plain masses.
    amount = strength * visible.any(-1, keepdim=True).to(mass.dtype)
    return Shares(
        baskets=torch.lerp(basket_mass, target_baskets.expand_as(basket_mass), amount),
        isolated=torch.lerp(isolated_mass, target_isolated, amount),
    )
