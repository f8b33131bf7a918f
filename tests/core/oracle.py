"""Calibrated attention in float64 Python loops, written from the definition, for the tests only.

For one query row of one head: logits l_k over the visible keys, p = softmax(l). Isolated tokens stand outside of the
baskets; the content is cut from the first on into baskets of B tokens. Within a basket the weights keep their
proportions, q_k = softmax over the basket's keys; the basket gets its target share s_b. The row used is
(1 - strength) p + strength s_b q_k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fair_calibration import FairConfig


@dataclass(frozen=True)
class Geometry:
    """The keys of one sequence by their role."""

    valid: list[int]
    isolated: list[int]
    kept: list[int]  # a prompt's tokens: they keep their mass
    baskets: list[list[int]]
    rows: list[int]  # the calibrated ones
    calibrated: bool


def geometry(mask: list[bool], config: FairConfig, prompt_length: int = 0) -> Geometry:
    """Reads the roles off one sequence's mask."""
    valid = [k for k, is_valid in enumerate(mask) if is_valid]
    bos = prompt_length if config.pooling == "cls" else 0  # pooling takes the first token behind the prompt
    isolated = []
    if config.isolate in ("bos", "bos_eos") and bos < len(valid):
        isolated.append(valid[bos])
    if config.isolate == "bos_eos" and len(valid) - 1 > bos:
        isolated.append(valid[-1])
    kept = [k for k in valid[:prompt_length] if k not in isolated]
    content = [k for k in valid if k not in isolated and k not in kept]
    size = config.basket_size
    if config.last_basket == "halves" and size < len(content) <= 2 * size:
        size = math.ceil(len(content) / 2)
    baskets = [content[i : i + size] for i in range(0, len(content), size)]
    least = config.basket_size if config.min_content is None else config.min_content
    calibrated = len(content) >= least
    if config.pooling == "mean":
        rows = valid
    elif config.pooling == "cls":
        rows = valid[bos : bos + 1]
    else:
        rows = valid[-1:]
    return Geometry(valid, isolated, kept, baskets, rows, calibrated)


def calibrated_row(logits: dict[int, float], shape: Geometry, config: FairConfig, strength: float) -> dict[int, float]:
    """Returns the weight of every visible key, of one row: ``logits`` holds the visible keys only."""
    total = log_sum_exp(list(logits.values()))
    plain = {k: math.exp(logit - total) for k, logit in logits.items()}
    baskets = [[k for k in basket if k in logits] for basket in shape.baskets]
    baskets = [basket for basket in baskets if basket]
    if not baskets:
        return plain
    isolated = [k for k in shape.isolated if k in logits]
    target = {k: plain[k] for k in shape.kept if k in logits}
    left = 1.0 - sum(target.values())
    for k in isolated:
        if config.isolated_share == "preserve":
            target[k] = plain[k]
        elif config.isolated_share == "equal":
            target[k] = left / (len(baskets) + len(isolated))
        else:
            target[k] = left * float(config.isolated_share)
    left = 1.0 - sum(target.values())
    n_content = sum(len(basket) for basket in baskets)
    for basket in baskets:
        share = left * len(basket) / n_content if config.last_basket == "proportional" else left / len(baskets)
        basket_total = log_sum_exp([logits[k] for k in basket])
        for k in basket:
            target[k] = share * math.exp(logits[k] - basket_total)
    return {k: (1 - strength) * plain[k] + strength * target[k] for k in logits}


def log_sum_exp(values: list[float]) -> float:
    """Returns log(sum(exp(v))) without overflow."""
    peak = max(values)
    return peak + math.log(sum(math.exp(v - peak) for v in values))


def oracle_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    visible: Tensor,
    bias: Tensor,
    scale: float,
    config: FairConfig,
    strength: float,
    prompt_length: int = 0,
) -> tuple[Tensor, Tensor]:
    """Computes the output (B, H, L, D_v) and the weights (B, H, L, K) in float64; rows of padding are left 0.

    Args:
        query: (B, H, L, D).
        key: (B, H_kv, K, D).
        value: (B, H_kv, K, D_v).
        attention_mask: (B, K), true for tokens.
        visible: bool (B, H, L, K), what the model's masks let each row see; padding need not be excluded.
        bias: (B, H, L, K).
        scale: Of the products.
        config: A resolved config.
        strength: In [0, 1].
        prompt_length: Leading tokens that pooling excludes.
    """
    n_sequences, n_heads, n_rows, _ = query.shape
    n_keys, n_kv = key.shape[2], key.shape[1]
    weights = torch.zeros(n_sequences, n_heads, n_rows, n_keys, dtype=torch.float64)
    products = query.double() @ key.double().repeat_interleave(n_heads // n_kv, 1).transpose(-1, -2) * scale
    all_logits = (products + bias.double()).tolist()
    all_visible = visible.tolist()
    for b in range(n_sequences):
        shape = geometry([bool(v) for v in attention_mask[b].tolist()], config, prompt_length)
        for h in range(n_heads):
            for row in shape.valid:
                logits = {k: all_logits[b][h][row][k] for k in shape.valid if all_visible[b][h][row][k]}
                if not logits:
                    continue
                change = strength if shape.calibrated and row in shape.rows else 0.0
                for k, weight in calibrated_row(logits, shape, config, change).items():
                    weights[b, h, row, k] = weight
    return weights @ value.double().repeat_interleave(n_heads // n_kv, 1), weights
