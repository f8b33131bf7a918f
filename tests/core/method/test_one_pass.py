"""The Triton kernel, run by Triton's interpreter on the CPU, against the float64 oracle and the reference."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fair_calibration.method import one_pass
from fair_calibration.method.calibrated_pass import CalibratedPass, KernelName
from fair_calibration.method.kernel_blocks import Blocks, block_of, choose_blocks
from fair_calibration.method.one_pass import OnePass
from tests.core.cases import MASKS, TOLERANCE, Case, assert_close, make_case, masked_variants

pytest.importorskip("triton", reason="the package triton, which exists for Linux, is not installed")
ADDITIVE = {name for name in MASKS if "additive" in name or "position bias" in name or "alibi" in name}


@torch.no_grad()
def run_kernel(case: Case) -> torch.Tensor:
    output = case.plain()
    OnePass(case.baskets, case.config).calibrate(output, case.call())
    return output


def assert_equals_oracle(case: Case, tolerance: float | None = None) -> None:
    """Compares with the oracle in float64 on the same, rounded, numbers; no other row of a token may be touched."""
    expected = case.to(torch.float64).oracle()[0].transpose(1, 2)
    output, rows, real = run_kernel(case), case.rows(), case.attention_mask.bool()
    assert output.dtype == case.query.dtype
    assert_close(output[rows], expected[rows], tolerance or TOLERANCE[case.query.dtype])
    assert torch.equal(output[real & ~rows], case.plain()[real & ~rows])
    assert output.isfinite().all()


def random_case(seed: int) -> Case:
    """Returns a case with random shapes, settings, masks and padding."""
    rng = random.Random(seed)
    n_kv = rng.choice([1, 2])
    case = make_case(
        [rng.randint(1, 26) for _ in range(rng.choice([1, 2, 3]))],
        side=rng.choice(["left", "right"]),
        extra=rng.choice([0, 3]),
        n_heads=n_kv * rng.choice([1, 2, 3]),
        n_kv=n_kv,
        dim=rng.choice([4, 16, 20]),
        value_dim=rng.choice([None, 8, 32]),
        seed=seed,
        pooling=rng.choice(["cls", "last", "mean", "mean"]),
        isolate=rng.choice(["auto", "none", "bos", "bos_eos"]),
        basket_size=rng.choice([1, 3, 5, 8, 16, 20]),
        strength=rng.choice([0.3, 1.0]),
        isolated_share=rng.choice(["preserve", "equal", 0.0, 0.2]),
        last_basket=rng.choice(["equal", "proportional", "halves"]),
        min_content=rng.choice([None, 1]),
    )
    case = replace(case, prompt_length=rng.choice([0, 0, 2, 17]))
    masked = masked_variants(case)[rng.choice(["none", "bool", "bool broadcast L", "causal flag", "causal bool"])]
    return replace(masked, window=rng.choice([None, None, 1, 4])) if masked.mask is None else masked


@pytest.mark.parametrize("seed", range(16))
def test_equals_the_oracle(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:  # blocks smaller than a basket, and more than one block of rows
        monkeypatch.setattr(one_pass, "choose_blocks", lambda *_: Blocks(16, 16, 4, 2))
    case = random_case(seed)
    dtype = (torch.float32, torch.float32, torch.bfloat16, torch.float16)[seed // 2 % 4]
    assert_equals_oracle(case.to(dtype))


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_every_mask_of_one_range_per_row(pooling: str) -> None:
    case = make_case((13, 5), pooling=pooling, isolate="bos", side="left").to(torch.float32)
    for name, masked in masked_variants(case).items():
        if name in ADDITIVE:
            with pytest.raises(
                ValueError, match=r"kernel: 'triton' cannot .* Attention: a bias is added to its logits"
            ):
                run_kernel(masked)
        elif name == "ragged heads":
            with pytest.raises(ValueError, match=r"Attention: its heads see different keys; use kernel='torch'"):
                run_kernel(masked)
        else:
            assert_equals_oracle(masked)
    hole = torch.ones(1, 1, 13, 13, dtype=torch.bool)
    hole[..., 12, 6] = False  # the last token of the first sequence, and the row of no other
    if pooling == "mean":
        with pytest.raises(ValueError, match=r"Attention: some of its rows see tokens on both sides of others"):
            run_kernel(replace(case, mask=hole))
    else:  # the pooled rows are the first ones
        assert_equals_oracle(replace(case, mask=hole))


def test_masks_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from fair_calibration.method import row_ranges

    monkeypatch.setattr(row_ranges, "_BLOCK_BYTES", 200)
    variants = masked_variants(make_case((13, 5), isolate="bos").to(torch.float32))
    for name in ("bool", "causal bool", "window"):
        assert_equals_oracle(variants[name])


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_padding_inside_a_sequence(pooling: str) -> None:
    case = make_case((19, 11), pooling=pooling, isolate="bos").to(torch.float32)
    mask = case.attention_mask.clone()
    mask[0, 5:8] = 0
    mask[1, 3] = 0
    halves = replace(case.config, basket_size=10, last_basket="halves")
    for changes in ({}, {"causal": True}, {"config": halves}):
        variant = replace(case, attention_mask=mask, **changes)
        assert any(content is None for content in variant.baskets.content)
        assert_equals_oracle(variant)


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
@pytest.mark.parametrize("kernel", ["torch", "triton"])
@torch.no_grad()
def test_a_batch_without_padding(pooling: str, kernel: KernelName) -> None:
    for flags in ({}, {"causal": True, "window": 5}):
        case = replace(make_case((13, 5, 9), pooling=pooling, n_heads=4, n_kv=2, min_content=5), **flags)
        case = case.to(torch.float32)
        expected, rows = case.to(torch.float64).oracle()[0].transpose(1, 2), case.rows()
        this = CalibratedPass(frozenset({0, 1}), case.baskets, case.config, kernel=kernel)
        for _ in range(2):  # the second layer uses what the first has found out
            output = this.attend(unpadded(case))[0]
            real = case.attention_mask.bool()
            assert output.shape == (1, 27, 4, 4)
            assert_close(output[0][rows[real]], expected[rows], 2e-5)
            assert torch.equal(output[0][~rows[real]], case.plain()[real & ~rows])


def unpadded(case: Case) -> Any:
    """Returns a case that is padded on the right as a call without padding."""
    real = case.attention_mask.bool()
    query, key, value = (t.transpose(1, 2)[real].transpose(0, 1)[None] for t in (case.query, case.key, case.value))
    offsets = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).int()

    def run_plain() -> tuple[torch.Tensor, None]:
        return case.plain()[real][None], None

    return replace(case.call(), query=query, key=key, value=value, run_plain=run_plain, offsets=offsets)


def test_extreme_logits() -> None:
    case = make_case((20,), isolate="bos_eos").to(torch.float32)
    # Logits of several hundred: most weights underflow to 0, but not those within a basket.
    assert_equals_oracle(replace(case, scale=80.0), 1e-3)
    query = case.query.clone()
    query[0, 0, 3, 0] = torch.nan
    output = run_kernel(replace(case, query=query))
    assert output[0, 3, 0].isnan().all()
    output[0, 3, 0] = 0
    assert output.isfinite().all()


@torch.no_grad()
def test_mixed_dtypes_and_layouts() -> None:
    case = make_case((13, 9), dim=8, value_dim=8).to(torch.float32)
    expected = case.to(torch.float64).oracle()[0].transpose(1, 2)[case.rows()]
    half = replace(case, value=case.value.bfloat16())
    assert_close(run_kernel(half).float()[case.rows()], expected, 3e-2)
    assert_close(run_kernel(replace(case, key=case.key.bfloat16()))[case.rows()], expected, 6e-2)  # logits of 10
    strided = replace(case, key=case.key.transpose(2, 3).contiguous().transpose(2, 3))
    assert_close(run_kernel(strided)[case.rows()], expected, 2e-5)


def replace_kernel(monkeypatch: pytest.MonkeyPatch, launch: Callable[[tuple[int, ...]], object]) -> None:
    """Calls ``launch`` with the grid instead of launching the kernel."""

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: launch(grid)

    kernel_module = pytest.importorskip("fair_calibration.method.one_pass_kernel")
    monkeypatch.setattr(kernel_module, "one_pass", Kernel())
    monkeypatch.setattr(one_pass, "_is_interpreted", lambda: True)


def test_the_device_of_the_tensors_is_the_current_one_at_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which the process of a second GPU need not have set."""
    case = make_case((13, 5), pooling="cls").to(torch.float32)
    call = case.call()
    entered: list[torch.Tensor] = []
    current: list[torch.Tensor] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        entered.append(tensor)
        yield
        entered.clear()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    replace_kernel(monkeypatch, lambda _: current.extend(entered))
    OnePass(case.baskets, case.config).calibrate(case.plain(), call)
    assert len(current) == 1
    assert current[0] is call.query


def test_a_layer_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What depends on the batch is computed in the first layer; the others launch the kernel and nothing else."""
    case = masked_variants(make_case((13, 5), pooling="cls").to(torch.float32))["bool"]
    this, call = OnePass(case.baskets, case.config), case.call()
    launches: list[tuple[int, ...]] = []
    replace_kernel(monkeypatch, launches.append)
    output = case.plain()
    this.calibrate(output, call)
    with _CountedOps() as ops:
        this.calibrate(output, call)
    assert launches == [(1, 2, 2)] * 2
    assert set(ops.names) <= {"aten.expand.default", "aten.detach.default"}  # views, which launch nothing


class _CountedOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_what_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case((9,)).to(torch.float32)
    with pytest.raises(
        ValueError, match=r"cannot compute the attention of Attention: its query is float64; use kernel="
    ):
        run_kernel(case.to(torch.float64))
    with pytest.raises(ValueError, match=r"its query has heads of 300 dimensions, more than 256"):
        run_kernel(make_case((9,), dim=300).to(torch.float32))
    with pytest.raises(ValueError, match=r"kernel: 'triton' computes no gradients; train with kernel='torch'"):
        OnePass(case.baskets, case.config).calibrate(
            case.plain(), replace(case.call(), value=case.value.requires_grad_())
        )
    with monkeypatch.context() as patch:
        patch.setattr(one_pass, "_is_interpreted", lambda: False)
        with pytest.raises(
            ValueError, match=r"kernel: 'triton' runs on CUDA devices, the model is on cpu; use kernel="
        ):
            OnePass(case.baskets, case.config)
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", None)
    with pytest.raises(ValueError, match=r"kernel: 'triton' needs the package triton, which torch's CUDA builds"):
        OnePass(case.baskets, case.config)


def test_blocks() -> None:
    half = torch.bfloat16
    assert choose_blocks(512, 128, 64, half).keys == 128
    assert [choose_blocks(512, size, 64, half).keys for size in (1, 16, 33, 100, 130, 512)] == [
        16,
        16,
        64,
        128,
        64,
        128,
    ]
    assert choose_blocks(512, 128, 256, half).keys == choose_blocks(512, 128, 128, torch.float32).keys == 64
    assert choose_blocks(8, 128, 64, half).rows == 16  # the pooled rows of up to 16 heads with the same keys
    assert [block_of(dim) for dim in (1, 16, 20, 64, 80, 128, 256)] == [16, 16, 32, 64, 128, 128, 256]
