from __future__ import annotations

import pytest
import torch

from fair_calibration.method.kernels import Kernel, attend_with_lse, select_kernel
from fair_calibration.method.shares import MASKED
from tests.core.cases import assert_close

KERNELS: list[Kernel] = ["cpu_flash", "math"]
# Of values of size 3: a few roundings of float32; of the dtype (eps 2^-8, 2^-11) for the weights and the result.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def tensors(dtype: torch.dtype, n_kv: int = 2, n_keys: int = 9) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 5, 8), (2, n_kv, n_keys, 8), (2, n_kv, n_keys, 8)]
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("n_kv", [4, 2, 1])
@pytest.mark.parametrize("masks", ["none", "bias", "visible", "both", "one row", "per head"])
def test_equals_softmax(kernel: Kernel, dtype: torch.dtype, n_kv: int, masks: str) -> None:
    query, key, value = tensors(dtype, n_kv)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(2, 1, 5, 9, generator=generator) if masks in ("bias", "both") else None
    visible = None
    if masks in ("visible", "both"):
        visible = torch.rand(2, 1, 5, 9, generator=generator) < 0.6
        visible[..., 2] = True
    elif masks == "one row":
        bias, visible = torch.randn(1, 1, 1, 9, generator=generator), torch.arange(9)[None, None, None] > 1
    elif masks == "per head":
        bias, visible = (
            torch.randn(1, 4, 5, 9, generator=generator),
            torch.ones(5, 9, dtype=torch.bool).tril()[None, None],
        )
    output, lse = attend_with_lse(query, key, value, bias=bias, visible=visible, scale=0.3, kernel=kernel)
    logits = query.double() @ key.double().repeat_interleave(4 // n_kv, 1).transpose(-1, -2) * 0.3
    if bias is not None:
        logits = logits + bias
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    assert lse.dtype == torch.float32
    assert lse.shape == (2, 4, 5)
    assert output.shape == (2, 4, 5, 8)
    assert_close(output, logits.softmax(-1) @ value.double().repeat_interleave(4 // n_kv, 1), TOLERANCE[dtype])
    # Accumulated in float32, whatever the inputs; torch approximates exp for half precision (measured: 6e-5).
    fused_half = kernel == "cpu_flash" and dtype != torch.float32
    assert_close(lse, logits.logsumexp(-1), 2e-4 if fused_half else 5e-6)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_row_that_sees_nothing(kernel: Kernel, dtype: torch.dtype) -> None:
    query, key, value = tensors(dtype)
    visible = torch.ones(1, 1, 5, 9, dtype=torch.bool)
    visible[..., 3, :] = False
    output, lse = attend_with_lse(query, key, value, bias=None, visible=visible, scale=0.3, kernel=kernel)
    assert output.isfinite().all()
    assert lse.isfinite().all()
    assert (lse[:, :, 3] <= MASKED / 2).all()
    assert (lse[:, :, [0, 1, 2, 4]].abs() < 10).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_large_negative_biases(kernel: Kernel) -> None:
    query, key, value = tensors(torch.float32)
    bias = torch.full((1, 1, 5, 9), -5000.0)
    plain = attend_with_lse(query, key, value, bias=None, visible=None, scale=0.3, kernel=kernel)
    shifted = attend_with_lse(query, key, value, bias=bias, visible=None, scale=0.3, kernel=kernel)
    # A constant changes no weights; float32 resolves 5000 to 5e-4.
    assert_close(shifted[0], plain[0], 5e-3)
    assert_close(shifted[1] + 5000, plain[1], 5e-3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_single_key(kernel: Kernel) -> None:
    query, key, value = tensors(torch.float32, n_keys=1)
    output, lse = attend_with_lse(query, key, value, bias=None, visible=None, scale=1.0, kernel=kernel)
    assert_close(output, value.repeat_interleave(2, 1).expand_as(output), 1e-6)
    assert_close(lse, (query * key.repeat_interleave(2, 1)).sum(-1), 1e-5)


def test_select_kernel() -> None:
    query, _, value = tensors(torch.float32)
    assert select_kernel(query, value) == "cpu_flash"
    for dtype in (torch.bfloat16, torch.float16):
        assert select_kernel(query.to(dtype), value.to(dtype)) == "cpu_flash"
    assert select_kernel(query.double(), value.double()) == "math"
    assert select_kernel(query, value[..., :4]) == "math"
    assert select_kernel(query.to("meta"), value.to("meta")) == "math"


def test_gradients_select_the_differentiable_kernel() -> None:
    query, _, value = tensors(torch.float32)
    leaf = query.clone().requires_grad_()
    assert select_kernel(leaf, value) == "math"
    assert select_kernel(query, value.clone().requires_grad_()) == "math"
    with torch.no_grad():
        assert select_kernel(leaf, value) == "cpu_flash"
    # A model with frozen queries and values whose keys are trained.
    key = torch.randn(2, 2, 9, 8, requires_grad=True)
    output, lse = attend_with_lse(
        query, key, value.repeat(1, 1, 1, 1), bias=None, visible=None, scale=0.3, kernel="math"
    )
    (output.sum() + lse.sum()).backward()
    assert key.grad is not None
    assert key.grad.abs().max() > 0
