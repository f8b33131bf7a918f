"""What is added to the attention logits and which keys a row may see, read in small blocks and never as a whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionBias:
    """The masks and biases of one attention call, as transformers passes them.

    Attributes:
        mask: (B or 1, H or 1, L or 1, K): bool, True where a key may be seen, or additive, with -inf or the dtype's
            minimum where it may not; None for no mask.
        position_bias: Additive, broadcastable to (B, H, L, K), or None.
        causal: Whether row i sees the keys up to i only (transformers leaves ``mask`` out then).
    """

    mask: Tensor | None
    position_bias: Tensor | None
    causal: bool
    _kept: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def tells_as(self, other: AttentionBias) -> bool:
        """Whether both are of the same memory: most models hand one mask to all their layers, and none changes it."""
        pairs = (self.mask, other.mask), (self.position_bias, other.position_bias)
        return self.causal == other.causal and all(_is_same(*pair) for pair in pairs)

    def keep(self, key: Hashable, read: Callable[[], T]) -> T:
        """Returns what was read off under a key, and reads it the first time; for one batch and its baskets."""
        if key not in self._kept:
            self._kept[key] = read()
        kept: T = self._kept[key]
        return kept

    def block(
        self, sequences: slice, rows: slice, keys: Tensor | slice, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """Reads the block of some rows and keys of some consecutive sequences.

        Args:
            sequences: Which sequences, b of them.
            rows: Which rows, l of them, with explicit start and stop.
            keys: Which keys: a slice of n with explicit start and stop, or int64 (b, n).
            device: Where the attention runs.

        Returns:
            The additive bias (float32) and the visibility (bool), each broadcastable to (b, H, l, n), or None for 'no
            bias' and 'everything is seen'. Invisible keys are to be read off the visibility alone.
        """
        mask = None if self.mask is None else _take(self.mask, sequences, rows, keys)
        position_bias = None if self.position_bias is None else _take(self.position_bias, sequences, rows, keys)
        seen = None
        if self.causal and not (isinstance(keys, slice) and keys.stop - 1 <= rows.start):
            row_positions = torch.arange(rows.start, rows.stop, device=device)[:, None]
            if isinstance(keys, slice):
                seen = (torch.arange(keys.start, keys.stop, device=device) <= row_positions)[None, None]
            else:
                seen = keys[:, None, None, :] <= row_positions
        return _merge(mask, position_bias, seen)

    @property
    def is_per_head(self) -> bool:
        """Whether heads differ in what they see or are told."""
        return any(tensor is not None and tensor.shape[1] > 1 for tensor in (self.mask, self.position_bias))

    @property
    def is_added(self) -> bool:
        """Whether anything is added to the logits, beside hiding keys."""
        return self.position_bias is not None or (self.mask is not None and self.mask.dtype != torch.bool)

    def of_heads(self, heads: slice) -> AttentionBias:
        """Returns the part of some heads."""
        mask, position_bias = (
            t if t is None or t.shape[1] == 1 else t[:, heads] for t in (self.mask, self.position_bias)
        )
        return AttentionBias(mask, position_bias, self.causal)

    def rows(self, rows: Tensor, n_keys: int) -> tuple[Tensor | None, Tensor | None]:
        """Reads one row of every sequence: ``rows`` is int64 (B,). Returns as `block` does, for (B, H, K)."""
        mask = None if self.mask is None else _take_rows(self.mask, rows)
        position_bias = None if self.position_bias is None else _take_rows(self.position_bias, rows)
        seen = None
        if self.causal:
            seen = (torch.arange(n_keys, device=rows.device) <= rows[:, None])[:, None]
        return _merge(mask, position_bias, seen)


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one is other:
        return one is other
    return _place(one) == _place(other)


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _merge(
    mask: Tensor | None, position_bias: Tensor | None, seen: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    bias = None if position_bias is None else position_bias.float()
    visible = seen
    if mask is not None:
        if mask.dtype == torch.bool:
            mask_visible = mask
        else:
            # A minimum plus any real bias stays below half the minimum, and real biases stay far above it.
            mask_visible = mask > torch.finfo(mask.dtype).min / 2
            bias = mask.float() if bias is None else bias + mask.float()
        visible = mask_visible if visible is None else visible & mask_visible
    return bias, visible


def _take(tensor: Tensor, sequences: slice, rows: slice, keys: Tensor | slice) -> Tensor:
    if tensor.shape[0] > 1:
        tensor = tensor[sequences]
    if tensor.shape[2] > 1:
        tensor = tensor[:, :, rows]
    if isinstance(keys, slice):
        return tensor[..., keys]
    _, n_heads, n_rows, _ = tensor.shape
    index = keys[:, None, None, :].expand(-1, n_heads, n_rows, -1)
    return tensor.expand(keys.shape[0], -1, -1, -1).gather(3, index)


def _take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    if tensor.shape[2] == 1:
        return tensor[:, :, 0]
    return tensor.expand(rows.shape[0], -1, -1, -1)[torch.arange(rows.shape[0], device=rows.device), :, rows]
