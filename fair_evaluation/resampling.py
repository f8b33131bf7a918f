"""The bootstrap over queries, and rank correlation under its weights.

This is the Bayesian bootstrap (Rubin 1981, Annals of Statistics 9(1)): a resample gives each query a random weight
instead of drawing queries with replacement. If each query is in one group, this is a bootstrap within each group
(stratified). If queries, or units of queries, are in several groups each, strata could consist of single queries, and
drawing without strata could leave small groups empty; weights avoid both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fair_evaluation.measures import Array

Codes = NDArray[np.int64]
_CELLS = 2**21  # elements of the arrays that are in memory at once


class UnitTotals(NamedTuple):
    """Sums of scores and numbers of rows by unit of resampling and position group.

    Attributes:
        sums: The sum of the scores, shape (U, G), float64.
        counts: The number of rows, shape (U, G), float64.
    """

    sums: Array
    counts: Array

    def group_means(self, weights: Array) -> Array:
        """Returns the weighted mean score of each group, shape (R, G), for weights of units, shape (R, U)."""
        return np.asarray((weights @ self.sums) / (weights @ self.counts))


def add_up_units(units: Codes, groups: Codes, scores: Array, n_groups: int) -> UnitTotals:
    """Adds up rows by unit and group.

    Args:
        units: The unit of each row, counted from 0, shape (N,).
        groups: The group of each row, counted from 0, shape (N,).
        scores: The score of each row, shape (N,).
        n_groups: The number of groups, G.
    """
    n_units = int(units.max()) + 1
    cells, size, shape = units * n_groups + groups, n_units * n_groups, (n_units, n_groups)
    sums = np.bincount(cells, weights=scores, minlength=size).astype(np.float64)
    counts = np.bincount(cells, minlength=size).astype(np.float64)
    return UnitTotals(sums=sums.reshape(shape), counts=counts.reshape(shape))


def draw_weights(n_units: int, *, n_resamples: int, seed: int, width: int) -> Iterator[Array]:
    """Draws random weights of units for all resamples, in chunks that fit in memory.

    Args:
        n_units: The number of units, U.
        n_resamples: The number of resamples, R.
        seed: Seed of the random numbers.
        width: The number of values that the caller computes from one resample, which limits the size of the chunks.

    Yields:
        Positive weights with expectation 1, shape (r, U), float64; the r of all chunks add up to R.
    """
    rng = np.random.default_rng(seed)
    chunk = max(1, _CELLS // max(width, n_units))
    for first in range(0, n_resamples, chunk):
        yield rng.standard_exponential((min(chunk, n_resamples - first), n_units))


def rank_correlation(x: Array, y: Array, weights: Array) -> Array:
    """Computes Spearman's rank correlation of weighted rows.

    Args:
        x: The first value of each row, shape (N,).
        y: The second value of each row, shape (N,).
        weights: The positive weight of each row in each resample, shape (R, N).

    Returns:
        The correlation in each resample, shape (R,); NaN if ``x`` or ``y`` does not vary. With integer weights it is
        that of `scipy.stats.spearmanr` on rows repeated so many times.
    """
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return np.full(len(weights), np.nan)
    middle = weights.sum(axis=1, keepdims=True) / 2
    a, b = _mid_ranks(x, weights) - middle, _mid_ranks(y, weights) - middle
    spread = (weights * a * a).sum(axis=1) * (weights * b * b).sum(axis=1)
    return np.asarray((weights * a * b).sum(axis=1) / np.sqrt(spread))


def _mid_ranks(values: Array, weights: Array) -> Array:
    """Returns for each row the weight of the rows below it plus half the weight of those tied with it, shape (R, N)."""
    order = np.argsort(values, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(values[order]) != 0])
    tied = np.add.reduceat(weights[:, order], starts, axis=1)
    middle = np.cumsum(tied, axis=1) - tied / 2
    ranks = np.empty_like(weights)
    ranks[:, order] = np.repeat(middle, np.diff(np.r_[starts, len(values)]), axis=1)
    return ranks
