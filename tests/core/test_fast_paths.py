from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fair_calibration import all_rows, pooled_row, seen_baskets
from tests.core.cases import MASKS, Case, assert_close, make_case, masked_variants, with_padding_mask

# Of outputs of size 1 to 3. float32: logits of size 30 are off by 30 * 6e-8, and so, relatively, are the weights; the
# logits of ALiBi reach 500. The low-precision inputs are the same for both sides, what is measured is arithmetic: the
# fused kernel holds weights and basket outputs in the dtype, of eps 2^-8 and 2^-11 (0.8 % and 0.1 % of a value of up to
# 3), and the result is rounded once more. Measured over this file: 8e-6, 1.3e-2 and 1.7e-3.
TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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


@pytest.fixture(autouse=True, scope="module", params=[1, seen_baskets.SHORTEST_RUN])
def shortest_run(request: pytest.FixtureRequest) -> Iterator[int]:
    """Runs every test also with all baskets joined that can be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seen_baskets, "SHORTEST_RUN", request.param)
        yield request.param


@pytest.fixture(params=["cpu_flash", "math"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(all_rows, "select_kernel", lambda *_: request.param)
    return str(request.param)


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
@pytest.mark.parametrize("isolate", ["none", "bos", "bos_eos"])
@pytest.mark.parametrize("isolated_share", ["preserve", "equal", 0.2])
@pytest.mark.parametrize("last_basket", ["equal", "proportional"])
def test_settings(pooling: str, isolate: str, isolated_share: str | float, last_basket: str) -> None:
    case = make_case(
        (14, 2, 9, 17), pooling=pooling, isolate=isolate, isolated_share=isolated_share, last_basket=last_basket
    )
    case = with_padding_mask(case.to(torch.float32))
    assert 0 < case.rows().any(1).sum() < 4  # one sequence is too short
    assert_fast_equals_reference(case)
    assert_fast_equals_reference(replace(case, prompt_length=3))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", ["cls", "last"])
def test_masks_of_the_pooled_row(mask: str, side: str, pooling: str) -> None:
    for isolated_share in ("preserve", "equal"):
        case = make_case(side=side, pooling=pooling, isolate="bos", isolated_share=isolated_share, n_heads=4, n_kv=2)
        assert_fast_equals_reference(masked_variants(case)[mask].to(torch.float32))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.usefixtures("kernel")
def test_masks_of_all_rows(mask: str, side: str) -> None:
    for isolated_share in ("preserve", "equal"):
        case = make_case(side=side, isolate="bos_eos", isolated_share=isolated_share, n_heads=4, n_kv=2)
        assert_fast_equals_reference(masked_variants(case)[mask].to(torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["none", "bool", "window", "additive minimum", "position bias", "alibi"])
@pytest.mark.parametrize("pooling", ["cls", "last"])
def test_dtypes_of_the_pooled_row(dtype: torch.dtype, mask: str, pooling: str) -> None:
    case = make_case((40, 9, 33), basket_size=8, pooling=pooling, dim=16, n_heads=4, n_kv=2)
    assert_fast_equals_reference(masked_variants(case)[mask].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["none", "bool", "window", "additive minimum", "position bias", "alibi"])
@pytest.mark.usefixtures("kernel")
def test_dtypes_of_all_rows(dtype: torch.dtype, mask: str) -> None:
    case = make_case((40, 9, 33), basket_size=8, isolate="bos", dim=16, n_heads=4, n_kv=2)
    assert_fast_equals_reference(masked_variants(case)[mask].to(dtype))


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_float64_is_computed(pooling: str) -> None:
    # A float64 model on CPU goes through the "math" kernel, in float32.
    assert_fast_equals_reference(with_padding_mask(make_case(pooling=pooling)))


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
def test_dtypes_may_differ(pooling: str) -> None:
    # Under autocast rotary embeddings leave queries and keys in float32, while values are in half precision.
    case = with_padding_mask(make_case(pooling=pooling).to(torch.bfloat16).to(torch.float32))
    expected = case.to(torch.float64).reference().output.transpose(1, 2)
    mixed = replace(case, value=case.value.to(torch.bfloat16))
    assert_close(mixed.fast()[case.rows()], expected[case.rows()], TOLERANCE[torch.float32])


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
def test_value_heads_of_another_size(pooling: str) -> None:
    assert_fast_equals_reference(make_case(pooling=pooling, dim=8, value_dim=6).to(torch.float32))


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
def test_underflow(pooling: str) -> None:
    # In plain float32 the weights of other baskets are exactly 0; at full strength each basket has a quarter anyway.
    case = make_case((16,), pooling=pooling, isolate="none", strength=1.0)
    distance = (torch.arange(16)[:, None] - torch.arange(16)[None]).abs().double()
    case = replace(case, position_bias=-200.0 * distance[None, None]).to(torch.float32)
    plain = replace(case, config=replace(case.config, strength=0.0)).reference().weights
    assert (plain[0, :, 0, 4:] == 0).all()
    assert (plain[0, :, -1, :12] == 0).all()
    row = -1 if pooling == "last" else 0
    masses = case.to(torch.float64).reference().weights[0, :, row].unflatten(-1, (4, 4)).sum(-1)
    assert_close(masses, torch.full_like(masses, 0.25), 1e-12)
    assert_fast_equals_reference(case, 5e-4)  # float32 resolves logits of -3000 to 2.4e-4


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
def test_strength_zero_changes_no_more_than_rounding(pooling: str) -> None:
    # The model never gets here at strength 0 (test_transformer.py); the blend has no offset all the same.
    case = with_padding_mask(make_case(pooling=pooling, strength=0.0).to(torch.float32))
    assert_close(case.fast(), case.plain(), 1e-6)


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
def test_permuting_baskets_leaves_the_output(pooling: str) -> None:
    case = make_case((12,), pooling=pooling, isolate="none", strength=0.8).to(torch.float32)
    order = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7])
    permuted = replace(case, key=case.key[:, :, order], value=case.value[:, :, order])
    assert_close(permuted.fast(), case.fast(), 2e-6)
    assert not torch.allclose(case.fast()[case.rows()], case.plain()[case.rows()], atol=1e-2)


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_batch_and_padding_invariance(pooling: str, side: str) -> None:
    lengths = (13, 6, 9)
    batch = with_padding_mask(make_case(lengths, side=side, extra=3, pooling=pooling).to(torch.float32))
    together = batch.fast()
    for i, n in enumerate(lengths):
        tokens = batch.attention_mask[i].bool()
        alone = replace(
            batch,
            query=batch.query[i : i + 1, :, tokens],
            key=batch.key[i : i + 1, :, tokens],
            value=batch.value[i : i + 1, :, tokens],
            attention_mask=torch.ones(1, n, dtype=torch.int64),
            mask=None,
        )
        # One batch sums in another order than the other: a few roundings of float32.
        assert_close(alone.fast()[0], together[i, tokens], 2e-6)


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
def test_a_batch_of_one_short_sequence_is_left_alone(pooling: str) -> None:
    case = make_case((3,), pooling=pooling).to(torch.float32)
    assert not case.baskets.is_calibrated[0]
    assert torch.equal(case.fast(), case.plain())
    assert torch.equal(case.fast_on_accelerator(), case.plain())


def test_rows_that_see_nothing_of_a_basket_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_baskets, "SHORTEST_RUN", 6)
    case = make_case((20,), isolate="none").to(torch.float32)  # 5 baskets of 4
    position = torch.arange(20)
    causal = position <= position[:, None]
    window = causal & (position > position[:, None] - 6)
    rows: list[tuple[int, int, bool]] = []
    attend_with_lse = all_rows.attend_with_lse

    def spy(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows.append((query.shape[2], key.shape[2], kwargs["visible"] is not None))
        return attend_with_lse(query, key, *args, **kwargs)

    monkeypatch.setattr(all_rows, "attend_with_lse", spy)
    monkeypatch.setattr(all_rows, "_ROWS_PER_BLOCK", 12)
    for masked, expected in (
        (replace(case, mask=causal[None, None]), [12, 8, 4, 8, 8, 8, 8, 4]),  # rows 0 to 11, then 12 to 19
        (replace(case, causal=True), [12, 8, 4, 8, 8, 8, 8, 4]),
        (replace(case, mask=window[None, None]), [9, 8, 4, 1, 5, 8, 4]),
    ):
        rows.clear()
        assert_fast_equals_reference(masked)
        on_cpu = [n_rows for n_rows, n_keys, _ in rows[: len(expected)]]
        assert on_cpu == expected
    rows.clear()
    replace(case, causal=True).fast()
    assert [masked for _, _, masked in rows] == [True, True, True, False, False, False, True, True]


def test_rows_and_heads_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_baskets, "SHORTEST_RUN", 99)
    variants = masked_variants(make_case((23, 11), isolate="bos", n_heads=4, n_kv=2).to(torch.float32))
    attend_with_lse = all_rows.attend_with_lse
    for name, case in variants.items():
        with monkeypatch.context() as patch:
            whole, on_accelerator = case.fast(), case.fast_on_accelerator()
            shapes: set[tuple[int, int]] = set()

            def spy(
                query: torch.Tensor, *args: Any, shapes: set[tuple[int, int]] = shapes, **kwargs: Any
            ) -> tuple[torch.Tensor, torch.Tensor]:
                shapes.add((query.shape[1], query.shape[2]))
                return attend_with_lse(query, *args, **kwargs)

            patch.setattr(all_rows, "attend_with_lse", spy)
            patch.setattr(all_rows, "_ROWS_PER_BLOCK", 5)
            patch.setattr(all_rows, "_CPU_BYTES", 1)
            assert_close(case.fast(), whole, 1e-6)
            # One of two key-value heads, 23 and 11 rows in blocks of 5; of each those that see any of a basket.
            assert {n_heads for n_heads, _ in shapes} == {2}
            assert max(n_rows for _, n_rows in shapes) == 5
            if name == "none":
                assert shapes == {(2, 5), (2, 3), (2, 1)}
            shapes.clear()
            patch.setattr(all_rows, "_DEVICE_BYTES", 1)
            assert_close(case.fast_on_accelerator(), on_accelerator, 1e-6)
            assert shapes == {(4, 1)}


def test_a_run_of_baskets_takes_one_call_per_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_baskets, "SHORTEST_RUN", 3)
    attend_with_lse = all_rows.attend_with_lse
    shapes: list[tuple[int, ...]] = []

    def spy(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append((*query.shape[:3], key.shape[2]))
        return attend_with_lse(query, key, *args, **kwargs)

    monkeypatch.setattr(all_rows, "attend_with_lse", spy)
    monkeypatch.setattr(all_rows, "_ROWS_PER_BLOCK", 16)
    case = make_case((23, 23), isolate="bos", n_heads=4, n_kv=2).to(torch.float32)  # 6 baskets of 4, one of 2
    case.fast()
    assert shapes == [(2, 6, 16, 4)] * 4 + [(2, 6, 7, 4)] * 4
    shapes.clear()
    replace(case, causal=True).fast()
    # Rows 0 to 15 see none of their four baskets alike, rows 16 to 22 the first four of six.
    assert [shape for shape in shapes if shape[1] == 4] == [(2, 4, 7, 4)] * 4
    assert len(shapes) == 2 * 4 + 4 + 2 * 2


def test_sequences_with_equally_many_baskets_are_worked_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def groups(*lengths: int, side: str = "right") -> list[tuple[int, int]]:
        case = make_case(lengths, isolate="bos", side=side)
        return [(group.start, group.stop) for group in all_rows._groups(case.baskets, 8)]

    assert groups(14, 15, 16, 9, 9) == [(0, 3), (3, 5)]
    assert groups(14, 15, 2, 14, 15, 16) == [(0, 2), (3, 6)]  # one is too short to be calibrated
    assert groups(14, 14, 16, side="left") == [(0, 2), (2, 3)]  # the content of the last begins elsewhere
    monkeypatch.setattr(all_rows, "_CPU_BYTES", 0)
    assert groups(14, 14) == [(0, 1), (1, 2)]


def test_pooled_row_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # Elsewhere than on CPUs several sequences go in one step.
    case = with_padding_mask(make_case((13, 5, 9), pooling="cls", n_heads=4, n_kv=2).to(torch.float32))
    one_by_one = case.fast()
    monkeypatch.setattr(pooled_row, "_steps", lambda _: [slice(0, 2), slice(2, 3)])
    assert_close(case.fast(), one_by_one, 1e-6)


@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    basket_size=st.integers(1, 9),
    min_content=st.none() | st.integers(1, 12),
    extra=st.integers(0, 3),
    side=st.sampled_from(["left", "right"]),
    pooling=st.sampled_from(["cls", "last", "mean", "mean"]),
    isolate=st.sampled_from(["none", "bos", "bos_eos"]),
    isolated_share=st.sampled_from(["preserve", "equal", 0.0, 0.3]),
    last_basket=st.sampled_from(["equal", "proportional"]),
    strength=st.floats(0, 1),
    prompt_length=st.integers(0, 4),
    mask=st.sampled_from(MASKS),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    seed=st.integers(0, 99),
)
def test_anything(
    lengths: list[int],
    side: str,
    extra: int,
    mask: str,
    prompt_length: int,
    heads: tuple[int, int],
    seed: int,
    pooling: str,
    isolate: str,
    **settings: object,
) -> None:
    case = make_case(
        lengths,
        side=side,
        extra=extra,
        n_heads=heads[0],
        n_kv=heads[1],
        seed=seed,
        pooling=pooling,
        isolate=isolate,
        **settings,
    )
    case = replace(masked_variants(case)[mask], prompt_length=prompt_length).to(torch.float32)
    assert_fast_equals_reference(case)


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
@pytest.mark.parametrize("mask", ["bool", "causal bool", "window", "position bias"])
def test_gradients_equal_the_reference(pooling: str, mask: str) -> None:
    # Sequences of different numbers of baskets, and rows that do not see every basket.
    case = masked_variants(make_case((13, 6, 2), pooling=pooling, isolate="bos").to(torch.float32))[mask]
    rows = case.rows()
    gradients = []
    for fast in (True, False):
        leaves = [t.detach().clone().requires_grad_() for t in (case.query, case.key, case.value)]
        this = replace(case, query=leaves[0], key=leaves[1], value=leaves[2])
        output = this.fast() if fast else this.reference().output.transpose(1, 2)
        weight = torch.linspace(-1, 1, output[rows].numel()).view_as(output[rows])
        (output[rows] * weight).sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    assert max(float(gradient.abs().max()) for gradient in gradients[1] if gradient is not None) > 1e-2
    for of_fast, of_reference in zip(*gradients, strict=True):
        assert of_fast is not None
        assert of_reference is not None
        assert_close(of_fast, of_reference, 1e-4)  # gradients reach 3 here
