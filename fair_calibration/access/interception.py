"""Where calibration enters models that compute attention themselves: torch's own functions, intercepted in a forward.

Such a model makes its weights with a softmax over logits that it holds, or calls torch's scaled_dot_product_attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.access.attention_call import AttentionHandler, SoftmaxCall

SOFTMAX, SDPA = "softmax", "scaled_dot_product_attention"
_FUNCTIONS: dict[Any, str] = {
    torch.softmax: SOFTMAX,
    torch.nn.functional.softmax: SOFTMAX,
    Tensor.softmax: SOFTMAX,
    torch.special.softmax: SOFTMAX,
    torch.nn.functional.scaled_dot_product_attention: SDPA,
}


class CallShape(NamedTuple):
    """What one attention call looks like from outside, whatever the batch: its function, dimensions and heads."""

    function: str
    n_dims: int
    n_heads: int


@dataclass(frozen=True)
class SdpaCall:
    """One call of `torch.nn.functional.scaled_dot_product_attention`."""

    name: str
    query: Tensor  # (B, H, L, D)
    key: Tensor  # (B, H_kv, L, D)
    value: Tensor  # (B, H_kv, L, D_v)
    scale: float
    bias: AttentionBias
    run: Callable[[], Tensor]

    def run_plain(self) -> tuple[Tensor, None]:
        """Runs the model's own call: the output (B, L, H, D_v)."""
        return self.run().view(*self.query.shape[:3], -1).transpose(1, 2), None


class Interception(TorchFunctionMode):
    """While entered, sends what looks like attention over a batch's tokens to a handler. Modes are of one thread.

    A softmax is attention if its logits are (B, H, L, L), also with (B, H) as one dimension or as more than two, and it
    runs over the last one; a scaled_dot_product_attention if its queries and keys are (B, H, L, D). All else runs as
    ever.

    Attributes:
        attention: The calls that the handler got, counted by shape.
        others: The other calls of the two functions.
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
        """Takes note of the batch.

        Args:
            handler: What becomes of the calls.
            batch_shape: (B, L).
            shapes: The calls that are the model's attention; None for all that look like attention.
            hidden_below: Logits up to this one hide a key.
            name: Gives the class of the attention module that is running.
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
        """Runs one function of torch."""
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
        input: Tensor,  # torch's own names, as models may pass them
        dim: int | None = None,
        *_: Any,
        out: Tensor | None = None,
        **__: Any,
    ) -> Tensor | None:
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
        of_batch = query.ndim < 5 and all(tensor.shape[-2] == self._length for tensor in (key, value))
        of_batch = of_batch and not any(tensor.shape[0] % self._n_sequences for tensor in (key, value))
        if not self._is_attention(SDPA, query, of_batch):
            return None
        q, k, v = (t.reshape(self._n_sequences, -1, *t.shape[-2:]) for t in (query, key, value))
        mask = None if attn_mask is None else self._mask(attn_mask, query.ndim)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        call = SdpaCall(self._name(), q, k, v, scale, AttentionBias(mask, None, is_causal), run)
        output = self._handler.attend(call)[0]
        return output.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])

    def _is_attention(self, function: str, tensor: Tensor, fits: bool) -> bool:
        """Tells whether logits or queries, if ``fits``, are (B, H, L, any), and of the shapes sought. Keeps count."""
        leading = tensor.shape[:-2]
        shape = CallShape(function, tensor.ndim, prod(leading) // self._n_sequences)
        fits = fits and len(leading) > 0 and leading[0] % self._n_sequences == 0 and tensor.shape[-2] == self._length
        fits = fits and (self._shapes is None or shape in self._shapes)
        (self.attention if fits else self.others)[shape] += 1
        return fits

    def _mask(self, mask: Tensor, n_dims: int) -> Tensor:
        """Returns a mask that broadcasts to the logits, in ``n_dims`` dimensions, as (B or 1, H or 1, L or 1, L)."""
        mask = mask[(None,) * (n_dims - mask.ndim)]
        if n_dims == 3:  # of (B and H in one)
            mask = mask[None] if mask.shape[0] == 1 else mask.reshape(self._n_sequences, -1, *mask.shape[1:])
        return mask.expand(-1, -1, -1, self._length)
