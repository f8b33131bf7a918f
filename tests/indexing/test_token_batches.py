"""Batches by tokens."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fair_indexing.token_batches import token_batches


@pytest.mark.parametrize(
    ("lengths", "tokens", "batch_size", "expected"),
    [
        ([3, 8, 5, 8, 1], 16, None, [[1, 3], [2, 0, 4]]),
        ([3, 8, 5, 8, 1], 10, None, [[1], [3], [2, 0], [4]]),
        ([3, 8, 5, 8, 1], 16, 1, [[1], [3], [2], [0], [4]]),
        ([3, 8, 5, 8, 1], 40, 2, [[1, 3], [2, 0], [4]]),
        ([100, 1, 1], 16, None, [[0], [1, 2]]),  # longer than the budget
        ([0, 0, 0], 2, None, [[0, 1], [2]]),  # texts without a token count as one
        ([], 16, None, []),
    ],
)
def test_batches(lengths: list[int], tokens: int, batch_size: int | None, expected: list[list[int]]) -> None:
    assert token_batches(lengths, tokens_per_batch=tokens, batch_size=batch_size) == expected


@given(
    lengths=st.lists(st.integers(0, 60)),
    tokens=st.integers(1, 200),
    documents=st.none() | st.integers(1, 9),
)
def test_budgets_are_kept_and_used(lengths: list[int], tokens: int, documents: int | None) -> None:
    batches = token_batches(lengths, tokens_per_batch=tokens, batch_size=documents)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    in_order = [lengths[i] for batch in batches for i in batch]
    assert in_order == sorted(lengths, reverse=True)
    for number, batch in enumerate(batches):
        longest = max(1, *(lengths[i] for i in batch))
        assert len(batch) == 1 or len(batch) * longest <= tokens
        assert documents is None or len(batch) <= documents
        if number < len(batches) - 1:  # one more would have been too many
            assert (len(batch) + 1) * longest > tokens or len(batch) == documents


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"tokens_per_batch": 0}, ValueError, "tokens_per_batch: expected an integer of at least 1, got 0"),
        ({"tokens_per_batch": 1.5}, TypeError, "tokens_per_batch: expected an integer of at least 1, got 1.5"),
        ({"tokens_per_batch": 8, "batch_size": 0}, ValueError, "batch_size: expected an integer of at least 1"),
    ],
)
def test_limits_out_of_range(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        token_batches([1], **settings)
