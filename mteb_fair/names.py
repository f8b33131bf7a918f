"""What was probably meant by a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, n: int = 3) -> list[str]:
    """Returns the names that are most like ``name``, ignoring case; the best first."""
    by_lower = {each.lower(): each for each in known}
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=n, cutoff=0.3)]
