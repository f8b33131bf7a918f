"""Measures over position groups: PSI, harmonic mean and slope. All of the project takes them from here.

Each takes the mean scores of G groups, or many such lists at once, with the groups along the last axis: the result is a
float for shape (G,), and a float64 array of shape (...) for shape (..., G). The module imports NumPy alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def position_sensitivity_index(scores: ArrayLike) -> Any:
    """Computes PSI, the position sensitivity index: 1 - min / max of the scores of position groups; 0 is position-fair.

    It was introduced with PosIR (arXiv 2601.08363). Sampling error alone makes it greater than 0, the more so the more
    groups there are and the fewer queries they have.

    Args:
        scores: The mean score of each group, nonnegative, shape (..., G).

    Returns:
        The index, in [0, 1]; 0 where every group's score is 0, and for one group.

    Raises:
        ValueError: There are no scores, or one is negative, infinite or NaN.
    """
    means = _checked(scores)
    highest = means.max(axis=-1)
    ratio = means.min(axis=-1) / np.where(highest > 0, highest, 1.0)
    return _float_or_array(np.where(highest > 0, 1.0 - ratio, 0.0))


def harmonic_mean(scores: ArrayLike) -> Any:
    """Computes the harmonic mean of group scores, which is low as soon as one group's score is low.

    Args:
        scores: The mean score of each group, nonnegative, shape (..., G).

    Returns:
        The mean; 0 if one group's score is 0.

    Raises:
        ValueError: There are no scores, or one is negative, infinite or NaN.
    """
    means = _checked(scores)
    lowest = means.min(axis=-1)
    # Reciprocals of the means divided by the smallest one do not overflow where means are tiny.
    ratios = (lowest[..., None] / np.where(means > 0, means, 1.0)).sum(axis=-1)
    return _float_or_array(lowest * means.shape[-1] / np.where(lowest > 0, ratios, 1.0))


def slope(positions: ArrayLike, scores: ArrayLike) -> Any:
    """Computes the slope of the least-squares line of score over position, with equal weight for each group.

    Args:
        positions: The position of each group, shape (G,), such as 0 for the beginning of documents to 1 for their end.
        scores: The mean score of each group, shape (..., G).

    Returns:
        Score per unit of position, negative if the beginning is favoured; None with fewer than two different positions.

    Raises:
        ValueError: There are no scores, one is infinite or NaN, or positions are not as many finite numbers.
    """
    means, places = _checked(scores, lowest=-np.inf), np.asarray(positions, dtype=np.float64)
    if places.shape != means.shape[-1:] or not np.isfinite(places).all():
        raise ValueError(f"positions: expected {means.shape[-1]} finite numbers, one for each score, got {positions!r}")
    if len(np.unique(places)) < 2:
        return None
    centred = places - places.mean()
    return _float_or_array(means @ centred / (centred @ centred))


def _checked(scores: ArrayLike, lowest: float = 0.0) -> Array:
    values = np.asarray(scores, dtype=np.float64)
    if not values.ndim or not values.shape[-1] or not (np.isfinite(values) & (values >= lowest)).all():
        kind = "finite, nonnegative" if lowest == 0 else "finite"
        raise ValueError(f"scores: expected one {kind} score per position group, got {scores!r}")
    return values


def _float_or_array(values: Any) -> Any:
    return values if np.ndim(values) else float(values)
