from __future__ import annotations

import copy
from pathlib import Path

import pandas as pd
import pyterrier as pt
import pytest
from pyterrier_dr import FlexIndex

from fair_calibration import EvenChunks
from fair_calibration.passages import cut_passages
from pyterrier_fair import FairBiEncoder, FairIndex, FairPassages
from tests.pyterrier.conftest import TEXTS, MakeEncoder

LONG = 3  # the number of the longest text, of 90 tokens


@pytest.fixture
def passages(make_encoder: MakeEncoder) -> FairPassages:
    return FairPassages(make_encoder(), chunk_size=16)


def test_rows(passages: FairPassages, docs: pd.DataFrame) -> None:
    cut = passages(docs.assign(title="t"))
    model = passages.encoder.calibrated_model()
    expected = [
        {"docno": f"d{i}%p{n}", "text": passage, "title": "t"}
        for i, text in enumerate(TEXTS)
        for n, passage in enumerate(cut_passages(model, text, chunk_size=16))
    ]
    assert cut.to_dict("records") == expected
    assert cut.index.tolist() == list(range(len(cut)))
    assert [*passages.transform_iter(docs.assign(title="t"))] == expected
    assert [*passages.transform_iter(docs.assign(title="t").to_dict("records"))] == expected
    assert docs["docno"].tolist()[0] == "d0"  # the input stays as it is
    assert passages(docs.iloc[:0]).empty


def test_results_are_cut_and_ranked_by_their_best_passage(
    passages: FairPassages, docs: pd.DataFrame, topics: pd.DataFrame
) -> None:
    encoder = passages.encoder
    results = topics.merge(docs, how="cross").assign(score=0.0, rank=0)
    ranked = (passages >> encoder >> pt.text.max_passage())(results)
    assert len(ranked) == len(results)
    scores = encoder(passages(results))
    scores["docno"] = scores["docno"].str.partition("%")[0]
    best = scores.groupby(["qid", "docno"])["score"].max()
    pd.testing.assert_series_equal(ranked.set_index(["qid", "docno"])["score"].sort_index(), best.sort_index())


def test_one_pipeline_from_documents_to_documents(
    passages: FairPassages, docs: pd.DataFrame, topics: pd.DataFrame, tmp_path: Path
) -> None:
    encoder, records = passages.encoder, docs.to_dict("records")
    index, flex = FairIndex(tmp_path / "fair", encoder), FlexIndex(tmp_path / "flex")
    (passages >> index).index(records)
    (passages >> encoder.doc_encoder() >> flex).index(records)
    n = len(passages(docs))
    assert len(index.flex()) == len(flex) == n
    retrieve = index.retriever(num_results=n) >> pt.text.max_passage() % 3
    other = encoder.query_encoder() >> flex.np_retriever(num_results=n) >> pt.text.max_passage() % 3
    found = retrieve(topics).sort_values(["qid", "rank"], ignore_index=True)
    assert found.groupby("qid").size().tolist() == [3] * len(topics)
    assert set(found["docno"]) <= set(docs["docno"])
    pd.testing.assert_frame_equal(
        found[["qid", "docno"]], other(topics).sort_values(["qid", "rank"], ignore_index=True)[["qid", "docno"]]
    )


def test_an_index_of_passages_is_resumed(passages: FairPassages, docs: pd.DataFrame, tmp_path: Path) -> None:
    index = FairIndex(tmp_path / "fair", passages.encoder, shard_size=4)
    records = docs.to_dict("records")
    with pytest.raises(ValueError, match=r"1 of 1 texts are missing \(docno 'd9'\)"):
        (passages >> index).index([*records, {"docno": "d9", "text": None}])
    (passages >> index).index(records)
    assert len(index.flex()) == len(passages(docs))


@pytest.mark.parametrize(
    ("docno", "error", "match"),
    [
        ("d1%p0", ValueError, "docno: 'd1%p0' has '%p' in it"),
        (7, TypeError, "docno: expected str, got 7"),
    ],
)
def test_docnos(passages: FairPassages, docno: object, error: type[Exception], match: str) -> None:
    records = [{"docno": docno, "text": "ba"}]
    with pytest.raises(error, match=match):
        passages(pd.DataFrame(records))
    with pytest.raises(error, match=match):
        next(passages.transform_iter(records))


def test_vectors_of_whole_documents_are_refused(passages: FairPassages, docs: pd.DataFrame) -> None:
    encoded = passages.encoder.doc_encoder()(docs)
    with pytest.raises(ValueError, match="doc_vec: these are the vectors of whole documents"):
        passages(encoded)
    with pytest.raises(ValueError, match="doc_vec: these are the vectors of whole documents"):
        next(passages.transform_iter(encoded.to_dict("records")))


def test_frames_can_be_indexed(passages: FairPassages, docs: pd.DataFrame, tmp_path: Path) -> None:
    index = FairIndex(tmp_path / "fair", passages.encoder)
    (passages >> index).index(docs)
    assert len(index.flex()) == len(passages(docs))
    with pytest.raises(TypeError, match="record 0: expected a dict with 'docno' and 'text', got 'd'"):
        next(passages.transform_iter("documents"))  # type: ignore[arg-type]


def test_missing_columns(passages: FairPassages, docs: pd.DataFrame) -> None:
    with pytest.raises(pt.validate.InputValidationError):
        passages(docs[["docno"]])
    with pytest.raises(ValueError, match=r"record 0: expected 'docno' and 'text', \['text'\] are missing"):
        next(passages.transform_iter([{"docno": "d1"}]))


def test_settings(make_encoder: MakeEncoder, passages: FairPassages) -> None:
    encoder = passages.encoder
    assert passages == copy.copy(passages) == FairPassages(make_encoder(strength=0.1), chunk_size=16)  # no calibration
    assert hash(passages) == hash(copy.copy(passages))
    assert passages != FairPassages(encoder, chunk_size=17)
    assert passages != FairPassages(make_encoder(text_field="body"), chunk_size=16)
    chunked = FairBiEncoder(encoder.model, EvenChunks(chunk_size=8, unit_size=8))
    assert FairPassages(chunked, chunk_size=16) == passages
    assert "chunk_size=16" in repr(passages)
    with pytest.raises(ValueError, match="chunk_size: expected at most 124, as the model reads 128 tokens"):
        FairPassages(encoder, chunk_size=127)
    with pytest.raises(TypeError, match="encoder: expected a FairBiEncoder, got str"):
        FairPassages("model")  # type: ignore[arg-type]


def test_the_chunk_size_may_be_changed(passages: FairPassages, docs: pd.DataFrame) -> None:
    known, n = {passages: 1}, len(passages(docs))
    passages.chunk_size = 8  # as a grid search does
    assert known[passages] == 1
    assert len(passages(docs)) > n


def test_a_limit_that_is_lowered_later(passages: FairPassages, docs: pd.DataFrame) -> None:
    passages.encoder.max_seq_length = 12
    with pytest.raises(ValueError, match="chunk_size: expected at most"):
        passages(docs)


def test_two_columns_of_one_name(passages: FairPassages, docs: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match="text: expected one column of this name, got 2"):
        passages(pd.concat([docs, docs[["text"]]], axis=1))
