"""Texts of every kind: a calibrated model takes what the plain one takes, in order, and counts it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fair_calibration import DocumentCounts, FairConfig, FairSentenceTransformer, calibrate
from tests.core.families import make_transformer, with_pooling

CONFIG = FairConfig(basket_size=8, strength=0.8, layers=2)
LIMIT = 96  # of tokens; both tokenizers make one of every byte
TOLERANCE = 2e-5
TEXTS = {
    "empty": "",
    "one character": "a",
    "spaces": " " * 40,
    "whitespace": "\t\n\r\v\f\u00a0\u2003\u3000 " * 4,
    "emoji": "\U0001f469\u200d\U0001f680\U0001f1eb\U0001f1ee\u2764\ufe0f\U0001f44d\U0001f3fd" * 2,
    "control characters": "".join(map(chr, [*range(1, 32), *range(127, 160)])),
    "NUL": "before\0after" * 4,
    "mixed scripts": "Latin кириллица ελληνικά 漢字かな 한글 देवनागरी ไทย",
    "right to left": "שלום עולם \u202eمرحبا بالعالم\u202c abc 123",  # noqa: RUF001
    "combining": "e\u0301" * 20 + "Z\u0351\u036b\u0343" * 3,
    "noncharacters": "\ufffe\uffff\ufdd0\U0010ffff\ufeff" * 4,
    "markup": "<s></s><pad><unk><mask>[CLS][SEP]&lt;&#0;%00\\x00",
    "identical words": "the " * 20,
}
LONG = "All work and no play. " * 45_500  # more than 10^6 characters


def fast_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@cache
def plain_model(kind: str) -> SentenceTransformer:
    """Returns a model whose tokenizer is fast or, written in Python, slow. Both make byte-level tokens."""
    if kind == "fast":
        tokenizer: PreTrainedTokenizerBase = fast_tokenizer()
        transformer = make_transformer("roberta", {"pad_token_id": 0})
    else:
        tokenizer = ByT5Tokenizer()
        transformer = make_transformer("t5", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "vocab_size": 384})
    assert tokenizer.is_fast == (kind == "fast")
    tokenizer.model_max_length = LIMIT
    transformer.processor = tokenizer
    model = with_pooling(transformer, "mean")
    model.prompts = {}
    return model


@cache
def fair_model(kind: str) -> FairSentenceTransformer:
    return calibrate(plain_model(kind), CONFIG)


def assert_encodes_like_the_plain_model(kind: str, texts: list[Any]) -> None:
    """Encodes in batches and alone, and compares with each other and, where too short, with the plain model."""
    plain, fair = plain_model(kind), fair_model(kind)
    before = fair.counts
    embeddings = fair.encode_document(texts, batch_size=4)
    after = fair.counts
    assert embeddings.shape == (len(texts), 32)
    assert np.isfinite(embeddings).all()
    tokens = [len(plain.tokenizer(text)["input_ids"]) for text in texts]
    added = DocumentCounts(*(b - a for a, b in zip(before, after, strict=True)))
    n_calibrated = sum(n >= CONFIG.min_content_tokens for n in tokens)
    # Slow tokenizers keep no record of what they cut off: what fills the limit counts as truncated.
    n_truncated = sum(n > LIMIT if kind == "fast" else n >= LIMIT for n in tokens)
    assert added == DocumentCounts(n_calibrated, len(texts) - n_calibrated, 0, n_truncated)
    for text, embedding in zip(texts, embeddings, strict=True):
        assert np.abs(fair.encode_document(text) - embedding).max() < TOLERANCE
    assert np.array_equal(fair.encode_document(texts, strength=0), plain.encode_document(texts))
    assert np.array_equal(fair.encode_query(texts), plain.encode_query(texts))


both = pytest.mark.parametrize("kind", ["fast", "slow"])


@both
def test_texts_of_every_kind(kind: str) -> None:
    assert_encodes_like_the_plain_model(kind, list(TEXTS.values()))


@both
def test_one_long_text_among_many_short_ones(kind: str) -> None:
    texts = ["a"] * 7 + [LONG] + ["short text"] * 7
    assert len(LONG) > 10**6
    fair = fair_model(kind)
    before = fair.counts
    embeddings = fair.encode(texts)
    assert fair.counts == before.plus(DocumentCounts(calibrated=8, too_short=7, truncated=1))
    # Identical texts stand at different places of the batch, and what is cut off does not count.
    assert np.abs(embeddings[:7] - embeddings[0]).max() < TOLERANCE
    assert np.abs(embeddings[8:] - embeddings[8]).max() < TOLERANCE
    assert np.abs(embeddings[7] - fair.encode(LONG[:LIMIT])).max() < TOLERANCE
    assert np.abs(embeddings[[0, 7, 8]] - embeddings[[7, 8, 0]]).max(1).min() > 1e-2


@both
def test_no_texts(kind: str) -> None:
    plain, fair = plain_model(kind), fair_model(kind)
    before = fair.counts
    for method in ("encode", "encode_document", "encode_query"):
        for kwargs in ({}, {"convert_to_tensor": True}, {"convert_to_numpy": False}, {"output_value": None}):
            empty, expected = getattr(fair, method)([], **kwargs), getattr(plain, method)([], **kwargs)
            assert type(empty) is type(expected)
            assert len(empty) == len(expected) == 0
    assert fair.counts == before


@both
@pytest.mark.parametrize("text", ["\ud800", "lone \udfff surrogate " * 4, "\udc80\ud83d"])
def test_lone_surrogates_are_what_they_are_to_the_plain_model(kind: str, text: str) -> None:
    errors = []
    for model in (plain_model(kind), fair_model(kind)):
        for method in (model.encode_document, model.encode_query):
            with pytest.raises((TypeError, UnicodeEncodeError)) as error:
                method(["fine", text])
            errors.append((error.type, str(error.value)))
    assert len(set(errors)) == 1
    counts = fair_model(kind).counts
    assert np.isfinite(fair_model(kind).encode(["fine", "and " * 9])).all()  # it is as good as before
    assert fair_model(kind).counts == counts.plus(DocumentCounts(calibrated=1, too_short=1))


@pytest.mark.parametrize("bad", [[None], [1.5], ["fine", None], [b"bytes"]])
def test_what_is_no_text_is_what_it_is_to_the_plain_model(bad: list[Any]) -> None:
    results = []
    for model in (plain_model("fast"), fair_model("fast")):
        with pytest.raises(Exception) as error:  # noqa: PT011 - the plain model's, whichever
            model.encode(bad)
        results.append((error.type, str(error.value)))
    assert results[0] == results[1]


@settings(max_examples=15)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=6))
@both
def test_any_texts(kind: str, texts: list[str]) -> None:
    assert_encodes_like_the_plain_model(kind, texts)


def test_texts_of_every_kind_with_the_real_model(minilm_path: str) -> None:
    plain = SentenceTransformer(minilm_path, device="cpu")
    plain.max_seq_length = 64
    fair = calibrate(plain, FairConfig(basket_size=8, strength=0.8))
    texts = [*TEXTS.values(), "word " * 100]
    embeddings = fair.encode([*texts, LONG])
    assert np.isfinite(embeddings).all()
    n_tokens = [len(plain.tokenizer(text)["input_ids"]) for text in texts]
    n_calibrated = sum(n >= 8 for n in n_tokens) + 1
    n_truncated = sum(n > 64 for n in n_tokens) + 1
    assert fair.counts == DocumentCounts(n_calibrated, len(texts) + 1 - n_calibrated, truncated=n_truncated)
    assert np.array_equal(fair.encode(texts, strength=0), plain.encode(texts))
    assert np.abs(fair.encode(texts[::-1], batch_size=3)[::-1] - embeddings[:-1]).max() < TOLERANCE
