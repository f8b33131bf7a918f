from __future__ import annotations

from pathlib import Path
from typing import Any

import mteb
import numpy as np
import pytest
from datasets import Dataset
from mteb.models import CompressionWrapper, EncoderProtocol, SearchProtocol
from mteb.models.cache_wrappers import CachedEmbeddingWrapper
from mteb.models.model_implementations import MODEL_REGISTRY
from mteb.types import OutputDType
from transformers import AutoTokenizer

import mteb_fair
from fair_calibration import EvenChunks
from fair_calibration.passages import cut_passages
from fair_indexing.encode import encode_texts
from mteb_fair import FairEncoder, FairPassageSearch, PositionDemoRetrieval
from tests.core.tiny_models import documents

TASK: Any = PositionDemoRetrieval.metadata
TEXTS = documents([3, 40, 100, 64, 17, 25])
QUERIES = documents([2, 5, 7])
CALL: dict[str, Any] = {
    "task_metadata": TASK,
    "hf_split": "test",
    "hf_subset": "default",
    "encode_kwargs": {"show_progress_bar": False},
    "num_proc": None,
}


@pytest.fixture(scope="module")
def encoder(tiny_path_once: Path) -> FairEncoder:
    return FairEncoder(tiny_path_once, strength=0, model_prompts={"query": "ba du ", "document": "ko "})


@pytest.fixture(scope="module")
def tiny_path_once(tiny_folder: Any) -> Path:
    return tiny_folder("bert", "mean")


def search(model: FairPassageSearch, *, top_k: int = 10, **kwargs: Any) -> dict[str, dict[str, float]]:
    corpus = Dataset.from_dict({"id": [f"d{i}" for i in range(len(TEXTS))], "title": ["bal"] * 6, "text": TEXTS})
    model.index(corpus, **CALL)
    queries = Dataset.from_dict({"id": [f"q{i}" for i in range(len(QUERIES))], "text": QUERIES})
    return model.search(queries, top_k=top_k, **CALL, **kwargs)


def best_passages(encoder: FairEncoder, passage_size: int) -> np.ndarray:
    """The similarity (queries, documents) by the definition, document by document."""
    queries = encode_texts(encoder.model, QUERIES, task="query", normalize=False)
    best = []
    for text in TEXTS:
        passages = cut_passages(encoder.model, f"bal {text}", chunk_size=passage_size)
        vectors = encode_texts(encoder.model, passages, task="document", normalize=False)
        best.append(np.asarray(encoder.model.similarity(queries, vectors)).max(1))
    return np.stack(best, axis=1)


class TestScores:
    @pytest.mark.parametrize(("passage_size", "n_passages"), [(16, 20), (60, 8), (97, 7)])
    def test_best_passages(self, encoder: FairEncoder, passage_size: int, n_passages: int) -> None:
        before = encoder.counts.documents
        found = search(FairPassageSearch(encoder, passage_size=passage_size))
        assert encoder.counts.documents - before == pytest.approx(n_passages, abs=3)
        actual = [[found[f"q{i}"][f"d{j}"] for j in range(len(TEXTS))] for i in range(len(QUERIES))]
        np.testing.assert_allclose(actual, best_passages(encoder, passage_size), atol=1e-5)

    def test_parts_of_the_corpus(self, encoder: FairEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither the documents that are encoded together nor the scores that are computed at once change a thing."""
        model = FairPassageSearch(encoder, passage_size=16)
        whole = search(model, top_k=3)
        assert all(len(scores) == 3 for scores in whole.values())
        model._search.corpus_chunk_size = 2
        monkeypatch.setattr("mteb_fair.passage_search._N_SCORES", 9)
        parts = search(model, top_k=3)
        assert {q: set(scores) for q, scores in parts.items()} == {q: set(scores) for q, scores in whole.items()}
        for query, scores in whole.items():
            for document, score in scores.items():
                assert parts[query][document] == pytest.approx(score, abs=1e-5)

    def test_reranking(self, encoder: FairEncoder) -> None:
        ranked = {"q0": ["d2", "d0"], "q1": ["d5"], "q2": []}
        found = search(FairPassageSearch(encoder, passage_size=16), top_ranked=ranked)
        expected = best_passages(encoder, 16)
        assert {q: set(scores) for q, scores in found.items()} == {q: set(names) for q, names in ranked.items()}
        assert found["q0"]["d2"] == pytest.approx(expected[0, 2], abs=1e-5)
        assert found["q1"]["d5"] == pytest.approx(expected[1, 5], abs=1e-5)


class TestIdentity:
    def test_metadata(self, encoder: FairEncoder) -> None:
        model = FairPassageSearch(encoder, passage_size=16)
        meta, base = model.mteb_model_meta, encoder.mteb_model_meta
        assert meta.name == str(base.name).replace(",prompts_digest", ",passage_size=16,prompts_digest")
        assert meta.experiment_kwargs == {**(base.experiment_kwargs or {}), "passage_size": 16}
        assert (meta.revision, meta.adapted_from) == (base.revision, base.adapted_from)
        assert encoder.mteb_model_meta.experiment_kwargs == base.experiment_kwargs  # not changed by it
        assert repr(model) == f"FairPassageSearch({meta.name!r}, device='cpu')"

    def test_results_stay_apart(self, tiny_path: Path, tmp_path: Path) -> None:
        """Of one vector and of passages, through `mteb.evaluate` and `MTEB(...).run`, and by the registered name."""
        cache, names, scores = mteb.ResultCache(tmp_path / "cache"), [], []
        for passage_size in (None, 32):
            given: dict[str, Any] = {} if passage_size is None else {"passage_size": passage_size}
            name = mteb_fair.register_model(tiny_path, strength=0, **given)
            model = mteb.get_model(name, device="cpu")
            assert isinstance(model, FairEncoder if passage_size is None else FairPassageSearch)
            assert model.mteb_model_meta.name == name
            result = mteb.evaluate(model, PositionDemoRetrieval(), cache=cache, show_progress_bar=False)
            names.append(name)
            scores.append(result.task_results[0].get_score())
            del MODEL_REGISTRY[name]
        (run,) = mteb.MTEB([PositionDemoRetrieval()]).run(model, output_folder=str(tmp_path / "run"), verbosity=0)
        assert run.get_score() == scores[1]
        assert len(set(names)) == len(set(scores)) == 2
        again = FairPassageSearch(FairEncoder(tiny_path, strength=0), passage_size=32)
        mteb.evaluate(again, PositionDemoRetrieval(), cache=cache, overwrite_strategy="only-cache")
        assert again.encoder.counts.documents == 0

    def test_names_of_hub_models(self) -> None:
        name = mteb_fair.register_model("BAAI/bge-m3", strength=0, passage_size=128)
        assert name == "mteb_fair/BAAI__bge-m3@strength=0.0,passage_size=128"
        chunked = mteb_fair.register_model("BAAI/bge-m3", config=EvenChunks(), passage_size=128)
        assert chunked == "mteb_fair/BAAI__bge-m3@even_chunks,strength=0.8,passage_size=128"


class TestOtherUses:
    def test_it_searches_alone(self, encoder: FairEncoder) -> None:
        model = FairPassageSearch(encoder, passage_size=16)
        assert isinstance(model, SearchProtocol)
        assert not isinstance(model, EncoderProtocol)
        results = mteb.mock_run(model)
        assert results.all_passed, results.to_markdown()
        task = mteb.get_task("STSBenchmark")
        with pytest.raises(TypeError, match="is a SearchProtocol, but this task STSBenchmark does not support Search"):
            task.evaluate(model, "test", encode_kwargs={})

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the half-made wrapper
    def test_wrappers_of_encoders(self, tiny_path: Path, tmp_path: Path) -> None:
        encoder = FairEncoder(tiny_path, strength=0)
        model = FairPassageSearch(encoder, passage_size=16)
        with pytest.raises(
            TypeError, match=r"CompressionWrapper compresses the one vector .* here a document has several"
        ):
            CompressionWrapper(model, OutputDType.INT8)  # type: ignore[arg-type]
        assert "output_dtypes" not in (model.mteb_model_meta.experiment_kwargs or {})
        with pytest.raises(ValueError, match="Model must have an 'encode' method"):
            CachedEmbeddingWrapper(model, tmp_path)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="encoder: expected a FairEncoder, got CachedEmbeddingWrapper"):
            FairPassageSearch(CachedEmbeddingWrapper(encoder, tmp_path))  # type: ignore[arg-type]
        CompressionWrapper(encoder, OutputDType.INT8)  # changes the encoder's metadata
        assert str(model.mteb_model_meta.name).endswith("passage_size=16")
        with pytest.raises(TypeError, match="CompressionWrapper compresses the one vector"):
            FairPassageSearch(encoder, passage_size=16)


class TestErrors:
    @pytest.mark.parametrize(
        ("passage_size", "error", "message"),
        [
            (0, ValueError, "passage_size: expected an integer of at least 1, got 0"),
            ("16", TypeError, "passage_size: expected an integer of at least 1, got '16'"),
            (128, ValueError, "passage_size: expected at most 125, as the model reads 128 tokens"),
        ],
    )
    def test_sizes(self, encoder: FairEncoder, passage_size: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            FairPassageSearch(encoder, passage_size=passage_size)

    def test_slow_tokenizers(self, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        encoder = FairEncoder(tiny_path, strength=0)
        tokenizer = AutoTokenizer.from_pretrained(tiny_path)
        monkeypatch.setattr(type(tokenizer), "is_fast", False)
        with pytest.raises(ValueError, match="needs the character offsets of a fast tokenizer"):
            FairPassageSearch(encoder, passage_size=16)

    def test_extremes(self, encoder: FairEncoder) -> None:
        """An empty document, a corpus of one, and an empty corpus."""
        model = FairPassageSearch(encoder, passage_size=16)
        query = Dataset.from_dict({"id": ["q"], "text": ["ba"]})
        for texts in ([""], ["ba"], []):
            model.index(Dataset.from_dict({"id": [str(i) for i in range(len(texts))], "text": texts}), **CALL)
            found = model.search(query, top_k=5, **CALL)
            assert len(found["q"]) == len(texts)
