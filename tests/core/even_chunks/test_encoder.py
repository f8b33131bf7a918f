from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from torch import Tensor

from fair_calibration import PRESETS, DocumentCounts, EvenChunks, FairConfig, FairSentenceTransformer, calibrate
from tests.conftest import TinyModel
from tests.core.tiny_models import MAX_LENGTH, document, documents

CONFIG = EvenChunks(strength=1.0, chunk_size=20, unit_size=6, ridge=0.3)
LENGTHS = [50, 7, 20, 21, 90, 50, 3]  # words, which are tokens
TOLERANCE = 2e-5  # as in test_transformer.py
ENCODERS = [("bert", p) for p in ("cls", "lasttoken", "mean")]
ENCODERS += [("xlm_roberta", p) for p in ("cls", "mean")]
ENCODERS += [("qwen3", p) for p in ("lasttoken", "mean")]
ENCODERS += [("mpnet", "mean")]


def expected(model: SentenceTransformer, text: str, *, chunk_size: int = 20, unit_size: int = 6) -> Tensor:
    """The definition, one chunk at a time: its words encoded as a text of their own by the plain model."""
    words = text.split()
    n = len(words)
    n_chunks = -(-n // chunk_size)
    chunks = [[word for i, word in enumerate(words) if i * n_chunks // n == j] for j in range(n_chunks)]
    pooling = model[1]
    assert isinstance(pooling, Pooling)
    if pooling.pooling_mode == "mean":
        states = []
        n_specials = int(model.preprocess([""])["attention_mask"].sum())
        first = n_specials - 1  # a BOS, where there is more than an EOS
        for chunk in chunks:
            embeddings = model.encode(" ".join(chunk), output_value="token_embeddings", convert_to_numpy=False)
            assert isinstance(embeddings, Tensor)
            assert len(embeddings) == len(chunk) + n_specials
            states.append(embeddings[first : first + len(chunk)])
        content = torch.cat(states).double()
        n_units = -(-n // unit_size)
        units = torch.stack([content[[i * n_units // n == k for i in range(n)]].mean(0) for k in range(n_units)])
        mean = content.mean(0)
    else:
        units = model.encode([" ".join(chunk) for chunk in chunks], convert_to_tensor=True).double()
        mean = units.mean(0)
    rows = units / units.norm(dim=1, keepdim=True)
    weights = torch.linalg.solve(
        rows @ rows.T + 0.3 * torch.eye(len(rows), dtype=torch.float64), torch.ones(len(rows), dtype=torch.float64)
    )
    direction = rows.T @ weights
    return (direction / direction.norm() * mean.norm()).float()


@pytest.fixture
def tiny_model(tiny_model: TinyModel) -> TinyModel:
    """The tiny models without their prompts."""

    def load(*args: str) -> SentenceTransformer:
        model = tiny_model(*args)
        model.prompts = {}
        return model

    return load


def encode(model: SentenceTransformer, texts: list[str], **kwargs: object) -> Tensor:
    vectors = model.encode_document(texts, convert_to_tensor=True, **kwargs)  # type: ignore[call-overload]
    assert isinstance(vectors, Tensor)
    assert vectors.isfinite().all()
    return vectors


@pytest.mark.parametrize(("family", "pooling"), ENCODERS)
def test_equals_the_definition(family: str, pooling: str, tiny_model: TinyModel) -> None:
    plain, texts = tiny_model(family, pooling), documents(LENGTHS)
    fair = calibrate(plain, CONFIG)
    vectors, plain_vectors = encode(fair, texts), encode(plain, texts)
    for text, vector, as_plain in zip(texts, vectors, plain_vectors, strict=True):
        is_long = len(text.split()) > 20
        torch.testing.assert_close(vector, expected(plain, text) if is_long else as_plain, rtol=0, atol=TOLERANCE)
        assert not is_long or (vector - as_plain).abs().max() > 1e-2
    assert fair.counts == DocumentCounts(calibrated=4, too_short=3)


def test_documents_are_read_beyond_the_models_limit(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    text = document(3 * MAX_LENGTH)
    fair = calibrate(plain, CONFIG)
    torch.testing.assert_close(encode(fair, [text])[0], expected(plain, text), rtol=0, atol=1e-4)  # 64 units
    changed = " ".join([*text.split()[:-10], *document(10, seed=9).split()])
    assert (encode(fair, [changed]) - encode(fair, [text])).abs().max() > 1e-3
    assert torch.equal(encode(plain, [changed]), encode(plain, [text]))  # which the plain model does not see
    assert fair.counts.truncated == 0


@pytest.mark.parametrize("n_words", [21, 30, 64, 65])
def test_more_units_than_dimensions(n_words: int, tiny_model: TinyModel) -> None:
    plain, text = tiny_model("bert", "mean"), document(n_words)
    fair = calibrate(plain, replace(CONFIG, unit_size=1))
    # The states of single tokens are alike, so the system is solved with 32 dimensions, and no worse than with n units.
    torch.testing.assert_close(encode(fair, [text])[0], expected(plain, text, unit_size=1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_neither_order_nor_batches_nor_passes_matter(pooling: str, tiny_model: TinyModel) -> None:
    texts = documents([*LENGTHS, 200, 130])
    fair = calibrate(tiny_model("bert", pooling), CONFIG)
    vectors = encode(fair, texts, batch_size=len(texts))
    for size in (1, 2, 4):
        torch.testing.assert_close(encode(fair, texts, batch_size=size), vectors, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(encode(fair, texts[::-1]).flip(0), vectors, rtol=0, atol=TOLERANCE)


def test_strength_weighs_against_the_plain_vectors(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    texts = documents([*LENGTHS, 2 * MAX_LENGTH])
    fair = calibrate(plain, CONFIG)
    as_plain, in_chunks = encode(plain, texts), encode(fair, texts)
    assert torch.equal(encode(fair, texts, strength=0), as_plain)
    mixed = encode(fair, texts, strength=0.25)
    weighed = 0.75 * as_plain + 0.25 * in_chunks
    torch.testing.assert_close(mixed[:-1], weighed[:-1], rtol=0, atol=TOLERANCE)
    # The last document is too long to be encoded as a whole.
    torch.testing.assert_close(mixed[-1], in_chunks[-1], rtol=0, atol=TOLERANCE)
    assert fair.counts.plain == len(texts)
    assert fair.counts.truncated == 1  # at strength 0 alone


def test_truncation_at_the_start_concerns_the_plain_model_alone(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    plain.tokenizer.truncation_side = "left"
    fair = calibrate(plain, CONFIG)
    texts = [document(2 * MAX_LENGTH)]
    assert np.array_equal(fair.encode_document(texts, strength=0), plain.encode_document(texts))
    torch.testing.assert_close(encode(fair, texts, strength=0.5), encode(fair, texts))
    features = fair.preprocess(texts, task="document")
    with pytest.raises(
        ValueError, match=r"strength: .* \(truncation_side='left'\) .* give preprocess strength=0 as well"
    ):
        fair(features, strength=0.0)


def test_queries_are_the_plain_models(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    fair = calibrate(plain, CONFIG)
    queries = documents([50, 4, 2 * MAX_LENGTH])
    assert np.array_equal(fair.encode_query(queries), plain.encode_query(queries))
    assert fair.counts.documents == 0


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("pooling", ["cls", "lasttoken", "mean"])
def test_the_prompt_stands_before_every_chunk(pooling: str, include_prompt: bool, tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", pooling)
    plain.prompts = {"document": "bal den "}
    assert isinstance(plain[1], Pooling)
    plain[1].include_prompt = include_prompt
    fair = calibrate(plain, CONFIG)
    text = document(50)
    chunks = [" ".join(text.split()[first:stop]) for first, stop in ((0, 17), (17, 34), (34, 50))]
    if pooling == "mean":
        states = [plain[0](plain.preprocess([f"bal den {chunk}"]))["token_embeddings"][0, 3:-1] for chunk in chunks]
        content = torch.cat(states).detach()
        units = torch.stack([content[[i * 9 // 50 == k for i in range(50)]].mean(0) for k in range(9)])
        mean = content.mean(0)
    else:
        units = encode(plain, chunks)
        mean = units.mean(0)
    rows = torch.nn.functional.normalize(units)
    direction = rows.T @ torch.linalg.solve(rows @ rows.T + 0.3 * torch.eye(len(rows)), torch.ones(len(rows)))
    direction *= mean.norm() / direction.norm()
    torch.testing.assert_close(encode(fair, [text])[0], direction, rtol=0, atol=TOLERANCE)
    short = [document(9)]
    torch.testing.assert_close(encode(fair, short), encode(plain, short), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("text", ["", "  ", "bal"])
def test_texts_of_nothing(text: str, tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    fair = calibrate(plain, CONFIG)
    texts = [text, document(60)]
    torch.testing.assert_close(encode(fair, texts)[0], encode(plain, texts)[0], rtol=0, atol=TOLERANCE)


def test_later_modules_and_settings_of_encode(minilm_path: str) -> None:
    """MiniLM normalizes; truncated dimensions and normalization come after the joining."""
    plain = SentenceTransformer(minilm_path, device="cpu")
    fair = calibrate(plain, PRESETS["even_chunks"])
    texts = ["The harbour was dredged in 1931. " * 60]
    full = encode(fair, texts)
    assert full.norm().item() == pytest.approx(1, abs=1e-6)
    cut = encode(fair, texts, truncate_dim=64, normalize_embeddings=True)
    torch.testing.assert_close(cut, torch.nn.functional.normalize(full[:, :64]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_joined_in_float32(dtype: torch.dtype, tiny_model: TinyModel) -> None:
    plain, texts = tiny_model("bert", "mean"), documents([60, 90])
    exact = encode(calibrate(plain, CONFIG), texts)
    lost = (encode(tiny_model("bert", "mean").to(dtype), texts).float() - encode(plain, texts)).abs().max()
    half = encode(calibrate(tiny_model("bert", "mean").to(dtype), CONFIG), texts)
    assert half.dtype == dtype
    # The ridge divides by as little as 0.3, so that it may enlarge what the plain model loses by 1 / 0.3.
    assert (half.float() - exact).abs().max() < 4 * lost


def test_saved_and_loaded(tmp_path: Path, tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    fair.save_pretrained(str(tmp_path))
    loaded = FairSentenceTransformer(str(tmp_path), device="cpu")
    assert loaded.fair_config == CONFIG
    assert torch.equal(encode(loaded, documents(LENGTHS)), encode(fair, documents(LENGTHS)))


def test_gradients_reach_the_model(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    features = fair.preprocess(documents([60]))
    fair(features)["sentence_embedding"].sum().backward()
    gradient = next(fair.parameters()).grad
    assert gradient is not None
    assert 0 < gradient.abs().sum() < float("inf")


def test_summary(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    encode(fair, documents(LENGTHS))
    assert str(fair.summary()).splitlines() == [
        "BertModel: strength 1.0, even chunks of at most 20 tokens",
        "  joined     parts of 6 tokens, equally similar with ridge 0.3",
        "  mechanism  chunks encoded one by one by the plain model; no attention is calibrated",
        "  documents  7: 4 in chunks, 3 too short (under 21 content tokens), 0 plain; "
        f"0 truncated at {MAX_LENGTH} tokens",
    ]
    assert "the chunks' pooled vectors" in str(calibrate(tiny_model("bert", "cls"), CONFIG).summary())


def test_chunks_that_do_not_fit_are_an_error(tiny_model: TinyModel) -> None:
    message = rf"chunk_size: chunks of {MAX_LENGTH} tokens, and the 2 that .* max_seq_length={MAX_LENGTH}; "
    with pytest.raises(ValueError, match=message + f"use chunk_size={MAX_LENGTH - 2}"):
        encode(calibrate(tiny_model("bert", "mean"), replace(CONFIG, chunk_size=MAX_LENGTH)), [document(5)])


def test_pooled_row_only_is_an_error(tiny_model: TinyModel) -> None:
    message = "pooled_row_only: expected False with EvenChunks, .* set pooled_row_only=False, or calibrate with a Fair"
    plain = tiny_model("bert", "cls")
    with pytest.raises(ValueError, match=message):
        calibrate(plain, CONFIG, pooled_row_only=True)
    by_row = calibrate(plain, FairConfig(basket_size=8), pooled_row_only=True)
    with pytest.raises(ValueError, match=message):
        calibrate(by_row, CONFIG)
    calibrate(by_row, CONFIG, pooled_row_only=False)


@pytest.mark.parametrize("mode", [("mean", "cls"), "max", "mean_sqrt_len_tokens", "weightedmean"])
def test_other_poolings_are_an_error(mode: Any, tiny_model: TinyModel) -> None:
    transformer = tiny_model("bert", "mean")[0]
    assert isinstance(transformer, Transformer)
    model = SentenceTransformer(modules=[transformer, Pooling(32, pooling_mode=mode)], device="cpu")  # type: ignore[list-item]
    with pytest.raises(
        ValueError, match=r"EvenChunks: expected a model that pools by 'cls' or 'lasttoken' or 'mean', got"
    ):
        calibrate(model, CONFIG)


def test_modules_between_transformer_and_pooling_are_an_error(tiny_model: TinyModel) -> None:
    transformer, pooling = tiny_model("bert", "mean")
    names = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    between = Dense(32, 32, **names)  # type: ignore[arg-type]
    model = SentenceTransformer(modules=[transformer, between, pooling], device="cpu")  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"directly after the transformer, got \['Dense', 'Pooling'\]"):
        calibrate(model, CONFIG)
    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    fair.insert(1, between)
    with pytest.raises(ValueError, match=r"directly after the transformer, got \['Dense', 'Pooling'\]"):
        encode(fair, [document(50)])


def test_modules_behind_pooling_take_the_joined_vector(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    fair = calibrate(plain, CONFIG)
    joined = encode(fair, documents(LENGTHS))
    dense = Dense(32, 8)
    plain.append(dense)
    with torch.inference_mode():
        expected_vectors = dense.activation_function(dense.linear(joined))
    torch.testing.assert_close(encode(calibrate(plain, CONFIG), documents(LENGTHS)), expected_vectors)


def test_token_embeddings_are_an_error(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    with pytest.raises(ValueError, match="output_value: documents in even chunks"):
        fair.encode_document([document(50)], output_value="token_embeddings")
    assert len(fair.encode_query([document(5)], output_value="token_embeddings")[0]) == 7


def test_truncated_features_are_an_error(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    with pytest.raises(ValueError, match=r"features: they were made for a query, or at strength 0"):
        fair(fair.preprocess([document(50)], task="query"))


def test_features_for_chunks_serve_the_plain_model_and_queries(tiny_model: TinyModel) -> None:
    """As where the strength is changed between the two calls, or a Router decides that a text is a query."""
    plain = tiny_model("bert", "mean")
    fair = calibrate(plain, CONFIG)
    texts = documents([50, 2 * MAX_LENGTH])
    for kwargs in ({"strength": 0.0}, {"task": "query"}):
        vectors = fair(fair.preprocess(texts), **kwargs)["sentence_embedding"]
        torch.testing.assert_close(vectors, encode(plain, texts), rtol=0, atol=TOLERANCE)
    assert fair.counts == DocumentCounts(plain=2, truncated=1, truncated_queries=1)


def test_unknown_features_are_an_error(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    features = fair.preprocess([document(50)])
    positions = torch.arange(features["input_ids"].shape[1])[None]
    with pytest.raises(ValueError, match=r"features: \['position_ids'\] cannot be cut into chunks"):
        fair({**features, "position_ids": positions})
