import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fair_calibration.even_chunks.chunks import Frame, content_ranges, even_chunks, frame_of, group_rows


@pytest.mark.parametrize(
    ("n_tokens", "size", "expected"),
    [
        (0, 4, [(0, 0)]),
        (4, 4, [(0, 4)]),
        (5, 4, [(0, 3), (3, 5)]),
        (10, 4, [(0, 4), (4, 7), (7, 10)]),
        (12, 4, [(0, 4), (4, 8), (8, 12)]),
    ],
)
def test_even_chunks(n_tokens: int, size: int, expected: list[tuple[int, int]]) -> None:
    assert even_chunks(n_tokens, size) == expected


@given(st.integers(1, 2000), st.integers(1, 300))
def test_even_chunks_are_few_even_and_cover_all(n_tokens: int, size: int) -> None:
    chunks = even_chunks(n_tokens, size)
    lengths = [stop - first for first, stop in chunks]
    assert len(chunks) == -(-n_tokens // size)
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1
    assert [i for first, stop in chunks for i in range(first, stop)] == list(range(n_tokens))
    # Token i is in chunk floor(i * c / n).
    assert all(i * len(chunks) // n_tokens == j for j, span in enumerate(chunks) for i in range(*span))


def test_the_frame_is_what_texts_share() -> None:
    assert frame_of([101, 102], [101, 7, 102]) == Frame(1, 1)
    assert frame_of([101, 8, 9, 102], [101, 8, 9, 7, 7, 102]) == Frame(3, 1)
    assert frame_of([], [7]) == Frame(0, 0)
    assert frame_of([2], [7, 2]) == Frame(0, 1)
    # A prompt's last space is a token of its own before nothing, and part of the first word before a word.
    assert frame_of([101, 8, 5, 102], [101, 8, 7, 102]) == Frame(2, 1)


def test_a_tokenizer_that_does_not_see_letters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokenizer: expected a letter .* to differ, got the ids \[101, 102\]"):
        frame_of([101, 102], [101, 102])


def test_content_ranges_with_padding_on_either_side() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    assert content_ranges(mask, Frame(1, 1)) == ((1, 4), (3, 5), (1, 1), (0, 0))


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_groups_hold_every_row_once_and_keep_to_the_size(lengths: list[int], size: int) -> None:
    groups = list(group_rows(lengths, size))
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(len(group) == 1 or max(lengths[i] for i in group) * len(group) <= size for group in groups)
