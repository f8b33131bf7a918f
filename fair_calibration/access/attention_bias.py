"""The masks and biases of an attention call, read for a few rows or keys at a time, never as a whole L x K matrix."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionBias:
    """What is added to the logits of one attention call, and which keys its rows may see.

    Attributes:
        mask: (B or 1, H or 1, L or 1, K), in one of the two forms that models pass: bool, True where a row may see a
            key, or floating-point, added to the logits, with -inf or the dtype's minimum where a row may not see a
            key. None if there is no mask.
        position_bias: Added to the logits, broadcastable to (B, H, L, K); None if there is none.
        causal: Whether row i may see only keys 0 to i. transformers sets this instead of passing a causal mask.
        window: Row i may see only keys at a distance below ``window``; None for no such limit. Flash attention is given
            this number instead of a mask.
    """

    mask: Tensor | None
    position_bias: Tensor | None
    causal: bool
    window: int | None = None
    _cache: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def has_same_masks(self, other: AttentionBias) -> bool:
        """Returns whether both consist of tensors that share storage, as most models pass one mask to all layers."""
        own, others = (map(_memory, (bias.mask, bias.position_bias)) for bias in (self, other))
        same_flags = (self.causal, self.window) == (other.causal, other.window)
        return same_flags and list(own) == list(others)

    def cached(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Returns what ``compute`` returned at the first call with this key, in the same batch."""
        if key not in self._cache:
            self._cache[key] = compute()
        result: T = self._cache[key]
        return result

    def block(
        self, sequences: slice, rows: slice, keys: Tensor | slice, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """Reads the bias and the visibility of some rows and keys.

        Args:
            sequences: Which b consecutive sequences.
            rows: Which l rows, a slice with explicit start and stop.
            keys: Which n keys: a slice with explicit start and stop, or positions, int64 (b, n).
            device: The device on which the attention runs.

        Returns:
            The bias (float32), None if nothing is added to the logits, and the visibility (bool, True where a row may
            see a key), None if every key is visible. Both are broadcastable to (b, H, l, n). The bias of a key that is
            not visible has no meaning.
        """
        mask = None if self.mask is None else _take(self.mask, sequences, rows, keys)
        position_bias = None if self.position_bias is None else _take(self.position_bias, sequences, rows, keys)
        visible = None
        skips = isinstance(keys, slice) and keys.stop - 1 <= rows.start and self.window is None
        if self._has_range and not skips:
            row_positions = torch.arange(rows.start, rows.stop, device=device)[:, None]
            if isinstance(keys, slice):
                visible = self._in_range(torch.arange(keys.start, keys.stop, device=device), row_positions)[None, None]
            else:
                visible = self._in_range(keys[:, None, None, :], row_positions)
        return _combine(mask, position_bias, visible)

    @property
    def _has_range(self) -> bool:
        return self.causal or self.window is not None

    def _in_range(self, keys: Tensor, rows: Tensor) -> Tensor:
        """Returns which keys lie where causality and the window let the rows see, given positions of both."""
        if self.window is None:
            return keys <= rows
        seen = keys > rows - self.window
        return seen & (keys <= rows if self.causal else keys < rows + self.window)

    @property
    def is_per_head(self) -> bool:
        """Whether the mask or the position bias differs between heads."""
        return any(tensor is not None and tensor.shape[1] > 1 for tensor in (self.mask, self.position_bias))

    @property
    def is_additive(self) -> bool:
        """Whether something may be added to the logits, rather than keys only being hidden."""
        return self.position_bias is not None or (self.mask is not None and self.mask.dtype != torch.bool)

    def select_heads(self, heads: slice) -> AttentionBias:
        """Returns the masks and biases of some of the heads."""
        mask, position_bias = (
            t if t is None or t.shape[1] == 1 else t[:, heads] for t in (self.mask, self.position_bias)
        )
        return AttentionBias(mask, position_bias, self.causal, self.window)

    def rows(self, rows: Tensor, n_keys: int) -> tuple[Tensor | None, Tensor | None]:
        """Reads the bias and visibility of one row of each sequence, int64 (B,), as `block` does, for (B, H, K)."""
        mask = None if self.mask is None else _take_rows(self.mask, rows)
        position_bias = None if self.position_bias is None else _take_rows(self.position_bias, rows)
        visible = None
        if self._has_range:
            visible = self._in_range(torch.arange(n_keys, device=rows.device), rows[:, None])[:, None]
        return _combine(mask, position_bias, visible)


def _memory(tensor: Tensor | None) -> object:
    """Returns where a tensor is in memory, and how it is laid out there."""
    return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _combine(
    mask: Tensor | None, position_bias: Tensor | None, in_range: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Turns a mask of either form, a position bias and the range of visible keys into one bias and one visibility."""
    bias = None if position_bias is None else position_bias.float()
    visible = in_range
    if mask is not None:
        if mask.dtype == torch.bool:
            mask_visible = mask
        else:
            # Some models add a real bias to the mask. The minimum plus any real bias stays below half of the minimum,
            # and real biases stay far above it.
            mask_visible = mask > torch.finfo(mask.dtype).min / 2
            bias = mask.float() if bias is None else bias + mask.float()
        visible = mask_visible if visible is None else visible & mask_visible
    return bias, visible


def _take(tensor: Tensor, sequences: slice, rows: slice, keys: Tensor | slice) -> Tensor:
    """Takes some sequences, rows and keys of (B or 1, H or 1, L or 1, K); dimensions of size 1 stay as they are."""
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
    """Takes one row of each sequence of (B or 1, H or 1, L or 1, K), giving (B or 1, H or 1, K)."""
    if tensor.shape[2] == 1:
        return tensor[:, :, 0]
    return tensor.expand(rows.shape[0], -1, -1, -1)[torch.arange(rows.shape[0], device=rows.device), :, rows]
