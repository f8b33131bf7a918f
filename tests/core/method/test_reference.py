from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fair_calibration import FairConfig
from tests.core.cases import MASKS, Case, assert_close, make_case, masked_variants
from tests.core.oracle import calibrated_row, geometry

# Both in float64, over sums of a few dozen terms of size 1: some hundred roundings of 1.1e-16.
FLOAT64 = 1e-12


def assert_reference_equals_oracle(case: Case) -> None:
    output, weights = case.oracle()
    reference = case.reference()
    assert reference.output.dtype == torch.float64
    assert_close(reference.weights, weights_of_valid_rows(case, weights), FLOAT64)
    valid = case.attention_mask.bool()[:, None, :, None]
    assert_close(reference.output * valid, output, FLOAT64)


def weights_of_valid_rows(case: Case, weights: torch.Tensor) -> torch.Tensor:
    # The oracle leaves rows of padding out; the reference has something in them, which nobody reads.
    valid = case.attention_mask.bool()[:, None, :, None]
    return torch.where(valid, weights, case.reference().weights)


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
@pytest.mark.parametrize("isolate", ["none", "bos", "bos_eos"])
@pytest.mark.parametrize("isolated_share", ["preserve", "equal", 0.2])
@pytest.mark.parametrize("last_basket", ["equal", "proportional", "halves"])
def test_settings(pooling: str, isolate: str, isolated_share: str | float, last_basket: str) -> None:
    case = make_case(pooling=pooling, isolate=isolate, isolated_share=isolated_share, last_basket=last_basket)
    assert_reference_equals_oracle(case)
    assert_reference_equals_oracle(replace(case, prompt_length=3))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
def test_masks(mask: str, side: str, pooling: str) -> None:
    case = make_case(side=side, pooling=pooling, isolate="bos", isolated_share="equal", n_heads=4, n_kv=2)
    assert_reference_equals_oracle(masked_variants(case)[mask])


@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=3),
    basket_size=st.integers(1, 6),
    min_content=st.none() | st.integers(1, 8),
    extra=st.integers(0, 3),
    side=st.sampled_from(["left", "right"]),
    pooling=st.sampled_from(["cls", "last", "mean"]),
    isolate=st.sampled_from(["none", "bos", "bos_eos"]),
    isolated_share=st.sampled_from(["preserve", "equal", 0.0, 0.3]),
    last_basket=st.sampled_from(["equal", "proportional", "halves"]),
    strength=st.sampled_from([0.0, 0.25, 1.0]),
    prompt_length=st.integers(0, 4),
    mask=st.sampled_from(MASKS),
    seed=st.integers(0, 99),
)
def test_anything(
    lengths: list[int],
    side: str,
    extra: int,
    mask: str,
    prompt_length: int,
    seed: int,
    pooling: str,
    isolate: str,
    **settings: object,
) -> None:
    case = make_case(lengths, side=side, extra=extra, seed=seed, pooling=pooling, isolate=isolate, **settings)
    assert_reference_equals_oracle(replace(masked_variants(case)[mask], prompt_length=prompt_length))


def test_default_scale_and_strength() -> None:
    case = replace(make_case(dim=16), scale=16**-0.5)
    from fair_calibration.method.reference import calibrated_attention

    visible = case.attention_mask.bool()[:, None, None]
    arguments = (case.query, case.key, case.value, case.baskets)
    by_default = calibrated_attention(*arguments, visible=visible, config=case.config)
    assert torch.equal(by_default.weights, case.reference().weights)
    stronger = calibrated_attention(*arguments, visible=visible, config=replace(case.config, strength=1.0))
    assert not torch.allclose(stronger.weights, by_default.weights, atol=1e-3)
    assert_close(
        stronger.weights, replace(case, config=replace(case.config, strength=1.0)).reference().weights, FLOAT64
    )


def test_dtype_of_the_result() -> None:
    case = make_case()
    assert case.reference().weights.dtype == torch.float64
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert case.to(dtype).reference().output.dtype == torch.float32


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
@pytest.mark.parametrize("mask", MASKS)
def test_rows_sum_to_one(pooling: str, mask: str) -> None:
    case = masked_variants(make_case(pooling=pooling, isolate="bos_eos", isolated_share=0.3))[mask]
    visible = case.full_bias_and_visible()[1] & case.attention_mask.bool()[:, None, None]
    sums = case.reference().weights.sum(-1)
    assert_close(sums, visible.any(-1).double(), FLOAT64)
    assert (case.reference().weights >= 0).all()


def test_full_strength_gives_baskets_equal_mass() -> None:
    case = make_case((12, 7), isolate="none", strength=1.0)
    weights = case.reference().weights
    # 12 tokens: three full baskets; 7 tokens: a full one and one of 3, which gets as much (the published rule).
    for sequence, bounds in ((0, [(0, 4), (4, 8), (8, 12)]), (1, [(0, 4), (4, 7)])):
        n_tokens = bounds[-1][1]
        for start, stop in bounds:
            mass = weights[sequence, :, :n_tokens, start:stop].sum(-1)
            assert_close(mass, torch.full_like(mass, 1 / len(bounds)), FLOAT64)


def test_proportional_last_basket_has_mass_by_size() -> None:
    case = make_case((10,), isolate="none", strength=1.0, last_basket="proportional")
    weights = case.reference().weights[0]
    for start, stop in ((0, 4), (4, 8), (8, 10)):
        mass = weights[..., start:stop].sum(-1)
        assert_close(mass, torch.full_like(mass, (stop - start) / 10), FLOAT64)


def test_within_a_basket_weights_keep_their_proportions() -> None:
    case = make_case((12,), isolate="none", strength=1.0)
    calibrated = case.reference().weights[0, :, :, 4:8]
    plain = replace(case, config=replace(case.config, strength=0.0)).reference().weights[0, :, :, 4:8]
    assert_close(calibrated / calibrated.sum(-1, keepdim=True), plain / plain.sum(-1, keepdim=True), FLOAT64)
    assert not torch.allclose(calibrated, plain, atol=1e-3)


def test_preserved_token_keeps_its_mass() -> None:
    case = make_case((12,), isolate="bos_eos", strength=1.0)
    calibrated = case.reference().weights
    plain = replace(case, config=replace(case.config, strength=0.0)).reference().weights
    assert_close(calibrated[..., [0, -1]], plain[..., [0, -1]], FLOAT64)
    assert not torch.allclose(calibrated[..., 1:-1], plain[..., 1:-1], atol=1e-3)


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
def test_permuting_baskets_permutes_weights(pooling: str) -> None:
    case = make_case((12,), pooling=pooling, isolate="none", strength=0.8)
    order = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7])
    permuted = replace(case, key=case.key[:, :, order], value=case.value[:, :, order])
    assert_close(permuted.reference().weights, case.reference().weights[..., order], FLOAT64)
    assert_close(permuted.reference().output, case.reference().output, FLOAT64)
    # Tokens moved across baskets, though, are calibrated with others.
    crossed = torch.tensor([0, 2, 1, 4, 3, 5, 7, 6, 8, 9, 10, 11])
    other = replace(case, key=case.key[:, :, crossed], value=case.value[:, :, crossed]).reference()
    assert not torch.allclose(other.weights, case.reference().weights[..., crossed], atol=1e-3)


def test_the_oracle_by_hand() -> None:
    # Four tokens, the first isolated, baskets of 2: {1, 2} and {3}; plain weights .4, .3, .1, .2.
    config = FairConfig(basket_size=2, isolate="bos").resolve("mean")
    logits = {k: float(torch.tensor(p).log()) for k, p in enumerate([0.4, 0.3, 0.1, 0.2])}
    shape = geometry([True] * 4, config)
    full = calibrated_row(logits, shape, config, 1.0)
    # Each basket gets (1 - .4) / 2 = .3; within the first 3 : 1.
    assert full == pytest.approx({0: 0.4, 1: 0.225, 2: 0.075, 3: 0.3}, abs=1e-6)
    half = calibrated_row(logits, shape, config, 0.5)
    assert half == pytest.approx({0: 0.4, 1: 0.2625, 2: 0.0875, 3: 0.25}, abs=1e-6)
