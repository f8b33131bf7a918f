"""Which attention layers a model has, read off one recorded forward pass, and whether we compute what they compute."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fair_calibration.attention import AttentionCall

# Largest error of recomputed attention, relative to the largest value: a few rounding steps of the dtype.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass
class AttentionRecorder:
    """Records the attention calls of a plain forward pass and recomputes each from its logits.

    Calibration works on logits, so an attention that is more than softmax(scale * q k + bias) v, or less, would be
    calibrated into something else. Comparing finds that out before any document is encoded.

    Attributes:
        attention_mask: (B, L), the batch's.
        modules: The class names of the attention modules called, in order.
    """

    attention_mask: Tensor
    modules: list[str] = field(default_factory=list)

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Runs the plain attention and checks it."""
        output, weights = call.run_plain()
        name = type(call.module).__name__
        length = self.attention_mask.shape[1]
        if call.query.shape[2] != length or call.key.shape[2] != length:
            raise ValueError(
                f"{name} attends from {call.query.shape[2]} to {call.key.shape[2]} positions of a batch "
                f"of {length} tokens: only self-attention over the document's tokens can be calibrated"
            )
        with torch.autocast(call.query.device.type, enabled=False):
            expected = _recompute(call)
        error = (expected - output.float())[self.attention_mask.bool()].abs().max()
        largest = call.value.float().abs().max().clamp(min=1e-6)
        # A comparison that NaN fails as well.
        if not error <= _TOLERANCE.get(output.dtype, 5e-2) * largest:
            raise ValueError(
                f"{name} does not compute softmax(scale * query key + bias) value (recomputed output is off by "
                f"{float(error):.3g}, values reach {float(largest):.3g}): this model's attention cannot be calibrated"
            )
        self.modules.append(name)
        return output, weights


def _recompute(call: AttentionCall) -> Tensor:
    """Computes the attention of the short recorded batch in float32, (B, L, H, D_v)."""
    n_groups = call.query.shape[1] // call.key.shape[1]
    key = call.key.float().repeat_interleave(n_groups, dim=1)
    value = call.value.float().repeat_interleave(n_groups, dim=1)
    logits = call.query.float() @ key.transpose(-1, -2) * call.scale
    every = slice(0, call.query.shape[2])
    bias, visible = call.bias.block(slice(0, call.query.shape[0]), every, every, call.query.device)
    if bias is not None:
        logits = logits + bias
    if visible is not None:
        logits = logits.masked_fill(~visible, torch.finfo(torch.float32).min)
    return (logits.softmax(-1) @ value).transpose(1, 2)
