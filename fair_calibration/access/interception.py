"""Reaches the attention of models that compute it themselves, by intercepting torch's functions.

Such a model, MPNet for example, either turns its attention logits into weights with one of torch's softmax functions,
or calls torch's scaled_dot_product_attention. During a forward pass a `TorchFunctionMode` receives these calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.access.attention_call import AttentionHandler, FusedCall, SoftmaxCall

SOFTMAX, SDPA = "softmax", "scaled_dot_product_attention"
_FUNCTIONS: dict[Any, str] = {
    torch.softmax: SOFTMAX,
    torch.nn.functional.softmax: SOFTMAX,
    Tensor.softmax: SOFTMAX,
    torch.special.softmax: SOFTMAX,
    torch.nn.functional.scaled_dot_product_attention: SDPA,
}


class CallShape(NamedTuple):
    """The properties by which attention calls of a model are recognized, which do not depend on the batch."""

    function: str  # `SOFTMAX` or `SDPA`
    n_dims: int  # the number of dimensions of the logits or queries
    n_heads: int


class Interception(TorchFunctionMode):
    """A context that hands what looks like self-attention over the tokens of one batch to a handler.

    A softmax looks like attention if its logits are (B, H, L, L) and it runs over the last dimension; (B, H) may also
    be one dimension or more than two. A scaled_dot_product_attention does if its queries and keys are (B, H, L, D). All
    other calls run unchanged, and so do all calls of other threads. ``attention`` counts the calls that the handler was
    given by shape, and ``others`` the other calls of the two functions.
    """

    def __init__(
        self,
        handler: AttentionHandler,
        batch_shape: Sequence[int],
        *,
        shapes: Collection[CallShape] | None = None,
        hidden_below: float = -torch.inf,
        name: Callable[[], str] = lambda: "the model",
    ) -> None:
        """Prepares the interception of one forward pass over a batch of shape (B, L).

        Args:
            handler: Takes over the calls.
            batch_shape: (B, L).
            shapes: The shapes of the model's attention calls; None means all calls that look like attention.
            hidden_below: A key whose logit in a softmax is at most this is masked.
            name: Returns the class name of the attention module that is running.
        """
        super().__init__()
        self.attention: Counter[CallShape] = Counter()
        self.others: Counter[CallShape] = Counter()
        self._handler = handler
        self._n_sequences, self._length = batch_shape
        self._shapes = shapes
        self._hidden_below = hidden_below
        self._name = name

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one of torch's functions, through the handler if it is attention."""
        kwargs = kwargs or {}
        function = _FUNCTIONS.get(func)
        if function is None:
            return func(*args, **kwargs)
        run = partial(func, *args, **kwargs)
        result = (self._softmax if function == SOFTMAX else self._sdpa)(run, *args, **kwargs)
        return run() if result is None else result

    def _softmax(
        self,
        run: Callable[[], Tensor],
        input: Tensor,  # the parameters are called as in torch, since models may pass them by keyword
        dim: int | None = None,
        *_: Any,
        out: Tensor | None = None,
        **__: Any,
    ) -> Tensor | None:
        """Returns the handler's weights in the shape of ``input``; None if this softmax is not attention."""
        over_keys = dim in (-1, input.ndim - 1) and input.shape[-1] == self._length and out is None
        if not self._is_attention(SOFTMAX, input, over_keys):
            return None
        logits = input.reshape(self._n_sequences, -1, self._length, self._length)
        return self._handler.weigh(SoftmaxCall(self._name(), logits, run, self._hidden_below))

    def _sdpa(
        self,
        run: Callable[[], Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG002
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: ARG002
    ) -> Tensor | None:
        """Returns the handler's output in the model's shape; None if this call is not attention over the batch."""
        over_tokens = query.ndim < 5 and all(tensor.shape[-2] == self._length for tensor in (key, value))
        over_tokens = over_tokens and not any(tensor.shape[0] % self._n_sequences for tensor in (key, value))
        if not self._is_attention(SDPA, query, over_tokens):
            return None
        q, k, v = (t.reshape(self._n_sequences, -1, *t.shape[-2:]) for t in (query, key, value))
        mask = None if attn_mask is None else self._mask(attn_mask, query.ndim)
        scale = query.shape[-1] ** -0.5 if scale is None else scale

        def run_plain() -> tuple[Tensor, None]:
            return run().view(*q.shape[:3], -1).transpose(1, 2), None

        call = FusedCall(self._name(), q, k, v, scale, AttentionBias(mask, None, is_causal), run_plain)
        output = self._handler.attend(call)[0]
        return output.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])

    def _is_attention(self, function: str, tensor: Tensor, fits: bool) -> bool:
        """Decides whether a call is attention, and counts it.

        The logits or queries have to be (B, H, L, any size); ``fits`` is whether the call meets the other conditions.
        """
        leading = tensor.shape[:-2]
        shape = CallShape(function, tensor.ndim, prod(leading) // self._n_sequences)
        fits = fits and len(leading) > 0 and leading[0] % self._n_sequences == 0 and tensor.shape[-2] == self._length
        fits = fits and (self._shapes is None or shape in self._shapes)
        (self.attention if fits else self.others)[shape] += 1
        return fits

    def _mask(self, mask: Tensor, n_dims: int) -> Tensor:
        """Brings a mask of logits with ``n_dims`` dimensions, 3 or 4, into the shape (B or 1, H or 1, L or 1, L)."""
        mask = mask[(None,) * (n_dims - mask.ndim)]
        if n_dims == 3:  # (B * H, L, L)
            mask = mask[None] if mask.shape[0] == 1 else mask.reshape(self._n_sequences, -1, *mask.shape[1:])
        return mask.expand(-1, -1, -1, self._length)
