"""Measures over position groups: PSI, harmonic mean and slope. All of the project takes them from here.

Each has a function for one list of group scores, which checks them, and one for arrays of resamples, along the last
axis. The module imports NumPy alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def position_sensitivity_index(scores: Sequence[float] | Array) -> float:
    """Computes PSI, the position sensitivity index: 1 - min / max of the scores of position groups; 0 is position-fair.

    It was introduced with PosIR (arXiv 2601.08363). Sampling error alone makes it greater than 0, the more so the more
    groups there are and the fewer queries they have (`fair_evaluation.position_evaluation`).

    Args:
        scores: The mean score of each group, nonnegative, shape (G,).

    Returns:
        The index, in [0, 1]; 0 where every group's score is 0, and for one group.

    Raises:
        ValueError: There are no scores, or one is negative, infinite or NaN.
    """
    return float(psi_of_rows(_checked(scores)))


def harmonic_mean(scores: Sequence[float] | Array) -> float:
    """Computes the harmonic mean of group scores, which is low as soon as one group's score is low.

    Args:
        scores: The mean score of each group, nonnegative, shape (G,).

    Returns:
        The mean; 0 if one group's score is 0.

    Raises:
        ValueError: There are no scores, or one is negative, infinite or NaN.
    """
    return float(harmonic_mean_of_rows(_checked(scores)))


def slope(positions: Sequence[float] | Array, scores: Sequence[float] | Array) -> float | None:
    """Computes the slope of the least-squares line of score over position, with equal weight for each group.

    Args:
        positions: The position of each group, shape (G,), such as 0 for the beginning of documents to 1 for their end.
        scores: The mean score of each group, nonnegative, shape (G,).

    Returns:
        Score per unit of position, negative if the beginning is favoured; None with fewer than two different positions.

    Raises:
        ValueError: There are no scores, one is negative, infinite or NaN, or positions are not as many finite numbers.
    """
    values, places = _checked(scores), np.asarray(positions, dtype=np.float64)
    if places.shape != values.shape or not np.isfinite(places).all():
        raise ValueError(f"positions: expected {len(values)} finite numbers, one for each score, got {positions!r}")
    return float(slope_of_rows(places, values)) if len(np.unique(places)) > 1 else None


def psi_of_rows(means: Array) -> Array:
    """Computes PSI along the last axis: (..., G) nonnegative group means to (...)."""
    highest = means.max(axis=-1)
    ratio = means.min(axis=-1) / np.where(highest > 0, highest, 1.0)
    return np.where(highest > 0, 1.0 - ratio, 0.0)


def harmonic_mean_of_rows(means: Array) -> Array:
    """Computes the harmonic mean along the last axis: (..., G) nonnegative group means to (...)."""
    lowest = means.min(axis=-1)
    # Reciprocals of the means divided by the smallest one do not overflow where means are tiny.
    ratios = (lowest[..., None] / np.where(means > 0, means, 1.0)).sum(axis=-1)
    return np.asarray(lowest * means.shape[-1] / np.where(lowest > 0, ratios, 1.0))


def slope_of_rows(positions: Array, means: Array) -> Array:
    """Computes the least-squares slope along the last axis: (G,) not all equal positions, (..., G) means to (...)."""
    centred = positions - positions.mean()
    return np.asarray(means @ centred / (centred @ centred))


def _checked(scores: Sequence[float] | Array) -> Array:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(f"scores: expected one finite, nonnegative score per position group, got {list(scores)}")
    return values
