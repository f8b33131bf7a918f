"""The last layer for the pooled rows alone: with cls and last-token pooling nothing else of its output is read.

Behind the last attention a transformer treats every token by itself. So the last attention is computed for one row of
each sequence, and from then on so are the linear layers, where most of the time goes. What stands between them, such as
residuals and norms, runs over all rows: one row is broadcast to them, and the others hold numbers without a meaning.
That this leaves the pooled row as it is, is proven on every model by a forward pass both ways, before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fair_calibration.config import FairConfig
from fair_calibration.method.baskets import Baskets
from fair_calibration.poolings import check_pooled_directly

# Largest difference to the whole layer, relative to the largest value: roundings of products of other shapes, behind
# norms. Rows that are mixed, or computed from numbers without a meaning, are off by about 1.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class PooledRows(TorchFunctionMode):
    """While entered, and from `begin` on, computes linear layers for one row per sequence. Modes are of one thread.

    Attributes:
        pooled: int64 (B,), the row of each sequence.
        length: L.
        n_linear: How many linear layers were cut so far.
    """

    def __init__(self, pooled: Tensor, length: int) -> None:
        """Takes note of the rows; B and L must differ, since layers are told by them."""
        super().__init__()
        if len(pooled) == length:
            raise ValueError(f"pooled: as many sequences as positions ({length}) cannot be told apart")
        self.pooled = pooled
        self.length = length
        self.n_linear = 0
        self._sequences = torch.arange(len(pooled), device=pooled.device)
        self._begun = False

    def begin(self) -> None:
        """From here on, only the pooled rows are right."""
        self._begun = True

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one function of torch."""
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
        """Returns the model's output (B, L, D) with NaN in all rows but the pooled ones: no one is to read them."""
        hidden = torch.full_like(states, torch.nan)
        hidden[self._sequences, self.pooled] = states[self._sequences, self.pooled]
        return hidden


@dataclass(frozen=True)
class LastLayer:
    """The last layer of a model that was proven to leave its pooled rows as they are when computed for them alone.

    Attributes:
        name: What errors call the model.
        n_layers: Its attention layers.
        n_linear: How many linear layers are cut.
    """

    name: str
    n_layers: int
    n_linear: int

    def rows(self, config: FairConfig, followers: Sequence[nn.Module], baskets: Baskets) -> PooledRows | None:
        """Returns the rows of a batch; None where they cannot be told apart, and all are computed.

        Raises:
            ValueError: The modules behind it or settings were changed, so that other rows are read.
        """
        n_sequences, length = baskets.segment_of_key.shape
        if n_sequences == length:
            return None
        _check(config, followers, self.n_layers)
        return PooledRows(baskets.pooled, length)

    def without_others(self, rows: PooledRows, result: dict[str, Any], output: str) -> dict[str, Any]:
        """Returns the features with NaN in all rows of ``output``, (B, L, D), but the pooled ones.

        Raises:
            ValueError: Other layers were cut than those that were proven, or states of all layers are asked for.
        """
        if rows.n_linear != self.n_linear:
            raise ValueError(
                f"{self.name} ran {rows.n_linear} linear layers behind its last attention instead of the "
                f"{self.n_linear} recorded. Were adapters added or removed? Calibrate the model again"
            )
        if "all_layer_embeddings" in result:
            raise ValueError(
                "output_hidden_states: with pooled_row_only the last layer's states are not all there; calibrate "
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
    """Proves that the last layer of a model may be computed for the pooled rows alone.

    Args:
        model: The transformer.
        name: What errors call it.
        config: A resolved config.
        followers: The modules that documents pass behind the transformer.
        n_layers: Its attention layers.
        rows: Those of the probe, used up by this.
        encode: Runs the calibrated model over the probe, with these rows or whole, giving its output (B, L, D).

    Raises:
        ValueError: Other rows are read, the last layer is not calibrated, the pooled rows come out otherwise, or there
            is nothing that could be left out.
    """
    _check(config, followers, n_layers)
    training = [(module, module.training) for module in model.modules()]
    model.train(False)
    try:
        with torch.inference_mode():
            whole = encode(None)
            try:
                part = encode(rows)
            except RuntimeError as error:  # of shapes
                raise ValueError(
                    f"{name} does not run with one row per sequence behind its last attention ({error}): calibrate it "
                    "without pooled_row_only"
                ) from error
    finally:
        for module, mode in training:
            module.training = mode
    if part.shape != whole.shape:
        raise ValueError(
            f"{name} returns states of shape {tuple(part.shape)} instead of {tuple(whole.shape)} with one row per "
            "sequence behind its last attention: calibrate it without pooled_row_only"
        )
    if not rows.n_linear:
        raise ValueError(
            f"{name} has no linear layer over (batch, length, size) behind its last attention: there is nothing to "
            "leave out; calibrate it without pooled_row_only"
        )
    sequences = torch.arange(len(whole), device=whole.device)
    expected, got = (states[sequences, rows.pooled].double() for states in (whole, part))
    off, largest = (got - expected).abs().max(), expected.abs().max()
    if not off <= _TOLERANCE.get(whole.dtype, 1e-1) * largest:  # a comparison that NaN fails as well
        raise ValueError(
            f"{name} mixes tokens behind its last attention (the pooled row alone is off by {float(off):.3g}, values "
            f"reach {float(largest):.3g}): calibrate it without pooled_row_only"
        )
    return LastLayer(name, n_layers, rows.n_linear)


def _check(config: FairConfig, followers: Sequence[nn.Module], n_layers: int) -> None:
    """Checks that nothing but the pooled rows of the last layer is read, and that it is calibrated."""
    if config.chunk_size is not None:
        raise ValueError("pooled_row_only: chunks (chunk_size) are encoded by the plain model, whole; set it to False")
    if config.pooling == "mean":
        raise ValueError("pooled_row_only: mean pooling reads every row of the last layer; set it to False")
    check_pooled_directly(followers, config, setting="pooled_row_only")
    if n_layers - 1 not in config.select_layers(n_layers):
        raise ValueError(
            f"pooled_row_only: layer {n_layers - 1}, the last one, is not among the calibrated ones (layers="
            f"{config.layers!r}); set it to False"
        )
