"""Reaching the attention of models that use transformers' AttentionInterface.

We register attention functions of our own with that interface, "fair_sdpa" and "fair_eager", and set one of them on the
model. During a calibrated forward pass the function hands each attention call to the current handler (see
`handle_attention`). At all other times it only calls the implementation that the model was loaded with. The attention
of models that do not use the interface is intercepted instead (`interception`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.access.attention_call import AttentionHandler

BaseImplementation = Literal["sdpa", "eager"]
BASE_IMPLEMENTATIONS: tuple[BaseImplementation, ...] = ("sdpa", "eager")
# Soft-capped logits, attention sinks and unpadded batches: with these, softmax(scale * q k + bias) over (B, H, L, K) is
# not what the model computes.
_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "cu_seq_lens_q")
AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class AttentionCall:
    """One call of a model's attention through the AttentionInterface (a `FusedCall`).

    Attributes:
        module: The attention module.
        base: The attention function that the model was loaded with.
        base_name: Its name.
        query: (B, H, L, D).
        key: (B, H_kv, K, D).
        value: (B, H_kv, K, D_v).
        mask: As in `AttentionBias`.
        arguments: The other arguments of the call, such as ``scaling`` and ``is_causal``.
    """

    module: nn.Module
    base: AttentionFunction
    base_name: BaseImplementation
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """The class name of the attention module."""
        return type(self.module).__name__

    def run_plain(self) -> tuple[Tensor, Tensor | None]:
        """Runs the model's own attention: the output (B, L, H, D_v), and the weights if it is eager attention."""
        return self.base(self.module, self.query, self.key, self.value, self.mask, **self.arguments)

    @property
    def scale(self) -> float:
        """The factor by which the products of query and key are multiplied."""
        scaling = self.arguments.get("scaling")
        return self.query.shape[-1] ** -0.5 if scaling is None else float(scaling)

    @property
    def bias(self) -> AttentionBias:
        """The masks and biases of the call."""
        is_causal = self.arguments.get("is_causal")
        if is_causal is None:
            is_causal = getattr(self.module, "is_causal", True)  # transformers' own default
        # transformers leaves out the mask of sdpa, but never that of eager attention, where causality alone would do.
        causal = bool(is_causal) and self.mask is None and self.query.shape[2] > 1 and self.base_name == "sdpa"
        return AttentionBias(self.mask, self.arguments.get("position_bias"), causal)


_handler: ContextVar[AttentionHandler | None] = ContextVar("fair_calibration_handler", default=None)


@contextmanager
def handle_attention(handler: AttentionHandler | None) -> Iterator[None]:
    """Hands the attention calls of this thread to ``handler`` while the context lasts; None leaves them plain."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def base_implementation(transformer: Transformer) -> BaseImplementation:
    """Returns the name of the attention implementation that a transformer was loaded with.

    Raises:
        ValueError: It is not one of `BASE_IMPLEMENTATIONS`, or the model was not loaded with the torch backend.
    """
    if transformer.backend != "torch":
        raise ValueError(
            f"backend: calibration needs the torch backend, the model was loaded with {transformer.backend!r}"
        )
    current = transformer.model.config._attn_implementation
    base = str(current).removeprefix("fair_")
    if base not in BASE_IMPLEMENTATIONS:
        raise ValueError(
            f"attn_implementation: calibration works on top of {list(BASE_IMPLEMENTATIONS)}, the model was loaded "
            f"with {current!r}; load it with model_kwargs={{'attn_implementation': 'sdpa'}}"
        )
    return base


def implementation_name(base: BaseImplementation) -> str:
    """Returns the name under which our implementation on top of ``base`` is registered."""
    return f"fair_{base}"


def register_implementations() -> None:
    """Registers our attention functions with transformers. Calling it again changes nothing."""
    for base in BASE_IMPLEMENTATIONS:
        name = implementation_name(base)
        if name not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(name, partial(_attention_forward, base))
            # Without a mask function of the same name transformers passes no mask at all, and tokens would attend to
            # padding.
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])


def _attention_forward(
    base_name: BaseImplementation,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that transformers calls in place of ``base_name``'s."""
    base = _base_function(base_name, module)
    handler = _handler.get()
    if handler is None:
        return base(module, query, key, value, attention_mask, **arguments)
    if unsupported := [name for name in _UNSUPPORTED_ARGUMENTS if arguments.get(name) is not None]:
        raise ValueError(
            f"{type(module).__name__} passes {unsupported} to its attention, which calibration does not support"
        )
    return handler.attend(AttentionCall(module, base, base_name, query, key, value, attention_mask, arguments))


def _base_function(name: BaseImplementation, module: nn.Module) -> AttentionFunction:
    """Returns the model's own attention function."""
    if name == "sdpa":
        return cast(AttentionFunction, ALL_ATTENTION_FUNCTIONS["sdpa"])
    # Every modeling file of transformers has an eager function of its own, under this name.
    function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise ValueError(
            f"{type(module).__name__} has no eager attention function; load the model with attn_implementation='sdpa'"
        )
    return cast(AttentionFunction, function)
