"""Times measured alternately, and their ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


def time_pairs(plain: Callable[[], object], other: Callable[[], object], n_pairs: int) -> dict[str, Any]:
    """Times two alternately, each first as often; the first pair warms up. See `paired_ratios`."""
    seconds: dict[str, list[float]] = {"plain": [], "other": []}
    runs = [("plain", plain), ("other", other)]
    for pair in range(-1, n_pairs):
        for name, run in runs if pair % 2 else runs[::-1]:
            start = time.perf_counter()
            run()
            if pair >= 0:
                seconds[name].append(time.perf_counter() - start)
    ratio, quartiles = paired_ratios(seconds["plain"], seconds["other"])
    return {"ratio": ratio, "quartiles": quartiles, "plain_s": statistics.median(seconds["plain"])}


def paired_ratios(plain: Sequence[float], other: Sequence[float]) -> tuple[float, list[float]]:
    """Returns the median of the pairs' ratios, other / plain, and its two quartiles, within what was measured."""
    ratios = [b / a for a, b in zip(plain, other, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return median, [low, high]
