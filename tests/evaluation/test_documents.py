from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sentence_transformers import SentenceTransformer

from fair_calibration import EvenChunks, calibrate
from fair_calibration.prompts import document_prompt
from fair_evaluation.documents import batches, count_tokens, max_document_tokens
from tests.conftest import TinyModel
from tests.core.tiny_models import MAX_LENGTH, document, documents


def used_prompt(model: SentenceTransformer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the prompt that encode_document really uses."""
    seen: list[str | None] = []
    preprocess = model.preprocess

    def spy(inputs: Any, prompt: str | None = None, **kwargs: Any) -> Any:
        seen.append(prompt)
        return preprocess(inputs, prompt=prompt, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(model, "preprocess", spy)
        model.encode_document(["bal"], show_progress_bar=False)
    return seen[0] or ""


@pytest.mark.parametrize(
    ("prompts", "default", "expected"),
    [
        ({"query": "q ", "document": "d ", "passage": "p "}, None, "d "),
        ({"query": "q ", "passage": "p ", "corpus": "c "}, None, "p "),
        ({"query": "q ", "corpus": "c "}, None, "c "),
        ({"query": "q "}, None, ""),
        ({}, None, ""),
        ({"other": "o "}, "other", "o "),
        ({"other": "o ", "document": ""}, "other", ""),
    ],
)
def test_the_prompt_is_that_of_encode_document(
    prompts: dict[str, str],
    default: str | None,
    expected: str,
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    model.prompts, model.default_prompt_name = prompts, default
    assert document_prompt(model) == used_prompt(model, monkeypatch) == expected


@pytest.mark.parametrize("fair", [False, True])
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_tokens_are_counted_before_truncation(
    family: str, fair: bool, tiny_model: TinyModel, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    model = tiny_model(family)
    n_special = 1 if family == "qwen3" else 2  # EOS, and BOS for bert
    if fair:
        model = calibrate(model)
    lengths = [3, 500, 1]
    assert count_tokens(model, documents(lengths), prompt="") == [n + n_special for n in lengths]
    assert count_tokens(model, documents(lengths), prompt="dan gos ") == [n + 2 + n_special for n in lengths]
    assert not caplog.records
    assert not recwarn.list
    # Counting leaves truncation as it was.
    assert model.preprocess([document(500)])["input_ids"].shape == (1, MAX_LENGTH)


def test_limits(tiny_model: TinyModel) -> None:
    model = tiny_model()
    assert max_document_tokens(model) == MAX_LENGTH
    model.max_seq_length = 50
    assert max_document_tokens(model) == 50
    model[0].document_length = 20
    assert max_document_tokens(model) == 20
    assert model.preprocess([document(90)], task="document")["input_ids"].shape == (1, 20)
    model[0].document_length = None
    model.max_seq_length = int(1e30)  # as of tokenizers that have no limit
    assert max_document_tokens(model) is None


def test_even_chunks_read_whole_documents(tiny_model: TinyModel) -> None:
    config = EvenChunks(chunk_size=32, unit_size=16)
    assert max_document_tokens(calibrate(tiny_model(), config)) is None
    assert max_document_tokens(calibrate(tiny_model(), replace(config, strength=0.0))) == MAX_LENGTH
    fair = calibrate(tiny_model(), config)
    assert count_tokens(fair, documents([3, 500]), prompt="") == count_tokens(
        tiny_model(), documents([3, 500]), prompt=""
    )
    assert fair.counts.truncated == 0


def test_batches() -> None:
    assert list(batches(iter("abcde"), 2)) == [["a", "b"], ["c", "d"], ["e"]]
    assert list(batches([], 2)) == []
    with pytest.raises(TypeError, match="texts: expected an iterable of strings, got one string; put it into a list"):
        next(batches("abc", 2))
    with pytest.raises(TypeError, match=r"texts: expected strings, got None \(NoneType\)"):
        list(batches(["a", None], 2))  # type: ignore[list-item]
