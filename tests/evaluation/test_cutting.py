from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from fair_evaluation.cutting import cut_segments, cut_text, rotated_orders, token_counter
from fair_evaluation.position_collections import load_passages
from tests.conftest import TinyModel
from tests.core.tiny_models import document

TEXT = "The waggle dance shows the direction of flowers. " * 100


def words(text: str) -> int:
    return len(text.split())


def test_all_that_count(minilm: SentenceTransformer, minilm_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(minilm_path)
    expected = len(tokenizer.tokenize(TEXT))
    assert expected > 900
    for counts in (minilm, tokenizer, tokenizer.backend_tokenizer, lambda text: len(tokenizer.tokenize(text))):
        assert token_counter(counts)(TEXT) == expected
        assert token_counter(counts)("") == 0
    assert "longer" not in capsys.readouterr().err


@pytest.mark.parametrize("tokenizer", [512, None, "bert-base-uncased", ["a"]])
def test_what_does_not_count(tokenizer: Any) -> None:
    with pytest.raises(
        TypeError, match=f"tokenizer: expected a SentenceTransformer, .*, got {type(tokenizer).__name__}"
    ):
        token_counter(tokenizer)


@pytest.mark.parametrize("value", [["a"], 2.0, None, True])
def test_functions_that_return_no_number(value: Any) -> None:
    with pytest.raises(TypeError, match=re.escape("expected a function that returns a number of tokens, got")):
        token_counter(lambda _: value)("text")


def test_cuts_by_hand() -> None:
    assert cut_text("one two three four", 2, words) == "one two"
    assert cut_text("one two three four", 4, words) == "one two three four"
    assert cut_text("one two  three", 9, words) == "one two  three"
    assert cut_text("one two", 0, words) == ""
    assert cut_text("\n\none two", 1, words) == "\n\none"


def test_scripts_without_white_space_are_cut_anywhere() -> None:
    assert cut_text("雨" * 200, 70, len) == "雨" * 70
    assert cut_text("word " + "雨" * 200, 70, len) == "word " + "雨" * 65  # white space is too far back


@given(st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=60), st.integers(0, 70))
def test_as_many_words_as_fit(tokens: list[str], n: int) -> None:
    text = " ".join(tokens)
    assert cut_text(text, n, words) == " ".join(tokens[:n])


@pytest.mark.parametrize("n", [1, 2, 7, 100, 333])
def test_cuts_of_a_real_tokenizer(minilm: SentenceTransformer, n: int) -> None:
    count = token_counter(minilm)
    cut = cut_text(TEXT, n, count)
    assert TEXT.startswith(cut)
    assert n - 3 <= count(cut) <= n  # "waggle" has three tokens
    assert TEXT[len(cut)].isspace() or n == 2


def test_the_rest_of_a_long_text_is_not_tokenized() -> None:
    longest = 0

    def count(text: str) -> int:
        nonlocal longest
        longest = max(longest, len(text))
        return words(text)

    cut_text("word " * 100_000, 30, count)
    assert longest < 1000


def test_a_tokenizer_that_needs_more_for_less() -> None:
    """A part of a text may have more tokens than more of the text; what is returned fits all the same."""

    def count(text: str) -> int:
        return len(text) if text.endswith("a") else len(text) // 2

    assert count(cut_text("aba bab abab aba", 6, count)) <= 6


def test_one_token_per_word(tiny_model: TinyModel) -> None:
    words = document(22).split()
    # 22 tokens in 4: cut before tokens 5, 11 and 16.
    expected = [" ".join(words[a:b]) for a, b in [(0, 5), (5, 11), (11, 16), (16, 22)]]
    assert cut_segments(tiny_model(), "  ".join(words), 4) == [text.replace(" ", "  ") for text in expected]
    assert cut_segments(tiny_model(), " ".join(words), 22) == words


def test_real_text_is_cut_between_words_into_equal_parts(minilm: SentenceTransformer) -> None:
    for passage in load_passages()[:10]:
        segments = cut_segments(minilm, passage.text, 4)
        assert segments is not None
        # Nothing is lost, and no word is cut.
        assert " ".join(segments).split() == passage.text.split()
        n_tokens = [len(minilm.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in segments]
        assert sum(n_tokens) == len(minilm.tokenizer(passage.text, add_special_tokens=False)["input_ids"])
        assert max(n_tokens) - min(n_tokens) <= 6  # of about 40: words have several tokens


def test_text_without_spaces_is_cut_at_tokens(minilm: SentenceTransformer) -> None:
    text = "東京は日本の首都である" * 4  # MiniLM has a token for every character
    segments = cut_segments(minilm, text, 4)
    assert segments == [text[i : i + 11] for i in range(0, 44, 11)]


def test_too_short(tiny_model: TinyModel) -> None:
    assert cut_segments(tiny_model(), document(31), 4, min_tokens=8) is None
    assert cut_segments(tiny_model(), document(32), 4, min_tokens=8) is not None
    assert cut_segments(tiny_model(), "", 2) is None


def test_slow_tokenizers_are_refused() -> None:
    class SlowTokenizer:
        is_fast = False

    class Model:
        tokenizer = SlowTokenizer()

    with pytest.raises(ValueError, match="character offsets of a fast tokenizer, SlowTokenizer is a slow one"):
        cut_segments(Model(), document(40), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("n_segments", range(2, 8))
def test_every_segment_stands_once_everywhere(n_segments: int) -> None:
    orders = rotated_orders(n_segments)
    assert orders[0].tolist() == list(range(n_segments))
    for rows in (orders, orders.T):
        assert np.sort(rows, axis=1).tolist() == [list(range(n_segments))] * n_segments


def test_rotations() -> None:
    assert rotated_orders(3).tolist() == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
