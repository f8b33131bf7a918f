"""Runs forward passes in which an observer sees every attention call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fair_calibration import FairConfig, FairSentenceTransformer
from fair_calibration.access.attention_call import FusedCall, SoftmaxCall, expand_heads
from fair_calibration.method.baskets import Baskets, build_baskets
from fair_calibration.method.calibrated_pass import CalibratedPass
from fair_calibration.transformer import FairTransformer

Call = FusedCall | SoftmaxCall
Observer = Callable[[int, Call], None]
"""Called with the index of a layer and its attention call, before the call runs."""


class Batch(NamedTuple):
    """Tokenized documents, on the model's device.

    Attributes:
        features: The input of the transformer.
        baskets: The baskets and isolated tokens of the documents.
        config: The model's settings, with no setting left on "auto".
        layers: The indices of the calibrated layers.
        n_truncated: The number of documents that were cut off.
    """

    features: dict[str, Any]
    baskets: Baskets
    config: FairConfig
    layers: frozenset[int]
    n_truncated: int


@dataclass
class ObservedPass:
    """Handles the attention calls of one forward pass: shows each to the observer, then runs it.

    Attributes:
        observe: The observer.
        calibrated: Runs the calls with calibration; None runs the plain attention.
        n_calls: The number of calls so far.
    """

    observe: Observer
    calibrated: CalibratedPass | None = None
    n_calls: int = 0

    def attend(self, call: FusedCall) -> tuple[Tensor, Tensor | None]:
        """Shows one call to the observer and runs it."""
        self._show(call)
        return call.run_plain() if self.calibrated is None else self.calibrated.attend(call)

    def weigh(self, call: SoftmaxCall) -> Tensor:
        """Shows one call to the observer and runs it."""
        self._show(call)
        return call.softmax() if self.calibrated is None else self.calibrated.weigh(call)

    def _show(self, call: Call) -> None:
        self.observe(self.n_calls, call)
        self.n_calls += 1


def load_batch(model: FairSentenceTransformer, texts: Sequence[str], *, prompt: str) -> Batch:
    """Tokenizes documents as the model does before encoding them, with truncation.

    Raises:
        TypeError: The model encodes in even chunks.
        ValueError: The model encodes documents without padding.
    """
    fair = model.fair
    if not isinstance(fair, FairTransformer):
        raise TypeError(
            f"config: {type(model.fair_config).__name__} leaves the model's attention as it is, so there is nothing to "
            "compare; give a FairConfig"
        )
    features, n_truncated = fair.tokenize_documents(list(texts), prompt or None, strength=0.0, task="document")
    features = {name: v.to(model.device) if isinstance(v, Tensor) else v for name, v in features.items()}
    if "attention_mask" not in features:
        raise ValueError(
            "model: with flash attention it encodes documents without padding, which is not diagnosed; set "
            "model[0].unpad_inputs = False, or load it with attn_implementation='sdpa'"
        )
    summary = fair.summary()
    prompt_length = fair.excluded_prompt(features)
    baskets = build_baskets(features["attention_mask"], summary.config, prompt_length=prompt_length)
    return Batch(features, baskets.to(model.device), summary.config, frozenset(summary.layers), n_truncated)


def observe_attention(
    model: FairSentenceTransformer, batch: Batch, observe: Observer, *, strength: float = 0.0
) -> None:
    """Runs the transformer over a batch and shows every attention call to ``observe``.

    Args:
        model: A calibrated model in evaluation mode. Its document counts do not change.
        batch: The documents, from `load_batch`.
        observe: Called before each attention call runs.
        strength: The strength of the calibration; 0 runs the plain model.
    """
    calibrated = None
    if strength > 0 and any(batch.baskets.is_calibrated):
        calibrated = CalibratedPass(batch.layers, batch.baskets, replace(batch.config, strength=strength))
    with torch.inference_mode():
        cast(FairTransformer, model.fair).run_handled(dict(batch.features), ObservedPass(observe, calibrated))


def row_logits(
    call: Call, sequence: int, rows: slice, keys: slice, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Returns the logits of some rows of one sequence: scaled products of query and key, plus bias.

    Args:
        call: The attention call.
        sequence: The index of the sequence in the batch.
        rows: The l rows, with explicit start and stop.
        keys: The n keys, with explicit start and stop.
        dtype: The dtype of the computation, float32 or float64. The logits of a `SoftmaxCall` have been computed
            already, in the model's dtype.

    Returns:
        The logits, shape (H, l, n), and a mask of the keys that each row sees, bool, shape (1 or H, l, n). The mask
        does not exclude padding.
    """
    if isinstance(call, SoftmaxCall):
        block = call.logits[sequence, :, rows, keys].to(dtype)
        return block, ~(block <= call.hidden_below)  # NaN hides no key
    this = slice(sequence, sequence + 1)
    query = call.query[this, :, rows].to(dtype)
    key = expand_heads(call.key[this, :, keys], query.shape[1]).to(dtype)
    with torch.autocast(query.device.type, enabled=False):
        logits = (query @ key.transpose(-1, -2))[0] * call.scale
    bias, visible = call.bias.block(this, rows, keys, query.device)
    if bias is not None:
        logits = logits + bias[0].to(dtype)
    if visible is None:
        return logits, torch.ones(1, *logits.shape[1:], dtype=torch.bool, device=logits.device)
    return logits, visible[0].expand(-1, *logits.shape[1:])


def count_heads(call: Call) -> int:
    """Returns the number of attention heads, H."""
    return (call.logits if isinstance(call, SoftmaxCall) else call.query).shape[1]
