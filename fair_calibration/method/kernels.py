"""Attention that also returns the log-sum-exp of its logits, as `all_rows` needs it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fair_calibration.access.attention_call import expand_heads
from fair_calibration.method.shares import MASKED

Kernel = Literal["cpu_flash", "math"]
"""``"cpu_flash"``: torch's fused attention for CPUs. ``"math"``: matrix products, for any device, differentiable."""
_VECTOR = 16  # float32 numbers in an AVX-512 register


def select_kernel(query: Tensor, value: Tensor) -> Kernel:
    """Chooses the kernel for tensors of this device and dtype, regardless of their values."""
    fused = (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1]
        # The fused op has no gradient for the log-sum-exp.
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
    """Computes softmax attention and, for every row, the log-sum-exp of its logits.

    Args:
        query: (b, H, l, D).
        key: (b, H_kv, n, D); H is a multiple of H_kv.
        value: (b, H_kv, n, D_v).
        bias: float32, broadcastable to (b, H, l, n), added to the scaled logits; or None.
        visible: bool, broadcastable to (b, H, l, n), True where a row sees a key; or None if all rows see all keys.
        scale: The factor by which the products of query and key are multiplied.
        kernel: From `select_kernel`.

    Returns:
        The output (b, H, l, D_v), and the log-sum-exp, float32 (b, H, l). If a row sees no key, its output is some
        finite number and its log-sum-exp is about `MASKED`.
    """
    mask = bias
    if visible is not None:
        mask = torch.where(visible, 0.0 if bias is None else bias, MASKED)
    if kernel == "cpu_flash":
        # This op takes 1.6 times as long for 127 keys as for 128 (torch 2.13, AVX-512), so the keys are padded with
        # hidden ones to a multiple of the vector size.
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
