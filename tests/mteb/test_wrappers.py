"""MTEB's wrappers of encoders around `FairEncoder`; `CachedEmbeddingWrapper` is in test_embedding_cache.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mteb
import pytest
from mteb.models import CompressionWrapper, HybridSearch
from mteb.types import OutputDType

from mteb_fair import FairEncoder, FairPassageSearch, FineWebPosQ
from tests.core.tiny_models import documents
from tests.mteb.layouts import write_fineweb


@pytest.fixture
def task(tmp_path: Path) -> FineWebPosQ:
    """Twelve documents of 20 to 64 words, each with a question of its own words."""
    texts = documents(list(range(20, 68, 4)))
    rows = [(" ".join(text.split()[-4:]), text, ["end"]) for text in texts]
    write_fineweb(tmp_path / "data", rows)
    return FineWebPosQ(data_folder=tmp_path / "data")


def evaluate(model: Any, task: FineWebPosQ, cache: mteb.ResultCache | None) -> float:
    result = mteb.evaluate(model, task, cache=cache, show_progress_bar=False)
    return float(result.task_results[0].scores["test"][0]["map_at_10"])


def test_hybrid_search_keeps_variants_apart(tiny_path: Path, tmp_path: Path, task: FineWebPosQ) -> None:
    def make(strength: float, passage_size: int | None = None) -> Any:
        encoder = FairEncoder(tiny_path, strength=strength, basket_size=8)
        return encoder if passage_size is None else FairPassageSearch(encoder, passage_size=passage_size)

    cache = mteb.ResultCache(tmp_path / "cache")
    pairs: list[tuple[Any, Any]] = [((0,), (1,)), ((0,), (0.5,)), ((0,), (0, 8)), ((0,), (0, 16))]
    hybrids = [HybridSearch([make(*first), make(*second)]) for first, second in pairs]
    names = [hybrid.mteb_model_meta.name for hybrid in hybrids]
    assert len(set(names)) == len(names)
    assert "strength=0.0,basket_size=8-local__bert-mean@strength=1.0,basket_size=8" in str(names[0])
    fresh = [evaluate(hybrid, task, None) for hybrid in hybrids]
    assert len({round(score, 9) for score in fresh}) > 1  # or mixed-up results would not show
    kept = [evaluate(hybrid, task, cache) for hybrid in hybrids]
    assert kept == fresh
    assert [evaluate(hybrid, task, cache) for hybrid in hybrids] == fresh  # out of the cache


def test_an_encoder_is_compressed_in_one_way(tiny_path: Path, task: FineWebPosQ, tmp_path: Path) -> None:
    cache, encoder = mteb.ResultCache(tmp_path / "cache"), FairEncoder(tiny_path, basket_size=8)
    plain = evaluate(encoder, task, cache)
    compressed = CompressionWrapper(encoder, OutputDType.BINARY)
    assert (
        compressed.mteb_model_meta.name == "mteb_fair/local__bert-mean@strength=0.5,basket_size=8,output_dtypes=binary"
    )
    binary = evaluate(compressed, task, cache)
    assert CompressionWrapper(encoder, OutputDType.BINARY).mteb_model_meta.name == compressed.mteb_model_meta.name
    for other in (
        {"output_dtype": OutputDType.INT8},
        {"output_dtype": OutputDType.BINARY, "clipping_margin": (0.1, 0.9)},
    ):
        with pytest.raises(
            ValueError, match=r"CompressionWrapper: this encoder is in another .*make a FairEncoder for"
        ):
            CompressionWrapper(encoder, **other)  # type: ignore[arg-type]
    assert compressed.mteb_model_meta.experiment_kwargs["output_dtypes"] == "binary"
    assert evaluate(FairEncoder(tiny_path, basket_size=8), task, cache) == plain
    assert evaluate(compressed, task, cache) == binary


def test_compression_of_a_hybrid(tiny_path: Path) -> None:
    """Each encoder is compressed by itself, and its name within the hybrid's says so."""
    encoders = [FairEncoder(tiny_path, strength=strength) for strength in (0, 1)]
    hybrid = HybridSearch([CompressionWrapper(encoders[0], OutputDType.INT8), encoders[1]])
    assert str(hybrid.mteb_model_meta.name).count("output_dtypes=int8") == 1
