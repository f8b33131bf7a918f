"""From positions to groups: labels in their order, or relative positions cut into bins; and classes of length."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

PLACES = ("beginning", "middle", "end")
"""The labels whose order is known."""
POSIR_LENGTHS = (0.0, 512.0, 1024.0, 1536.0, np.inf)
"""The bounds of PosIR's length quartiles, in tokens (arXiv 2601.08363)."""
LengthClasses = Literal["posir", "quartiles"] | Sequence[float]
_NAMED = 5  # how many records an error names
_DIGITS = 9  # 0.15 * 20 is no whole number in floating point


class Grouped(NamedTuple):
    """Rows in groups.

    Attributes:
        codes: The group of each row, shape (N,), int64.
        names: What the groups are called, from the beginning of documents to their end.
        places: Where each group stands, shape (G,), float64: the middle of its bin, or of its share of [0, 1].
        values: The position of each row, shape (N,), float64: its own, or its group's place.
    """

    codes: NDArray[np.int64]
    names: tuple[str, ...]
    places: NDArray[np.float64]
    values: NDArray[np.float64]


def group_positions(
    positions: pd.Series[Any], *, bins: int | Sequence[float], order: Sequence[Hashable] | None
) -> Grouped:
    """Groups positions: by their labels where they are labels, or an order is given, and else into bins.

    Args:
        positions: The position of each row, none missing.
        bins: For numbers: how many bins of equal width [0, 1] is cut into, or the edges.
        order: All labels, from the beginning of documents to their end. None for the categories of a categorical
            column, or for labels among "beginning", "middle" and "end".

    Raises:
        ValueError: The order is needed, or lacks a label, or has one twice, or a number is outside the bins.
    """
    if order is None and isinstance(positions.dtype, pd.CategoricalDtype):
        order = list(positions.cat.categories)
    if order is None and all(_is_number(value) for value in positions):
        return _cut(positions.to_numpy(dtype=np.float64), bins)
    return _by_label(positions, order)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _by_label(labels: pd.Series[Any], order: Sequence[Hashable] | None) -> Grouped:
    found = list(dict.fromkeys(labels))
    if order is None:
        if unknown := [label for label in found if label not in PLACES]:
            raise ValueError(
                f"order: expected all groups from the beginning of documents to their end, for labels other than "
                f"{list(PLACES)}; the labels have {unknown[:_NAMED]}"
            )
        order = [place for place in PLACES if place in found]
    order = list(order)
    if len(set(order)) < len(order):
        raise ValueError(f"order: expected each group once, got {order}")
    if unknown := [label for label in found if label not in order]:
        raise ValueError(f"order: expected all groups, got {order} without {unknown[:_NAMED]}")
    places = (np.arange(len(order)) + 0.5) / len(order)
    codes = labels.map({label: code for code, label in enumerate(order)}).to_numpy(dtype=np.int64)
    return Grouped(codes=codes.astype(np.int64), names=tuple(map(str, order)), places=places, values=places[codes])


def _cut(positions: NDArray[np.float64], bins: int | Sequence[float]) -> Grouped:
    edges = _edges(bins)
    outside = positions[(positions < edges[0]) | (positions > edges[-1])]
    if len(outside):
        raise ValueError(
            f"position: expected relative positions in [{edges[0]:g}, {edges[-1]:g}], got {outside[:_NAMED].tolist()}; "
            "divide offsets by the document's length, or give bins= as edges, or order= for labels that are numbers"
        )
    # Closed at the upper edge, as in PosIR's own evaluation; what stands at the very beginning is in the first.
    codes = np.searchsorted(np.round(edges, _DIGITS), np.round(positions, _DIGITS), side="left") - 1
    return Grouped(
        codes=np.maximum(codes, 0).astype(np.int64),
        names=_interval_names(edges, closed_below=True),
        places=(edges[:-1] + edges[1:]) / 2,
        values=positions,
    )


def _edges(bins: int | Sequence[float]) -> NDArray[np.float64]:
    if isinstance(bins, bool | str):
        raise TypeError(f"bins: expected the number of bins or their edges, got {bins!r}")
    if isinstance(bins, int | np.integer):
        if bins < 1:
            raise ValueError(f"bins: expected at least 1, got {bins}")
        return np.linspace(0, 1, int(bins) + 1)
    edges = np.asarray(bins, dtype=np.float64)
    if edges.ndim != 1 or len(edges) < 2 or not np.isfinite(edges).all() or (np.diff(edges) <= 0).any():
        raise ValueError(f"bins: expected a number, or at least two finite edges in ascending order, got {bins!r}")
    return edges


def group_lengths(lengths: pd.Series[Any], classes: LengthClasses) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Groups document lengths, closed at the upper bound.

    Args:
        lengths: The length of each row's relevant document, positive numbers.
        classes: "posir" for (0, 512], (512, 1024], (1024, 1536] and over 1536 tokens, "quartiles" for those of the
            rows, or the bounds, of which the last may be infinite.

    Returns:
        The class of each row, shape (N,), and the names of the classes. Quartiles whose bounds coincide are joined.

    Raises:
        ValueError: A length is none, or outside the classes.
    """
    values = pd.to_numeric(lengths, errors="coerce").to_numpy(dtype=np.float64)
    if not (np.isfinite(values) & (values > 0)).all():
        wrong = lengths[~(np.isfinite(values) & (values > 0))].tolist()
        raise ValueError(
            f"length: expected positive numbers, got {wrong[:_NAMED]} in {len(wrong)} of {len(values)} rows"
        )
    quartiles = isinstance(classes, str) and classes == "quartiles"
    if quartiles:
        bounds = np.unique(np.quantile(values, [0, 0.25, 0.5, 0.75, 1]))
        bounds = bounds if len(bounds) > 1 else np.array([0, bounds[0]])
    elif isinstance(classes, str):
        if classes != "posir":
            raise ValueError(f"length_classes: expected 'posir', 'quartiles' or bounds, got {classes!r}")
        bounds = np.asarray(POSIR_LENGTHS)
    else:
        bounds = np.asarray(classes, dtype=np.float64)
        if bounds.ndim != 1 or len(bounds) < 2 or not (np.diff(bounds) > 0).all():
            raise ValueError(f"length_classes: expected at least two bounds in ascending order, got {classes!r}")
    codes = np.searchsorted(bounds, values, side="left") - 1
    codes = np.maximum(codes, 0) if quartiles else codes  # the least length is in the first
    outside = values[(codes < 0) | (codes > len(bounds) - 2)]
    if len(outside):
        raise ValueError(
            f"length_classes: expected all lengths in ({bounds[0]:g}, {bounds[-1]:g}], got {outside[:_NAMED]}"
        )
    return codes.astype(np.int64), _interval_names(bounds, closed_below=quartiles)


def _interval_names(edges: NDArray[np.float64], *, closed_below: bool) -> tuple[str, ...]:
    texts = [f"{edge:.4g}" for edge in edges]
    if len(set(texts)) < len(texts):
        texts = [repr(float(edge)) for edge in edges]
    names = [f"({low}, {high}]" for low, high in pairwise(texts)]
    names[0] = f"[{names[0][1:]}" if closed_below else names[0]
    names[-1] = f"over {texts[-2]}" if np.isinf(edges[-1]) else names[-1]
    return tuple(names)
