from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt
import pytest

from fair_evaluation import from_experiment
from pyterrier_fair import PositionDataset
from pyterrier_fair.benchmarks import BenchmarkDataset, FairDatasetProvider
from tests.mteb.layouts import write_fineweb, write_posir, write_squad


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MTEB_FAIR_DATA", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Small data in the layouts of the three benchmarks."""
    write_fineweb(
        tmp_path / "FineWeb-PosQ",
        [("red?", "red page", ["beginning"]), ("blue?", "blue page", ["middle", "end"]), (None, "other page", None)],
    )
    write_squad(
        tmp_path / "SQuAD-PosQ", [("q1", "red", "red?", [3]), ("q2", "blue", "blue?", [100]), ("q3", "g", "why?", [])]
    )
    for language in ("eng-Latn", "deu-Latn"):
        write_posir(
            tmp_path / "PosIR",
            language,
            "law",
            corpus={"d1": f"red {language}", "d2": "blue"},
            queries={"q1": ("red?", (0, 10), 100, 700), "q2": ("blue?", (90, 100), 100, 300)},
            qrels=[("q1", "d1", 1), ("q2", "d2", 1), ("q2", "d1", 0)],
        )
    return tmp_path


def evaluate(dataset: Any, **options: Any) -> Any:
    """Evaluates a system that finds every relevant document."""
    topics = dataset.get_topics()
    perfect = dataset.get_qrels().assign(score=1.0, rank=0).drop(columns="label")
    results = pt.Experiment(
        [pt.Transformer.from_df(perfect)], topics[["qid", "query"]], dataset.get_qrels(), ["ndcg_cut_10"],
        names=["perfect"], perquery=True,
    )  # fmt: skip
    return from_experiment(results, topics, **options)["perfect"]


def test_the_demo_by_name() -> None:
    dataset = pt.get_dataset("fair:demo/1")
    assert isinstance(dataset, PositionDataset)
    assert {document["docno"][:2] for document in dataset.get_corpus_iter(verbose=False)} == {"r1"}
    result = evaluate(dataset)
    assert (result.mean, result.psi) == (1, 0)


def test_fineweb(folder: Path) -> None:
    dataset = pt.get_dataset("fair:fineweb-posq", data_folder=folder / "FineWeb-PosQ")
    corpus = list(dataset.get_corpus_iter(verbose=False))
    assert [document["text"] for document in corpus] == ["red page", "blue page", "other page"]
    assert dataset.get_topics()["place"].tolist() == [["beginning"], ["middle", "end"]]
    assert dataset.get_qrels()["docno"].tolist() == [corpus[0]["docno"], corpus[1]["docno"]]
    assert evaluate(dataset).groups["n"].tolist() == [1, 1, 1]
    found = pt.text.get_text(dataset)(pd.DataFrame({"docno": [corpus[2]["docno"]]}))
    assert found["text"].tolist() == ["other page"]


def test_squad(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTEB_FAIR_DATA", str(folder))
    dataset = pt.get_dataset("fair:squad-posq")
    assert dataset.get_topics()["place"].tolist() == [["0+"], ["0+", "100+"]]
    assert len(list(dataset.get_corpus_iter(verbose=False))) == 3
    assert evaluate(dataset, order=dataset.places).groups["n"].tolist() == [2, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(("name", "text"), [("eng-Latn", "red eng-Latn"), ("deu-Latn_eng-Latn", "red eng-Latn")])
def test_posir(folder: Path, name: str, text: str) -> None:
    dataset = pt.get_dataset(f"fair:posir/{name}/law", data_folder=folder / "PosIR")
    topics = dataset.get_topics()
    assert list(topics.columns) == ["qid", "query", "position", "length"]
    assert topics["position"].tolist() == [0.05, 0.95]
    assert next(iter(dataset.get_corpus_iter(verbose=False))) == {"docno": "law/d1", "text": text}
    assert dataset.get_qrels()["label"].tolist() == [1, 1, 0]
    result = evaluate(dataset, length="length")
    assert result.groups["n"].tolist() == [1, *[0] * 17, 1, 0]
    assert list(result.lengths) == ["(0, 512]", "(512, 1024]"]


def test_names() -> None:
    for name in FairDatasetProvider().list_dataset_names():  # PyTerrier asks each for these when it lists them
        dataset = pt.get_dataset(f"fair:{name}")
        assert all(dataset._describe_component(part) for part in ("topics", "qrels", "corpus"))
        assert dataset._describe_component("index") is None
        dataset.get_topics_lang(), dataset.get_corpus_lang(), dataset.info_url()
    for name in ("demo/3", "posir", "posir/xxx-Latn/law", "posir/eng-Latn_deu-Latn/law", "posir/eng-Latn/../law", ""):
        with pytest.raises(KeyError, match="not found in provider 'fair'"):
            pt.get_dataset(f"fair:{name}")
    with pytest.raises(KeyError, match=r"'demo': expected one of \['demo/0', .*, or posir/<language>/<domain>"):
        FairDatasetProvider().get_dataset("demo")


def test_nothing_is_read_before_it_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = pt.get_dataset("fair:fineweb-posq", data_folder=folder / "nowhere")
    assert isinstance(dataset, BenchmarkDataset)
    assert (dataset.get_topics_lang(), dataset.get_corpus_lang()) == ("en", "en")
    assert "2505.13950" in dataset.info_url()
    with pytest.raises(ValueError, match=r"data_folder: there is no folder '.*nowhere'"):
        dataset.get_topics()
    with pytest.raises(ValueError, match=r"domains: \['law2'\] are not in .*; the nearest to 'law2' are \['law'\]"):
        pt.get_dataset("fair:posir/eng-Latn/law2", data_folder=folder / "PosIR").get_qrels()
    with pytest.raises(ValueError, match="variant: this dataset has no variants, got 'test'"):
        dataset.get_topics("test")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
    with pytest.raises(ValueError, match=r"NovaSearch/FineWeb-PosQ: the dataset is not in the cache .* local copy"):
        pt.get_dataset("fair:fineweb-posq").get_topics()
