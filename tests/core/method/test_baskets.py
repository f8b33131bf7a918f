from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fair_calibration import FairConfig
from fair_calibration.method.baskets import Baskets, build_baskets
from tests.core.oracle import geometry


def build(mask: list[list[int]], prompt_length: int = 0, pooling: str = "mean", **settings: object) -> Baskets:
    config = FairConfig(**{"basket_size": 3, **settings})  # type: ignore[arg-type]
    return build_baskets(torch.tensor(mask), config.resolve(pooling), prompt_length=prompt_length)


def content_of(baskets: Baskets) -> list[list[list[int]]]:
    """Lists the positions in every basket of every sequence."""
    size = baskets.basket_size
    return [
        [
            baskets.slots[b, n * size : (n + 1) * size][baskets.filled[b, n * size : (n + 1) * size]].tolist()
            for n in range(baskets.n_baskets)
        ]
        for b in range(len(baskets.slots))
    ]


def test_the_last_basket_takes_the_remainder() -> None:
    baskets = build([[1] * 7, [0, 0, 0, 1, 1, 1, 1]])
    assert content_of(baskets) == [[[0, 1, 2], [3, 4, 5], [6]], [[3, 4, 5], [6], []]]
    assert baskets.segment_of_key.tolist() == [[0, 0, 0, 1, 1, 1, 2], [3, 3, 3, 0, 0, 0, 1]]
    assert baskets.n_baskets == 3
    assert baskets.valid == ((0, 7), (3, 7))
    assert baskets.content == ((0, 7), (3, 7))


def test_two_baskets_as_halves() -> None:
    baskets = build([[1] * n + [0] * (7 - n) for n in (3, 4, 5, 6, 7)], last_basket="halves")
    assert content_of(baskets) == [
        [[0, 1, 2], [], []],
        [[0, 1], [2, 3], []],
        [[0, 1, 2], [3, 4], []],
        [[0, 1, 2], [3, 4, 5], []],
        [[0, 1, 2], [3, 4, 5], [6]],
    ]
    assert baskets.sizes == (3, 2, 3, 3, 3)
    assert baskets.segment_of_key[1].tolist() == [0, 0, 1, 1, 3, 3, 3]


def test_isolated_tokens() -> None:
    baskets = build([[1] * 6, [1, 1, 1, 1, 0, 0]], isolate="bos_eos")
    assert content_of(baskets) == [[[1, 2, 3], [4]], [[1, 2], []]]
    assert baskets.isolated.tolist() == [[0, 5], [0, 3]]
    assert baskets.isolated_filled.all()
    assert baskets.segment_of_key.tolist() == [[2, 0, 0, 0, 1, 3], [2, 0, 0, 3, 4, 4]]
    assert baskets.content == ((1, 5), (1, 3))
    assert baskets.n_kept == 0


def test_too_little_content() -> None:
    mask = [[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert build(mask, isolate="bos").is_calibrated == (True, False, True)
    assert build(mask, isolate="none").is_calibrated == (True, True, True)
    assert build(mask, isolate="bos_eos").is_calibrated == (False, False, True)
    assert build(mask, isolate="bos", min_content=4).is_calibrated == (False, False, True)
    few = build(mask, isolate="bos", min_content=1)
    assert few.is_calibrated == (True, True, True)
    assert few.calibrated.tolist() == [True, True, True]


@pytest.mark.parametrize(("pooling", "pooled"), [("cls", [0, 2]), ("last", [2, 4])])
def test_pooled_row(pooling: str, pooled: list[int]) -> None:
    assert build([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]], pooling=pooling).pooled.tolist() == pooled


def test_an_excluded_prompt_is_no_content() -> None:
    baskets = build([[1] * 8, [0] + [1] * 7], prompt_length=3, isolate="bos_eos")
    assert content_of(baskets) == [[[3, 4, 5], [6]], [[4, 5, 6], []]]
    # BOS, EOS, then the prompt's tokens by their place, of which BOS was the first.
    assert baskets.isolated.tolist() == [[0, 7, 0, 1, 2], [1, 7, 0, 2, 3]]
    assert baskets.isolated_filled.tolist() == [[True, True, False, True, True]] * 2
    assert baskets.n_kept == 3


def test_cls_pooling_takes_the_first_token_behind_an_excluded_prompt() -> None:
    baskets = build([[1] * 8, [1] * 5 + [0] * 3], prompt_length=3, pooling="cls")
    assert baskets.pooled.tolist() == [3, 3]
    assert content_of(baskets) == [[[4, 5, 6], [7]], [[4], []]]
    assert baskets.isolated.tolist() == [[3, 0, 1, 2]] * 2


def test_a_prompt_longer_than_the_text() -> None:
    for pooling in ("cls", "last", "mean"):
        baskets = build([[1, 1, 1, 0], [1, 1, 1, 1]], prompt_length=9, pooling=pooling)
        assert baskets.is_calibrated == (False, False)


def test_content_with_gaps_is_no_range() -> None:
    baskets = build([[1, 1, 0, 1, 1]])
    assert baskets.content == (None,)
    assert content_of(baskets) == [[[0, 1, 3], [4]]]
    assert baskets.valid == ((0, 5),)


def test_nothing_valid() -> None:
    baskets = build([[0, 0, 0], [1, 1, 1]])
    assert baskets.is_calibrated == (False, True)
    assert baskets.valid[0] == (0, 0)
    assert baskets.pooled[0] == 0


def test_empty_batch() -> None:
    baskets = build_baskets(torch.zeros(0, 4), FairConfig().resolve("mean"))
    assert baskets.is_calibrated == ()
    assert baskets.segment_of_key.shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_mask_dtypes(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 1, 1, 0]])
    config = FairConfig(basket_size=2).resolve("last")
    assert build_baskets(mask.to(dtype), config).segment_of_key.equal(build_baskets(mask, config).segment_of_key)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \(batch, length\), got \(2, 3, 4\)"):
        build_baskets(torch.ones(2, 3, 4), FairConfig().resolve("mean"))
    for config in (FairConfig(), FairConfig(pooling="cls"), FairConfig(isolate="bos")):
        with pytest.raises(ValueError, match="config: 'auto' settings must be resolved first"):
            build_baskets(torch.ones(2, 3), config)


def test_to_moves_every_tensor() -> None:
    moved = build([[1, 1, 1]]).to(torch.device("meta"))
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 7
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert moved.is_calibrated == (True,)


@given(
    masks=st.integers(1, 20).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=4)
    ),
    pooling=st.sampled_from(["cls", "last", "mean"]),
    isolate=st.sampled_from(["none", "bos", "bos_eos"]),
    basket_size=st.integers(1, 7),
    min_content=st.none() | st.integers(1, 9),
    prompt_length=st.integers(0, 6),
    last_basket=st.sampled_from(["equal", "halves"]),
)
def test_geometry_equals_the_oracle(
    masks: list[list[bool]],
    pooling: str,
    isolate: str,
    basket_size: int,
    min_content: int | None,
    prompt_length: int,
    last_basket: str,
) -> None:
    config = FairConfig(
        basket_size=basket_size,
        isolate=isolate,  # type: ignore[arg-type]
        min_content=min_content,
        last_basket=last_basket,  # type: ignore[arg-type]
    ).resolve(pooling)
    baskets = build_baskets(torch.tensor(masks), config, prompt_length=prompt_length)
    n_isolated = baskets.isolated.shape[1] - baskets.n_kept
    for b, mask in enumerate(masks):
        expected = geometry(mask, config, prompt_length)
        assert [basket for basket in content_of(baskets)[b] if basket] == expected.baskets
        positions, filled = baskets.isolated[b].tolist(), baskets.isolated_filled[b].tolist()
        present = [p for p, is_there in zip(positions, filled, strict=True) if is_there]
        assert present[: sum(filled[:n_isolated])] == expected.isolated
        assert present[sum(filled[:n_isolated]) :] == expected.kept
        assert baskets.is_calibrated[b] == expected.calibrated == bool(baskets.calibrated[b])
        if pooling != "mean" and expected.rows:
            assert [int(baskets.pooled[b])] == expected.rows
        # Every key is in exactly one segment, and segments and places agree.
        segment = baskets.segment_of_key[b].tolist()
        for k, n in enumerate(segment):
            if n < baskets.n_baskets:
                assert k in expected.baskets[n]
            elif n < baskets.n_baskets + len(positions):
                assert positions[n - baskets.n_baskets] == k
            else:
                assert not mask[k]
        flat = sorted(k for basket in expected.baskets for k in basket)
        together = bool(flat) and flat == list(range(flat[0], flat[-1] + 1))
        if flat:
            assert baskets.content[b] == ((flat[0], flat[-1] + 1) if together else None)
        if expected.valid:
            assert baskets.valid[b] == (expected.valid[0], expected.valid[-1] + 1)
