"""One window of documents: the vectors of encode_document, batches by tokens, memory that ends."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from tokenizers.processors import TemplateProcessing

from fair_calibration import DocumentCounts, EvenChunks, FairConfig, FairSentenceTransformer, calibrate
from fair_indexing.encode import encode_texts
from fair_indexing.text_encoder import TOKENS_PER_BATCH, TOKENS_PER_CPU_BATCH, TextEncoder, default_tokens_per_batch
from tests.core.tiny_models import document, documents

TinyModel = Callable[..., SentenceTransformer]
LENGTHS = [50, 3, 12, 90, 64, 21, 1, 41, 200, 41]  # 200 is beyond the model's 128 tokens
TEXTS = [*documents(LENGTHS), "", " "]
CONFIG = FairConfig(basket_size=8, strength=0.8)
# Other batches, other padding: float32 sums in another order. Measured: up to 3e-7 for vectors of unit length.
TOLERANCE = 2e-6


class Passes:
    """Records the shape and padding of every forward pass; fails some of them."""

    def __init__(
        self, model: SentenceTransformer, *, tokens: int | None = None, error: Exception | None = None
    ) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.tokens = tokens
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        model.register_forward_pre_hook(self._record)

    def _record(self, _module: torch.nn.Module, args: tuple[dict[str, torch.Tensor]]) -> None:
        shape = args[0]["input_ids"].shape
        self.shapes.append((shape[0], shape[1]))
        if self.tokens is not None and shape[0] * shape[1] > self.tokens:
            raise self.error


@pytest.fixture
def fair(tiny_model: TinyModel) -> FairSentenceTransformer:
    return calibrate(tiny_model(), CONFIG)


def expected_vectors(model: SentenceTransformer, texts: list[str] = TEXTS, **settings: Any) -> np.ndarray:
    settings = {"normalize_embeddings": True, **settings}
    return np.asarray(model.encode_document(texts, **settings))


# The same vectors


@pytest.mark.parametrize("tokens", [1, 100, 300, None])
@pytest.mark.parametrize(
    ("family", "pooling"), [("bert", "cls"), ("bert", "mean"), ("xlm_roberta", "cls"), ("qwen3", "lasttoken")]
)
def test_vectors_are_those_of_the_model(tiny_model: TinyModel, family: str, pooling: str, tokens: int | None) -> None:
    plain = tiny_model(family, pooling)
    for model in (plain, calibrate(plain, CONFIG)):
        vectors = encode_texts(model, TEXTS, tokens_per_batch=tokens)
        assert vectors.dtype == np.float32
        assert vectors.flags.c_contiguous
        np.testing.assert_allclose(vectors, expected_vectors(model), atol=TOLERANCE)
        backwards = encode_texts(model, TEXTS[::-1], tokens_per_batch=tokens)
        np.testing.assert_allclose(backwards[::-1], vectors, atol=TOLERANCE)


def test_left_padding_is_seen(tiny_model: TinyModel) -> None:
    model = tiny_model("qwen3", "lasttoken")
    masks = []
    model.register_forward_pre_hook(lambda _, args: masks.append(args[0]["attention_mask"].clone()))
    encode_texts(model, TEXTS[:4])
    assert (
        masks[0].sum(dim=1).tolist()
        == sorted(
            model.preprocess(TEXTS[:4], prompt=model.prompts.get("document"))["attention_mask"].sum(dim=1).tolist()
        )[::-1]
    )
    assert masks[0][:, -1].all()
    assert masks[0][:, 0].tolist() == [1, 0, 0, 0]


def test_strength(fair: FairSentenceTransformer, tiny_model: TinyModel) -> None:
    plain = encode_texts(tiny_model(), TEXTS)
    assert np.array_equal(encode_texts(fair, TEXTS, strength=0.0), plain)  # strength 0 is the plain model
    np.testing.assert_allclose(
        encode_texts(fair, TEXTS, strength=0.3), expected_vectors(fair, strength=0.3), atol=TOLERANCE
    )
    assert np.abs(encode_texts(fair, TEXTS) - plain).max() > 0.01
    with pytest.raises(ValueError, match="strength: the model is not calibrated"):
        encode_texts(tiny_model(), TEXTS, strength=0.5)
    with pytest.raises(ValueError, match="strength"):
        encode_texts(fair, TEXTS, strength=1.5)


@pytest.mark.parametrize(
    ("prompts", "default"),
    [
        ({"document": "bal gos: "}, None),
        ({"passage": "bal: ", "query": "fen: "}, None),
        ({"document": "", "passage": "bal: "}, None),
        ({"own": "bal gos: "}, "own"),
        ({"query": "bal gos: "}, None),
    ],
)
@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts(tiny_model: TinyModel, prompts: dict[str, str], default: str | None, include_prompt: bool) -> None:
    plain = tiny_model("bert", "mean", prompts=prompts, default_prompt_name=default)
    plain.set_pooling_include_prompt(include_prompt)
    for model in (plain, calibrate(plain, CONFIG)):
        np.testing.assert_allclose(encode_texts(model, TEXTS), expected_vectors(model), atol=TOLERANCE)


def test_dimensions_and_later_modules(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    modules = [*plain.children(), Dense(32, 24), Normalize()]
    model = calibrate(SentenceTransformer(modules=modules, truncate_dim=16, device="cpu"), CONFIG)
    for normalize in (True, False):
        vectors = encode_texts(model, TEXTS, normalize=normalize)
        assert vectors.shape == (len(TEXTS), 16)
        np.testing.assert_allclose(vectors, expected_vectors(model, normalize_embeddings=normalize), atol=TOLERANCE)


def test_unit_length_by_default_for_the_cosine_only(tiny_model: TinyModel) -> None:
    model = tiny_model("bert", "mean")
    np.testing.assert_allclose(np.linalg.norm(encode_texts(model, TEXTS), axis=1), 1, atol=1e-5)
    model.similarity_fn_name = "dot"
    vectors = encode_texts(model, TEXTS)
    assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() > 0.1
    np.testing.assert_allclose(vectors, expected_vectors(model, normalize_embeddings=False), atol=1e-5)


def test_half_precision_gives_float32(tiny_model: TinyModel) -> None:
    model = tiny_model().bfloat16()
    assert encode_texts(model, TEXTS).dtype == np.float32


def test_a_model_in_training_mode(fair: FairSentenceTransformer) -> None:
    vectors = encode_texts(fair, TEXTS)
    fair.train()
    assert np.array_equal(encode_texts(fair, TEXTS), vectors)  # without dropout
    assert not fair.training  # as encode leaves it


def test_no_and_one_document(fair: FairSentenceTransformer) -> None:
    assert encode_texts(fair, []).shape == (0, 32)
    assert encode_texts(fair, []).dtype == np.float32
    np.testing.assert_allclose(encode_texts(fair, TEXTS[:1]), expected_vectors(fair, TEXTS[:1]), atol=TOLERANCE)


@pytest.mark.parametrize("documents_per_batch", [1, None])
def test_texts_without_a_token(tiny_model: TinyModel, documents_per_batch: int | None) -> None:
    plain = tiny_model("bert", "mean", prompts={"document": ""})
    plain.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    texts = ["", TEXTS[0], " "]
    for model in (plain, calibrate(plain, CONFIG)):
        vectors = encode_texts(model, texts, batch_size=documents_per_batch)
        np.testing.assert_allclose(vectors, expected_vectors(model, texts), atol=TOLERANCE)
        assert not vectors[0].any()


def test_the_real_model(minilm: SentenceTransformer) -> None:
    model = calibrate(minilm)
    texts = ["A short text.", "Another text, of rather more words. " * 40, "日本語の文書です。", ""]
    np.testing.assert_allclose(encode_texts(model, texts), expected_vectors(model, texts), atol=TOLERANCE)


# Every document once


@pytest.mark.parametrize("tokens", [100, None])
def test_counts(fair: FairSentenceTransformer, tokens: int | None) -> None:
    fair.encode_document(TEXTS)
    counts = fair.counts
    assert counts.documents == len(TEXTS)
    assert counts.truncated == 1
    encode_texts(fair, TEXTS, tokens_per_batch=tokens)
    assert fair.counts == counts.plus(counts)


def test_every_text_is_tokenized_once(fair: FairSentenceTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = TextEncoder(fair)
    seen: list[str] = []
    preprocess = type(fair).preprocess

    def recorded(self: FairSentenceTransformer, inputs: list[str], **kwargs: Any) -> dict[str, Any]:
        seen.extend(inputs)
        return preprocess(self, inputs, **kwargs)

    monkeypatch.setattr(type(fair), "preprocess", recorded)
    encoder.encode(encoder.prepare(TEXTS))
    assert sorted(seen) == sorted(TEXTS)


def test_forward_passes_keep_the_budget(fair: FairSentenceTransformer) -> None:
    passes = Passes(fair)
    encode_texts(fair, TEXTS, tokens_per_batch=256)
    # With four special tokens the lengths are 128 94, 68 54 45, 45 25 16 7 5, 4 4.
    assert passes.shapes == [(2, 128), (3, 68), (5, 45), (2, 4)]
    passes.shapes.clear()
    encode_texts(fair, TEXTS, tokens_per_batch=100_000, batch_size=5)
    assert [n for n, _ in passes.shapes] == [5, 5, 2]


def test_the_budget_is_by_device(tiny_model: TinyModel) -> None:
    assert TextEncoder(tiny_model()).tokens_per_batch == TOKENS_PER_CPU_BATCH
    assert default_tokens_per_batch(torch.device("cuda:1")) == TOKENS_PER_BATCH


# Models whose features are not one row per document


class OwnEncode(SentenceTransformer):
    def encode(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().encode(*args, **kwargs)


def test_a_subclass_encodes_itself(tiny_folder: Callable[..., Any]) -> None:
    model = OwnEncode(str(tiny_folder()), device="cpu")
    passes = Passes(model)
    vectors = encode_texts(model, TEXTS, tokens_per_batch=256, normalize=False)
    np.testing.assert_allclose(vectors, expected_vectors(model, normalize_embeddings=False), atol=1e-5)
    batches = [n for n, _ in passes.shapes[: passes.shapes.index((len(TEXTS), 128))]]
    assert sum(batches) == len(TEXTS)
    assert batches[0] == 2  # of 128 tokens, by the estimate too


@pytest.mark.parametrize("strength", [None, 0.0])
def test_documents_in_chunks(tiny_model: TinyModel, strength: float | None) -> None:
    model = calibrate(tiny_model("bert", "mean"), EvenChunks(chunk_size=16))
    expected = expected_vectors(model, strength=strength)
    counts = model.counts
    np.testing.assert_allclose(
        encode_texts(model, TEXTS, tokens_per_batch=256, strength=strength), expected, atol=TOLERANCE
    )
    assert model.counts == counts.plus(counts)


def test_documents_in_chunks_are_tokenized_whole(tiny_model: TinyModel) -> None:
    model = calibrate(tiny_model(), EvenChunks(chunk_size=16))
    # Two special tokens and two of the prompt; the model's inputs end at 128.
    assert TextEncoder(model).prepare([document(300), document(5)]).lengths == [304, 9]


def test_estimates_end_where_the_model_truncates(tiny_model: TinyModel) -> None:
    model = OwnEncode(modules=[*tiny_model().children()], device="cpu")
    assert TextEncoder(model).prepare(["x" * 3000, "ü" * 3]).lengths == [128, 3]


def test_a_router(tiny_model: TinyModel) -> None:
    from sentence_transformers.base.modules import Router

    queries, documents_ = tiny_model("bert", "mean"), tiny_model("xlm_roberta", "cls")
    router = Router.for_query_document([*queries.children()], [*documents_.children()])
    model = calibrate(SentenceTransformer(modules=[router], device="cpu"), CONFIG)
    passes: list[object] = []
    model.register_forward_pre_hook(lambda _, args: passes.append(args[0]))
    vectors = encode_texts(model, TEXTS, tokens_per_batch=100_000)
    assert len(passes) == 1
    np.testing.assert_allclose(vectors, expected_vectors(model), atol=TOLERANCE)


def test_static_embeddings(tiny_model: TinyModel) -> None:
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    tokenizer = tiny_model()[0].tokenizer.backend_tokenizer
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8)], device="cpu")
    texts = documents([3, 9, 5])
    np.testing.assert_allclose(encode_texts(model, texts), expected_vectors(model, texts), atol=TOLERANCE)


# Memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
        MemoryError(),
    ],
)
def test_a_batch_that_does_not_fit_is_halved(
    fair: FairSentenceTransformer, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    expected = expected_vectors(fair)
    counts = fair.counts
    passes = Passes(fair, tokens=256, error=error)
    with caplog.at_level(logging.WARNING, "fair_indexing"):
        vectors = encode_texts(fair, TEXTS, tokens_per_batch=1536)
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)
    assert fair.counts == counts.plus(counts)
    # 12 documents of 128 tokens at most did not fit, nor 6, nor 3; what comes after the one that fits is as small.
    assert passes.shapes[:3] == [(12, 128), (6, 128), (3, 128)]
    assert all(n * length <= 256 for n, length in passes.shapes[3:])
    assert [record.name for record in caplog.records].count("fair_indexing") == 1
    assert "A batch of 12 texts, 1536 tokens together, ran out of memory on cpu" in caplog.text
    assert "tokens_per_batch=768" in caplog.text


def test_the_smaller_batches_are_kept_for_later_windows(fair: FairSentenceTransformer) -> None:
    passes = Passes(fair, tokens=256)
    encoder = TextEncoder(fair, tokens_per_batch=1536)
    encoder.encode(encoder.prepare(TEXTS))
    passes.shapes.clear()
    encoder.encode(encoder.prepare(TEXTS))
    assert all(n * length <= 256 for n, length in passes.shapes)


def test_memory_that_ends_after_the_transformer(fair: FairSentenceTransformer) -> None:
    """The transformer has counted its documents by then."""
    failures = [torch.OutOfMemoryError("CUDA out of memory")]

    def fail_once(*_: object) -> None:
        if failures:
            raise failures.pop()

    fair[1].register_forward_pre_hook(fail_once)
    encode_texts(fair, TEXTS)
    assert not failures
    counts = DocumentCounts(calibrated=8, too_short=4, truncated=1)
    assert fair.counts == counts
    failures.append(torch.OutOfMemoryError("CUDA out of memory"))
    encode_texts(fair, TEXTS, task="query")
    assert not failures
    assert fair.counts == counts._replace(truncated_queries=1)


def test_a_document_that_does_not_fit_by_itself(fair: FairSentenceTransformer) -> None:
    Passes(fair, tokens=100)
    text = "document 'd8' (128 tokens) does not fit into the memory of cpu by itself; lower model.max_seq_length"
    with pytest.raises(MemoryError, match=re.escape(text)):
        encode_texts(fair, TEXTS, names=[f"d{i}" for i in range(len(TEXTS))])


def test_other_errors_pass(fair: FairSentenceTransformer) -> None:
    passes = Passes(fair, tokens=1, error=RuntimeError("size mismatch"))
    with pytest.raises(RuntimeError, match="size mismatch"):
        encode_texts(fair, TEXTS)
    assert len(passes.shapes) == 1


# Errors


@pytest.mark.parametrize(
    ("texts", "names", "error", "text"),
    [
        ("bal", None, TypeError, "texts: expected a list of str, got one str, 'bal'"),
        (["bal", None], None, ValueError, "texts: 1 of 2 texts are missing (document 1)"),
        (["bal", 3], ["a", "b"], TypeError, "texts: expected str, got int (document 'b')"),
        (
            ["bal", "\ud800"],
            ["a", "b"],
            ValueError,
            "texts: 1 of 2 texts contain a lone surrogate, which UTF-8 cannot encode (document 'b')",
        ),
        (["bal"], ["a", "b"], ValueError, "names: expected one for each of 1 texts, got 2"),
    ],
)
def test_what_is_no_text(
    fair: FairSentenceTransformer, texts: Any, names: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        encode_texts(fair, texts, names=names)


def test_vectors_that_are_not_finite(fair: FairSentenceTransformer) -> None:
    def spoil(_module: torch.nn.Module, _args: object, output: dict[str, torch.Tensor]) -> None:
        output["sentence_embedding"][:2] = float("nan")

    fair.register_forward_hook(spoil)
    text = "model: the vectors of 2 of 3 texts have NaN or infinite values (document 'b', 'c')"
    with pytest.raises(ValueError, match=re.escape(text)):
        encode_texts(fair, documents([5, 30, 20]), names=["a", "b", "c"])


def test_other_models_and_settings(fair: FairSentenceTransformer) -> None:
    with pytest.raises(TypeError, match="model: expected a SentenceTransformer, got str"):
        TextEncoder("bert")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens_per_batch: expected an integer of at least 1, got 0"):
        encode_texts(fair, TEXTS, tokens_per_batch=0)
    with pytest.raises(ValueError, match="batch_size"):
        encode_texts(fair, TEXTS, batch_size=0)


def test_the_bar(fair: FairSentenceTransformer, capsys: pytest.CaptureFixture[str]) -> None:
    encode_texts(fair, TEXTS)
    assert capsys.readouterr().err == ""
    encode_texts(fair, TEXTS, show_progress_bar=True)
    assert re.search(r"Encoding: 100%.*12/12 .*doc/s", capsys.readouterr().err)


@pytest.mark.parametrize("task", ["document", "query"])
def test_texts_of_our_own_are_not_counted(
    fair: FairSentenceTransformer, task: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An encoder looks at two texts first, to see how the model pads."""
    fair.max_seq_length = 5  # fewer tokens than those have
    with caplog.at_level(logging.WARNING):
        encode_texts(fair, ["ba"], task=task)
    assert fair.counts.truncated == fair.counts.truncated_queries == 0
    assert not caplog.records
