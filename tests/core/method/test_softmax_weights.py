from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fair_calibration import FairConfig, calibrate
from fair_calibration.method import calibrated_pass, softmax_weights
from fair_calibration.method.baskets import Baskets, build_baskets
from fair_calibration.method.softmax_weights import calibrate_weights
from tests.conftest import TinyModel
from tests.core.cases import assert_close
from tests.core.oracle import calibrated_row, geometry, oracle_attention
from tests.core.tiny_models import documents

# Weights are at most 1; float32 logits of size 10 are off by 6e-7, and so, relatively, are weights. Measured 4e-7.
TOLERANCE = 5e-6
MASKS = ["none", "causal", "window", "bias", "alibi"]
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class WeightsCase:
    """The logits of one softmax, and how its weights are to be calibrated."""

    logits: Tensor  # (B, H, L, L) float64, without masks
    visible: Tensor  # bool (B, 1, L, L), padding excluded
    attention_mask: Tensor
    config: FairConfig
    masked: float = LOWEST
    prompt_length: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def baskets(self) -> Baskets:
        return build_baskets(self.attention_mask, self.config, prompt_length=self.prompt_length)

    @property
    def hidden_below(self) -> float:
        return max(0.9 * self.masked, torch.finfo(torch.float16).min / 2)

    def model_logits(self) -> Tensor:
        """Returns the logits as a model has them."""
        return self.logits.to(self.dtype).masked_fill(~self.visible, self.masked)

    def calibrated(self, *, logits: Tensor | None = None) -> Tensor:
        logits = self.model_logits() if logits is None else logits
        weights = logits.softmax(-1)
        weights = weights.clone() if weights.requires_grad else weights
        calibrate_weights(
            weights,
            logits,
            self.baskets,
            hidden_below=self.hidden_below,
            config=self.config,
        )
        return weights

    def oracle(self) -> Tensor:
        """Returns the oracle's weights, of the logits as rounded to the dtype; rows of padding are 0."""
        logits = self.logits.to(self.dtype).double()
        nothing = logits.new_zeros(*logits.shape[:3], 1)
        return oracle_attention(
            nothing,
            nothing,
            nothing,
            self.attention_mask,
            visible=self.visible.expand(logits.shape),
            bias=logits,
            scale=1.0,
            config=self.config,
            strength=self.config.strength,
            prompt_length=self.prompt_length,
        )[1]

    def check(self, tolerance: float = TOLERANCE) -> None:
        """Compares with the oracle, and untouched rows with the plain weights."""
        weights, rows = self.calibrated(), self.attention_mask.bool()
        assert weights.dtype == self.dtype
        by_row, expected = weights.transpose(1, 2)[rows], self.oracle().transpose(1, 2)[rows]
        assert_close(by_row, expected, tolerance)
        calibrated = self.baskets.calibrated
        assert_same(weights[~calibrated], self.model_logits().softmax(-1)[~calibrated])
        if self.config.pooling != "mean":
            others = torch.ones_like(rows).scatter(1, self.baskets.pooled[:, None], False)
            plain = self.model_logits().softmax(-1).transpose(1, 2)
            assert_same(weights.transpose(1, 2)[others], plain[others])


def assert_same(one: Tensor, other: Tensor) -> None:
    """Compares bits; rows of padding may be NaN, where a mask of -inf hides all keys from them."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def make_case(
    lengths: Sequence[int] = (23, 5, 14),
    *,
    mask: str = "none",
    side: str = "right",
    n_heads: int = 2,
    seed: int = 0,
    pooling: str = "mean",
    holes: bool = False,
    **settings: Any,
) -> WeightsCase:
    generator = torch.Generator().manual_seed(seed)
    length = max(lengths) + 2
    attention_mask = torch.zeros(len(lengths), length, dtype=torch.int64)
    for i, n in enumerate(lengths):
        attention_mask[i, slice(0, n) if side == "right" else slice(length - n, length)] = 1
        if holes and n > 6:
            attention_mask[i, length // 2] = 0
    positions = torch.arange(length)
    distance = positions[:, None] - positions
    logits = torch.randn(len(lengths), n_heads, length, length, generator=generator, dtype=torch.float64) * 3
    visible = attention_mask.bool()[:, None, None].expand(-1, 1, length, -1)
    if mask == "causal":
        visible = visible & (distance >= 0)
    if mask == "window":
        visible = visible & (distance.abs() <= 3)
    if mask == "bias":
        logits = logits + 3 * torch.randn(n_heads, length, length, generator=generator, dtype=torch.float64)
    if mask == "alibi":  # of a very long input, with -9000 in the end, while -10000 hides
        visible = visible & (distance >= 0)
        logits = logits - 8000 / length * distance.abs() * torch.tensor([1.0, 0.1])[:n_heads, None, None]
    config = FairConfig(**{"basket_size": 4, "strength": 0.7, **settings}).resolve(pooling)
    return WeightsCase(logits, visible, attention_mask, config)


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
@pytest.mark.parametrize("isolate", ["none", "bos", "bos_eos"])
@pytest.mark.parametrize("isolated_share", ["preserve", "equal", 0.2])
@pytest.mark.parametrize("last_basket", ["equal", "proportional"])
def test_settings(pooling: str, isolate: str, isolated_share: str | float, last_basket: str) -> None:
    case = make_case(
        (14, 2, 9, 17), pooling=pooling, isolate=isolate, isolated_share=isolated_share, last_basket=last_basket
    )
    assert 0 < case.baskets.calibrated.sum() < 4
    case.check()
    replace(case, prompt_length=3).check()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("masked", [-1e4, torch.finfo(torch.float16).min, -1e9, LOWEST, -torch.inf])
@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
def test_masks(mask: str, masked: float, pooling: str) -> None:
    for side in ("left", "right"):
        for isolated_share in ("preserve", "equal"):
            case = make_case(mask=mask, side=side, pooling=pooling, isolate="bos", isolated_share=isolated_share)
            # float32 resolves logits of -8000 to 5e-4.
            replace(case, masked=masked).check(2e-3 if mask == "alibi" else TOLERANCE)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("mask", ["none", "causal", "alibi"])
def test_content_with_holes(pooling: str, mask: str) -> None:
    case = make_case(mask=mask, pooling=pooling, holes=True)
    assert case.baskets.content[0] is None
    case.check(2e-3 if mask == "alibi" else TOLERANCE)


@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float64, 2**-20)])
@pytest.mark.parametrize("mask", ["none", "causal", "bias"])
@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
def test_dtypes(dtype: torch.dtype, eps: float, mask: str, pooling: str) -> None:
    # Rounded once, in the end: half a unit in the last place of weights up to 1.
    case = replace(make_case(mask=mask, pooling=pooling), dtype=dtype, masked=float(torch.finfo(dtype).min))
    case.check(eps / 2)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_far_keys_are_not_hidden(pooling: str) -> None:
    # Every plain weight outside of the last basket is exactly 0, at any precision.
    case = make_case((24,), mask="alibi", pooling=pooling, isolate="none", strength=1.0, n_heads=1)
    plain = case.model_logits().softmax(-1)
    assert (plain[0, :, 23, :20] == 0).all()
    masses = case.calibrated()[0, 0, 23, :24].unflatten(-1, (6, 4)).sum(-1)
    assert_close(masses, torch.full((6,), 1 / 6), 1e-6)
    # With a mask that reaches no deeper than the bias they cannot be told apart.
    shallow = replace(case, masked=-1000.0).calibrated()[0, 0, 23, :24].unflatten(-1, (6, 4)).sum(-1)
    assert shallow[0] == 0


def test_rows_that_see_isolated_tokens_alone() -> None:
    case = make_case((9,), mask="causal", isolate="bos")
    assert case.calibrated()[0, :, 0, 0].tolist() == [1.0, 1.0]
    case.check()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_nan_is_passed_on(pooling: str) -> None:
    case = make_case((12, 12), mask="causal", pooling=pooling)
    logits, row = case.model_logits(), 11
    logits[0, 0, row, 5] = torch.nan
    weights, clean = case.calibrated(logits=logits), case.calibrated()
    assert weights[0, 0, row, :12].isnan().any()
    weights[0, 0, row] = clean[0, 0, row]
    assert_close(weights, clean, 1e-6)  # and to no other row


def test_logits_are_left_alone() -> None:
    for pooling in ("cls", "mean"):
        case = make_case(mask="causal", pooling=pooling)
        logits = case.model_logits()
        before = logits.clone()
        case.calibrated(logits=logits)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("mask", ["none", "causal", "alibi"])
def test_blocks_of_rows(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(mask=mask, isolate="bos")
    holes = make_case(mask=mask, isolate="bos", holes=True)
    whole = case.calibrated(), holes.calibrated()
    blocks: list[int] = []
    block = softmax_weights._calibrate_block

    def spy(weights: Tensor, *args: Any) -> None:
        blocks.append(weights.shape[1])
        block(weights, *args)

    monkeypatch.setattr(softmax_weights, "_calibrate_block", spy)
    monkeypatch.setattr(softmax_weights, "_CPU_BYTES", 5 * 4 * 2 * 25)
    monkeypatch.setattr(softmax_weights, "_DEVICE_BYTES", 7 * 4 * 6 * 25)
    assert_close(case.calibrated(), whole[0], 1e-6)
    assert_close(holes.calibrated(), whole[1], 1e-6)
    assert blocks == [5, 5, 5, 5, 3, 5, 5, 5, 4]  # 23, 5 and 14 rows


@pytest.mark.parametrize("last_basket", ["equal", "proportional"])
def test_rescaled_weights_equal_those_of_logits(last_basket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(isolate="bos", isolated_share="equal", last_basket=last_basket)
    calls: list[int] = []
    parts_of_logits = softmax_weights._parts_of_logits
    monkeypatch.setattr(softmax_weights, "_parts_of_logits", lambda *args: calls.append(1) or parts_of_logits(*args))
    rescaled = case.calibrated()
    assert bool(calls) == (last_basket == "proportional")
    monkeypatch.setattr(softmax_weights, "_LEAST_MASS", 1.0)
    assert_close(case.calibrated(), rescaled, 1e-6)
    assert calls


@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=3),
    basket_size=st.integers(1, 9),
    min_content=st.none() | st.integers(1, 12),
    side=st.sampled_from(["left", "right"]),
    pooling=st.sampled_from(["cls", "last", "mean", "mean"]),
    isolate=st.sampled_from(["none", "bos", "bos_eos"]),
    isolated_share=st.sampled_from(["preserve", "equal", 0.0, 0.3]),
    last_basket=st.sampled_from(["equal", "proportional"]),
    strength=st.floats(0, 1),
    prompt_length=st.integers(0, 4),
    mask=st.sampled_from(["none", "causal", "window", "bias"]),
    masked=st.sampled_from([-1e4, LOWEST, -torch.inf]),
    holes=st.booleans(),
    seed=st.integers(0, 99),
)
def test_anything(prompt_length: int, masked: float, **settings: Any) -> None:
    replace(make_case(**settings), prompt_length=prompt_length, masked=masked).check()


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_gradients_equal_the_references(pooling: str) -> None:
    case = make_case((13, 6, 2), mask="causal", pooling=pooling, isolate="bos")
    logits = case.model_logits().requires_grad_()
    weights = case.calibrated(logits=logits)
    rows = case.attention_mask.bool()[:, None, :, None].expand(weights.shape)
    factor = torch.linspace(-1, 1, weights.numel()).view_as(weights) * rows
    (weights * factor).sum().backward()
    assert logits.grad is not None
    # Against differences of the oracle's weights, of some logits each.
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        direction = torch.randn(case.logits.shape, generator=generator, dtype=torch.float64) * case.visible
        ahead, behind = (replace(case, logits=case.logits + h * direction, dtype=torch.float64) for h in (1e-4, -1e-4))
        slope = ((ahead.oracle() - behind.oracle()) * factor).sum() / 2e-4
        assert_close((logits.grad.double() * direction).sum(), slope, 1e-3 * float(slope.abs()) + 1e-3)


# As part of a model


def peak_memory(run: Any) -> int:
    """Returns the most bytes that torch's allocator held at once while ``run`` ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    total = peak = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        total += size
        peak = max(peak, total)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
def test_no_second_matrix(pooling: str, mask: str, dtype: torch.dtype) -> None:
    length = 1024
    logits = torch.randn(2, 8, length, length)
    if mask == "causal":
        logits.masked_fill_(~torch.ones(length, length, dtype=torch.bool).tril(), LOWEST)
    logits = logits.to(dtype)
    weights = logits.softmax(-1)
    config = FairConfig().resolve(pooling)
    baskets = build_baskets(torch.ones(2, length, dtype=torch.int64), config)
    peak = peak_memory(lambda: calibrate_weights(weights, logits, baskets, hidden_below=-3e4, config=config))
    # A float32 matrix has 64 MiB. Measured: 0.3 MiB for one row, 0.2 to 6.6 MiB for all rows in blocks of 2 MiB.
    assert 0 < peak < (1 if pooling != "mean" else 8) * 2**20


@pytest.mark.parametrize("family", ["bloom", "mpt"])
@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
def test_alibi_over_2048_tokens_in_bfloat16(
    family: str, pooling: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tiny_model(family, pooling, model_kwargs={"dtype": torch.bfloat16})
    plain.max_seq_length = plain[0].model.config.max_seq_len = 2100
    fair = calibrate(plain, FairConfig(layers=1))
    config = fair.summary().config
    taken: list[tuple[Tensor, Tensor]] = []

    def spy(weights: Tensor, logits: Tensor, *args: Any, **kwargs: Any) -> None:
        calibrate_weights(weights, logits, *args, **kwargs)
        taken.append((weights, logits))

    monkeypatch.setattr(calibrated_pass, "calibrate_weights", spy)
    assert fair.encode(documents([2090, 1900]), convert_to_tensor=True).isfinite().all()
    (weights, logits) = taken[0]
    mask = fair.preprocess(documents([2090, 1900]))["attention_mask"]
    length = mask.shape[1]
    assert length == 2091
    plain = logits.float().softmax(-1)
    for sequence, head in ((0, 0), (1, 0), (1, 3)):
        shape = geometry([bool(v) for v in mask[sequence].tolist()], config)
        rows = [shape.rows[i] for i in (-1, -300, 1000)] if pooling == "mean" else shape.rows
        for row in rows:
            seen = {k: float(logits[sequence, head, row, k]) for k in shape.valid if k <= row}
            expected = calibrated_row(seen, shape, config, config.strength)
            found = {k: float(weights[sequence, head, row, k]) for k in seen}
            total = sum(expected[k] for k in shape.baskets[0])
            assert total > 0.02  # half a share of 16
            if head == 0:
                assert (plain[sequence, head, row, shape.baskets[0]] == 0).all()
            # Relative to the largest weight of the row: half a unit of bfloat16, and float32's logits of -500.
            assert max(abs(found[k] - expected[k]) for k in seen) < 2**-8 * max(expected.values())
