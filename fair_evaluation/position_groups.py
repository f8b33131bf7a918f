"""Groups queries by position, as labels in their order or relative positions in bins, and by document length."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

PLACES = ("beginning", "middle", "end")
"""The labels that need no ``order``."""
POSIR_LENGTHS = (0.0, 512.0, 1024.0, 1536.0, np.inf)
"""The bounds of PosIR's length classes, in tokens (arXiv 2601.08363)."""
LengthClasses = Literal["posir"] | Sequence[float]
_SHOWN = 5  # records named in an error
_DIGITS = 9  # bins are compared after rounding: 0.15 * 20 is not an integer in floating point


class Grouped(NamedTuple):
    """The groups of rows.

    Attributes:
        codes: The index of the group of each row, shape (N,), int64.
        names: The names of the groups, from the beginning of documents to their end.
        places: The position of each group in [0, 1], shape (G,), float64: the middle of its bin; labels divide [0, 1]
            evenly.
    """

    codes: NDArray[np.int64]
    names: tuple[str, ...]
    places: NDArray[np.float64]


def group_positions(
    positions: pd.Series[Any], *, bins: int | Sequence[float], order: Sequence[Hashable] | None
) -> Grouped:
    """Groups positions by label, or numbers without an order into bins.

    Args:
        positions: The position of each row, without missing values.
        bins: The number of bins of equal width in [0, 1], or the edges of the bins.
        order: All labels, from the beginning of documents to their end. None means the categories of a categorical
            column, or "beginning", "middle" and "end".

    Raises:
        ValueError: An order is needed and missing, does not have all labels, or has one twice; or a number is outside
            the bins.
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
                f"{list(PLACES)}; the labels have {unknown[:_SHOWN]}"
            )
        order = [place for place in PLACES if place in found]
    order = list(order)
    if len(set(order)) < len(order):
        raise ValueError(f"order: expected each group once, got {order}")
    if unknown := [label for label in found if label not in order]:
        raise ValueError(f"order: expected all groups, got {order} without {unknown[:_SHOWN]}")
    places = (np.arange(len(order)) + 0.5) / len(order)
    codes = labels.map({label: code for code, label in enumerate(order)}).to_numpy()
    return Grouped(codes=codes.astype(np.int64), names=tuple(map(str, order)), places=places)


def _cut(positions: NDArray[np.float64], bins: int | Sequence[float]) -> Grouped:
    edges = _edges(bins)
    outside = positions[(positions < edges[0]) | (positions > edges[-1])]
    if len(outside):
        raise ValueError(
            f"position: expected relative positions in [{edges[0]:g}, {edges[-1]:g}], got {outside[:_SHOWN].tolist()}; "
            "divide offsets by the document's length, or give bins= as edges, or order= for labels that are numbers"
        )
    # Bins include their upper edge, as in PosIR's own evaluation, and the first one its lower edge as well.
    codes = np.searchsorted(np.round(edges, _DIGITS), np.round(positions, _DIGITS), side="left") - 1
    return Grouped(
        codes=np.maximum(codes, 0).astype(np.int64),
        names=_interval_names(edges, closed_below=True),
        places=(edges[:-1] + edges[1:]) / 2,
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
    """Groups document lengths into classes that include their upper bound.

    Args:
        lengths: The length of each row's relevant document, a positive number.
        classes: "posir" for (0, 512], (512, 1024], (1024, 1536] and over 1536 tokens, or the bounds, of which the last
            may be infinite.

    Returns:
        The index of the class of each row, shape (N,), and the names of the classes.

    Raises:
        ValueError: A length is not a positive number, or outside the classes.
    """
    values = pd.to_numeric(lengths, errors="coerce").to_numpy(dtype=np.float64)
    if len(wrong := lengths[~(np.isfinite(values) & (values > 0))]):
        raise ValueError(
            f"length: expected positive numbers, got {wrong.tolist()[:_SHOWN]} in {len(wrong)} of {len(values)} rows"
        )
    if isinstance(classes, str) and classes != "posir":
        raise ValueError(f"length_classes: expected 'posir' or bounds, got {classes!r}")
    bounds = np.asarray(POSIR_LENGTHS if isinstance(classes, str) else classes, dtype=np.float64)
    if bounds.ndim != 1 or len(bounds) < 2 or not (np.diff(bounds) > 0).all():
        raise ValueError(f"length_classes: expected at least two bounds in ascending order, got {classes!r}")
    codes = np.searchsorted(bounds, values, side="left") - 1
    outside = values[(codes < 0) | (codes > len(bounds) - 2)]
    if len(outside):
        raise ValueError(
            f"length_classes: expected all lengths in ({bounds[0]:g}, {bounds[-1]:g}], got {outside[:_SHOWN]}"
        )
    return codes.astype(np.int64), _interval_names(bounds)


def _interval_names(edges: NDArray[np.float64], *, closed_below: bool = False) -> tuple[str, ...]:
    texts = [f"{edge:.4g}" for edge in edges]
    if len(set(texts)) < len(texts):
        texts = [repr(float(edge)) for edge in edges]
    names = [f"({low}, {high}]" for low, high in pairwise(texts)]
    names[0] = f"[{names[0][1:]}" if closed_below else names[0]
    names[-1] = f"over {texts[-2]}" if np.isinf(edges[-1]) else names[-1]
    return tuple(names)
