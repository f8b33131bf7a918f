"""Joins vectors into one that is about equally similar to all of them."""

from __future__ import annotations

import torch
from torch import Tensor


def even_direction(units: Tensor, counts: list[int], *, ridge: float) -> Tensor:
    """Returns for every document the direction whose similarity with all of its units is as even as possible.

    With the unit vectors of a document as the rows of U it is ``argmin_d sum_j (u_j . d - 1)^2 + ridge |d|^2``, that is
    ``U^T (U U^T + ridge I)^-1 1``: ridge regression of the constant 1 on the units (Hoerl and Kennard 1970). A mean
    leans towards what many units share; here units that say the same share one weight.

    Args:
        units: float32 or float64 (T, D), the units of all documents one after the other, of any length but 0.
        counts: How many of the T units every document has, at least one each.
        ridge: Above 0. The larger it is, the closer to the mean of the unit vectors.

    Returns:
        (B, D), unit vectors.
    """
    n_units, dimension = max(counts), units.shape[1]
    document = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    start = torch.tensor([0, *counts[:-1]]).cumsum(0)
    place = torch.arange(len(document)) - start[document]
    document, place = document.to(units.device), place.to(units.device)
    rows = units.new_zeros(len(counts), n_units, dimension)  # rows of zeros count for nothing
    rows[document, place] = torch.nn.functional.normalize(units, dim=-1)
    columns = rows.transpose(1, 2)
    if n_units <= dimension:
        ones = units.new_zeros(len(counts), n_units, 1)
        ones[document, place] = 1.0
        directions = columns @ _solve(rows @ columns, ones, ridge)
    else:  # the same by (U^T U + ridge I)^-1 U^T 1, which is no larger than D x D
        directions = _solve(columns @ rows, columns.sum(-1, keepdim=True), ridge)
    return torch.nn.functional.normalize(directions.squeeze(-1), dim=-1)


def _solve(gram: Tensor, right: Tensor, ridge: float) -> Tensor:
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return torch.cholesky_solve(right, torch.linalg.cholesky(gram + ridge * identity))
