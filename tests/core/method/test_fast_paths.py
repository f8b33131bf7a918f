from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fair_calibration.method import all_rows, pooled_row, visible_baskets
from tests.core.cases import (
    MASKS,
    TOLERANCE,
    assert_close,
    assert_fast_equals_reference,
    make_case,
    masked_variants,
    with_padding_mask,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, scope="module", params=[1, visible_baskets.SHORTEST_RUN])
def shortest_run(request: pytest.FixtureRequest) -> Iterator[int]:
    """Runs every test also with all baskets joined that can be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visible_baskets, "SHORTEST_RUN", request.param)
        yield request.param


@pytest.fixture(params=["cpu_flash", "math"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(all_rows, "select_kernel", lambda *_: request.param)
    return str(request.param)


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
@pytest.mark.parametrize("isolate", ["none", "bos", "bos_eos"])
@pytest.mark.parametrize("isolated_share", ["preserve", "equal", 0.2])
@pytest.mark.parametrize("last_basket", ["equal", "proportional", "halves"])
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
    last_basket=st.sampled_from(["equal", "proportional", "halves"]),
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
