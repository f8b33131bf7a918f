"""The two kinds of attention calls that models make, and the protocol of what may take them over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fair_calibration.access.attention_bias import AttentionBias


@dataclass(frozen=True)
class FusedCall:
    """One call of a whole attention function: queries, keys and values go in, the output comes out.

    Attributes:
        name: The class name of the attention module.
        query: (B, H, L, D).
        key: (B, H_kv, K, D); H is a multiple of H_kv.
        value: (B, H_kv, K, D_v).
        scale: The factor by which the products of query and key are multiplied.
        bias: The masks and biases of the call.
        run_plain: Runs the model's own attention. It returns the output (B, L, H, D_v), and the attention weights if
            the model's attention returns them, else None.
    """

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    bias: AttentionBias
    run_plain: Callable[[], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class SoftmaxCall:
    """One softmax with which a model that computes attention by itself turns its logits into weights.

    Attributes:
        name: The class name of the attention module.
        logits: (B, H, L, L), masks and biases included.
        softmax: Runs the model's own softmax. The weights that it returns have the model's shape, in which (B, H) may
            be one dimension or more than two.
        hidden_below: A key whose logit is at most this is masked.
    """

    name: str
    logits: Tensor
    softmax: Callable[[], Tensor]
    hidden_below: float


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
