"""An experiment: ALiBi's linear distance bias made logarithmic at inference, so that distant keys do not underflow.

ALiBi (Press et al. 2022, arXiv 2108.12409) subtracts ``m * d`` from the logit of a key at distance d, with a slope m of
each head. KERPLE's logarithmic variant (Chi et al. 2022, arXiv 2205.09921) subtracts ``r1 * log(1 + r2 * d)`` and is
trained with it. Here a model trained with the first is run with ``m * log(1 + d)``, which is alike near d = 0 and falls
far more slowly. The model was not trained for it: measure before you believe in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fair_calibration.bias import AttentionBias
from fair_calibration.calls import AttentionHandler, FusedCall, SoftmaxCall
from fair_calibration.discovery import wrap_handlers
from fair_calibration.model import FairSentenceTransformer
from fair_calibration.recorder import recompute

_N_TOKENS = 64
_HIDDEN_BELOW = -1000.0  # on so few tokens no bias is as low as a mask
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


@contextmanager
def log_distance(model: FairSentenceTransformer) -> Iterator[Tensor]:
    """Encodes documents with logarithmic instead of linear distances for the duration. An experiment, see above.

    It holds for this thread, and for documents at any strength; queries are left as they are. Every layer's logits are
    changed as a whole, and where a model calls torch's fused attention, that is computed unfused: it is neither fast
    nor sparing of memory.

    Args:
        model: A calibrated model; strength 0 will do.

    Yields:
        The slopes, float32 (H,), as read off the model's first layer.

    Raises:
        TypeError: ``model`` is not calibrated.
        ValueError: The logits of the model's first layer have no bias that is linear in the distance.
    """
    if not isinstance(model, FairSentenceTransformer):
        raise TypeError(f"model: expected a FairSentenceTransformer, from calibrate(), got {type(model).__name__}")
    slopes = find_slopes(model)
    with wrap_handlers(lambda handler: _LogDistance(slopes, handler)):
        yield slopes


def find_slopes(model: FairSentenceTransformer) -> Tensor:
    """Returns the slopes of a model's linear distance bias, float32 (H,).

    Over one token repeated, the first layer's queries and keys are all alike: its logits differ by their bias alone.

    Raises:
        ValueError: They have none, or one that is not linear.
    """
    fair = model.fair
    token = fair.preprocess(["a"], task="query")["input_ids"][0, 0]
    ids = token.repeat(1, _N_TOKENS).to(model.device)
    observer = _FirstLogits()
    with torch.inference_mode():
        fair.run_handled({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, observer)
    logits = observer.logits
    if logits is None:
        raise ValueError(f"{type(fair.model).__name__} made no attention call")
    distance = _distance(_N_TOKENS, logits.device)
    below = logits.diagonal(dim1=-2, dim2=-1)[..., None] - logits  # (H, L, L): what each key's bias takes away
    visible = logits > _HIDDEN_BELOW
    slopes = below[:, -1, 0] / (_N_TOKENS - 1)  # the last row sees the first key also in causal attention
    error = (below - slopes[:, None, None] * distance).masked_fill(~visible, 0.0).abs().amax()
    tolerance = _TOLERANCE.get(fair.model.dtype, 1e-4) * max(1.0, float(below[:, -1].abs().amax()))
    if not (slopes > 1e-6).all() or not error <= tolerance:
        raise ValueError(
            f"{type(fair.model).__name__} has no distance bias that is linear: over {_N_TOKENS} equal tokens its "
            f"logits fall by {float(slopes.amin()):.3g} to {float(slopes.amax()):.3g} per token, and are up to "
            f"{float(error):.3g} off a line"
        )
    return slopes


def _distance(length: int, device: torch.device) -> Tensor:
    positions = torch.arange(length, device=device, dtype=torch.float32)
    return (positions[:, None] - positions).abs()


class _FirstLogits:
    """Keeps the logits of the first attention call, float32 (H, L, L)."""

    def __init__(self) -> None:
        self.logits: Tensor | None = None

    def attend(self, call: FusedCall) -> tuple[Tensor, Tensor | None]:
        if self.logits is None:
            self.logits = recompute(call)[0][0]
        return call.run_plain()

    def weigh(self, call: SoftmaxCall) -> Tensor:
        if self.logits is None:
            self.logits = call.logits[0].float()
        return call.softmax()


@dataclass(frozen=True)
class _ChangedCall:
    """A fused call with another bias, which it is computed with unfused."""

    call: FusedCall
    bias: AttentionBias

    def __getattr__(self, name: str) -> Any:
        return getattr(self.call, name)

    def run_plain(self) -> tuple[Tensor, None]:
        return recompute(self)[1].to(self.call.value.dtype), None


class _LogDistance:
    """Hands calls with changed logits on to another handler, or computes them where there is none."""

    def __init__(self, slopes: Tensor, handler: AttentionHandler | None) -> None:
        self._slopes = slopes
        self._handler = handler

    def _correction(self, length: int) -> Tensor:
        """Returns what is added to the logits, float32 (H, L, L)."""
        distance = _distance(length, self._slopes.device)
        return self._slopes[:, None, None] * (distance - distance.log1p())

    def attend(self, call: FusedCall) -> tuple[Tensor, Tensor | None]:
        correction = self._correction(call.query.shape[2])[None]
        if call.bias.position_bias is not None:
            correction = correction + call.bias.position_bias
        changed = _ChangedCall(call, replace(call.bias, position_bias=correction))
        return changed.run_plain() if self._handler is None else self._handler.attend(changed)

    def weigh(self, call: SoftmaxCall) -> Tensor:
        weights = call.softmax()
        hidden = call.logits <= call.hidden_below
        logits = (call.logits.float() + self._correction(call.logits.shape[-1])).masked_fill(hidden, -torch.inf)
        lowest = torch.finfo(torch.float32).min  # rows of padding may see nothing
        logits = logits.clamp(min=lowest)
        changed = replace(
            call,
            logits=logits,
            softmax=lambda: logits.softmax(-1).to(weights.dtype).view(weights.shape),
            hidden_below=max(call.hidden_below, torch.finfo(torch.float16).min / 2),
        )
        return changed.softmax() if self._handler is None else self._handler.weigh(changed)
