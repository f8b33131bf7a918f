from __future__ import annotations

import re
from statistics import harmonic_mean as reference_harmonic_mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import linregress

from fair_evaluation.measures import harmonic_mean, position_sensitivity_index, slope

SCORES = st.lists(st.floats(0, 1), min_size=2, max_size=25)


def test_by_hand() -> None:
    assert position_sensitivity_index([0.8, 0.6, 0.4]) == pytest.approx(0.5)  # 1 - .4 / .8
    assert harmonic_mean([0.8, 0.6, 0.4]) == pytest.approx(3 / (1 / 0.8 + 1 / 0.6 + 1 / 0.4))
    assert slope([1 / 6, 1 / 2, 5 / 6], [0.8, 0.6, 0.4]) == pytest.approx(-0.6)  # from 1/6 to 5/6 it falls by .4


@pytest.mark.parametrize(
    ("scores", "psi", "harmonic"),
    [([0.0, 0.0], 0, 0), ([0.5, 0.0], 1, 0), ([0.3], 0, 0.3), ([0.3, 0.3], 0, 0.3), ([5e-324, 5e-324], 0, 5e-324)],
)
def test_edges(scores: list[float], psi: float, harmonic: float) -> None:
    assert position_sensitivity_index(scores) == psi
    assert harmonic_mean(scores) == pytest.approx(harmonic)


def test_no_slope_without_two_positions() -> None:
    assert slope([0.5], [0.3]) is None
    assert slope([0.5, 0.5], [0.3, 0.4]) is None


def test_scores_are_floats_and_arrays_are_taken() -> None:
    scores = np.array([0.8, 0.6, 0.4], dtype=np.float32)
    for value in (position_sensitivity_index(scores), harmonic_mean(scores), slope(scores, scores)):
        assert type(value) is float


@pytest.mark.parametrize("scores", [[], [0.5, -0.1], [0.5, float("nan")], [0.5, float("inf")], 0.5, [[]]])
def test_scores_that_are_none(scores: Any) -> None:
    for measure in (position_sensitivity_index, harmonic_mean):
        with pytest.raises(ValueError, match="scores: expected one finite, nonnegative score per position group, got"):
            measure(scores)
    if scores != [0.5, -0.1]:  # a similarity can be negative, and has a slope all the same
        with pytest.raises(ValueError, match="scores: expected one finite score"):
            slope([0.1, 0.2], scores)


@pytest.mark.parametrize("positions", [[0.1], [0.1, float("nan")], [[0.1, 0.2]]])
def test_positions_that_do_not_fit(positions: list[float]) -> None:
    with pytest.raises(ValueError, match=re.escape("positions: expected 2 finite numbers, one for each score, got")):
        slope(positions, [0.5, 0.4])


@given(SCORES)
def test_against_other_implementations(scores: list[float]) -> None:
    psi = position_sensitivity_index(scores)
    assert 0 <= psi <= 1
    assert psi == (1 - min(scores) / max(scores) if max(scores) > 0 else 0)
    assert harmonic_mean(scores) == pytest.approx(reference_harmonic_mean(scores), rel=1e-9, abs=1e-300)
    places = (np.arange(len(scores)) + 0.5) / len(scores)
    assert slope(places, scores) == pytest.approx(linregress(places, scores).slope, abs=1e-9)


@given(st.lists(SCORES.filter(lambda s: len(s) >= 4).map(lambda s: s[:4]), min_size=1, max_size=5))
def test_many_at_once_are_each_by_itself(rows: list[list[float]]) -> None:
    means, places = np.array(rows), np.array([0.1, 0.2, 0.6, 0.9])
    assert position_sensitivity_index(means).tolist() == [position_sensitivity_index(row) for row in rows]
    assert harmonic_mean(means).tolist() == pytest.approx([harmonic_mean(row) for row in rows])
    assert slope(places, means).tolist() == pytest.approx([slope(places, row) for row in rows], abs=1e-12)
