"""The bootstrap over queries, and rank correlation under its weights.

It is the Bayesian bootstrap (Rubin 1981, Annals of Statistics 9(1)): a resample does not draw queries with replacement
but gives each a random weight. Where each query is in one group, that is a bootstrap within each group by itself
(stratified). Where queries, or units of them, stand in several groups, and each in others, strata would be of single
queries, and drawing without strata would empty small groups; weights do neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fair_evaluation.measures import Array

Codes = NDArray[np.int64]
_CELLS = 2**21  # of the arrays held at once


class UnitTotals(NamedTuple):
    """What each unit of resampling adds to each position group.

    Attributes:
        sums: The sums of its scores, shape (U, G), float64.
        counts: The numbers of its rows, shape (U, G), float64.
    """

    sums: Array
    counts: Array

    def group_means(self, weights: Array) -> Array:
        """Returns the mean score of each group, of shape (R, G), for weights of shape (R, U)."""
        return np.asarray((weights @ self.sums) / (weights @ self.counts))


def add_up_units(units: Codes, groups: Codes, scores: Array, n_groups: int) -> UnitTotals:
    """Adds up rows by unit and group: ``units``, ``groups`` (both counted from 0) and ``scores`` of shape (N,)."""
    n_units = int(units.max()) + 1
    cells, size, shape = units * n_groups + groups, n_units * n_groups, (n_units, n_groups)
    sums = np.bincount(cells, weights=scores, minlength=size).astype(np.float64)
    counts = np.bincount(cells, minlength=size).astype(np.float64)
    return UnitTotals(sums=sums.reshape(shape), counts=counts.reshape(shape))


def draw_weights(n_units: int, *, n_resamples: int, seed: int, width: int) -> Iterator[Array]:
    """Draws the weights of units.

    Args:
        n_units: How many there are, U.
        n_resamples: How many times, R.
        seed: The same seed gives the same weights.
        width: The size of what the caller makes of one resample; sets how many are yielded at once.

    Yields:
        Positive weights with mean 1, shape (r, U), float64; the r of all chunks add up to R.
    """
    rng = np.random.default_rng(seed)
    chunk = max(1, _CELLS // max(width, n_units))
    for first in range(0, n_resamples, chunk):
        yield rng.standard_exponential((min(chunk, n_resamples - first), n_units))


def rank_correlation(x: Array, y: Array, weights: Array) -> Array:
    """Computes Spearman's rank correlation of weighted rows.

    Args:
        x: The first value of each row, shape (N,).
        y: The second.
        weights: Of the rows, positive, shape (R, N).

    Returns:
        Shape (R,). For whole numbers as weights it is what `scipy.stats.spearmanr` gives on rows repeated so often; NaN
        where one side does not vary.
    """
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return np.full(len(weights), np.nan)
    middle = weights.sum(axis=1, keepdims=True) / 2
    a, b = _mid_ranks(x, weights) - middle, _mid_ranks(y, weights) - middle
    spread = (weights * a * a).sum(axis=1) * (weights * b * b).sum(axis=1)
    return np.asarray((weights * a * b).sum(axis=1) / np.sqrt(spread))


def _mid_ranks(values: Array, weights: Array) -> Array:
    """Returns the weight of the rows below each row and half of that of the rows tied with it, shape (R, N)."""
    order = np.argsort(values, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(values[order]) != 0])
    tied = np.add.reduceat(weights[:, order], starts, axis=1)
    middle = np.cumsum(tied, axis=1) - tied / 2
    ranks = np.empty_like(weights)
    ranks[:, order] = np.repeat(middle, np.diff(np.r_[starts, len(values)]), axis=1)
    return ranks
