"""Argument checks shared by several modules. Errors name the argument, what was expected and what was given."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any


def validate_strength(strength: float) -> float:
    """Returns a calibration strength as a float.

    Raises:
        TypeError: ``strength`` is not a real number.
        ValueError: ``strength`` is outside [0, 1], or NaN.
    """
    if isinstance(strength, bool) or not isinstance(strength, Real):
        raise TypeError(f"strength: expected a number in [0, 1], got {strength!r} ({type(strength).__name__})")
    if not 0.0 <= float(strength) <= 1.0:
        raise ValueError(f"strength: expected a number in [0, 1], got {strength!r}")
    return float(strength) + 0.0  # -0.0 would be equal to 0.0, but another text in JSON


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
