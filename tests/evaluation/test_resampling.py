from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import bootstrap

from fair_evaluation.resampling import add_up_units, draw_weights


def draw(n_units: int, n_resamples: int, seed: int = 0) -> np.ndarray:
    return np.concatenate(list(draw_weights(n_units, n_resamples=n_resamples, seed=seed)))


def test_units_are_added_up() -> None:
    # Unit 0 stands in both groups, unit 1 twice in the second, unit 2 in both again.
    units, groups = np.array([0, 0, 1, 1, 2, 2]), np.array([0, 1, 1, 1, 1, 0])
    totals = add_up_units(units, groups, np.array([0.5, 0.25, 1.0, 0.5, 0.0, 1.0]), 2)
    assert totals.sums.tolist() == [[0.5, 0.25], [0, 1.5], [1.0, 0.0]]
    assert totals.counts.tolist() == [[1, 1], [0, 2], [1, 1]]
    assert totals.group_means().tolist() == [0.75, 0.4375]
    weighted = totals.group_means(np.array([[3.0, 0.5, 1.0], [1.0, 1.0, 1.0]]))
    assert weighted[0].tolist() == pytest.approx([2.5 / 4, 1.5 / 5])
    assert weighted[1].tolist() == [0.75, 0.4375]


def test_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = draw(7, 20_000)
    assert weights.shape == (20_000, 7)
    assert weights.min() > 0
    # Exponential: mean 1 with a standard error of .007, variance 1 with one of .02.
    assert weights.mean(axis=0) == pytest.approx(np.ones(7), abs=0.03)
    assert weights.var(axis=0) == pytest.approx(np.ones(7), abs=0.08)
    assert np.abs(np.corrcoef(weights.T) - np.eye(7)).max() < 0.03
    assert (draw(7, 50, seed=1) != draw(7, 50, seed=2)).all()
    monkeypatch.setattr("fair_evaluation.resampling._CELLS", 7)
    assert (draw(7, 20_000) == weights).all()  # one resample at a time


@pytest.mark.parametrize("n", [30, 200])
def test_the_intervals_of_means_are_about_scipys(n: int) -> None:
    """Two groups of disjoint queries, and their ratio, against draws with replacement within each group."""
    rng = np.random.default_rng(0)
    a, b = rng.random(n), rng.random(n) ** 2
    totals = add_up_units(np.arange(2 * n), np.repeat([0, 1], n), np.r_[a, b], 2)
    means = totals.group_means(draw(2 * n, 20_000))
    for values, sample, statistic in (
        (means[:, 0], (a,), np.mean),
        (means[:, 1] / means[:, 0], (a, b), lambda x, y, axis: y.mean(axis) / x.mean(axis)),
    ):
        low, high = bootstrap(sample, statistic, n_resamples=20_000, method="percentile", rng=1).confidence_interval
        assert np.quantile(values, [0.025, 0.975]) == pytest.approx([low, high], abs=0.1 * (high - low))
