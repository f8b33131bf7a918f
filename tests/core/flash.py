"""A flash attention of the tests' own, which runs on CPUs, in place of the package that transformers calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, modeling_flash_attention_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_flash_attention_utils import _pad_input, _unpad_input

from fair_calibration.access import interface

HUB_NAME = "kernels-community/flash-attn2"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Computes attention over (B, L, H, D), as the function of this name of the package flash-attn does."""
    assert dropout_p == 0.0
    n_groups = q.shape[2] // k.shape[2]
    query, key, value = q.transpose(1, 2), *(t.repeat_interleave(n_groups, 2).transpose(1, 2) for t in (k, v))
    rows, keys = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    visible = torch.ones(len(rows), len(keys), dtype=torch.bool)
    left, right = window_size
    if left >= 0:
        visible &= keys >= rows - left
    if right >= 0:
        visible &= keys <= rows + right
    if causal:
        visible &= keys <= rows
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, visible, scale=softmax_scale)
    return output.transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """The same over sequences that stand one after the other, (T, H, D)."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    assert cu_seqlens_q[-1] == len(q)
    ends = cu_seqlens_q.tolist()
    parts = [
        flash_attn_func(q[None, a:b], k[None, a:b], v[None, a:b], dropout_p, softmax_scale, causal, window_size)[0]
        for a, b in pairwise(ends)
    ]
    return torch.cat(parts)


def lazy_imports(implementation: str, *_: Any, **__: Any) -> tuple[Any, ...]:
    """Takes the place of the function with which transformers loads the package, or a kernel of the hub."""
    if "/" in implementation:
        AttentionInterface.register(implementation, flash_attention_forward)
        AttentionMaskInterface.register(implementation, flash_attention_mask)
    return flash_attn_func, flash_attn_varlen_func, None, _pad_input, _unpad_input


@contextmanager
def pretend_flash_attention(*, is_installed: bool = True) -> Iterator[None]:
    """A context in which transformers believes that flash attention runs on CPUs.

    Args:
        is_installed: Whether transformers finds the package, or else only the kernel on the hub.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_flash_attention_utils, "_lazy_imports", lazy_imports)
        patch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
        # Where the package is missing, transformers replaces its name by that of the kernel on the hub.
        packages = modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX
        patch.setitem(packages[2], "general_availability_check", lambda: is_installed)
        patch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
        yield
    interface._flash_functions.clear()
    AttentionInterface.register("flash_attention_2", flash_attention_forward)
    AttentionInterface._global_mapping.pop(HUB_NAME, None)
