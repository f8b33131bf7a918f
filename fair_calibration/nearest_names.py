"""Finds the known names that are nearest to an unknown one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest_names(name: str, known: Iterable[str], *, n: int = 3) -> list[str]:
    """Returns at most ``n`` known names most like ``name``, ignoring case: first those that contain it."""
    by_lower = {each.lower(): each for each in known}
    wanted = name.lower()
    containing = [each for each in by_lower if wanted in each] if len(wanted) > 1 else []
    # "Demo" and "demo" are a word of PositionDemoRetrieval, but not of DiDeMoT2VRetrieval.
    words = (name, name.capitalize())
    containing.sort(key=lambda each: (not any(word in by_lower[each] for word in words), len(each)))
    similar = difflib.get_close_matches(wanted, by_lower, n=n, cutoff=0.3)
    return [by_lower[match] for match in dict.fromkeys([*containing, *similar])][:n]
