"""The two kinds of attention calls that models make, and the protocol of a handler that takes them over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fair_calibration.access.attention_bias import AttentionBias


@dataclass(frozen=True)
class FusedCall:
    """One call of a whole attention function: queries, keys and values go in, the output comes out.

    ``run_plain`` runs the model's own attention. It returns the output (B, L, H, D_v), and the attention weights if the
    model's attention returns them, else None. If ``offsets`` is given, the batch has no padding: its B sequences stand
    one after the other in tensors with B = 1 and L = T tokens together, and each sees itself only (`unpadded`).
    """

    name: str  # the class name of the attention module
    query: Tensor  # (B, H, L, D)
    key: Tensor  # (B, H_kv, K, D); H is a multiple of H_kv
    value: Tensor  # (B, H_kv, K, D_v)
    scale: float  # multiplies the products of query and key
    bias: AttentionBias
    run_plain: Callable[[], tuple[Tensor, Tensor | None]]
    window: int | None = None  # a token sees only tokens fewer positions away than this; None means all
    offsets: Tensor | None = None  # int32 (B + 1,), where the sequences of a batch without padding begin and end


@dataclass(frozen=True)
class SoftmaxCall:
    """One softmax with which a model that computes attention itself turns its logits into weights.

    ``softmax`` runs the model's own softmax. The weights that it returns have the model's shape, in which (B, H) may be
    one dimension or more than two.
    """

    name: str  # the class name of the attention module
    logits: Tensor  # (B, H, L, L), masks and biases included
    softmax: Callable[[], Tensor]
    hidden_below: float  # a key whose logit is at most this is masked


class AttentionHandler(Protocol):
    """Takes over the attention calls of a model during one forward pass."""

    def attend(self, call: FusedCall) -> tuple[Tensor, Tensor | None]:
        """Returns the output (B, L, H, D_v) and the attention weights, or None in their place."""

    def weigh(self, call: SoftmaxCall) -> Tensor:
        """Returns the attention weights in the shape that ``call.softmax()`` returns."""


def expand_heads(tensor: Tensor, n_heads: int) -> Tensor:
    """Repeats the key or value heads (B, H_kv, K, D) of grouped-query attention for all H = ``n_heads`` query heads.

    H has to be a multiple of H_kv. Nothing is copied if H_kv is 1 or H.
    """
    n_groups = n_heads // tensor.shape[1]
    if tensor.shape[1] == 1:
        return tensor.expand(-1, n_heads, -1, -1)
    return tensor if n_groups == 1 else tensor.repeat_interleave(n_groups, dim=1)
