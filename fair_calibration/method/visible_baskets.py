"""Which baskets a block of rows can see, and which of them all its rows see alike."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.method.baskets import Baskets

SHORTEST_RUN = 6  # fewer baskets are faster one by one, with all heads at once


class SeenBasket(NamedTuple):
    """A basket as some rows see it.

    Attributes:
        keys: A slice where the contents of all sequences begin together, else positions (b, n).
        rows: Those of the rows, counted from the first one, that see any of it.
        bias: float32 (b or 1, H or 1, l or 1, n) of ``rows``, or None.
        visible: bool, likewise, or None where these rows see all of it.
        size: (b or 1, H or 1, l or 1), of all rows: how many keys each sees.
    """

    keys: slice | Tensor
    rows: slice
    bias: Tensor | None
    visible: Tensor | None
    size: Tensor


class BasketRun(NamedTuple):
    """Consecutive baskets, n of S keys, of which every row and head sees the same keys, and without bias.

    Attributes:
        keys: The n * S positions; the last ones may lie beyond the sequences' end.
        visible: bool (b or 1, n, 1, S), or None where all of it is seen.
        size: (n, b or 1, 1, 1): how many keys of each basket are seen.
    """

    keys: slice
    visible: Tensor | None
    size: Tensor


class SeenBaskets(NamedTuple):
    """The baskets that some rows of a group of sequences see: the run, if there is one, and the others."""

    run: BasketRun | None
    others: list[SeenBasket]


def see_baskets(bias: AttentionBias, baskets: Baskets, group: slice, rows: slice, device: torch.device) -> SeenBaskets:
    """Looks which baskets some rows of a group of sequences see.

    Args:
        bias: The masks and biases of the call, or of some heads.
        baskets: The batch's geometry.
        group: Which sequences, b of them.
        rows: Which rows, l of them.
        device: Where the attention runs. Only on CPUs values are looked at, and only there are baskets left out,
            rows cut and runs found: elsewhere looking would wait for the device.
    """
    seen = []
    every = slice(0, rows.stop - rows.start)
    on_cpu = device.type == "cpu"
    for n, keys in enumerate(_basket_keys(baskets, group)):
        if bias.causal and isinstance(keys, slice) and keys.start >= rows.stop:
            continue  # in the future
        added, visible = bias.block(group, rows, keys, device)
        filled = baskets.filled[group, n * baskets.basket_size : (n + 1) * baskets.basket_size][:, None, None]
        if isinstance(keys, slice):
            filled = filled[..., : keys.stop - keys.start]
        if not (on_cpu and filled.all()):
            visible = filled if visible is None else visible & filled
        some = every
        if visible is None:
            size = torch.full((1, 1, 1), filled.shape[-1], device=device)
        else:
            size = visible.sum(-1)
            if on_cpu:
                seeing = (size > 0).any(1).any(0).nonzero().flatten()
                if not len(seeing):
                    continue  # outside of the rows' window
                if visible.shape[2] > 1 and (visible == visible[:, :, :1]).all():
                    visible, size = visible[:, :, :1].clone(), size[:, :, :1].clone()  # what is kept is small
                if size.shape[-1] > 1:
                    some = slice(int(seeing[0]), int(seeing[-1]) + 1)
                    visible = visible[:, :, some]
                    added = added[:, :, some] if added is not None and added.shape[2] > 1 else added
                visible = None if visible.all() else visible
        seen.append(SeenBasket(keys, some, added, visible, size))
    return _find_run(seen, every, baskets.basket_size) if on_cpu else SeenBaskets(None, seen)


def count_baskets(baskets: Baskets, group: slice) -> int:
    """Returns how many baskets `see_baskets` goes through for a group."""
    content = _joint_content(baskets, group)
    return baskets.n_baskets if content is None else -(-(content[1] - content[0]) // baskets.basket_size)


def _joint_content(baskets: Baskets, group: slice) -> tuple[int, int] | None:
    """Returns (first, last + 1) of the contents of all sequences of a group, if they begin together."""
    contents = [content for content in baskets.content[group] if content is not None]
    if len(contents) < group.stop - group.start or len({start for start, _ in contents}) > 1:
        return None
    return contents[0][0], max(stop for _, stop in contents)


def _basket_keys(baskets: Baskets, group: slice) -> list[slice | Tensor]:
    """Returns the keys of each basket: slices where the contents begin together, else positions (b, S)."""
    size = baskets.basket_size
    content = _joint_content(baskets, group)
    if content is None:
        return [baskets.slots[group, n * size : (n + 1) * size] for n in range(baskets.n_baskets)]
    first, stop = content
    return [slice(start, min(start + size, stop)) for start in range(first, stop, size)]


def _find_run(seen: list[SeenBasket], every: slice, basket_size: int) -> SeenBaskets:
    """Joins the longest run that is long enough."""
    longest, start = range(0), 0
    for i, basket in enumerate(seen):
        hidden_alike = basket.visible is None or basket.visible.shape[1:3] == (1, 1)
        if not isinstance(basket.keys, slice) or basket.bias is not None or basket.rows != every or not hidden_alike:
            start = i + 1
        elif i > start and cast(slice, seen[i - 1].keys).stop != basket.keys.start:
            start = i
        longest = max(longest, range(start, i + 1), key=len)
    run = seen[longest.start : longest.stop]
    if len(run) < SHORTEST_RUN:
        return SeenBaskets(None, seen)
    first = cast(slice, run[0].keys).start
    joined = BasketRun(
        keys=slice(first, first + len(run) * basket_size),
        visible=_join_visible(run, basket_size),
        size=torch.stack(torch.broadcast_tensors(*(basket.size for basket in run))),  # type: ignore[no-untyped-call]
    )
    return SeenBaskets(joined, seen[: longest.start] + seen[longest.stop :])


def _join_visible(run: list[SeenBasket], basket_size: int) -> Tensor | None:
    """Returns bool (b or 1, n, 1, S), False beyond the end of the last basket; or None where everything is seen."""
    columns = []
    for basket in run:
        keys = cast(slice, basket.keys)
        visible = torch.ones(1, 1, 1, keys.stop - keys.start, dtype=torch.bool)
        if basket.visible is not None:
            visible = basket.visible
        columns.append(torch.nn.functional.pad(visible, (0, basket_size - visible.shape[-1])))
    joined: Tensor = torch.cat(torch.broadcast_tensors(*columns), dim=1)  # type: ignore[no-untyped-call]
    return None if joined.all() else joined
