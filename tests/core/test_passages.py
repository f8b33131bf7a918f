from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from sentence_transformers import SentenceTransformer

from fair_calibration import EvenChunks, calibrate
from fair_calibration.passages import check_chunk_size, cut_passages
from fair_evaluation.position_collections import load_passages
from tests.conftest import TinyModel
from tests.core.tiny_models import document


def n_tokens(model: SentenceTransformer, text: str) -> int:
    return len(model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 32, 33, 100])
def test_words_of_one_token_give_as_few_passages_as_possible(tiny_model: TinyModel, n: int) -> None:
    model, text = tiny_model(), document(n)
    passages = cut_passages(model, text, chunk_size=16)
    assert len(passages) == max(1, -(-n // 16))
    assert " ".join(passages) == text
    lengths = [n_tokens(model, passage) for passage in passages]
    assert max(lengths) <= 16
    assert max(lengths) - min(lengths) <= 1


def test_real_texts_are_cut_at_white_space(minilm: SentenceTransformer) -> None:
    rng = random.Random(0)
    passages = load_passages()
    for _ in range(20):
        text = "\n\n".join(passage.text for passage in rng.sample(passages, rng.randint(1, 5)))
        size = rng.choice([16, 50, 128])
        cut = cut_passages(minilm, text, chunk_size=size)
        assert " ".join(cut).split() == text.split()
        lengths = [n_tokens(minilm, passage) for passage in cut]
        assert max(lengths) <= size
        assert min(lengths) >= max(lengths) / 2
        assert len(cut) <= n_tokens(minilm, text) / size * 1.3 + 1


@pytest.mark.parametrize(
    "text",
    [
        "蜜蜂在黑暗的蜂巢里跳舞告诉同伴花蜜的方向和距离" * 20,
        "Donaudampfschifffahrtsgesellschaftskapitän" * 20,
        "🙂🐝🌸" * 60,
        "a" + " " * 300 + "b" + "\n" * 300 + " c d e f g" * 30,
    ],
)
def test_texts_without_usual_words(minilm: SentenceTransformer, text: str) -> None:
    cut = cut_passages(minilm, text, chunk_size=20)
    assert "".join("".join(cut).split()) == "".join(text.split())
    assert all(0 < n_tokens(minilm, passage) <= 20 for passage in cut)


def test_a_passage_and_its_frame_fit_into_the_model(tiny_model: TinyModel) -> None:
    model = tiny_model()
    model.max_seq_length = 20
    model.prompts = {"document": "ba du "}
    for fitting in (model, calibrate(model), calibrate(model, EvenChunks(chunk_size=16, unit_size=8))):
        check_chunk_size(fitting, 16)  # two special tokens and two of the prompt
        with pytest.raises(ValueError, match=r"expected at most 16, as the model reads 20 tokens .* take 4, got 17"):
            check_chunk_size(fitting, 17)
    with pytest.raises(ValueError, match="chunk_size: expected an integer of at least 1, got 0"):
        check_chunk_size(model, 0)
    model.max_seq_length = None
    check_chunk_size(model, 10**6)


def test_beside_a_thread_that_tokenizes(minilm: SentenceTransformer) -> None:
    """As in an indexing pipeline: a tokenizer keeps padding and truncation as state."""
    fair = calibrate(minilm)
    texts = [passage.text for passage in load_passages()[:8]]
    expected = [cut_passages(fair, text, chunk_size=20) for text in texts]
    with ThreadPoolExecutor(2) as threads:
        batches = [threads.submit(fair.preprocess, texts) for _ in range(40)]
        for _ in range(10):
            assert [cut_passages(fair, text, chunk_size=20) for text in texts] == expected
        assert len({batch.result()["input_ids"].shape for batch in batches}) == 1


def test_slow_tokenizers_are_refused(tiny_model: TinyModel) -> None:
    model = tiny_model()
    model.tokenizer.__class__ = type("Slow", (type(model.tokenizer),), {"is_fast": False})
    with pytest.raises(ValueError, match="offsets of a fast tokenizer, Slow is a slow one"):
        cut_passages(model, "ba du")
