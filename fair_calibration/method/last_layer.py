"""Computes the last layer for the pooled rows only, since cls and last-token pooling read no other row of it.

After its last attention a transformer processes every token independently of the others. So the last attention is
computed for one row of each sequence, and so are the linear layers after it, which take most of the time. The steps
between them, such as residual connections and norms, still run over all rows: the one row is broadcast to them, and
the other rows hold meaningless numbers. Before this is used with a model, a forward pass both ways checks that the
pooled rows are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fair_calibration.config import FairConfig
from fair_calibration.poolings import check_pooled_directly

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of two ways to compute a model's output, relative to the largest value, by dtype.

Matrix products of other shapes round differently. Rows that are mixed, or made of meaningless numbers, are off by 1.
"""


class PooledRows(TorchFunctionMode):
    """A context in which, once ``has_begun`` is True, linear layers are computed for one row per sequence only.

    ``pooled`` is the row of each sequence, int64 (B,), and ``length`` is L. B and L have to differ, because otherwise
    (B, L) could not be distinguished from (L, B). ``n_linear`` counts the linear layers computed for these rows only.
    """

    def __init__(self, pooled: Tensor, length: int) -> None:
        super().__init__()
        self.pooled = pooled
        self.length = length
        self.n_linear = 0
        self._sequences = torch.arange(len(pooled), device=pooled.device)
        self.has_begun = False  # becomes True in the last attention layer

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one of torch's functions, a linear layer for the pooled rows only."""
        kwargs = kwargs or {}
        if self.has_begun and func is nn.functional.linear:
            args, kwargs = self._cut(*args, **kwargs), {}
        return func(*args, **kwargs)

    def _cut(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        if input.ndim == 3 and input.shape[:2] == (len(self.pooled), self.length):
            self.n_linear += 1
            input = self.select(input)[:, None]
        return input, weight, bias

    def select(self, states: Tensor) -> Tensor:
        """Returns the pooled rows (B, D) of states (B, L, D)."""
        return states[self._sequences, self.pooled]

    def hide_others(self, states: Tensor) -> Tensor:
        """Returns states (B, L, D) with NaN in all other rows, so that it is noticed if they are read."""
        hidden = torch.full_like(states, torch.nan)
        hidden[self._sequences, self.pooled] = self.select(states)
        return hidden


def check_only_pooled_rows_are_read(
    config: FairConfig, followers: Sequence[nn.Module], *, layers: Collection[int], n_layers: int
) -> None:
    """Checks that only the pooled rows of the last layer are read, and that this layer is calibrated.

    Args:
        config: The settings, with "auto" resolved.
        followers: The modules that documents pass through after the transformer.
        layers: The indices of the calibrated layers.
        n_layers: The number of the model's attention layers.

    Raises:
        ValueError: Other rows are read as well, or the last layer is not calibrated.
    """
    if config.pooling == "mean":
        raise ValueError("pooled_row_only: mean pooling reads every row of the last layer; set it to False")
    check_pooled_directly(followers, config.pooling, setting="pooled_row_only")
    if n_layers - 1 not in layers:
        raise ValueError(
            f"pooled_row_only: layer {n_layers - 1}, the last one, is not among the calibrated ones (layers="
            f"{config.layers!r}, attention={config.attention!r}); set it to False"
        )


def compare_with_whole_layer(name: str, rows: PooledRows, encode: Callable[[PooledRows | None], Tensor]) -> None:
    """Checks on a short batch that the last layer of a model can be computed for the pooled rows only.

    Args:
        name: The model's name in error messages.
        rows: The pooled rows of the batch. Afterwards ``rows.n_linear`` is the number of linear layers.
        encode: Runs the calibrated model over the batch, for these rows only or as a whole (None): output (B, L, D).

    Raises:
        ValueError: The pooled rows come out differently, or there is no linear layer to leave rows out of.
    """
    whole = encode(None)
    try:
        part = encode(rows)
    except RuntimeError as error:  # such as shapes that do not fit
        raise ValueError(
            f"{name} does not run with one row per sequence after its last attention ({error}): calibrate it without "
            "pooled_row_only"
        ) from error
    if part.shape != whole.shape:
        problem = (
            f"returns states of shape {tuple(part.shape)} instead of {tuple(whole.shape)} with one row per sequence "
            "after its last attention"
        )
    elif not rows.n_linear:
        problem = (
            "has no linear layer over (batch, length, size) after its last attention, so nothing could be left out"
        )
    else:
        expected, got = rows.select(whole).double(), rows.select(part).double()
        off, largest = (got - expected).abs().max(), expected.abs().max()
        if off <= TOLERANCE.get(whole.dtype, 1e-1) * largest:  # not so for NaN
            return
        problem = (
            f"mixes tokens after its last attention (the pooled row alone is off by {float(off):.3g}, values reach "
            f"{float(largest):.3g})"
        )
    raise ValueError(f"{name} {problem}: calibrate it without pooled_row_only")
