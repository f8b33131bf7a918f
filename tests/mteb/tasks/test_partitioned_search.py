from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset

from mteb_fair.tasks.demo import PositionDemoRetrieval
from mteb_fair.tasks.partitioned_search import PartitionedSearch, part_of

SETTINGS: dict[str, Any] = {
    "task_metadata": PositionDemoRetrieval.metadata,
    "hf_split": "test",
    "hf_subset": "default",
    "encode_kwargs": {"batch_size": 8},
    "num_proc": None,
}


def dataset(**texts: str) -> Dataset:
    ids = [name.replace("_", "/") for name in texts]
    return Dataset.from_dict({"id": ids, "text": list(texts.values())})


def test_part() -> None:
    assert part_of("law/a/b") == "law"


def test_a_query_finds_documents_of_its_part_alone(keyword_encoder: Any) -> None:
    search = PartitionedSearch(keyword_encoder)
    search.index(dataset(a_1="red", b_1="red red", a_2="blue"), **SETTINGS)
    results = search.search(dataset(b_q="red", a_q="red"), top_k=10, **SETTINGS)
    assert results == {"a/q": {"a/1": 1.0, "a/2": 0.0}, "b/q": {"b/1": 2.0}}
    assert search.mteb_model_meta is keyword_encoder.mteb_model_meta


def test_a_part_without_documents(keyword_encoder: Any) -> None:
    search = PartitionedSearch(keyword_encoder)
    search.index(dataset(a_1="red"), **SETTINGS)
    with pytest.raises(ValueError, match="1 belong to the part 'b', which has no documents"):
        search.search(dataset(b_q="red"), top_k=10, **SETTINGS)


def test_reranking_is_within_the_part(keyword_encoder: Any) -> None:
    search = PartitionedSearch(keyword_encoder)
    search.index(dataset(a_1="red", a_2="red red", b_1="blue"), **SETTINGS)
    ranked = {"a/q": ["a/1"], "b/q": ["b/1"]}
    results = search.search(dataset(a_q="red", b_q="blue"), top_ranked=ranked, top_k=10, **SETTINGS)
    assert results == {"a/q": {"a/1": 1.0}, "b/q": {"b/1": 1.0}}


def test_other_models() -> None:
    with pytest.raises(TypeError, match="expected an MTEB encoder or search model, got str"):
        PartitionedSearch("model")  # type: ignore[arg-type]
