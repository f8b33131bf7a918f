"""Records the attention calls of a plain forward pass, and checks that they can be calibrated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fair_calibration.access.attention_call import FusedCall, SoftmaxCall, expand_heads
from fair_calibration.access.unpadded import pad_call, pad_sequences

# Largest error of recomputed attention, relative to the largest value: a few rounding steps of the dtype.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# In a batch of a few tokens a logit this low is a mask: models mask by adding or filling in -10000, -65504 (float16's
# minimum), -1e9, float32's minimum or -inf. The biases of ALiBi are above -1 per token of distance.
_MASKED_BELOW = -1000.0


@dataclass
class AttentionRecorder:
    """Records the attention calls of a plain forward pass over a short batch in which one sequence is padded.

    Calibration works on the logits, so it would give wrong results for an attention that computes anything but
    softmax(scale * q k + bias) v. Therefore the recorder recomputes the output of every fused call and compares. Of an
    intercepted softmax only the logits and weights are known. That it is attention over the tokens of the batch is
    concluded from how it treats the padding. Reasons to doubt it are collected in ``doubts`` and not raised at once,
    because the number of calls has to be checked first.
    """

    attention_mask: Tensor  # (B, L), of the batch
    intercepting: bool = False  # whether the calls come from an `Interception`, which can only guess what is attention
    modules: list[str] = field(default_factory=list)  # the class names of the attention modules, in order of the calls
    windows: list[int | None] = field(default_factory=list)  # of fused calls, as `FusedCall.window`
    doubts: list[str] = field(default_factory=list)  # why intercepted calls are not attention that can be calibrated
    highest_mask: float = -torch.inf  # the highest logit of a masked key

    @property
    def hidden_below(self) -> float:
        """The logit up to which a key counts as masked; distant keys under ALiBi stay above it."""
        # A mask varies with the logits that it is added to. Masks below float16's range are all treated alike.
        return max(0.9 * self.highest_mask, torch.finfo(torch.float16).min / 2)

    def attend(self, call: FusedCall) -> tuple[Tensor, Tensor | None]:
        """Runs the plain attention and checks it.

        Raises:
            ValueError: The call is not self-attention over the tokens of the batch, its values are not finite, or its
                output is not that of softmax(scale * q k + bias) v.
        """
        plain_output, weights = call.run_plain()
        output = plain_output
        length = self.attention_mask.shape[1]
        if call.offsets is not None:
            output = pad_sequences(output, call.offsets, length)
            call = pad_call(call, call.offsets, length)
            call = replace(call, bias=replace(call.bias, mask=self.attention_mask.bool()[:, None, None]))
        if call.query.shape[2] != length or call.key.shape[2] != length:
            raise ValueError(
                f"{call.name} attends from {call.query.shape[2]} to {call.key.shape[2]} positions of a batch "
                f"of {length} tokens: only self-attention over the document's tokens can be calibrated"
            )
        valid = self.attention_mask.bool()
        self._check_finite(call.name, output[valid])
        with torch.autocast(call.query.device.type, enabled=False):
            logits, expected = recompute(call)
        error = (expected - output.float())[valid].abs().max()
        largest = call.value.float().abs().max().clamp(min=1e-6)
        if not error <= _TOLERANCE.get(output.dtype, 5e-2) * largest:  # written so that NaN fails it
            raise ValueError(
                f"{call.name} does not compute softmax(scale * query key + bias) value (recomputed output is off by "
                f"{float(error):.3g}, values reach {float(largest):.3g}): this model's attention cannot be calibrated"
            )
        if self.intercepting:
            # `AttentionBias` recognizes masks by -inf or the dtype's minimum. It would take others for biases.
            weak_masks = (logits <= _MASKED_BELOW) & (logits > torch.finfo(logits.dtype).min)
            if (weak_masks & valid[:, None, :, None] & valid[:, None, None, :]).any():
                self.doubts.append(
                    f"{call.name} masks keys with about {float(logits[weak_masks].max()):.3g} instead of -inf, the "
                    "dtype's minimum or False: this model's attention cannot be calibrated"
                )
            self._check_padding(call.name, logits)
        self.modules.append(call.name)
        self.windows.append(call.window)
        return plain_output, weights

    def weigh(self, call: SoftmaxCall) -> Tensor:
        """Runs the plain softmax and checks that it is attention over the tokens of the batch.

        Raises:
            ValueError: The weights are not finite.
        """
        weights = call.softmax()
        by_row = weights.reshape(call.logits.shape).transpose(1, 2)  # (B, L, H, L)
        self._check_finite(call.name, by_row[self.attention_mask.bool()])
        self._check_padding(call.name, call.logits.float())
        self.modules.append(call.name)
        return weights

    def _check_finite(self, name: str, values: Tensor) -> None:
        """Checks that the plain attention computed finite values."""
        if not values.isfinite().all():
            raise non_finite_error(f"{name}, one of the model's attention layers,", values.dtype)

    def _check_padding(self, name: str, logits: Tensor) -> None:
        """Checks that logits (B, H, L, L) mask the batch's padding, and records how low masked logits are."""
        valid = self.attention_mask.bool()
        row, key = valid[:, None, :, None], valid[:, None, None, :]
        masked = logits <= _MASKED_BELOW
        # Tokens must not see padding. A causal mask alone would hide padding on their right, so that rows of padding
        # after a token must not see earlier padding, either. Rows of padding on the left may see anything.
        earlier = torch.ones_like(masked[0, 0]).tril(-1)
        after_token = (valid.cumsum(1) > 0)[:, None, :, None]
        must_be_masked = (~key & (row | (after_token & earlier))).expand(logits.shape)
        # A token sees at least itself.
        must_be_visible = (row & torch.eye(len(earlier), dtype=torch.bool, device=valid.device)).expand(logits.shape)
        if not masked[must_be_masked].all() or masked[must_be_visible].any():
            self.doubts.append(
                f"the logits of what looks like attention in {name} do not hide the batch's padding from its tokens, "
                "or hide a token from itself: the model cannot be calibrated"
            )
        if masked.any():
            self.highest_mask = max(self.highest_mask, float(logits[masked].max()))


def non_finite_error(what: str, dtype: torch.dtype, hint: str = "") -> ValueError:
    """Returns the error for a plain model that computes NaN or infinite values; ``hint`` may name the cause."""
    wider = [str(d).removeprefix("torch.") for d in (torch.bfloat16, torch.float32) if d != dtype]
    remedy = "check its weights"
    if dtype in (torch.float16, torch.bfloat16):
        remedy += f", or load it in {' or '.join(wider)}: model_kwargs={{'dtype': '{wider[0]}'}}"
    return ValueError(
        f"{what} gives NaN or infinite values in {str(dtype).removeprefix('torch.')} for a short text, before anything "
        f"is calibrated{hint}. The plain model is at fault: {remedy}"
    )


def recompute(call: FusedCall) -> tuple[Tensor, Tensor]:
    """Computes the logits (B, H, L, K) and the output (B, L, H, D_v) of a call in float32, as whole matrices."""
    n_heads = call.query.shape[1]
    key, value = expand_heads(call.key, n_heads).float(), expand_heads(call.value, n_heads).float()
    logits = call.query.float() @ key.transpose(-1, -2) * call.scale
    every = slice(0, call.query.shape[2])
    bias, visible = call.bias.block(slice(0, call.query.shape[0]), every, every, call.query.device)
    if bias is not None:
        logits = logits + bias
    if visible is not None:
        logits = logits.masked_fill(~visible, torch.finfo(torch.float32).min)
    return logits, (logits.softmax(-1) @ value).transpose(1, 2)
