"""Attention that also returns the log-sum-exp of the logits: what the all-rows path is built on."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fair_calibration.method.shares import MASKED

Kernel = Literal["cpu_flash", "math"]
"""``"cpu_flash"``: torch's fused attention for CPUs. ``"math"``: plain matrix products, any device, differentiable."""
_VECTOR = 16


def select_kernel(query: Tensor, value: Tensor) -> Kernel:
    """Returns the kernel for these tensors. The choice depends on their kind alone, so that it is reproducible."""
    fused = (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1]
        # The fused op gives no gradient of the log-sum-exp.
        and not (torch.is_grad_enabled() and (query.requires_grad or value.requires_grad))
    )
    return "cpu_flash" if fused else "math"


def attend_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None,
    visible: Tensor | None,
    scale: float,
    kernel: Kernel,
) -> tuple[Tensor, Tensor]:
    """Computes softmax attention and the log-sum-exp of its logits.

    Args:
        query: (b, H, l, D).
        key: (b, H_kv, n, D); H is a multiple of H_kv.
        value: (b, H_kv, n, D_v).
        bias: float32, broadcastable to (b, H, l, n), added to the scaled logits; or None.
        visible: bool, broadcastable to (b, H, l, n); or None where every key is seen.
        scale: What the products of query and key are multiplied by.
        kernel: From `select_kernel`.

    Returns:
        The output (b, H, l, D_v), and the log-sum-exp, float32 (b, H, l). Where a row sees no key the output is finite
        and the log-sum-exp is about `MASKED`.
    """
    mask = bias
    if visible is not None:
        mask = torch.where(visible, 0.0 if bias is None else bias, MASKED)
    if kernel == "cpu_flash":
        # 127 keys take this op 1.6 times as long as 128 (torch 2.13, AVX-512), so hidden ones fill up the last vector.
        if n_missing := -key.shape[2] % _VECTOR:
            key, value = (torch.nn.functional.pad(tensor, (0, 0, 0, n_missing)) for tensor in (key, value))
            mask = key.new_zeros(1, 1, 1, key.shape[2] - n_missing, dtype=torch.float32) if mask is None else mask
            mask = torch.nn.functional.pad(mask, (0, n_missing), value=MASKED)
        key, value = expand_heads(key, query.shape[1]), expand_heads(value, query.shape[1])
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=mask, scale=scale
        )
        return output, lse
    key, value = expand_heads(key, query.shape[1]), expand_heads(value, query.shape[1])
    logits = query.float() @ key.float().transpose(-1, -2) * scale
    if mask is not None:
        logits = logits + mask
    lse = logits.logsumexp(-1)
    return (logits - lse[..., None]).exp() @ value.float(), lse


def expand_heads(tensor: Tensor, n_heads: int) -> Tensor:
    """Repeats the key or value heads (b, H_kv, n, D) of grouped-query attention to (b, H, n, D); one is not copied."""
    n_groups = n_heads // tensor.shape[1]
    if tensor.shape[1] == 1:
        return tensor.expand(-1, n_heads, -1, -1)
    return tensor if n_groups == 1 else tensor.repeat_interleave(n_groups, dim=1)
