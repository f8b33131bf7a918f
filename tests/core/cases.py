"""Attention problems for the oracle ladder: tensors, masks and settings, and how to run each rung on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fair_calibration import FairConfig
from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.access.attention_call import FusedCall
from fair_calibration.method.all_rows import calibrate_all_rows
from fair_calibration.method.baskets import Baskets, build_baskets
from fair_calibration.method.pooled_row import calibrate_pooled_row
from fair_calibration.method.reference import ReferenceAttention, calibrated_attention
from tests.core.oracle import oracle_attention

# Of outputs of size 1 to 3. float32: logits of size 30 are off by 30 * 6e-8, and so, relatively, are the weights; the
# logits of ALiBi reach 500. The low-precision inputs are the same for both sides, what is measured is arithmetic: the
# fused kernel holds weights and basket outputs in the dtype, of eps 2^-8 and 2^-11 (0.8 % and 0.1 % of a value of up to
# 3), and the result is rounded once more. Measured over test_fast_paths: 8e-6, 1.3e-2 and 1.7e-3.
TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Case:
    """One call of an attention layer on one batch, and how it is to be calibrated."""

    query: Tensor  # (B, H, L, D) float64
    key: Tensor  # (B, H_kv, L, D)
    value: Tensor  # (B, H_kv, L, D_v)
    attention_mask: Tensor  # (B, L) int64
    config: FairConfig
    mask: Tensor | None = None
    position_bias: Tensor | None = None
    causal: bool = False
    window: int | None = None
    scale: float = 0.4
    prompt_length: int = 0

    @property
    def strength(self) -> float:
        return self.config.strength

    @property
    def baskets(self) -> Baskets:
        return build_baskets(self.attention_mask, self.config, prompt_length=self.prompt_length)

    @property
    def bias(self) -> AttentionBias:
        return AttentionBias(self.mask, self.position_bias, self.causal, self.window)

    def to(self, dtype: torch.dtype) -> Case:
        """Returns the case rounded to ``dtype``, additive masks and biases included, as a model of it has them."""

        def cast(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or tensor.dtype == torch.bool:
                return tensor
            hidden = (tensor <= torch.finfo(tensor.dtype).min / 2) & ~tensor.isinf()
            return tensor.to(dtype).masked_fill(hidden, torch.finfo(dtype).min)

        return replace(
            self,
            query=self.query.to(dtype),
            key=self.key.to(dtype),
            value=self.value.to(dtype),
            mask=cast(self.mask),
            position_bias=cast(self.position_bias),
        )

    def full_bias_and_visible(self) -> tuple[Tensor, Tensor]:
        """Spells the masks out over (B, H, L, K), float64 and bool, by what transformers means by them."""
        n_sequences, n_heads, length, _ = self.query.shape
        shape = (n_sequences, n_heads, length, length)
        bias, visible = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.bool)
        if self.mask is not None and self.mask.dtype == torch.bool:
            visible = visible & self.mask
        elif self.mask is not None:
            hidden = self.mask <= torch.finfo(self.mask.dtype).min / 2
            visible = visible & ~hidden
            bias = bias + self.mask.double().masked_fill(hidden, 0.0)
        if self.position_bias is not None:
            bias = bias + self.position_bias.double()
        if self.causal:
            visible = visible & torch.ones(length, length, dtype=torch.bool).tril()
        if self.window is not None:
            positions = torch.arange(length)
            visible = visible & ((positions[:, None] - positions).abs() < self.window)
        return bias, visible

    def oracle(self) -> tuple[Tensor, Tensor]:
        """Returns the oracle's output (B, H, L, D_v) and weights (B, H, L, K), float64."""
        bias, visible = self.full_bias_and_visible()
        return oracle_attention(
            self.query,
            self.key,
            self.value,
            self.attention_mask,
            visible=visible,
            bias=bias,
            scale=self.scale,
            config=self.config,
            strength=self.strength,
            prompt_length=self.prompt_length,
        )

    def reference(self) -> ReferenceAttention:
        """Returns what the package's reference computes."""
        bias, visible = self.full_bias_and_visible()
        visible = visible & self.attention_mask.bool()[:, None, None]
        return calibrated_attention(
            self.query,
            self.key,
            self.value,
            self.baskets,
            visible=visible,
            bias=bias,
            scale=self.scale,
            config=self.config,
        )

    def plain(self) -> Tensor:
        """Returns plain attention (B, L, H, D_v) in the case's dtype; rows that see nothing are 0."""
        bias, visible = self.full_bias_and_visible()
        visible = visible & self.attention_mask.bool()[:, None, None]
        n_groups = self.query.shape[1] // self.key.shape[1]
        logits = self.query.double() @ self.key.double().repeat_interleave(n_groups, 1).transpose(-1, -2) * self.scale
        weights = (logits + bias).masked_fill(~visible, -1e300).softmax(-1) * visible
        output = weights @ self.value.double().repeat_interleave(n_groups, 1)
        return output.transpose(1, 2).to(self.query.dtype)

    def rows(self) -> Tensor:
        """Returns bool (B, L): the rows that calibration may change."""
        baskets = self.baskets
        if self.config.pooling == "mean":
            rows = self.attention_mask.bool()
        else:
            rows = torch.zeros_like(self.attention_mask, dtype=torch.bool)
            rows[torch.arange(len(rows)), baskets.pooled] = True
        return rows & baskets.calibrated[:, None]

    def fast(self) -> Tensor:
        """Runs the fast path of the case's pooling over the plain output: (B, L, H, D_v)."""
        output = self.plain()
        function = calibrate_all_rows if self.config.pooling == "mean" else calibrate_pooled_row
        function(output, self.call(), self.baskets, self.config)
        return output

    def call(self) -> FusedCall:
        """Returns the case as an attention call."""

        def run_plain() -> tuple[Tensor, None]:
            return self.plain(), None

        return FusedCall("Attention", self.query, self.key, self.value, self.scale, self.bias, run_plain)

    def fast_on_accelerator(self) -> Tensor:
        """Runs `fast` on the code paths of accelerators: the whole batch at once with gathered keys."""
        with _AcceleratorPaths():
            assert self.query.device.type != "cpu"
            return self.fast()


class _AcceleratorPaths(TorchFunctionMode):
    """Makes CPU tensors say that they are on some other device, so that code for other devices runs here."""

    said = torch.device("meta")

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return self.said
        args = [torch.device("cpu") if arg == self.said else arg for arg in args] if func is torch.Tensor.to else args
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == self.said:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def make_case(
    lengths: Sequence[int] = (13, 5, 9),
    *,
    side: str = "right",
    extra: int = 0,
    n_heads: int = 2,
    n_kv: int | None = None,
    dim: int = 4,
    value_dim: int | None = None,
    seed: int = 0,
    pooling: str = "mean",
    isolate: str = "auto",
    **settings: object,
) -> Case:
    """Builds a case of sequences of these lengths, padded on a side, all maskless: add masks with `replace`."""
    generator = torch.Generator().manual_seed(seed)
    length = max(lengths) + extra
    attention_mask = torch.zeros(len(lengths), length, dtype=torch.int64)
    for i, n in enumerate(lengths):
        attention_mask[i, slice(0, n) if side == "right" else slice(length - n, length)] = 1

    def normal(heads: int, size: int) -> Tensor:
        shape = (len(lengths), heads, length, size)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    config = FairConfig(**{"basket_size": 4, "strength": 0.7, "isolate": isolate, **settings})  # type: ignore[arg-type]
    n_kv = n_heads if n_kv is None else n_kv
    return Case(
        # Sharp attention: logits of a few units, so that baskets differ.
        query=normal(n_heads, dim) * 1.5,
        key=normal(n_kv, dim) * 1.5,
        value=normal(n_kv, dim if value_dim is None else value_dim),
        attention_mask=attention_mask,
        config=config.resolve(pooling),
    )


def with_padding_mask(case: Case) -> Case:
    """Gives the case the bool mask (B, 1, L, K) that transformers makes of padding, with L expanded."""
    length = case.query.shape[2]
    mask = case.attention_mask.bool()[:, None, None, :].expand(-1, 1, length, -1)
    return replace(case, mask=mask)


def masked_variants(case: Case) -> dict[str, Case]:
    """Returns the case under every kind of mask that models pass."""
    n_sequences, n_heads, length, _ = case.query.shape
    padding = case.attention_mask.bool()[:, None, None, :]
    positions = torch.arange(length)
    tril = torch.ones(length, length, dtype=torch.bool).tril()
    window = (positions[:, None] - positions[None]).abs() <= 2
    generator = torch.Generator().manual_seed(3)
    ragged = torch.rand(n_sequences, n_heads, length, length, generator=generator) < 0.5
    additive = torch.zeros(n_sequences, 1, length, length, dtype=torch.float64)
    lowest = torch.finfo(torch.float64).min  # `Case.to` makes it the dtype's own
    position_bias = torch.randn(1, n_heads, length, length, generator=generator, dtype=torch.float64)
    slopes = torch.tensor([2.0**-i for i in range(n_heads)], dtype=torch.float64)
    # ALiBi as of a very long input: one key away is -40, a basket away beyond what float32's exp can hold.
    alibi = -40.0 * slopes[:, None, None] * (positions[:, None] - positions[None]).abs()
    return {
        "none": case,
        "bool": replace(case, mask=padding.expand(-1, 1, length, -1)),
        "bool broadcast L": replace(case, mask=padding),
        "causal flag": replace(case, causal=True),
        "causal bool": replace(case, mask=padding & tril),
        "window flag": replace(case, window=3),
        "causal window flag": replace(case, window=3, causal=True),
        "window": replace(case, mask=padding & window),
        "causal window": replace(case, mask=padding & window & tril),
        "ragged heads": replace(case, mask=padding & ragged),
        "additive minimum": replace(case, mask=additive.masked_fill(~(padding & tril), lowest)),
        "additive infinity": replace(case, mask=additive.masked_fill(~padding, -torch.inf)),
        "additive broadcast L": replace(case, mask=additive[:, :, :1].masked_fill(~padding, lowest)),
        "position bias": replace(case, position_bias=position_bias),
        "position bias and bool": replace(case, position_bias=position_bias, mask=padding & window),
        "position bias and minimum": replace(
            case, position_bias=position_bias, mask=additive.masked_fill(~(padding & window), lowest)
        ),
        "alibi": replace(case, position_bias=alibi[None], mask=padding),
        "alibi in the mask": replace(case, mask=(additive + alibi[None]).masked_fill(~(padding & tril), lowest)),
    }


MASKS = list(masked_variants(make_case((3,))))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compares absolutely, in float64, and fails on NaN. The values are averages of standard normals, so about 1."""
    difference = (actual.double() - expected.double()).abs().max().item() if actual.numel() else 0.0
    if not difference <= tolerance:
        pytest.fail(f"off by {difference:.3g}, allowed {tolerance:.3g}")


def assert_fast_equals_reference(case: Case, tolerance: float | None = None) -> None:
    """Compares every way to compute the case with the reference in float64 on the same, rounded, numbers."""
    expected = case.to(torch.float64).reference().output.transpose(1, 2)
    plain, rows = case.plain(), case.rows()
    real = case.attention_mask.bool()
    for output in (case.fast(), case.fast_on_accelerator()):
        assert output.dtype == case.query.dtype
        assert_close(output[rows], expected[rows], tolerance or TOLERANCE[case.query.dtype])
        assert torch.equal(output[real & ~rows], plain[real & ~rows])  # no other token is touched
        assert output.isfinite().all()  # nor is padding spoilt: the next layer multiplies it by 0
