"""Finds docnos that come twice among millions, in 24 bytes a docno."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

_SIZE = 16


class DuplicateDocnoError(ValueError):
    """Two documents have one docno."""


class DocnoHashes:
    """The docnos so far, as 128-bit hashes in sorted runs, each at least twice as long as the next."""

    def __init__(self) -> None:
        self._runs: list[tuple[npt.NDArray[np.bytes_], npt.NDArray[np.int64]]] = []

    def __len__(self) -> int:
        return sum(len(hashes) for hashes, _ in self._runs)

    def add(self, docnos: Sequence[str], start: int, *, locate: Callable[[int], str]) -> None:
        """Adds the docnos of consecutive documents.

        Args:
            docnos: Many at once; one at a time is slow.
            start: The number of the first one.
            locate: Says of a number where that document stands, for the error.

        Raises:
            DuplicateDocnoError: One was there before; both places are named. Then nothing is added.
        """
        if not docnos:
            return
        # Of fixed width, numpy's bytes compare as the whole 16 bytes, trailing zeros included.
        hashes = np.array([hashlib.blake2b(d.encode(), digest_size=_SIZE).digest() for d in docnos], dtype=f"S{_SIZE}")
        order = np.argsort(hashes, kind="stable")
        run = hashes[order], order + start
        same = np.flatnonzero(run[0][1:] == run[0][:-1])
        twice = list(zip(run[1][same + 1], run[1][same], strict=True))  # the later one, the earlier one
        for old_hashes, old_rows in self._runs:
            places = np.minimum(np.searchsorted(old_hashes, run[0]), len(old_hashes) - 1)
            same = np.flatnonzero(old_hashes[places] == run[0])
            twice += zip(run[1][same], old_rows[places[same]], strict=True)
        if twice:
            later, earlier = min(twice)
            raise DuplicateDocnoError(
                f"{locate(int(later))}: docno {docnos[later - start]!r} is that of {locate(int(earlier))} already"
                f"{f' (and {len(twice) - 1} more like it)' if len(twice) > 1 else ''}; every document needs its own"
            )
        while self._runs and len(self._runs[-1][0]) < 2 * len(run[0]):
            other = self._runs.pop()
            joined = np.concatenate([other[0], run[0]])
            order = np.argsort(joined, kind="stable")
            run = joined[order], np.concatenate([other[1], run[1]])[order]
        self._runs.append(run)
