"""Cuts documents into even chunks, and groups the chunks into forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

from torch import Tensor


class Frame(NamedTuple):
    """The number of tokens before and after the text in every input."""

    prefix: int
    suffix: int


class Row(NamedTuple):
    """One input of the model: the content tokens ``first`` to ``stop - 1`` of a document, given by its index."""

    document: int
    first: int
    stop: int


def frame_of(empty: Sequence[int], letter: Sequence[int]) -> Frame:
    """Returns how many token ids an empty text and one letter have in common at both ends.

    Raises:
        ValueError: All ids are the same.
    """
    if list(letter) == list(empty):
        raise ValueError(
            f"tokenizer: expected a letter and an empty text to differ, got the ids {list(letter)} for both"
        )
    prefix = _n_common(empty, letter)
    return Frame(prefix, _n_common(empty[prefix:][::-1], letter[prefix:][::-1]))


def _n_common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def content_ranges(attention_mask: Tensor, frame: Frame) -> tuple[tuple[int, int], ...]:
    """Returns the range of the text between prefix and suffix for every row of a mask (B, K)."""
    ranges = []
    for mask in attention_mask.detach().cpu().bool():
        valid = mask.nonzero().squeeze(-1)
        first, stop = (int(valid[0]), int(valid[-1]) + 1) if len(valid) else (0, 0)
        start = min(first + frame.prefix, stop)
        ranges.append((start, max(start, stop - frame.suffix)))
    return tuple(ranges)


def group_rows(lengths: Sequence[int], tokens_per_pass: int) -> Iterator[list[int]]:
    """Yields the indices of the rows of each pass, short rows first; only a single row may exceed the size."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if group and lengths[i] * (len(group) + 1) > tokens_per_pass:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def even_chunks(n_tokens: int, chunk_size: int) -> list[tuple[int, int]]:
    """Cuts ``n_tokens`` into as few ranges of at most ``chunk_size`` as possible, which differ by one token at most."""
    n_chunks = max(1, -(-n_tokens // chunk_size))
    borders = [-(-i * n_tokens // n_chunks) for i in range(n_chunks + 1)]
    return list(pairwise(borders))
