"""Reaches the attention of models that use transformers' AttentionInterface.

Two attention functions, "fair_sdpa" and "fair_eager", are registered with that interface, and one of them is set on the
model. During a calibrated forward pass it hands each attention call to the current handler (`handle_attention`). At all
other times it calls the implementation that the model was loaded with. Flash attention is recognized by the name of the
implementation, in transformers and sentence-transformers alike. So its name stays, and the function registered under
it is replaced by one that does the same. The attention of models that do not use the interface is intercepted instead
(`interception`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.access.attention_call import AttentionHandler, FusedCall
from fair_calibration.access.unpadded import OFFSETS

BASE_IMPLEMENTATIONS = ("sdpa", "eager")
# With soft-capped logits and attention sinks, softmax(scale * q k + bias) is not what the model computes.
_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux")

_flash_functions: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {}  # transformers' own, by implementation

_handler: ContextVar[AttentionHandler | None] = ContextVar("fair_calibration_handler", default=None)


@contextmanager
def handle_attention(handler: AttentionHandler | None) -> Iterator[None]:
    """A context in which ``handler`` gets the attention calls of this thread; with None they run unchanged."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def base_implementation(transformer: Transformer) -> str:
    """Returns the name of the attention implementation that a transformer was loaded with.

    It is "sdpa", "eager", or the name of a flash attention: "flash_attention_2" or that of a kernel on the hub.

    Raises:
        ValueError: It is another one, or the model was not loaded with the torch backend.
    """
    if transformer.backend != "torch":
        raise ValueError(
            f"backend: calibration needs the torch backend, the model was loaded with {transformer.backend!r}"
        )
    current = str(transformer.model.config._attn_implementation)
    base = current.removeprefix("fair_")
    if base not in BASE_IMPLEMENTATIONS and not _is_flash(base):
        raise ValueError(
            f"attn_implementation: calibration works on top of {list(BASE_IMPLEMENTATIONS)} and flash attention, the "
            f"model was loaded with {current!r}; load it with model_kwargs={{'attn_implementation': 'sdpa'}}"
        )
    return base


def _is_flash(name: str) -> bool:
    is_paged = name.startswith("paged|")  # for generation with a cache of keys
    return not is_paged and is_flash_attention_requested(requested_attention_implementation=name)


def implementation_name(base: str) -> str:
    """Returns the name under which our implementation on top of ``base`` is registered."""
    return base if _is_flash(base) else f"fair_{base}"


def register_implementations(base: str = "sdpa") -> None:
    """Registers our attention functions with transformers; further calls change nothing.

    If ``base`` is a flash attention, it is loaded if need be, and its function is replaced, for all models. The new one
    calls it, and hands calls to the current handler if there is one.
    """
    for name in BASE_IMPLEMENTATIONS:
        own = implementation_name(name)
        if own not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(own, partial(_attention_forward, name))
            # Without a mask function of the same name transformers passes no mask at all, and tokens would attend to
            # padding.
            AttentionMaskInterface.register(own, ALL_MASK_ATTENTION_FUNCTIONS[name])
    if not _is_flash(base):
        return
    if base not in ALL_ATTENTION_FUNCTIONS:
        lazy_import_flash_attention(base)  # registers a kernel of the hub, as in a worker process
    function = ALL_ATTENTION_FUNCTIONS[base]
    if not (isinstance(function, partial) and function.func is _attention_forward):
        _flash_functions[base] = function
        AttentionInterface.register(base, partial(_attention_forward, base))


def _attention_forward(
    base_name: str,
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
    is_flash = base_name in _flash_functions
    unsupported = [*_UNSUPPORTED_ARGUMENTS, *(() if is_flash else (OFFSETS,))]
    if unsupported := [name for name in unsupported if arguments.get(name) is not None]:
        raise ValueError(
            f"{type(module).__name__} passes {unsupported} to its attention, which calibration does not support"
        )
    is_causal, scaling = arguments.get("is_causal"), arguments.get("scaling")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)  # transformers' own default
    causal = bool(is_causal) and query.shape[2] > 1
    window, offsets, mask = arguments.get("sliding_window"), arguments.get(OFFSETS), attention_mask
    if is_flash:  # its mask only hides padding: causality and windows are numbers
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None]
    else:
        # transformers leaves out the mask of sdpa, but never that of eager attention, where causality alone would do.
        causal = causal and attention_mask is None and base_name == "sdpa"
    return handler.attend(
        FusedCall(
            name=type(module).__name__,
            query=query,
            key=key,
            value=value,
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            bias=AttentionBias(mask, arguments.get("position_bias"), causal, window if is_flash else None),
            run_plain=partial(plain, module, query, key, value, attention_mask, **arguments),
            window=window,
            offsets=offsets,
        )
    )


def _base_function(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Returns the model's own attention function."""
    if name in _flash_functions:
        return _flash_functions[name]
    function: Callable[..., tuple[Tensor, Tensor | None]] | None = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if name == "eager":  # every modeling file of transformers has a function of its own, under this name
        function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise ValueError(
            f"{type(module).__name__} has no eager attention function; load the model with attn_implementation='sdpa'"
        )
    return function
