from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fair_calibration import FairConfig
from fair_calibration.method.shares import MASKED, Shares, blended_shares


def shares_of(
    lse: list[float],
    isolated: list[float],
    sizes: list[int] | None = None,
    seen: list[bool] | None = None,
    *,
    n_kept: int = 0,
    strength: float = 1.0,
    **settings: object,
) -> Shares:
    """Computes the shares of a single row."""
    return blended_shares(
        torch.tensor(lse),
        torch.tensor(isolated),
        torch.tensor([4] * len(lse) if sizes is None else sizes),
        torch.tensor([True] * len(isolated) if seen is None else seen, dtype=torch.bool),
        n_kept=n_kept,
        config=FairConfig(strength=strength, **settings),  # type: ignore[arg-type]
    )


def logs(*masses: float) -> list[float]:
    return [math.log(mass) for mass in masses]


def test_preserve() -> None:
    shares = shares_of(logs(0.5, 0.1), logs(0.4))
    assert shares.isolated.tolist() == pytest.approx([0.4])
    assert shares.baskets.tolist() == pytest.approx([0.3, 0.3])


def test_equal() -> None:
    shares = shares_of(logs(0.5, 0.1), logs(0.3, 0.1), isolated_share="equal")
    assert torch.cat(shares).tolist() == pytest.approx([0.25] * 4)


def test_fixed() -> None:
    shares = shares_of(logs(0.5, 0.1), logs(0.3, 0.1), isolated_share=0.2)
    assert shares.isolated.tolist() == pytest.approx([0.2, 0.2])
    assert shares.baskets.tolist() == pytest.approx([0.3, 0.3])


def test_fixed_nothing() -> None:
    shares = shares_of(logs(0.5, 0.1), logs(0.4), isolated_share=0.0)
    assert shares.isolated.tolist() == [0.0]
    assert shares.baskets.tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("isolated_share", ["preserve", "equal", 0.2])
def test_proportional(isolated_share: str | float) -> None:
    shares = shares_of(logs(0.5, 0.1), logs(0.4), [6, 2], isolated_share=isolated_share, last_basket="proportional")
    alone = {"preserve": 0.4, "equal": 1 / 3, 0.2: 0.2}[isolated_share]
    assert shares.isolated.tolist() == pytest.approx([alone])
    assert shares.baskets.tolist() == pytest.approx([0.75 * (1 - alone), 0.25 * (1 - alone)])


def test_unseen_baskets_get_nothing() -> None:
    shares = shares_of([*logs(0.5, 0.1), 77.0], logs(0.4), [4, 2, 0])
    assert shares.baskets.tolist() == pytest.approx([0.3, 0.3, 0.0])


@pytest.mark.parametrize("isolated_share", ["preserve", "equal", 0.2])
def test_unseen_isolated_tokens_get_nothing(isolated_share: str | float) -> None:
    shares = shares_of(logs(0.5, 0.5), [50.0], seen=[False], isolated_share=isolated_share)
    assert shares.isolated.tolist() == [0.0]
    assert shares.baskets.tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("isolated_share", ["preserve", "equal", 0.2])
def test_a_prompt_keeps_its_mass(isolated_share: str | float) -> None:
    shares = shares_of(logs(0.4, 0.1), logs(0.2, 0.3), n_kept=1, isolated_share=isolated_share)
    alone = {"preserve": 0.2, "equal": 0.7 / 3, 0.2: 0.7 * 0.2}[isolated_share]
    assert shares.isolated.tolist() == pytest.approx([alone, 0.3])
    assert shares.baskets.tolist() == pytest.approx([(0.7 - alone) / 2] * 2)


def test_a_row_that_sees_no_content_keeps_its_masses() -> None:
    shares = shares_of([3.0, 4.0], logs(0.6, 0.4), [0, 0], isolated_share="equal")
    assert shares.baskets.tolist() == [0.0, 0.0]
    assert shares.isolated.tolist() == pytest.approx([0.6, 0.4])


def test_a_row_that_sees_nothing_is_finite() -> None:
    shares = shares_of([MASKED, MASKED], [MASKED], [0, 0], [False])
    assert torch.cat(shares).isfinite().all()


def test_underflow() -> None:
    shares = shares_of([0.0, -900.0, -9000.0], [])
    assert shares.baskets.tolist() == pytest.approx([1 / 3] * 3)


def test_strength_blends() -> None:
    shares = shares_of(logs(0.5, 0.1), logs(0.4), strength=0.25)
    assert shares.baskets.tolist() == pytest.approx([0.75 * 0.5 + 0.25 * 0.3, 0.75 * 0.1 + 0.25 * 0.3])
    plain = shares_of(logs(0.5, 0.1), logs(0.4), strength=0.0, isolated_share="equal")
    assert torch.cat(plain).tolist() == pytest.approx([0.5, 0.1, 0.4])


@given(
    lse=st.lists(st.floats(-200, 50), min_size=0, max_size=5),
    isolated=st.lists(st.floats(-200, 50), min_size=1, max_size=4),
    data=st.data(),
    isolated_share=st.sampled_from(["preserve", "equal", 0.0, 0.2]),
    last_basket=st.sampled_from(["equal", "proportional"]),
    strength=st.floats(0, 1),
)
def test_sum_to_one(
    lse: list[float],
    isolated: list[float],
    data: st.DataObject,
    isolated_share: str | float,
    last_basket: str,
    strength: float,
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(lse), max_size=len(lse)))
    n_kept = data.draw(st.integers(0, len(isolated)))
    assert len(isolated) - n_kept <= 4  # 4 * 0.2 < 1
    shares = shares_of(
        lse, isolated, sizes, n_kept=n_kept, strength=strength, isolated_share=isolated_share, last_basket=last_basket
    )
    assert float(torch.cat(shares).sum()) == pytest.approx(1.0, abs=2e-6)
    assert (torch.cat(shares) >= -1e-6).all()  # 1 - mass is subject to rounding
    assert (shares.baskets[torch.tensor(sizes) == 0] == 0).all() if sizes else True


def test_many_rows_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    lse, isolated = torch.randn(3, 2, 5, generator=generator), torch.randn(2, 2, 5, generator=generator)
    sizes = torch.randint(0, 3, (3, 1, 5), generator=generator)
    seen = torch.rand(2, 2, 1, generator=generator) < 0.7
    config = FairConfig(isolated_share="equal", strength=0.6)
    together = blended_shares(lse, isolated, sizes, seen, n_kept=1, config=config)
    assert together.baskets.shape == lse.shape
    assert together.isolated.shape == isolated.shape
    for h in range(2):
        for row in range(5):
            alone = blended_shares(
                lse[:, h, row],
                isolated[:, h, row],
                sizes[:, 0, row],
                seen[:, h, 0],
                n_kept=1,
                config=config,
            )
            assert torch.allclose(together.baskets[:, h, row], alone.baskets, atol=1e-6)
            assert torch.allclose(together.isolated[:, h, row], alone.isolated, atol=1e-6)
