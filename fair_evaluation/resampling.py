"""The bootstrap over queries.

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
_CELLS = 2**21  # weights that are in memory at once


class UnitTotals(NamedTuple):
    """Sums of scores and numbers of rows by unit of resampling and position group.

    Attributes:
        sums: The sum of the scores, shape (U, G), float64.
        counts: The number of rows, shape (U, G), float64.
    """

    sums: Array
    counts: Array

    def group_means(self, weights: Array | None = None) -> Array:
        """Returns the mean score of each group, shape (G,), or for weights of units, shape (R, U), shape (R, G)."""
        if weights is None:
            return np.asarray(self.group_means(np.ones((1, len(self.sums))))[0])
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


def draw_weights(n_units: int, *, n_resamples: int, seed: int) -> Iterator[Array]:
    """Draws random weights of units for all resamples, in chunks that fit in memory.

    Args:
        n_units: The number of units, U.
        n_resamples: The number of resamples, R.
        seed: Seed of the random numbers.

    Yields:
        Positive weights with expectation 1, shape (r, U), float64; the r of all chunks add up to R.
    """
    rng = np.random.default_rng(seed)
    chunk = max(1, _CELLS // n_units)
    for first in range(0, n_resamples, chunk):
        yield rng.standard_exponential((min(chunk, n_resamples - first), n_units))


def is_biased(bias: float, standard_error: float) -> bool:
    """Returns whether a bias deserves a note: it exceeds a quarter of the standard error and shows in three digits.

    Source: Efron, Tibshirani (1993), An Introduction to the Bootstrap, 10.3.
    """
    return abs(bias) > max(0.25 * standard_error, 0.0005)


def check_bootstrap(confidence: float, n_resamples: int) -> None:
    """Raises a ValueError if a setting of the bootstrap is out of range."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected a number between 0 and 1, such as 0.95, got {confidence!r}")
    if isinstance(n_resamples, bool) or not isinstance(n_resamples, int | np.integer) or n_resamples < 1:
        raise ValueError(f"n_resamples: expected an integer of at least 1, got {n_resamples!r}")
