"""What was probably meant by a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, n: int = 3) -> list[str]:
    """Returns the names that are most like ``name``, ignoring case: first those that hold it, the shortest first."""
    by_lower = {each.lower(): each for each in known}
    wanted = name.lower()
    holding = [each for each in by_lower if wanted in each] if len(wanted) > 1 else []
    # "Demo" and "demo" are a word of PositionDemoRetrieval, but not of DiDeMoT2VRetrieval.
    words = (name, name.capitalize())
    holding.sort(key=lambda each: (not any(word in by_lower[each] for word in words), len(each)))
    similar = difflib.get_close_matches(wanted, by_lower, n=n, cutoff=0.3)
    return [by_lower[match] for match in dict.fromkeys([*holding, *similar])][:n]
