"""What a model that computes attention itself should return: torch's functions replaced by the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from fair_calibration import FairConfig
from fair_calibration.method.baskets import build_baskets
from fair_calibration.method.reference import calibrated_attention

Visible = Callable[[Tensor], Tensor]
"""Turns an attention mask (B, L) into what each row may see, bool (B, 1, L, L)."""


def bidirectional(attention_mask: Tensor) -> Tensor:
    return attention_mask.bool()[:, None, None, :].expand(-1, 1, attention_mask.shape[1], -1)


def causal(attention_mask: Tensor) -> Tensor:
    return bidirectional(attention_mask).tril()


def patched_reference(
    model: SentenceTransformer,
    texts: Sequence[str],
    config: FairConfig,
    *,
    visible: Visible | Sequence[Visible] = bidirectional,
    gradients: bool = False,
) -> Tensor:
    """Encodes the texts as one batch, with the reference attention in float64 in the calibrated layers.

    Which keys a row may see is told from outside, not read off the logits.

    Args:
        model: A plain model. It stays as it is.
        texts: The documents.
        config: A resolved config.
        visible: For all layers, or one for each.
        gradients: Whether the result can be differentiated.
    """
    features = model.preprocess(list(texts))
    mask = features["attention_mask"]
    n_layers = model[0].model.config.num_hidden_layers
    visibles = [visible] * n_layers if callable(visible) else list(visible)
    baskets = build_baskets(mask, config)
    layers, length = config.select_layers(n_layers), mask.shape[1]
    n_calls = 0

    def is_calibrated() -> bool:
        nonlocal n_calls
        n_calls += 1
        return n_calls - 1 in layers

    def reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> Any:
        seen = visibles[n_calls - 1](mask)
        if bias is not None:
            bias = bias.double().masked_fill(~seen, 0)
        q, k, v = q.double(), k.double(), v.double()
        return calibrated_attention(q, k, v, baskets, visible=seen, bias=bias, scale=scale, config=config)

    def softmax(original: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weights = original(input, *args, **kwargs)
        if weights.shape[-2:] != (length, length) or not is_calibrated():
            return weights
        logits = input.reshape(len(mask), -1, length, length)
        nothing = logits.new_zeros(*logits.shape[:3], 1)
        return reference(nothing, nothing, nothing, logits, 1.0).weights.to(weights.dtype).view_as(weights)

    def sdpa(
        original: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        output = original(query, key, value, attn_mask, scale=scale, **kwargs)
        if not is_calibrated():
            return output
        q, k, v = (x.reshape(len(mask), -1, length, x.shape[-1]) for x in (query, key, value))
        bias = None if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask
        return reference(q, k, v, bias, scale).output.to(output.dtype).view_as(output)

    with torch.inference_mode(not gradients), _patched(softmax, sdpa):
        embeddings: Tensor = model.eval()(features)["sentence_embedding"]
    assert n_calls == n_layers
    return embeddings


@contextmanager
def _patched(softmax: Callable[..., Tensor], sdpa: Callable[..., Tensor]) -> Iterator[None]:
    owners = (torch, torch.nn.functional, torch.special, torch.Tensor)
    # One calls another (`torch.nn.functional.softmax` the method, the reference too), so only the outermost counts.
    depth = 0

    def outermost(function: Callable[..., Tensor], original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal depth
            depth += 1
            try:
                return function(original, *args, **kwargs) if depth == 1 else original(*args, **kwargs)
            finally:
                depth -= 1

        return call

    functional = torch.nn.functional
    patches = [mock.patch.object(owner, "softmax", outermost(softmax, owner.softmax)) for owner in owners]
    name = "scaled_dot_product_attention"
    patches.append(mock.patch.object(functional, name, outermost(sdpa, getattr(functional, name))))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
