import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fair_calibration.even_chunks.even_similarity import even_direction


def expected(units: torch.Tensor, ridge: float) -> torch.Tensor:
    rows = units.double() / units.double().norm(dim=1, keepdim=True)
    gram = rows @ rows.T + ridge * torch.eye(len(rows), dtype=torch.float64)
    direction = rows.T @ torch.linalg.inv(gram) @ torch.ones(len(rows), dtype=torch.float64)
    return direction / direction.norm()


def test_one_unit_is_its_own_direction() -> None:
    torch.testing.assert_close(even_direction(torch.tensor([[3.0, 4.0]]), [1], ridge=0.3), torch.tensor([[0.6, 0.8]]))


def test_a_repeated_subject_counts_once() -> None:
    """Three units of one subject and one of another: the mean leans to the first, the direction hardly does."""
    units = torch.eye(4)[[0, 0, 0, 1]]
    direction = even_direction(units, [4], ridge=0.3)[0]
    # By hand, with (U U^T + .3 I) w = 1: 3.3 a = 1 for each of the three, 1.3 b = 1; 3 a e_0 + b e_1.
    by_hand = torch.tensor([3 / 3.3, 1 / 1.3, 0.0, 0.0])
    torch.testing.assert_close(direction, by_hand / by_hand.norm())
    mean = units.mean(0) / units.mean(0).norm()
    assert direction[1] / direction[0] > 2 * mean[1] / mean[0]


def test_a_small_ridge_makes_all_similarities_equal() -> None:
    units = torch.randn(5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    similarities = torch.nn.functional.normalize(units) @ even_direction(units, [5], ridge=1e-9)[0]
    assert similarities.std() < 1e-8 < similarities.mean()


def test_a_large_ridge_is_the_mean_of_the_unit_vectors() -> None:
    units = torch.randn(5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean = torch.nn.functional.normalize(units).mean(0)
    torch.testing.assert_close(even_direction(units, [5], ridge=1e9)[0], mean / mean.norm())


@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    dimension=st.integers(2, 16),
    ridge=st.sampled_from([0.1, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
def test_equals_the_definition(counts: list[int], dimension: int, ridge: float, seed: int) -> None:
    """More units than dimensions take the other of the two equal ways."""
    units = torch.randn(sum(counts), dimension, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    units += 1.0  # as encoders have it, where all vectors are somewhat alike: the sum is away from 0
    found = even_direction(units, counts, ridge=ridge)
    for row, part in zip(found, torch.split(units, counts), strict=True):
        torch.testing.assert_close(row, expected(part, ridge), rtol=0, atol=1e-10)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_length_of_units_does_not_matter(scale: float) -> None:
    units = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)) + 0.5
    scaled = units * torch.linspace(1, scale, 6)[:, None]
    torch.testing.assert_close(
        even_direction(units, [6], ridge=0.3), even_direction(scaled, [6], ridge=0.3), atol=1e-5, rtol=0
    )
