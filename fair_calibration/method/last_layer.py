"""Computes the last layer for the pooled rows only, since cls and last-token pooling read no other row of it.

After its last attention a transformer processes every token independently of the others. So the last attention is
computed for one row of each sequence, and so are the linear layers after it, which take most of the time. The steps
between them, such as residual connections and norms, still run over all rows: the one row is broadcast to them, and
the other rows hold meaningless numbers. Before this is used with a model, a forward pass both ways checks that the
pooled rows are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fair_calibration.access.discovery import evaluating
from fair_calibration.config import FairConfig
from fair_calibration.method.baskets import Baskets
from fair_calibration.poolings import check_pooled_directly

# Largest difference from the whole layer, relative to the largest value: matrix products of other shapes round
# differently. If rows are mixed, or computed from meaningless numbers, they are off by about 1.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class PooledRows(TorchFunctionMode):
    """A context in which, after `begin`, linear layers are computed for one row per sequence only, in this thread.

    ``pooled`` is the row of each sequence, int64 (B,), ``length`` is L, and ``n_linear`` counts the linear layers that
    were computed for these rows only.
    """

    def __init__(self, pooled: Tensor, length: int) -> None:
        """Prepares one forward pass.

        Raises:
            ValueError: B equals L. Then (B, L) could not be told from (L, B) in the shapes of a layer's input.
        """
        super().__init__()
        if len(pooled) == length:
            raise ValueError(f"pooled: as many sequences as positions ({length}) cannot be told apart")
        self.pooled = pooled
        self.length = length
        self.n_linear = 0
        self._sequences = torch.arange(len(pooled), device=pooled.device)
        self._begun = False

    def begin(self) -> None:
        """Starts computing linear layers for the pooled rows only; called in the last attention layer."""
        self._begun = True

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one of torch's functions, a linear layer for the pooled rows only."""
        kwargs = kwargs or {}
        if self._begun and func is nn.functional.linear:
            args, kwargs = self._cut(*args, **kwargs), {}
        return func(*args, **kwargs)

    def _cut(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        if input.ndim == 3 and input.shape[:2] == (len(self.pooled), self.length):
            self.n_linear += 1
            input = input[self._sequences, self.pooled][:, None]
        return input, weight, bias

    def hide_others(self, states: Tensor) -> Tensor:
        """Returns the model's output (B, L, D) with NaN in all other rows, so that it is noticed if they are read."""
        hidden = torch.full_like(states, torch.nan)
        hidden[self._sequences, self.pooled] = states[self._sequences, self.pooled]
        return hidden


@dataclass(frozen=True)
class LastLayer:
    """A model's last layer, after `prove` found that it can be computed for the pooled rows only."""

    name: str  # the name of the model in error messages
    n_layers: int  # the number of its attention layers
    n_linear: int  # the number of linear layers after the last attention

    def rows(self, config: FairConfig, followers: Sequence[nn.Module], baskets: Baskets) -> PooledRows | None:
        """Returns the context in which a batch is encoded, or None to compute all rows.

        Raises:
            ValueError: The settings or the modules were changed, so that other rows are read.
        """
        n_sequences, length = baskets.segment_of_key.shape
        if n_sequences == length:
            return None
        _check(config, followers, self.n_layers)
        return PooledRows(baskets.pooled, length)

    def without_others(self, rows: PooledRows, result: dict[str, Any], output: str) -> dict[str, Any]:
        """Returns the transformer's features with NaN in all rows of the output but the pooled ones.

        Raises:
            ValueError: The model ran other linear layers than when it was checked, or it returns the states of all
                layers.
        """
        if rows.n_linear != self.n_linear:
            raise ValueError(
                f"{self.name} ran {rows.n_linear} linear layers after its last attention instead of the "
                f"{self.n_linear} recorded. Were adapters added or removed? Calibrate the model again"
            )
        if "all_layer_embeddings" in result:
            raise ValueError(
                "output_hidden_states: with pooled_row_only most states of the last layer are not computed; calibrate "
                "without it"
            )
        return {**result, output: rows.hide_others(result[output])}


def prove(
    model: nn.Module,
    name: str,
    config: FairConfig,
    followers: Sequence[nn.Module],
    n_layers: int,
    rows: PooledRows,
    encode: Callable[[PooledRows | None], Tensor],
) -> LastLayer:
    """Checks on a short batch, the probe, that the last layer of a model can be computed for the pooled rows only.

    Args:
        model: The transformer.
        name: Its name in error messages.
        config: The settings, with "auto" resolved.
        followers: The modules that documents pass through after the transformer.
        n_layers: The number of its attention layers.
        rows: The pooled rows of the probe, which are used up.
        encode: Runs the calibrated model over the probe, for these rows only or whole (None): output (B, L, D).

    Raises:
        ValueError: Other rows of the last layer are read, it is not calibrated, its pooled rows come out differently,
            or it has no linear layer to leave rows out of.
    """
    _check(config, followers, n_layers)
    with evaluating(model):
        whole = encode(None)
        try:
            part = encode(rows)
        except RuntimeError as error:  # such as shapes that do not fit
            raise ValueError(
                f"{name} does not run with one row per sequence after its last attention ({error}): calibrate it "
                "without pooled_row_only"
            ) from error
    if part.shape != whole.shape:
        raise ValueError(
            f"{name} returns states of shape {tuple(part.shape)} instead of {tuple(whole.shape)} with one row per "
            "sequence after its last attention: calibrate it without pooled_row_only"
        )
    if not rows.n_linear:
        raise ValueError(
            f"{name} has no linear layer over (batch, length, size) after its last attention, so nothing could be left "
            "out: calibrate it without pooled_row_only"
        )
    sequences = torch.arange(len(whole), device=whole.device)
    expected, got = (states[sequences, rows.pooled].double() for states in (whole, part))
    off, largest = (got - expected).abs().max(), expected.abs().max()
    if not off <= _TOLERANCE.get(whole.dtype, 1e-1) * largest:  # written so that NaN fails it
        raise ValueError(
            f"{name} mixes tokens after its last attention (the pooled row alone is off by {float(off):.3g}, values "
            f"reach {float(largest):.3g}): calibrate it without pooled_row_only"
        )
    return LastLayer(name, n_layers, rows.n_linear)


def _check(config: FairConfig, followers: Sequence[nn.Module], n_layers: int) -> None:
    """Checks that only the pooled rows of the last layer are read, and that it is a calibrated one."""
    if config.pooling == "mean":
        raise ValueError("pooled_row_only: mean pooling reads every row of the last layer; set it to False")
    check_pooled_directly(followers, config.pooling, setting="pooled_row_only")
    if n_layers - 1 not in config.select_layers(n_layers):
        raise ValueError(
            f"pooled_row_only: layer {n_layers - 1}, the last one, is not among the calibrated ones (layers="
            f"{config.layers!r}); set it to False"
        )
