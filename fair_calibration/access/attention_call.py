"""The two kinds of attention call that a model makes, and who may take them over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fair_calibration.access.attention_bias import AttentionBias


class FusedCall(Protocol):
    """One call of attention as a whole: queries, keys and values in, output out."""

    @property
    def name(self) -> str:
        """The class of the attention module."""

    @property
    def query(self) -> Tensor:
        """(B, H, L, D)."""

    @property
    def key(self) -> Tensor:
        """(B, H_kv, K, D)."""

    @property
    def value(self) -> Tensor:
        """(B, H_kv, K, D_v)."""

    @property
    def scale(self) -> float:
        """What the products of query and key are multiplied by."""

    @property
    def bias(self) -> AttentionBias:
        """The masks and biases of the call."""

    def run_plain(self) -> tuple[Tensor, Tensor | None]:
        """Runs the model's own attention: the output (B, L, H, D_v) and, where it comes with it, the weights."""


@dataclass(frozen=True)
class SoftmaxCall:
    """One softmax by which a model that computes attention itself turns its logits into weights.

    Attributes:
        name: The class of the attention module.
        logits: (B, H, L, L), with biases and masks.
        softmax: Runs the model's own call: weights in the model's shape, in which (B, H) may be one dimension or more.
        hidden_below: Logits up to this one hide a key.
    """

    name: str
    logits: Tensor
    softmax: Callable[[], Tensor]
    hidden_below: float


class AttentionHandler(Protocol):
    """Takes over a model's attention calls during one forward pass."""

    def attend(self, call: FusedCall) -> tuple[Tensor, Tensor | None]:
        """Returns the output (B, L, H, D_v) and the weights or None."""

    def weigh(self, call: SoftmaxCall) -> Tensor:
        """Returns the weights, in the shape of ``call.softmax()``."""
