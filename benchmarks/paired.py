"""Ratios of times that were measured alternately."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def paired_ratios(plain: Sequence[float], other: Sequence[float]) -> tuple[float, list[float]]:
    """Returns the median of the pairs' ratios, other / plain, and its two quartiles, within what was measured."""
    ratios = [b / a for a, b in zip(plain, other, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return median, [low, high]
