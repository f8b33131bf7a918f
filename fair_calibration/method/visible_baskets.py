"""Finds the baskets that some rows see.

A row sees only part of the keys: with causal attention those before it, with a sliding window those near it. Baskets
that no row sees are not computed, and baskets of which all rows see the same keys can be computed together.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.method.baskets import Baskets

SHORTEST_RUN = 6
"""The least number of baskets that are computed together. Fewer are faster one by one, with all heads at once."""


class VisibleBasket(NamedTuple):
    """One basket of n keys, for l rows of b sequences."""

    keys: slice | Tensor  # the positions of the keys: a slice if they are the same in all sequences, else int64 (b, n)
    rows: slice  # the part of the l rows that sees any of the keys, counted from the first of them
    bias: Tensor | None  # added to the logits of ``rows``, float32 (b or 1, H or 1, rows or 1, n)
    visible: Tensor | None  # which keys ``rows`` see, bool of the same shape; None if they see all of them
    size: Tensor  # how many of the keys each of the l rows sees, (b or 1, H or 1, l or 1)


class BasketRun(NamedTuple):
    """Consecutive baskets, n of s keys, without bias, of which all rows and heads see the same keys."""

    keys: slice  # the n * s positions, of which the last ones may lie beyond the end of the sequences
    visible: Tensor | None  # which keys the rows see, bool (b or 1, n, 1, s); None if they see all of them
    size: Tensor  # how many keys of each basket the rows see, (n, b or 1, 1, 1)


class VisibleBaskets(NamedTuple):
    """The baskets that some rows of some sequences see."""

    run: BasketRun | None  # those that can be computed together
    others: list[VisibleBasket]  # those that are computed one by one


def find_visible_baskets(
    bias: AttentionBias, baskets: Baskets, group: slice, rows: slice, device: torch.device
) -> VisibleBaskets:
    """Finds the baskets that some rows of some sequences see.

    On CPUs, baskets that no row sees are left out, rows that see nothing of a basket are cut off, and baskets that can
    be computed together are joined into a run. On other devices all baskets and rows are returned, without a run:
    reading the values of the masks would have to wait for the device. ``bias`` may be that of some heads only.
    """
    found = []
    every = slice(0, rows.stop - rows.start)
    on_cpu = device.type == "cpu"
    for n, keys in enumerate(_basket_keys(baskets, group)):
        if bias.causal and isinstance(keys, slice) and keys.start >= rows.stop:
            continue  # all of its keys come after all of the rows
        added, visible = bias.block(group, rows, keys, device)
        filled = baskets.filled[group, n * baskets.basket_size : (n + 1) * baskets.basket_size][:, None, None]
        if isinstance(keys, slice):
            filled = filled[..., : keys.stop - keys.start]
        if not (on_cpu and filled.all()):
            visible = filled if visible is None else visible & filled
        seeing_rows = every
        if visible is None:
            size = torch.full((1, 1, 1), filled.shape[-1], device=device)
        else:
            size = visible.sum(-1)
            if on_cpu:
                seeing = (size > 0).any(1).any(0).nonzero().flatten()
                if not len(seeing):
                    continue  # hidden from all of the rows, by a sliding window for example
                if visible.shape[2] > 1 and (visible == visible[:, :, :1]).all():
                    # One row stands for all. It is copied, so that caching it does not keep the whole mask in memory.
                    visible, size = visible[:, :, :1].clone(), size[:, :, :1].clone()
                if size.shape[-1] > 1:
                    seeing_rows = slice(int(seeing[0]), int(seeing[-1]) + 1)
                    visible = visible[:, :, seeing_rows]
                    added = added[:, :, seeing_rows] if added is not None and added.shape[2] > 1 else added
                visible = None if visible.all() else visible
        found.append(VisibleBasket(keys, seeing_rows, added, visible, size))
    return _join_run(found, every, baskets.sizes[group.start]) if on_cpu else VisibleBaskets(None, found)


def count_baskets(baskets: Baskets, group: slice) -> int:
    """Returns an upper bound of the number of baskets that `find_visible_baskets` returns for some sequences."""
    starts = _common_starts(baskets, group)
    return baskets.n_baskets if starts is None else len(starts)


def _common_starts(baskets: Baskets, group: slice) -> range | None:
    """Returns where the baskets of all sequences of a group start; None if they do not start at the same positions.

    The stop of the range is where the longest content stops.
    """
    contents = [content for content in baskets.content[group] if content is not None]
    if len(contents) < group.stop - group.start or len({start for start, _ in contents}) > 1:
        return None
    if len(set(baskets.sizes[group])) > 1:
        return None
    return range(contents[0][0], max(stop for _, stop in contents), baskets.sizes[group.start])


def _basket_keys(baskets: Baskets, group: slice) -> list[slice | Tensor]:
    """Returns the keys of each basket: slices if they are the same in all sequences, else positions, int64 (b, S)."""
    size = baskets.basket_size
    starts = _common_starts(baskets, group)
    if starts is None:
        return [baskets.slots[group, n * size : (n + 1) * size] for n in range(baskets.n_baskets)]
    return [slice(start, min(start + starts.step, starts.stop)) for start in starts]


def _join_run(found: list[VisibleBasket], every: slice, basket_size: int) -> VisibleBaskets:
    """Joins the longest run of consecutive baskets of which all rows see the same keys, if it is long enough.

    Baskets that are slices have ``basket_size`` keys, and the last one may have fewer.
    """
    longest, start = range(0), 0
    for i, basket in enumerate(found):
        seen_alike = basket.visible is None or basket.visible.shape[1:3] == (1, 1)
        if not isinstance(basket.keys, slice) or basket.bias is not None or basket.rows != every or not seen_alike:
            start = i + 1
        elif i > start and cast(slice, found[i - 1].keys).stop != basket.keys.start:
            start = i
        longest = max(longest, range(start, i + 1), key=len)
    run = found[longest.start : longest.stop]
    if len(run) < SHORTEST_RUN:
        return VisibleBaskets(None, found)
    first = cast(slice, run[0].keys).start
    joined = BasketRun(
        keys=slice(first, first + len(run) * basket_size),
        visible=_join_visible(run, basket_size),
        size=torch.stack(torch.broadcast_tensors(*(basket.size for basket in run))),  # type: ignore[no-untyped-call]
    )
    return VisibleBaskets(joined, found[: longest.start] + found[longest.stop :])


def _join_visible(run: list[VisibleBasket], basket_size: int) -> Tensor | None:
    """Returns the `BasketRun.visible` of a run; places beyond the end of the last basket are not visible."""
    columns = []
    for basket in run:
        keys = cast(slice, basket.keys)
        visible = torch.ones(1, 1, 1, keys.stop - keys.start, dtype=torch.bool)
        if basket.visible is not None:
            visible = basket.visible
        columns.append(torch.nn.functional.pad(visible, (0, basket_size - visible.shape[-1])))
    joined: Tensor = torch.cat(torch.broadcast_tensors(*columns), dim=1)  # type: ignore[no-untyped-call]
    return None if joined.all() else joined
