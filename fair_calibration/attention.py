"""Where calibration enters a model: attention functions registered with transformers' AttentionInterface.

A calibrated model that routes its attention through it runs with one of our attention implementations set. Outside of a
calibrated forward pass the function calls the implementation that the model had before and nothing else. The attention
of other models is intercepted (`interception`); what a calibrated pass does with it is here as well.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import torch
from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fair_calibration.all_rows import calibrate_all_rows
from fair_calibration.baskets import Baskets
from fair_calibration.bias import AttentionBias
from fair_calibration.calls import AttentionHandler, FusedCall, SoftmaxCall
from fair_calibration.config import FairConfig
from fair_calibration.last_layer import PooledRows
from fair_calibration.pooled_row import calibrate_pooled_row
from fair_calibration.softmax_weights import calibrate_weights

BaseImplementation = Literal["sdpa", "eager"]
BASE_IMPLEMENTATIONS: tuple[BaseImplementation, ...] = ("sdpa", "eager")
_MASKS_KEPT = 2  # of full attention, and of attention in a window
_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "cu_seq_lens_q")
AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class AttentionCall:
    """One call of a model's attention, as transformers makes it."""

    module: nn.Module
    base: AttentionFunction
    base_name: BaseImplementation
    query: Tensor  # (B, H, L, D)
    key: Tensor  # (B, H_kv, K, D)
    value: Tensor  # (B, H_kv, K, D_v)
    mask: Tensor | None
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """The class of the attention module."""
        return type(self.module).__name__

    def run_plain(self) -> tuple[Tensor, Tensor | None]:
        """Runs the model's own attention: the output (B, L, H, D_v) and, of eager attention, the weights."""
        return self.base(self.module, self.query, self.key, self.value, self.mask, **self.arguments)

    @property
    def scale(self) -> float:
        """What the products of query and key are multiplied by."""
        scaling = self.arguments.get("scaling")
        return self.query.shape[-1] ** -0.5 if scaling is None else float(scaling)

    @property
    def bias(self) -> AttentionBias:
        """The masks and biases of the call."""
        is_causal = self.arguments.get("is_causal")
        if is_causal is None:
            is_causal = getattr(self.module, "is_causal", True)  # transformers' own default
        # Eager attention is always given its mask. sdpa's is left out where causality alone would do.
        causal = bool(is_causal) and self.mask is None and self.query.shape[2] > 1 and self.base_name == "sdpa"
        return AttentionBias(self.mask, self.arguments.get("position_bias"), causal)


_handler: ContextVar[AttentionHandler | None] = ContextVar("fair_calibration_handler", default=None)


@contextmanager
def handle_attention(handler: AttentionHandler | None) -> Iterator[None]:
    """Sends the attention calls of this thread to ``handler`` for the duration; None leaves them plain."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


@dataclass
class CalibratedPass:
    """The calibration of one forward pass over one batch.

    Attributes:
        layers: The indices of the attention calls that are calibrated.
        baskets: The batch's geometry, on the model's device.
        config: A resolved config.
        strength: In (0, 1].
        rows: Where only the pooled rows of the last layer, a calibrated one, are wanted: they begin there.
        n_calls: How many attention calls have been made so far.
    """

    layers: frozenset[int]
    baskets: Baskets
    config: FairConfig
    strength: float
    rows: PooledRows | None = None
    n_calls: int = field(default=0)
    _biases: deque[AttentionBias] = field(default_factory=lambda: deque(maxlen=_MASKS_KEPT))

    def _is_calibrated(self) -> bool:
        """Counts one more call and tells whether its turn is one of ``layers``."""
        self.n_calls += 1
        return self.n_calls - 1 in self.layers

    def _begins_rows(self) -> PooledRows | None:
        """Returns ``rows`` if the turn of the last of ``layers`` has come."""
        return self.rows if self.n_calls - 1 == max(self.layers) else None

    def _known(self, bias: AttentionBias) -> AttentionBias:
        """Returns the bias of an earlier layer with the same masks, with what was read off them."""
        # Each layer's graph is its own; and so are large biases in some models, which are not to outlive their layer.
        if torch.is_grad_enabled() or bias.is_added:
            return bias
        for known in self._biases:
            if known.tells_as(bias):
                return known
        self._biases.append(bias)
        return bias

    def weigh(self, call: SoftmaxCall) -> Tensor:
        """Runs the softmax of one attention call and calibrates its weights if its turn is one of ``layers``."""
        weights = call.softmax()
        if self._is_calibrated():
            if weights.requires_grad:
                weights = weights.clone()  # the softmax's backward needs its own output
            with torch.autocast(weights.device.type, enabled=False):
                calibrate_weights(
                    weights.view(call.logits.shape),
                    call.logits,
                    self.baskets,
                    hidden_below=call.hidden_below,
                    config=self.config,
                    strength=self.strength,
                )
            if (rows := self._begins_rows()) is not None:
                rows.begin()
        return weights

    def attend(self, call: FusedCall) -> tuple[Tensor, Tensor | None]:
        """Runs one attention call, calibrated if its turn is one of ``layers``."""
        if not self._is_calibrated():
            return call.run_plain()
        length, n_keys = self.baskets.segment_of_key.shape[1], call.key.shape[2]
        if call.query.shape[2] != length or n_keys != length:
            raise ValueError(
                f"{call.name} attends from {call.query.shape[2]} to {n_keys} positions, "
                f"but the batch has {length} tokens: this attention cannot be calibrated"
            )
        every_row = self.config.pooling == "mean"
        if every_row and all(self.baskets.is_calibrated):
            padded = any(valid != (0, length) for valid in self.baskets.valid)
            # Rows of padding are written by nobody.
            allocate = call.value.new_zeros if padded else call.value.new_empty
            output = allocate((call.query.shape[0], length, call.query.shape[1], call.value.shape[-1]))
        elif (rows := self._begins_rows()) is not None and all(self.baskets.is_calibrated):
            # No one reads the other rows, so that there is no attention to compute but the pooled rows' own.
            output = call.value.new_zeros((call.query.shape[0], length, call.query.shape[1], call.value.shape[-1]))
        else:
            output = call.run_plain()[0]
            if output.requires_grad:
                output = output.clone()  # fused attention's backward needs its own output
        # Weights are computed in float32, also where autocast would have matrix products in half precision.
        with torch.autocast(call.query.device.type, enabled=False):
            (calibrate_all_rows if every_row else calibrate_pooled_row)(
                output,
                call.query,
                call.key,
                call.value,
                self._known(call.bias),
                self.baskets,
                scale=call.scale,
                config=self.config,
                strength=self.strength,
            )
        if not every_row and (rows := self._begins_rows()) is not None:
            rows.begin()
        return output, None  # eager attention's weights would be the plain ones


def base_implementation(transformer: Transformer) -> BaseImplementation:
    """Returns the attention that a loaded transformer runs on.

    Raises:
        ValueError: It is one that cannot be calibrated.
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
    """Returns the name under which the implementation on top of ``base`` is registered."""
    return f"fair_{base}"


def register_implementations() -> None:
    """Makes our attention functions known to transformers. Calling it again changes nothing."""
    for base in BASE_IMPLEMENTATIONS:
        name = implementation_name(base)
        if name not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(name, partial(_attention_forward, base))
            # Without a mask function of the same name transformers passes no mask at all, and padding leaks in.
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
    if name == "sdpa":
        return cast(AttentionFunction, ALL_ATTENTION_FUNCTIONS["sdpa"])
    # Every modelling file of transformers has its own eager function, under this name.
    function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise ValueError(
            f"{type(module).__name__} has no eager attention function; load the model with attn_implementation='sdpa'"
        )
    return cast(AttentionFunction, function)
