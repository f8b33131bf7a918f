"""What a calibrated forward pass does with each attention call of the model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.access.attention_call import FusedCall, SoftmaxCall
from fair_calibration.access.unpadded import pad_call, pad_sequences, unpad_sequences
from fair_calibration.config import FairConfig
from fair_calibration.method.all_rows import calibrate_all_rows
from fair_calibration.method.baskets import Baskets
from fair_calibration.method.last_layer import PooledRows
from fair_calibration.method.one_pass import OnePass
from fair_calibration.method.pooled_row import calibrate_pooled_row
from fair_calibration.method.softmax_weights import calibrate_weights

KernelName = Literal["torch", "triton"]
"""What computes the calibrated rows: torch's functions, or a Triton kernel for CUDA devices (`one_pass`)."""
_N_CACHED_MASKS = 2  # models use up to two, one for full attention and one for a sliding window


@dataclass
class CalibratedPass:
    """Calibrates the attention calls of one forward pass over one batch (an `AttentionHandler`)."""

    layers: frozenset[int]  # which attention calls are calibrated, counted from 0
    baskets: Baskets  # on the model's device
    config: FairConfig  # with "auto" resolved
    rows: PooledRows | None = None  # computes the last layer, which is calibrated, for the pooled rows only
    kernel: KernelName = "torch"
    n_calls: int = 0  # the number of attention calls so far
    _biases: deque[AttentionBias] = field(default_factory=lambda: deque(maxlen=_N_CACHED_MASKS))

    @cached_property
    def _one_pass(self) -> OnePass:
        return OnePass(self.baskets, self.config)

    def _next_is_calibrated(self) -> bool:
        """Counts one more call and returns whether it is to be calibrated; the last such call begins ``rows``."""
        if self.rows is not None and self.n_calls == max(self.layers):
            self.rows.has_begun = True
        self.n_calls += 1
        return self.n_calls - 1 in self.layers

    def _with_cache(self, bias: AttentionBias) -> AttentionBias:
        """Returns the `AttentionBias` of an earlier layer with the same masks, if any, for its cached results."""
        # In some models each layer has a large additive bias of its own, which must not be kept in memory. With
        # gradients nothing is shared, since each layer needs its own graph.
        if torch.is_grad_enabled() or bias.is_additive:
            return bias
        for earlier in self._biases:
            if earlier.has_same_masks(bias):
                return earlier
        self._biases.append(bias)
        return bias

    def _count_positions(self, call: FusedCall) -> int:
        """Returns how many positions a call over the tokens of the batch has."""
        if call.offsets is None:
            return self.baskets.segment_of_key.shape[1]
        return sum(stop - first for first, stop in self.baskets.valid)

    def _check_device(self, name: str, device: torch.device) -> None:
        if device != self.baskets.pooled.device:
            raise ValueError(
                f"{name} runs on {device}, but the batch is on {self.baskets.pooled.device}: a model that is spread "
                "over several devices cannot be calibrated; load it onto one device, without device_map"
            )

    def _calibrate_unpadded(self, output: Tensor, call: FusedCall, offsets: Tensor) -> Tensor:
        """Returns the output with every row calibrated, for a batch without padding. Padded copies are made."""
        length = self.baskets.segment_of_key.shape[1]
        padded = pad_sequences(output, offsets, length)
        calibrate_all_rows(padded, pad_call(call, offsets, length), self.baskets, self.config)
        return unpad_sequences(padded, offsets, output.shape[1])

    def weigh(self, call: SoftmaxCall) -> Tensor:
        """Runs one softmax, and calibrates its weights if its layer is a calibrated one.

        Raises:
            ValueError: The kernel is "triton", which computes attention as a whole, or the layer runs on another
                device than the batch.
        """
        if self.kernel == "triton":
            raise ValueError(
                f"kernel: 'triton' cannot be used with {call.name}, which computes its attention weights itself; use "
                "kernel='torch'"
            )
        weights = call.softmax()
        if self._next_is_calibrated():
            self._check_device(call.name, weights.device)
            if weights.requires_grad:
                weights = weights.clone()  # softmax needs its unchanged result in the backward pass
            with torch.autocast(weights.device.type, enabled=False):
                calibrate_weights(
                    weights.view(call.logits.shape),
                    call.logits,
                    self.baskets,
                    hidden_below=call.hidden_below,
                    config=self.config,
                )
        return weights

    def attend(self, call: FusedCall) -> tuple[Tensor, Tensor | None]:
        """Runs one attention call, and calibrates its output if its layer is a calibrated one.

        Returns:
            The output (B, L, H, D_v), and the attention weights. The latter are None for a calibrated layer.

        Raises:
            ValueError: The call is to be calibrated, but does not attend over the tokens of the batch, runs on another
                device than the batch, or the kernel cannot compute it.
        """
        if not self._next_is_calibrated():
            return call.run_plain()
        length, n_keys = self._count_positions(call), call.key.shape[2]
        if call.query.shape[2] != length or n_keys != length:
            raise ValueError(
                f"{call.name} attends from {call.query.shape[2]} to {n_keys} positions, "
                f"but the batch has {length} tokens: this attention cannot be calibrated"
            )
        self._check_device(call.name, call.query.device)
        every_row, every_sequence = self.config.pooling == "mean", all(self.baskets.is_calibrated)
        if every_sequence and (every_row or (self.rows is not None and self.rows.has_begun)):
            # The plain attention need not run, since all rows that are read later are overwritten. Rows of padding are
            # zeros, because uninitialized memory may hold NaN.
            padded = not every_row or any(valid != (0, length) for valid in self.baskets.valid)
            allocate = call.value.new_zeros if padded else call.value.new_empty
            output = allocate((call.query.shape[0], length, call.query.shape[1], call.value.shape[-1]))
        else:
            output = call.run_plain()[0]
            if output.requires_grad:
                output = output.clone()  # fused attention needs its unchanged output in the backward pass
        call = replace(call, bias=self._with_cache(call.bias))
        # Autocast would run the matrix products of the calibration in half precision; they need float32.
        with torch.autocast(call.query.device.type, enabled=False):
            if self.kernel == "triton":
                self._one_pass.calibrate(output, call)
            elif not every_row:
                calibrate_pooled_row(output, call, self.baskets, self.config)
            elif call.offsets is None:
                calibrate_all_rows(output, call, self.baskets, self.config)
            else:
                output = self._calibrate_unpadded(output, call, call.offsets)
        return output, None  # the weights of eager attention would be the plain ones
