"""Argument checks shared by several modules. Errors name the argument, what was expected and what was given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any


def validate_strength(strength: float) -> float:
    """Returns a calibration strength as a float; errors are those of `validate_number` with ``at_most`` 1."""
    return validate_number("strength", strength, at_most=1.0)


def validate_number(name: str, value: Any, *, at_most: float | None = None) -> float:
    """Returns the value of the argument ``name``, a finite number of at least 0, as a float.

    Raises:
        TypeError: ``value`` is not a real number.
        ValueError: ``value`` is negative, above ``at_most``, infinite or NaN.
    """
    expected = "a finite number of at least 0" if at_most is None else f"a number in [0, {at_most:g}]"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected {expected}, got {value!r} ({type(value).__name__})")
    number = float(value)
    if not (0.0 <= number < math.inf and (at_most is None or number <= at_most)):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    return number + 0.0  # -0.0 would be equal to 0.0, but another text in JSON


def validate_positive_int(name: str, value: Any) -> int:
    """Returns the value of the argument ``name`` as an int; NumPy integers are accepted.

    Raises:
        TypeError: ``value`` is not an integer.
        ValueError: ``value`` is below 1.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected an integer of at least 1, got {value!r} ({type(value).__name__})")
    if value < 1:
        raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}")
    return int(value)


def validate_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises a ValueError unless the value of the argument ``name`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {list(choices)}, got {value!r}")
