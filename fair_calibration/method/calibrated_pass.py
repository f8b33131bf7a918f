"""What a calibrated forward pass does with each attention call of a model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.access.attention_call import FusedCall, SoftmaxCall
from fair_calibration.config import FairConfig
from fair_calibration.method.all_rows import calibrate_all_rows
from fair_calibration.method.baskets import Baskets
from fair_calibration.method.last_layer import PooledRows
from fair_calibration.method.pooled_row import calibrate_pooled_row
from fair_calibration.method.softmax_weights import calibrate_weights

_MASKS_KEPT = 2  # of full attention, and of attention in a window


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
