"""Reaches the attention of models that use transformers' AttentionInterface.

Two attention functions, "fair_sdpa" and "fair_eager", are registered with that interface, and one of them is set on the
model. During a calibrated forward pass it hands each attention call to the current handler (`handle_attention`). At all
other times it calls the implementation that the model was loaded with. The attention of models that do not use the
interface is intercepted instead (`interception`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.access.attention_call import AttentionHandler, FusedCall

BaseImplementation = Literal["sdpa", "eager"]
BASE_IMPLEMENTATIONS: tuple[BaseImplementation, ...] = ("sdpa", "eager")
# Soft-capped logits, attention sinks and unpadded batches: with these, softmax(scale * q k + bias) over (B, H, L, K) is
# not what the model computes.
_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "cu_seq_lens_q")


_handler: ContextVar[AttentionHandler | None] = ContextVar("fair_calibration_handler", default=None)


@contextmanager
def handle_attention(handler: AttentionHandler | None) -> Iterator[None]:
    """A context in which ``handler`` gets the attention calls of this thread; with None they run unchanged."""
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
    """Registers our attention functions with transformers; further calls change nothing."""
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
    handler, plain = _handler.get(), _base_function(base_name, module)
    if handler is None:
        return plain(module, query, key, value, attention_mask, **arguments)
    if unsupported := [name for name in _UNSUPPORTED_ARGUMENTS if arguments.get(name) is not None]:
        raise ValueError(
            f"{type(module).__name__} passes {unsupported} to its attention, which calibration does not support"
        )
    is_causal, scaling = arguments.get("is_causal"), arguments.get("scaling")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)  # transformers' own default
    # transformers leaves out the mask of sdpa, but never that of eager attention, where causality alone would do.
    causal = bool(is_causal) and attention_mask is None and query.shape[2] > 1 and base_name == "sdpa"
    return handler.attend(
        FusedCall(
            name=type(module).__name__,
            query=query,
            key=key,
            value=value,
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            bias=AttentionBias(attention_mask, arguments.get("position_bias"), causal),
            run_plain=partial(plain, module, query, key, value, attention_mask, **arguments),
            window=arguments.get("sliding_window"),  # the mask is made accordingly; this only says so
        )
    )


def _base_function(name: BaseImplementation, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Returns the model's own attention function."""
    function: Callable[..., tuple[Tensor, Tensor | None]] | None = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if name == "eager":  # every modeling file of transformers has a function of its own, under this name
        function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise ValueError(
            f"{type(module).__name__} has no eager attention function; load the model with attn_implementation='sdpa'"
        )
    return function
