"""Records the attention calls of a plain forward pass, and checks that what would be calibrated is their attention."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fair_calibration.access.attention_call import FusedCall, SoftmaxCall

# Largest error of recomputed attention, relative to the largest value: a few rounding steps of the dtype.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# On a probe of a few tokens no key is so far off unless it is masked: models add or fill in -10000, -65504 (float16's
# minimum), -1e9, float32's minimum, or -inf. ALiBi subtracts less than 1 per token of distance.
_MASKED_BELOW = -1000.0


@dataclass
class AttentionRecorder:
    """Records the attention calls of a plain forward pass over a short batch, one of whose sequences is padded.

    Calibration works on logits, so an attention that is more than softmax(scale * q k + bias) v, or less, would be
    calibrated into something else. Comparing finds that out before any document is encoded. Of an intercepted softmax
    only logits and weights are known; that it is attention over the batch's tokens shows in how it treats the padding.

    Attributes:
        attention_mask: (B, L), the batch's.
        intercepting: Whether the calls come from an `Interception`, which can but guess what is attention.
        modules: The class names of the attention modules called, in order.
        doubts: Why what was intercepted is not attention that can be calibrated, where it is not.
        highest_mask: The highest logit that hid a key from a row.
    """

    attention_mask: Tensor
    intercepting: bool = False
    modules: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    highest_mask: float = -torch.inf

    @property
    def hidden_below(self) -> float:
        """Up to which logit a key counts as hidden: close to the masks, so that far keys under ALiBi are none."""
        # Logits added to a mask make it vary a little. Masks beyond float16's range are all one.
        return max(0.9 * self.highest_mask, torch.finfo(torch.float16).min / 2)

    def attend(self, call: FusedCall) -> tuple[Tensor, Tensor | None]:
        """Runs the plain attention and checks it."""
        output, weights = call.run_plain()
        length = self.attention_mask.shape[1]
        if call.query.shape[2] != length or call.key.shape[2] != length:
            raise ValueError(
                f"{call.name} attends from {call.query.shape[2]} to {call.key.shape[2]} positions of a batch "
                f"of {length} tokens: only self-attention over the document's tokens can be calibrated"
            )
        with torch.autocast(call.query.device.type, enabled=False):
            logits, expected = recompute(call)
        error = (expected - output.float())[self.attention_mask.bool()].abs().max()
        largest = call.value.float().abs().max().clamp(min=1e-6)
        # A comparison that NaN fails as well.
        if not error <= _TOLERANCE.get(output.dtype, 5e-2) * largest:
            raise ValueError(
                f"{call.name} does not compute softmax(scale * query key + bias) value (recomputed output is off by "
                f"{float(error):.3g}, values reach {float(largest):.3g}): this model's attention cannot be calibrated"
            )
        if self.intercepting:
            # The bias reads masks as -inf or the dtype's minimum; other ones would count as biases.
            bias_masks = (logits <= _MASKED_BELOW) & (logits > torch.finfo(logits.dtype).min)
            valid = self.attention_mask.bool()
            if (bias_masks & valid[:, None, :, None] & valid[:, None, None, :]).any():
                self.doubts.append(
                    f"{call.name} masks keys with about {float(logits[bias_masks].max()):.3g} instead of -inf, the "
                    "dtype's minimum or False: this model's attention cannot be calibrated"
                )
            self._check_padding(call.name, logits)
        self.modules.append(call.name)
        return output, weights

    def weigh(self, call: SoftmaxCall) -> Tensor:
        """Runs the plain softmax and checks that it is attention."""
        weights = call.softmax()
        self._check_padding(call.name, call.logits.float())
        self.modules.append(call.name)
        return weights

    def _check_padding(self, name: str, logits: Tensor) -> None:
        """Checks that logits (B, H, L, L) are of this batch, sequence by sequence, and learns how masks look."""
        valid = self.attention_mask.bool()
        row, key = valid[:, None, :, None], valid[:, None, None, :]
        hidden = logits <= _MASKED_BELOW
        # Causality alone would hide padding on the right from the tokens, whosever padding it is, but not from the rows
        # of padding behind it. Padding on the left may see anything: there is no token that it could see.
        before = torch.ones_like(hidden[0, 0]).tril(-1)
        behind_token = (valid.cumsum(1) > 0)[:, None, :, None]
        of_padding = (~key & (row | (behind_token & before))).expand(logits.shape)
        of_itself = (row & torch.eye(len(before), dtype=torch.bool, device=valid.device)).expand(logits.shape)
        if not hidden[of_padding].all() or hidden[of_itself].any():
            self.doubts.append(
                f"the logits of what looks like attention in {name} do not hide the batch's padding from its tokens, "
                "or hide a token from itself: the model cannot be calibrated"
            )
        if hidden.any():
            self.highest_mask = max(self.highest_mask, float(logits[hidden].max()))


def recompute(call: FusedCall) -> tuple[Tensor, Tensor]:
    """Computes logits (B, H, L, K) and output (B, L, H, D_v) in float32 and unfused, L x L at once."""
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
    return logits, (logits.softmax(-1) @ value).transpose(1, 2)
