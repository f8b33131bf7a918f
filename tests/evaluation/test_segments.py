from __future__ import annotations

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from fair_evaluation.cutting import cut_segments, rotated_orders
from fair_evaluation.position_collections import load_passages
from tests.conftest import TinyModel
from tests.core.tiny_models import document


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
