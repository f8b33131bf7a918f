from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sentence_transformers import SentenceTransformer

from fair_calibration import calibrate
from fair_evaluation.documents import count_tokens
from fair_evaluation.position_collections import build_collections, load_passages
from fair_evaluation.truncation import TruncationSummary, summarize_truncation
from tests.conftest import TinyModel
from tests.core.tiny_models import document, documents


@pytest.mark.parametrize("fair", [False, True])
def test_by_hand(fair: bool, tiny_model: TinyModel) -> None:
    model = tiny_model()
    model.prompts = {}
    model.max_seq_length = 20
    if fair:
        model = calibrate(model)
    texts = documents([5, 18, 19, 38])  # and two special tokens each
    summary = summarize_truncation(model, texts, batch_size=3)
    assert summary == TruncationSummary(documents=4, truncated=2, tokens=88, lost=21, longest=40, max_tokens=20)
    assert summary.share_truncated == 0.5
    assert summary.share_lost == 21 / 88
    assert str(summary) == (
        "2 of 4 documents (50.0%) lose 21 of 88 tokens (23.9%) at max_seq_length 20; the longest has 40"
    )


def test_the_prompt_takes_room(tiny_model: TinyModel) -> None:
    model = tiny_model()  # with the document prompt "dan gos "
    model.max_seq_length = 20
    for prompt, n_tokens in (("dan gos ", 22), ("bal ", 21), ("", 20)):
        model.prompts = {"document": prompt}
        expected = TruncationSummary(1, int(n_tokens > 20), n_tokens, n_tokens - 20, n_tokens, 20)
        assert summarize_truncation(model, [document(18)]) == expected


def test_it_says_what_encoding_counts(tiny_model: TinyModel) -> None:
    model = calibrate(tiny_model())
    model.max_seq_length = 30
    texts = documents([10, 26, 27, 50, 3])
    model.encode_document(texts, show_progress_bar=False)
    assert model.counts.truncated == summarize_truncation(model, texts).truncated == 2


def test_without_a_limit(tiny_model: TinyModel) -> None:
    model = tiny_model()
    model.prompts = {}
    model.max_seq_length = int(1e30)
    summary = summarize_truncation(model, documents([5000]))
    assert summary == TruncationSummary(1, 0, 5002, 0, 5002, None)


def test_it_streams(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, taken_when_counted = 0, []

    def texts() -> Iterator[str]:
        nonlocal taken
        for _ in range(10):
            taken += 1
            yield document(3)

    def counting(*args: Any, **settings: Any) -> list[int]:
        taken_when_counted.append(taken)
        return count_tokens(*args, **settings)

    monkeypatch.setattr("fair_evaluation.truncation.count_tokens", counting)
    assert summarize_truncation(tiny_model(), texts(), batch_size=4).tokens == 70
    assert taken_when_counted == [4, 8, 10]


def test_nothing_and_bad_input(tiny_model: TinyModel) -> None:
    nothing = summarize_truncation(tiny_model(), [])
    assert (nothing.documents, nothing.share_truncated, nothing.share_lost) == (0, 0.0, 0.0)
    with pytest.raises(TypeError, match="texts: expected an iterable of strings, got one string"):
        summarize_truncation(tiny_model(), "one text")
    with pytest.raises(ValueError, match="batch_size: expected an integer of at least 1, got 0"):
        summarize_truncation(tiny_model(), [], batch_size=0)


def test_minilm(minilm: SentenceTransformer) -> None:
    model = calibrate(minilm)  # with settings of its own
    texts = [d["text"] for d in build_collections(load_passages())[0].documents]
    lengths = [len(minilm.tokenizer.tokenize(text)) + 2 for text in texts]
    model.max_seq_length = 256
    summary = summarize_truncation(model, texts)
    assert summary == TruncationSummary(
        documents=25,
        truncated=sum(n > 256 for n in lengths),
        tokens=sum(lengths),
        lost=sum(max(0, n - 256) for n in lengths),
        longest=max(lengths),
        max_tokens=256,
    )
    assert summary.share_lost > 0.4  # nearly half is never read, by default
