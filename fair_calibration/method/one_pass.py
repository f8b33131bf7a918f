"""Launches the Triton kernel: calibrated attention in one pass over the keys, one launch per layer.

The kernel is equal to the other implementations in Triton's interpreter and compiles for GPUs, but nobody has run it on
a GPU yet. So it is off unless it is asked for (``calibrate(model, kernel="triton")``).
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fair_calibration.access.attention_call import FusedCall
from fair_calibration.config import FairConfig
from fair_calibration.method.baskets import Baskets
from fair_calibration.method.kernel_blocks import PRECISION, block_of, choose_blocks
from fair_calibration.method.last_layer import TOLERANCE
from fair_calibration.method.row_ranges import RowRanges, find_row_ranges

LARGEST_HEAD = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SHARE_KINDS = {"preserve": 0, "equal": 1}  # every other value is a fixed share, kind 2


class OnePass:
    """Calibrates the attention calls of one batch with the Triton kernel.

    What depends on the batch alone is put together once, for all layers.
    """

    def __init__(self, baskets: Baskets, config: FairConfig) -> None:
        """Takes the roles of the tokens, on the model's device, and the settings, with "auto" resolved.

        Raises:
            ValueError: The kernel cannot run on this device.
        """
        check_device(baskets.pooled.device)
        self._baskets = baskets
        self._config = config
        self._sequences: Tensor | None = None

    def calibrate(self, output: Tensor, call: FusedCall) -> None:
        """Overwrites the calibrated rows in ``output``: the pooled rows, or every row of a token for mean pooling.

        The arguments are those of `pooled_row.calibrate_pooled_row`. For mean pooling ``output`` need not be
        initialized in calibrated sequences; its rows of padding are left as they are.

        Raises:
            ValueError: The kernel cannot compute this call, or gradients are asked for.
        """
        _check_call(call)
        try:
            ranges = call.bias.cached("ranges", lambda: self._find_ranges(call))
        except ValueError as error:
            raise _unsupported(call, str(error)) from error
        self._launch(output, call, ranges)

    def _find_ranges(self, call: FusedCall) -> RowRanges | None:
        pooled = None if self._config.pooling == "mean" else self._baskets.pooled
        ranges = find_row_ranges(call.bias, self._baskets, pooled)
        if ranges is None and self._gathers:
            return RowRanges(*self._isolated.new_tensor([[[0]], [[self._baskets.segment_of_key.shape[1]]]]))
        return ranges

    @cached_property
    def _gathers(self) -> bool:
        """Whether the content of a calibrated sequence is not one range of positions."""
        baskets = self._baskets
        return any(c and content is None for c, content in zip(baskets.is_calibrated, baskets.content, strict=True))

    @cached_property
    def _isolated(self) -> Tensor:
        """The positions of isolated tokens, int32 (B, I), -1 for one that a sequence lacks."""
        return torch.where(self._baskets.isolated_filled, self._baskets.isolated, -1).int().contiguous()

    def _describe_sequences(self, offsets: Tensor | None) -> Tensor:
        """Returns what the kernel reads of every sequence, int32 (B, 6)."""
        baskets = self._baskets
        device = baskets.pooled.device
        on_host = [
            (*valid, (content or (0, 0))[0], size)
            for valid, content, size in zip(baskets.valid, baskets.content, baskets.sizes, strict=True)
        ]
        first, end, content, size = torch.tensor(on_host, device=device).reshape(-1, 4).unbind(1)
        if self._config.pooling != "mean":
            first, end = baskets.pooled, baskets.pooled + 1
        end = torch.where(baskets.calibrated, end, first)  # no rows of other sequences
        begin = torch.zeros_like(first) if offsets is None else offsets[:-1]
        return torch.stack([begin, first, end, content, baskets.filled.sum(1), size], 1).int()

    def _launch(self, output: Tensor, call: FusedCall, ranges: RowRanges | None) -> None:
        from fair_calibration.method.one_pass_kernel import one_pass

        baskets, config = self._baskets, self._config
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (call.query, call.key, call.value))
        if self._sequences is None:
            self._sequences = self._describe_sequences(call.offsets)
        sequences = self._sequences
        n_kv = key.shape[1]
        n_groups = query.shape[1] // n_kv
        n_rows = baskets.segment_of_key.shape[1] if config.pooling == "mean" else 1
        dim, value_dim = key.shape[-1], value.shape[-1]
        blocks = choose_blocks(
            n_rows * n_groups,
            config.basket_size,
            max(dim, value_dim),
            key.dtype if key.dtype == value.dtype else torch.float32,
        )
        lowest, highest = (sequences, sequences) if ranges is None else ranges
        lowest, highest = torch.broadcast_tensors(lowest, highest)  # type: ignore[no-untyped-call]
        range_strides = [0 if size == 1 else stride for size, stride in zip(lowest.shape, lowest.stride(), strict=True)]
        strides = [stride for tensor in (query, key, value, output) for stride in tensor.stride()[:3]]
        if call.offsets is not None:
            strides[::3] = [0] * 4  # the sequences begin at their offsets
        share = config.isolated_share
        grid = (-(-n_rows * n_groups // blocks.rows), n_kv, len(sequences))
        # Triton launches on the current device, which may be another one.
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            one_pass[grid](
                query,
                key,
                value,
                output,
                sequences,
                baskets.slots,
                self._isolated,
                lowest,
                highest,
                call.scale * math.log2(math.e),
                config.strength,
                share if isinstance(share, float) else 0.0,
                _SHARE_KINDS.get(str(share), 2),
                int(config.last_basket == "proportional"),
                n_groups,
                baskets.slots.shape[1],
                self._isolated.shape[1],
                baskets.n_kept,
                baskets.basket_size,
                *strides,
                *range_strides,
                RANGES=ranges is not None,
                GATHER=self._gathers,
                SINGLE=blocks.keys >= baskets.basket_size,
                D=dim,
                BLOCK_D=block_of(dim),
                DV=value_dim,
                BLOCK_DV=block_of(value_dim),
                BLOCK_ROWS=blocks.rows,
                BLOCK_KEYS=blocks.keys,
                PRECISION=PRECISION,
                AS_FLOAT32=_is_interpreted(),
                num_warps=blocks.n_warps,
                num_stages=blocks.n_stages,
            )


def check_device(device: torch.device) -> None:
    """Raises a ValueError if the kernel cannot run on a device."""
    try:
        is_interpreted = _is_interpreted()
    except ImportError as error:
        raise ValueError(
            f"kernel: 'triton' needs the package triton, which torch's CUDA builds bring along ({error}); use "
            "kernel='torch'"
        ) from error
    if device.type != "cuda" and not is_interpreted:
        raise ValueError(
            f"kernel: 'triton' runs on CUDA devices, the model is on {device}; use kernel='torch', or move the model"
        )


def _is_interpreted() -> bool:
    """Returns whether the kernel runs in Triton's interpreter (``TRITON_INTERPRET=1``)."""
    from triton.runtime.interpreter import InterpretedFunction

    from fair_calibration.method.one_pass_kernel import one_pass

    return isinstance(one_pass, InterpretedFunction)


def check_same_output(name: str, expected: Tensor, output: Tensor) -> None:
    """Checks that a model gives the same output (..., D) with the kernel as with torch's functions, up to rounding.

    Raises:
        ValueError: The outputs differ by more. ``name`` is the model's name in the message.
    """
    off = (output.double() - expected.double()).abs().max()
    largest = expected.double().abs().max()
    if not off <= TOLERANCE.get(expected.dtype, 1e-1) * largest:  # written so that NaN fails it
        raise ValueError(
            f"kernel: 'triton' computes something else than torch's functions for a short text with {name} (off by "
            f"{float(off):.3g}, values reach {float(largest):.3g}); use kernel='torch', and please report this"
        )


def _check_call(call: FusedCall) -> None:
    """Raises a ValueError if the kernel cannot compute a call."""
    tensors: dict[str, Any] = {"query": call.query, "key": call.key, "value": call.value}
    for name, tensor in tensors.items():
        if tensor.stride(2) * tensor.shape[2] >= 2**31:  # positions are multiplied in 32 bits
            raise _unsupported(call, f"its {name} is too long ({tensor.shape[2]} tokens)")
        if tensor.dtype not in _DTYPES:
            raise _unsupported(call, f"its {name} is {str(tensor.dtype).removeprefix('torch.')}")
        if tensor.shape[-1] > LARGEST_HEAD:
            raise _unsupported(call, f"its {name} has heads of {tensor.shape[-1]} dimensions, more than {LARGEST_HEAD}")
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(
                "kernel: 'triton' computes no gradients; train with kernel='torch', or encode under torch.no_grad()"
            )


def _unsupported(call: FusedCall, reason: str) -> ValueError:
    return ValueError(f"kernel: 'triton' cannot compute the attention of {call.name}: {reason}; use kernel='torch'")
