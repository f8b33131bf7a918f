"""How the Triton kernel cuts its work into blocks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

PRECISION = "tf32x3"
"""float32 is multiplied on tensor cores in three parts, which keeps 21 bits or more of its 24."""


class Blocks(NamedTuple):
    """How the kernel cuts the work: rows and keys of a block, warps, and stages of loading ahead."""

    rows: int
    keys: int
    n_warps: int
    n_stages: int


def choose_blocks(n_rows: int, basket_size: int, dim: int, dtype: torch.dtype) -> Blocks:
    """Chooses the blocks for a number of rows (over all heads that share keys), the larger head size and a dtype.

    They are chosen by what the kernel, compiled for sm_80 and sm_90, needs of registers and shared memory
    (``benchmarks/compile_kernel.py``). Which of them are fastest was not measured.
    """
    block_d = block_of(dim)
    half = dtype != torch.float32
    largest = (128 if block_d <= 128 else 64) if half else (64 if block_d <= 128 else 32)
    # A basket is padded to whole blocks, and a block has costs of its own, taken to be those of 32 keys.
    keys = min(
        (128, 64, 32, 16), key=lambda size: -(-basket_size // size) * (size + 32) if size <= largest else math.inf
    )
    if half:
        rows, n_warps, n_stages = (64, 4, 3) if block_d <= 64 else (64, 8, 2) if block_d <= 128 else (32, 8, 2)
    else:
        rows, n_warps, n_stages = (32, 4, 2) if block_d <= 64 else (16, 8, 2)
    if n_rows <= 16 and rows > 16:
        return Blocks(16, keys, 4 if block_d <= 128 else 8, 2)
    return Blocks(rows, keys, n_warps, n_stages)


def block_of(dim: int) -> int:
    """Returns the number of dimensions that the kernel computes with: the next power of 2, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())
