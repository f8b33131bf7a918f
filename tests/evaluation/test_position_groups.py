from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fair_evaluation.position_groups import Grouped, group_lengths, group_positions


def group(values: Sequence[Any], bins: Any = 20, order: Any = None) -> Grouped:
    return group_positions(pd.Series(values), bins=bins, order=order)


def names(grouped: Grouped) -> list[str]:
    return [grouped.names[code] for code in grouped.codes]


class TestLabels:
    def test_places_have_an_order(self) -> None:
        grouped = group(["end", "beginning", "end"])
        assert grouped.names == ("beginning", "end")
        assert grouped.codes.tolist() == [1, 0, 1]
        assert grouped.places.tolist() == [0.25, 0.75]

    def test_a_given_order_may_have_groups_without_rows(self) -> None:
        grouped = group([7, 3], order=[3, 5, 7])
        assert grouped.names == ("3", "5", "7")
        assert grouped.codes.tolist() == [2, 0]
        assert grouped.places.tolist() == pytest.approx([1 / 6, 1 / 2, 5 / 6])

    def test_categories_are_an_order(self) -> None:
        grouped = group(pd.Categorical(["b", "a"], categories=["b", "c", "a"]))  # type: ignore[arg-type]
        assert grouped.names == ("b", "c", "a")
        assert grouped.codes.tolist() == [0, 2]

    @pytest.mark.parametrize(
        ("values", "order", "message"),
        [
            (["first", "end"], None, "order: expected all groups from the beginning of documents to their end"),
            (["end", True], None, "the labels have [True]"),
            (["a", "b"], ["a"], "order: expected all groups, got ['a'] without ['b']"),
            (["a"], ["a", "a"], "order: expected each group once, got ['a', 'a']"),
        ],
    )
    def test_orders_that_do_not_fit(self, values: list[Any], order: Any, message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            group(values, order=order)


class TestBins:
    def test_by_hand(self) -> None:
        grouped = group([0.0, 0.25, 0.2500001, 0.5, 1.0, 0.74], bins=4)
        assert names(grouped) == ["[0, 0.25]", "[0, 0.25]", "(0.25, 0.5]", "(0.25, 0.5]", "(0.75, 1]", "(0.5, 0.75]"]
        assert grouped.places.tolist() == [0.125, 0.375, 0.625, 0.875]

    def test_edges(self) -> None:
        grouped = group([0, 100, 101, 500], bins=[0, 100, 500])
        assert names(grouped) == ["[0, 100]", "[0, 100]", "(100, 500]", "(100, 500]"]
        assert grouped.places.tolist() == [50, 300]

    @given(st.integers(1, 5000), st.integers(0, 5000))
    def test_twenty_bins_are_those_of_posir(self, length: int, middle: int) -> None:
        """As in the benchmark's evaluation: ceil(20 p) - 1, with what floating point makes of 0.15 * 20 put right."""
        position = min(middle, length) / length
        assert group([position]).codes[0] == max(0, math.ceil(round(position * 20, 9)) - 1)

    def test_every_multiple_of_a_twentieth_is_in_the_bin_that_it_ends(self) -> None:
        for denominator in (20, 40, 60, 100, 220):
            step = denominator // 20
            positions = [step * i / denominator for i in range(1, 21)]
            assert group(positions).codes.tolist() == list(range(20))

    @pytest.mark.parametrize("values", [[0.5, 1.01], [-0.01], [17]])
    def test_positions_outside(self, values: list[float]) -> None:
        with pytest.raises(ValueError, match=re.escape("position: expected relative positions in [0, 1], got")):
            group(values)

    @pytest.mark.parametrize("bins", [0, -1, [0], [0, 0], [1, 0], [0, float("nan")], [0, float("inf")], [[0, 1]]])
    def test_bins_that_are_none(self, bins: Any) -> None:
        with pytest.raises(ValueError, match="bins: expected"):
            group([0.5], bins=bins)

    @pytest.mark.parametrize("bins", [True, "20"])
    def test_bins_of_another_type(self, bins: Any) -> None:
        with pytest.raises(TypeError, match="bins: expected the number of bins or their edges, got"):
            group([0.5], bins=bins)


class TestLengths:
    def test_those_of_posir(self) -> None:
        codes, classes = group_lengths(pd.Series([1, 512, 513, 1024, 1536, 1537, 90000]), "posir")
        assert classes == ("(0, 512]", "(512, 1024]", "(1024, 1536]", "over 1536")
        assert codes.tolist() == [0, 0, 1, 1, 2, 3, 3]

    def test_bounds(self) -> None:
        codes, classes = group_lengths(pd.Series([5, 15]), [0, 10, np.inf])
        assert classes == ("(0, 10]", "over 10")
        assert codes.tolist() == [0, 1]

    @pytest.mark.parametrize("lengths", [[0], [-3], [float("nan")], [float("inf")], ["long"], [None]])
    def test_lengths_that_are_none(self, lengths: list[Any]) -> None:
        with pytest.raises(ValueError, match="length: expected positive numbers, got"):
            group_lengths(pd.Series([5, *lengths]), "posir")

    @pytest.mark.parametrize("classes", ["quartiles", [5], [5, 5], [0, 10]])
    def test_classes_that_do_not_fit(self, classes: Any) -> None:
        with pytest.raises(ValueError, match="length_classes: expected"):
            group_lengths(pd.Series([5, 15]), classes)
