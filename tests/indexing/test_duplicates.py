from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fair_indexing.duplicates import DocnoHashes, DuplicateDocnoError


def locate(number: int) -> str:
    return f"line {number}"


WINDOWS = st.lists(st.lists(st.integers(0, 60).map(str), max_size=6), max_size=8)


@given(WINDOWS)
def test_finds_what_a_dict_finds(windows: list[list[str]]) -> None:
    hashes, seen, start = DocnoHashes(), {}, 0  # type: ignore[var-annotated]
    for window in windows:
        twice = []
        first = dict(seen)
        for number, docno in enumerate(window, start=start):
            if docno in first:
                twice.append((number, docno))
            first.setdefault(docno, number)
        if not twice:
            hashes.add(window, start, locate=locate)
            seen, start = first, start + len(window)
            assert len(hashes) == start
            continue
        number, docno = twice[0]
        with pytest.raises(DuplicateDocnoError) as error:
            hashes.add(window, start, locate=locate)
        assert str(error.value).startswith(f"line {number}: docno {docno!r} is that of line {first[docno]} already")
        assert len(hashes) == start  # as it was before


def test_many() -> None:
    hashes = DocnoHashes()
    for start in range(0, 30_000, 1000):
        hashes.add([f"doc-{i}" for i in range(start, start + 1000)], start, locate=locate)
    assert len(hashes) == 30_000
    with pytest.raises(DuplicateDocnoError) as error:
        hashes.add(["new", "doc-17", "doc-29999"], 30_000, locate=locate)
    assert str(error.value) == (
        "line 30001: docno 'doc-17' is that of line 17 already (and 1 more like it); every document needs its own"
    )


def test_memory_is_that_of_the_hashes() -> None:
    hashes = DocnoHashes()
    for start in range(0, 20_000, 500):
        hashes.add([f"{i:0100d}" for i in range(start, start + 500)], start, locate=locate)
    assert sum(a.nbytes + b.nbytes for a, b in hashes._runs) == 20_000 * 24
    assert len(hashes._runs) < 10
