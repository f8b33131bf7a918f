from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fair_calibration.access.attention_bias import AttentionBias
from tests.core.cases import MASKS, Case, make_case, masked_variants

CPU = torch.device("cpu")


def spelled_out(added: Tensor | None, visible: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Expands what was read; biases of hidden keys mean nothing."""
    visible = torch.ones(1, dtype=torch.bool) if visible is None else visible
    added = torch.zeros(1) if added is None else added
    assert visible.dtype == torch.bool
    assert added.dtype == torch.float32
    return added.expand(shape).masked_fill(~visible, 0.0), visible.expand(shape)


def expected_of(case: Case) -> tuple[Tensor, Tensor]:
    added, visible = case.full_bias_and_visible()
    return added.float().masked_fill(~visible, 0.0), visible


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks(mask: str, dtype: torch.dtype) -> None:
    case = masked_variants(make_case((13, 5, 9)))[mask].to(dtype)
    added, visible = expected_of(case)
    for sequences in (slice(0, 3), slice(1, 2)):
        n = sequences.stop - sequences.start
        for rows in (slice(0, 13), slice(4, 6)):
            block = case.bias.block(sequences, rows, slice(3, 8), CPU)
            shape = (n, 2, rows.stop - rows.start, 5)
            actual_added, actual_visible = spelled_out(*block, shape)
            assert torch.equal(actual_visible, visible[sequences, :, rows, 3:8])
            assert torch.equal(actual_added, added[sequences, :, rows, 3:8])

            keys = torch.tensor([[5, 0, 12], [1, 1, 2], [7, 8, 0]])[sequences]
            actual_added, actual_visible = spelled_out(*case.bias.block(sequences, rows, keys, CPU), (*shape[:3], 3))
            index = keys[:, None, None].expand(*shape[:3], 3)
            assert torch.equal(actual_visible, visible[sequences, :, rows].gather(3, index))
            assert torch.equal(actual_added, added[sequences, :, rows].gather(3, index))


@pytest.mark.parametrize("mask", MASKS)
def test_rows(mask: str) -> None:
    case = masked_variants(make_case((13, 5, 9)))[mask].to(torch.float32)
    added, visible = expected_of(case)
    rows = torch.tensor([12, 0, 4])
    actual_added, actual_visible = spelled_out(*case.bias.rows(rows, 13), (3, 2, 13))
    assert torch.equal(actual_visible, visible[torch.arange(3), :, rows])
    assert torch.equal(actual_added, added[torch.arange(3), :, rows])


def test_nothing_is_read_where_there_is_nothing() -> None:
    bias = AttentionBias(None, None, causal=False)
    assert bias.block(slice(0, 2), slice(0, 3), slice(0, 4), CPU) == (None, None)
    assert bias.rows(torch.tensor([1]), 4) == (None, None)


def test_a_bool_mask_adds_nothing() -> None:
    added, visible = AttentionBias(torch.ones(1, 1, 3, 3, dtype=torch.bool), None, causal=False).block(
        slice(0, 1), slice(0, 3), slice(0, 3), CPU
    )
    assert added is None
    assert visible is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_minimum_hides_and_large_biases_do_not(dtype: torch.dtype) -> None:
    lowest = torch.finfo(dtype).min
    row = torch.tensor([0.0, -10000.0, lowest, -torch.inf, 0.75 * lowest], dtype=dtype)
    _, visible = AttentionBias(row[None, None, None], None, causal=False).rows(torch.tensor([0]), 5)
    assert visible is not None
    assert visible.flatten().tolist() == [True, True, False, False, False]


def test_has_same_masks_with_windows() -> None:
    assert not AttentionBias(None, None, True, 4).has_same_masks(AttentionBias(None, None, True, 5))
    assert AttentionBias(None, None, True, 4).has_same_masks(AttentionBias(None, None, True, 4))
