from __future__ import annotations

from typing import Any

import pandas as pd
import pyterrier as pt
import pytest

from fair_evaluation.position_collections import PositionCollection, build_collections, load_passages
from pyterrier_fair import PositionDataset


@pytest.fixture(scope="module")
def collection() -> PositionCollection:
    return build_collections(load_passages()[:12])[1]


@pytest.fixture(scope="module")
def dataset(collection: PositionCollection) -> PositionDataset:
    return PositionDataset(collection)


def test_the_corpus(dataset: PositionDataset, collection: PositionCollection) -> None:
    assert list(dataset.get_corpus_iter(verbose=False)) == list(collection.documents)
    assert list(dataset.get_corpus_iter(verbose=False)) == list(dataset.get_corpus_iter(verbose=True))


def test_bars_of_the_corpus(dataset: PositionDataset, capsys: pytest.CaptureFixture[str]) -> None:
    list(dataset.get_corpus_iter(verbose=False))
    assert capsys.readouterr().err == ""
    list(dataset.get_corpus_iter())
    assert "documents" in capsys.readouterr().err


def test_topics(dataset: PositionDataset, collection: PositionCollection) -> None:
    topics = dataset.get_topics()
    assert list(topics.columns) == ["qid", "query", "place"]
    assert list(topics.itertuples(index=False, name=None)) == [(q.qid, q.query, q.place) for q in collection.queries]


def test_qrels(dataset: PositionDataset, collection: PositionCollection) -> None:
    qrels = dataset.get_qrels()
    assert list(qrels.columns) == ["qid", "docno", "label"]
    assert list(qrels.itertuples(index=False, name=None)) == [(q.qid, q.docno, 1) for q in collection.queries]
    assert qrels["label"].dtype == int
    assert list(qrels["qid"]) == list(dataset.get_topics()["qid"])


def test_a_collection_without_anything() -> None:
    dataset = PositionDataset(PositionCollection(documents=(), queries=()))
    assert list(dataset.get_corpus_iter(verbose=False)) == []
    assert list(dataset.get_topics().columns) == ["qid", "query", "place"]
    assert list(dataset.get_qrels().columns) == ["qid", "docno", "label"]
    assert len(dataset.text_loader()(pd.DataFrame(columns=["docno"]))) == 0


@pytest.mark.parametrize("method", ["get_topics", "get_qrels"])
def test_there_are_no_variants(dataset: PositionDataset, method: str) -> None:
    with pytest.raises(ValueError, match="variant: this dataset has no variants, got 'test'"):
        getattr(dataset, method)("test")


# Text


@pytest.mark.parametrize("fields", ["*", "text", ["text"]])
def test_the_text_loader(dataset: PositionDataset, collection: PositionCollection, fields: Any) -> None:
    docnos = [d["docno"] for d in collection.documents]
    frame = pd.DataFrame({"qid": ["q"] * 5, "docno": [*docnos[::-1], docnos[0]]}, index=[4, 4, 2, 1, 0])
    result = dataset.text_loader(fields)(frame)
    texts = {d["docno"]: d["text"] for d in collection.documents}
    assert list(result.columns) == ["qid", "docno", "text"]
    assert list(result["text"]) == [texts[docno] for docno in frame["docno"]]
    assert list(result.index) == [4, 4, 2, 1, 0]
    assert list(frame.columns) == ["qid", "docno"]


def test_get_text(dataset: PositionDataset, collection: PositionCollection) -> None:
    frame = pd.DataFrame({"docno": [d["docno"] for d in collection.documents]})
    expected = [d["text"] for d in collection.documents]
    assert list(pt.text.get_text(dataset)(frame)["text"]) == expected
    assert list(pt.text.get_text(dataset, "text")(frame)["text"]) == expected
    assert list(dataset.text_loader()(frame.assign(text="old"))["text"]) == expected
    assert list(dataset.text_loader()(frame.astype("category"))["text"]) == expected


@pytest.mark.parametrize("fields", ["title", ["text", "title"], []])
def test_fields_that_documents_do_not_have(dataset: PositionDataset, fields: Any) -> None:
    with pytest.raises(ValueError, match="fields: the documents have the field 'text' alone, got"):
        dataset.text_loader(fields)


@pytest.mark.parametrize("docnos", [["none"], [1], [None], ["none", 1], ["none", None, float("nan")]])
def test_documents_that_are_not_there(dataset: PositionDataset, docnos: list[Any]) -> None:
    frame = pd.DataFrame({"docno": pd.Series(docnos, dtype=object)})
    with pytest.raises(ValueError, match=f"docno: {len(docnos)} documents are not in the dataset, such as"):
        dataset.text_loader()(frame)


def test_frames_without_docno(dataset: PositionDataset) -> None:
    with pytest.raises(pt.validate.InputValidationError):
        dataset.text_loader()(pd.DataFrame({"qid": ["q"]}))


def test_bars_of_the_text_loader(dataset: PositionDataset, capsys: pytest.CaptureFixture[str]) -> None:
    frame = pd.DataFrame({"docno": [d["docno"] for d in dataset.collection.documents]})
    dataset.text_loader()(frame)
    assert capsys.readouterr().err == ""
    dataset.text_loader(verbose=True)(frame)
    assert "texts" in capsys.readouterr().err


def test_inspection(dataset: PositionDataset) -> None:
    loader = dataset.text_loader()
    assert pt.inspect.transformer_inputs(loader) == [["docno"]]
    assert pt.inspect.transformer_outputs(loader, ["qid", "docno"]) == ["qid", "docno", "text"]
    assert pt.schematic.transformer_schematic(loader)["label"] == "TextLoader"


def _text_loader() -> pt.Transformer:
    return PositionDataset(build_collections(load_passages()[:3])[0]).text_loader()


class TestTextLoader(pt.testing.transformer_test_class(_text_loader)):  # type: ignore[misc]
    pass
