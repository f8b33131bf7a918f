"""MTEB's own checks of tasks, as far as they need no network, and descriptive statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mteb_fair import FineWebPosQ, PosIR, PositionDemoRetrieval, SQuADPosQ
from mteb_fair.tasks import TASKS
from mteb_fair.tasks.position_task import PositionMetadata
from tests.mteb.layouts import write_fineweb, write_posir, write_squad


@pytest.mark.parametrize("name", TASKS)
def test_metadata(name: str) -> None:
    metadata = TASKS[name].metadata
    metadata._validate_metadata()
    assert metadata.is_filled()
    assert metadata.dataset.get("trust_remote_code", False) is False
    assert "revision" in metadata.dataset
    assert metadata.intext_citation() is not None
    assert type(metadata.model_validate(metadata.model_dump())) is PositionMetadata


def test_statistics_of_the_demo_are_those_of_its_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = PositionDemoRetrieval.metadata.descriptive_stats
    assert kept is not None
    assert PositionDemoRetrieval.metadata.n_samples == {"test": kept["test"]["num_samples"]}  # type: ignore[typeddict-item]
    monkeypatch.setattr(PositionMetadata, "descriptive_stat_path", tmp_path / "demo.json")
    statistics = PositionDemoRetrieval().calculate_descriptive_statistics()
    assert json.loads((tmp_path / "demo.json").read_text()) == statistics == kept
    test: Any = statistics["test"]
    documents, queries, judgements = (
        test[f"{n}_statistics"] for n in ("documents_text", "queries_text", "relevant_docs")
    )
    assert documents["unique_texts"] == test["num_documents"]  # no duplicates
    assert queries["unique_texts"] * 3 == test["num_queries"]  # each question once for each rotation
    assert min(documents["min_text_length"], queries["min_text_length"]) > 3
    assert judgements["min_relevant_docs_per_query"] == judgements["max_relevant_docs_per_query"] == 1


def test_statistics_of_local_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(PositionMetadata, "descriptive_stat_path", tmp_path / "statistics.json")
    for language in ("eng-Latn", "fra-Latn"):
        rows: Any = {"corpus": {"d": "ba du"}, "queries": {"q": ("ba", [0, 9], 100, 300)}, "qrels": [("q", "d", 1)]}
        write_posir(tmp_path / "posir", language, "law", **rows)
    write_fineweb(tmp_path / "fineweb", [("ba", "ba du", ["end"]), (None, "ko", None)])
    write_squad(tmp_path / "squad", [("q", "ba du", "ba", [0])])
    for task, n in ((PosIR, 4), (FineWebPosQ, 3), (SQuADPosQ, 2)):
        folder = tmp_path / task.dataset_name.split("-")[0].lower()
        statistics: Any = task(data_folder=folder).calculate_descriptive_statistics(overwrite_results=True)
        assert statistics["test"]["num_samples"] == n
