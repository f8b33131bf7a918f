from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fair_calibration import EvenChunks


def test_defaults() -> None:
    assert EvenChunks() == EvenChunks(strength=0.8, chunk_size=128, unit_size=32, ridge=1.0)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"chunk_size": 0}, ValueError, "chunk_size: expected an integer of at least 1, got 0"),
        ({"chunk_size": 64.0}, TypeError, r"chunk_size: .* got 64.0 \(float\)"),
        ({"chunk_size": None}, TypeError, r"chunk_size: .* got None \(NoneType\)"),
        ({"unit_size": 0}, ValueError, "unit_size: expected an integer of at least 1, got 0"),
        ({"unit_size": None}, TypeError, r"unit_size: .* got None \(NoneType\)"),
        ({"ridge": 0}, ValueError, "ridge: expected a finite number above 0, got 0"),
        ({"ridge": float("nan")}, ValueError, "ridge: expected a finite number above 0, got nan"),
        ({"ridge": float("inf")}, ValueError, "ridge: expected a finite number above 0, got inf"),
        ({"ridge": "0.3"}, TypeError, r"ridge: expected a number above 0, got '0.3' \(str\)"),
        ({"strength": 2}, ValueError, r"strength: expected a number in \[0, 1\], got 2"),
    ],
)
def test_errors(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EvenChunks(**settings)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"chunk_size": np.int64(64)}, {"chunk_size": 64}),
        ({"unit_size": np.int64(16)}, {"unit_size": 16}),
        ({"ridge": 1}, {"ridge": np.float64(1)}),
        ({"strength": 1}, {"strength": 1.0}),
    ],
)
def test_equal_settings_are_one_value(one: dict[str, Any], other: dict[str, Any]) -> None:
    a, b = EvenChunks(**one), EvenChunks(**other)
    assert (a, hash(a), a.to_json()) == (b, hash(b), b.to_json())


@given(
    st.builds(
        EvenChunks,
        strength=st.floats(0, 1),
        chunk_size=st.integers(1, 10**6),
        unit_size=st.integers(1, 10**6),
        ridge=st.floats(1e-9, 1e9),
    )
)
def test_round_trip(config: EvenChunks) -> None:
    assert EvenChunks.from_dict(json.loads(config.to_json())) == config


def test_unknown_settings_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"unknown EvenChunks settings \['basket_size'\]; the settings are"):
        EvenChunks.from_dict({"basket_size": 3})
