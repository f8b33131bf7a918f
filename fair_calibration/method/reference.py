"""Attention calibration written out as plain loops: the implementation to read first.

For one query row of one head, let l_k be the logits of the keys k that the row may see (scaled products of query and
key, plus biases) and p = softmax(l) the model's own attention weights. The calibrated weights are computed in four
steps (arXiv 2601.16934 introduces full calibration, arXiv 2606.02737 the strength):

1. The isolated tokens (such as the CLS token) stand by themselves. All other tokens, the content, are cut into
   consecutive baskets of ``basket_size`` tokens; the last basket takes the remainder. (With ``last_basket="halves"``
   the content of two baskets is cut in the middle.)
2. Every isolated token i gets a target share s_i of the row's attention: its own plain weight p_i
   (``isolated_share="preserve"``), as much as a basket (``"equal"``), or a fixed number.
3. The N baskets of which the row sees at least one key split the rest equally: s_b = (1 - sum_i s_i) / N. (With
   ``last_basket="proportional"`` they split it by their numbers of such keys.) Within a basket the keys keep their
   proportions to each other: p'_k = s_b * q_k, where q is the softmax of l over the keys of basket b alone. For an
   isolated token p'_i = s_i.
4. The weights used are (1 - strength) * p + strength * p'.

This is done for the pooled token's row only (cls and last-token pooling), or for every row (mean pooling). The fast
implementations (`pooled_row`, `all_rows`, `softmax_weights`) are tested against this one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fair_calibration.access.attention_call import expand_heads
from fair_calibration.config import FairConfig
from fair_calibration.method.baskets import Baskets


class ReferenceAttention(NamedTuple):
    """The result of `calibrated_attention`.

    Attributes:
        output: (B, H, L, D_v), the weighted sums of the values.
        weights: (B, H, L, K), the attention weights; 0 where a row may not see a key.
    """

    output: Tensor
    weights: Tensor


class Roles(NamedTuple):
    """The positions of the keys that one row may see, by their role."""

    baskets: list[list[int]]  # those in each basket of which the row sees a key
    isolated: list[int]
    prompt: list[int]  # of a prompt that pooling excludes: these tokens always keep their own weights


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
) -> ReferenceAttention:
    """Computes attention with calibrated weights, one row after the other.

    Args:
        query: (B, H, L, D).
        key: (B, H_kv, K, D); H is a multiple of H_kv.
        value: (B, H_kv, K, D_v).
        baskets: The roles of the tokens, from `build_baskets`.
        visible: bool, broadcastable to (B, H, L, K): which keys each row may see. Padding must be excluded.
        bias: Added to the scaled logits, broadcastable to (B, H, L, K); None for no bias.
        scale: The factor of the products of query and key; None means 1 / sqrt(D).
        config: The settings, with "auto" resolved (`FairConfig.resolve`).

    Returns:
        The output and the weights, float64 for a float64 query and float32 otherwise. They are differentiable.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    n_sequences, n_heads, n_rows, _ = query.shape
    key, value = expand_heads(key, n_heads).to(dtype), expand_heads(value, n_heads).to(dtype)

    logits = query.to(dtype) @ key.transpose(-1, -2) * scale  # (B, H, L, K)
    if bias is not None:
        logits = logits + bias.to(dtype)
    all_visible: list[list[list[list[bool]]]] = visible.expand_as(logits).tolist()

    weights = []  # of every row, (K,) each
    for b in range(n_sequences):
        pooled_row = int(baskets.pooled[b])
        for h in range(n_heads):
            for row in range(n_rows):
                is_calibrated = baskets.is_calibrated[b] and (config.pooling == "mean" or row == pooled_row)
                strength = config.strength if is_calibrated else 0.0
                roles = _visible_roles(baskets, b, all_visible[b][h][row])
                weights.append(_row_weights(logits[b, h, row], roles, config, strength))
    all_weights = torch.stack(weights).view(logits.shape) if weights else torch.zeros_like(logits)
    return ReferenceAttention(output=all_weights @ value, weights=all_weights)


def _visible_roles(baskets: Baskets, sequence: int, visible: list[bool]) -> Roles:
    """Sorts the keys of a sequence that one row may see by their role, given ``visible`` for all K keys."""
    first_of_prompt = baskets.n_baskets + baskets.isolated.shape[1] - baskets.n_kept
    roles = Roles([[] for _ in range(baskets.n_baskets)], [], [])
    for k, segment in enumerate(baskets.segment_of_key[sequence].tolist()):  # the baskets come first
        if visible[k] and segment < baskets.n_baskets:
            roles.baskets[segment].append(k)
        elif visible[k]:
            (roles.isolated if segment < first_of_prompt else roles.prompt).append(k)
    return roles._replace(baskets=[keys for keys in roles.baskets if keys])


def _row_weights(logits: Tensor, roles: Roles, config: FairConfig, strength: float) -> Tensor:
    """Computes the weights (K,) of one row from its logits (K,); at strength 0 they are the plain softmax."""
    plain = torch.zeros_like(logits)
    keys = sorted([k for keys in roles.baskets for k in keys] + roles.isolated + roles.prompt)
    plain[keys] = logits[keys].softmax(0)
    if strength == 0 or not roles.baskets:  # a row that sees no content has nothing to calibrate
        return plain
    return (1 - strength) * plain + strength * _target_weights(logits, plain, roles, config)


def _target_weights(logits: Tensor, plain: Tensor, roles: Roles, config: FairConfig) -> Tensor:
    """Computes the fully calibrated weights p' (K,) of one row, whose visible keys have the given roles."""
    baskets, isolated, prompt = roles
    target = torch.zeros_like(plain)
    target[prompt] = plain[prompt]
    left = 1 - plain[prompt].sum()
    if config.isolated_share == "preserve":
        target[isolated] = plain[isolated]
    elif config.isolated_share == "equal":
        target[isolated] = left / (len(baskets) + len(isolated))
    else:
        target[isolated] = left * float(config.isolated_share)
    left = left - target[isolated].sum()

    n_content = sum(len(keys) for keys in baskets)
    for keys in baskets:
        share = left * len(keys) / n_content if config.last_basket == "proportional" else left / len(baskets)
        target[keys] = share * logits[keys].softmax(0)
    return target
