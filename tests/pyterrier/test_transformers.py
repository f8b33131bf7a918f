"""The query encoder, the doc encoder and the scorer on frames of all kinds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch
from pyterrier_dr import SimFn

from fair_calibration import DocumentCounts
from pyterrier_fair import FairBiEncoder
from pyterrier_fair import columns as columns_module
from pyterrier_fair.biencoder import FairDocEncoder, FairQueryEncoder, FairScorer
from tests.pyterrier.conftest import QUERIES, TEXTS, MakeEncoder


@pytest.fixture(scope="module")
def encoder(make_encoder: MakeEncoder) -> FairBiEncoder:
    """An encoder that the tests leave as it is."""
    return make_encoder()


def matrix(column: pd.Series) -> np.ndarray:
    return np.stack(column.to_list())


def test_the_parts_are_ours(encoder: FairBiEncoder) -> None:
    assert type(encoder.query_encoder()) is FairQueryEncoder
    assert type(encoder.doc_encoder()) is FairDocEncoder
    assert type(encoder.scorer()) is type(encoder.text_scorer()) is FairScorer


# What the parts add


def test_documents(encoder: FairBiEncoder, docs: pd.DataFrame) -> None:
    docs["url"] = "u"
    before = docs.copy()
    expected = encoder.encode_docs(TEXTS)
    for result in (encoder.doc_encoder()(docs), encoder(docs)):
        assert list(result.columns) == ["docno", "text", "url", "doc_vec"]
        assert np.array_equal(matrix(result["doc_vec"]), expected)
        assert result["doc_vec"].iloc[0].dtype == np.float32
    pd.testing.assert_frame_equal(docs, before)


def test_queries(encoder: FairBiEncoder, topics: pd.DataFrame) -> None:
    topics["place"] = "end"
    before = topics.copy()
    for result in (encoder.query_encoder()(topics), encoder(topics)):
        assert list(result.columns) == ["qid", "query", "place", "query_vec"]
        assert np.array_equal(matrix(result["query_vec"]), encoder.encode_queries(QUERIES))
    pd.testing.assert_frame_equal(topics, before)


def test_scores(encoder: FairBiEncoder, pairs: pd.DataFrame) -> None:
    before = pairs.copy()
    products = (encoder.encode_queries(QUERIES) @ encoder.encode_docs(TEXTS).T).ravel()
    for result in (encoder.scorer()(pairs), encoder(pairs)):
        assert list(result.columns) == ["qid", "query", "docno", "text", "score", "rank"]
        by_pair = result.set_index(["qid", "docno"])["score"].reindex(
            list(zip(pairs["qid"], pairs["docno"], strict=True))
        )
        np.testing.assert_allclose(by_pair, products, atol=1e-6)
        for _, ranked in result.groupby("qid"):
            ranked = ranked.sort_values("rank")
            assert list(ranked["rank"]) == list(range(len(TEXTS)))
            assert ranked["score"].is_monotonic_decreasing
    pd.testing.assert_frame_equal(pairs, before)


def test_vectors_that_are_there_are_used(
    encoder: FairBiEncoder, make_encoder: MakeEncoder, pairs: pd.DataFrame
) -> None:
    full = encoder.doc_encoder()(encoder.query_encoder()(pairs))
    expected = encoder.scorer()(pairs).set_index(["qid", "docno"])["score"]
    other = make_encoder(strength=0)  # would give the documents other vectors
    for columns in (["query_vec", "doc_vec"], ["query", "doc_vec"]):
        frame = full[["qid", "docno", *columns]]
        for scorer in (other.scorer(), other):
            result = scorer(frame)
            assert list(result.columns) == ["qid", "docno", *columns, "score", "rank"]
            np.testing.assert_array_equal(result.set_index(["qid", "docno"])["score"].loc[expected.index], expected)
    assert other.counts == DocumentCounts()
    frame = full[["qid", "docno", "query_vec", "text"]]
    result = encoder.scorer()(frame).set_index(["qid", "docno"])["score"]
    np.testing.assert_array_equal(result.loc[expected.index], expected)


def test_records_instead_of_frames(encoder: FairBiEncoder, docs: pd.DataFrame) -> None:
    records = list(encoder.doc_encoder()(docs.to_dict(orient="records")))
    assert [r["docno"] for r in records] == list(docs["docno"])
    assert np.array_equal(np.stack([r["doc_vec"] for r in records]), encoder.encode_docs(TEXTS))


def test_streams_of_records(make_encoder: MakeEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_module, "WINDOW", 3)
    encoder = make_encoder()
    texts = [TEXTS[i] for i in (0, 1, 0, 1, 1, 2, 3)]
    read = []

    def records() -> Iterator[dict[str, str]]:
        for i, text in enumerate(texts):
            read.append(i)
            yield {"docno": f"d{i}", "text": text, "url": "u"}

    stream = encoder.doc_encoder()(records())
    assert read == []
    first = next(stream)
    assert read == [0, 1, 2, 3, 4, 5]  # the window and the next one
    result = [first, *stream]
    assert [list(r) for r in result] == [["docno", "text", "url", "doc_vec"]] * 7
    assert [r["docno"] for r in result] == [f"d{i}" for i in range(7)]
    assert encoder.counts.documents == 2 + 2 + 1  # every distinct text of a window once
    np.testing.assert_allclose(np.stack([r["doc_vec"] for r in result]), encoder.encode_docs(texts), atol=2e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda encoder: setattr(encoder, "max_seq_length", 64),
        lambda encoder: setattr(encoder, "strength", 0.1),
        lambda encoder: setattr(encoder, "basket_size", 16),
        lambda encoder: encoder.calibrated_model().prompts.update(document="kir "),
        lambda encoder: next(encoder.calibrated_model().parameters()).data.mul_(1.1),
    ],
)
def test_an_encoder_that_is_changed_in_mid_stream_is_refused(
    make_encoder: MakeEncoder, monkeypatch: pytest.MonkeyPatch, change: Callable[[FairBiEncoder], object]
) -> None:
    monkeypatch.setattr(columns_module, "WINDOW", 3)
    encoder = make_encoder()
    stream = encoder.doc_encoder()({"docno": f"d{i}", "text": text} for i, text in enumerate(TEXTS[:6]))
    next(stream)
    change(encoder)
    encoder.encode_queries(["bal"])  # applies what was set to the model
    assert [record["docno"] for record in (next(stream), next(stream))] == ["d1", "d2"]  # were encoded before
    with pytest.raises(ValueError, match=r"encoder: FairBiEncoder\(.* was changed while it encoded a stream"):
        next(stream)


def test_streams_of_frames(encoder: FairBiEncoder, docs: pd.DataFrame) -> None:
    records = list(encoder.doc_encoder().transform_iter(docs.set_index(docs.index[::-1])))
    assert [r["docno"] for r in records] == list(docs["docno"])
    assert np.array_equal(np.stack([r["doc_vec"] for r in records]), encoder.encode_docs(TEXTS))


def test_streams_that_are_no_documents(encoder: FairBiEncoder) -> None:
    doc_encoder = encoder.doc_encoder()
    assert list(doc_encoder(iter([]))) == []
    with pytest.raises(pt.validate.InputValidationError, match="text"):
        list(doc_encoder([{"docno": "a", "body": "bal"}]))
    with pytest.raises(ValueError, match=re.escape("text: 1 of 2 texts are missing (docno 'b')")):
        list(doc_encoder([{"docno": "a", "text": "bal"}, {"docno": "b"}]))
    with pytest.raises(TypeError, match=re.escape("text: expected str, got int (row 1)")):
        list(doc_encoder([{"text": "bal"}, {"text": 3}]))


def test_the_bar_of_a_stream(make_encoder: MakeEncoder, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = make_encoder(verbose=True)
    capsys.readouterr()
    list(encoder.doc_encoder()([{"docno": str(i), "text": text} for i, text in enumerate([*TEXTS, *TEXTS])]))
    assert re.search(r"Encoding: 100%.*16/16 .*doc/s", capsys.readouterr().err)


def test_a_similarity_other_than_the_dot_product(encoder: FairBiEncoder) -> None:
    assert encoder.scorer(sim_fn=SimFn.dot) == encoder.scorer()
    with pytest.raises(ValueError, match=r"sim_fn: expected SimFn\.dot"):
        encoder.scorer(sim_fn=SimFn.cos)


# Frames of all kinds


@pytest.mark.parametrize("dtype", ["str", "string", "string[python]", "object", "category", "numpy"])
def test_dtypes_of_text(encoder: FairBiEncoder, dtype: str) -> None:
    def column(texts: list[str]) -> pd.Series:
        if dtype == "numpy":
            return pd.Series([np.str_(text) for text in texts], dtype=object)
        return pd.Series(texts).astype(dtype)

    docs = pd.DataFrame({"docno": column([f"d{i}" for i in range(len(TEXTS))]), "text": column(TEXTS)})
    assert np.array_equal(matrix(encoder(docs)["doc_vec"]), encoder.encode_docs(TEXTS))
    topics = pd.DataFrame({"qid": column([f"q{i}" for i in range(len(QUERIES))]), "query": column(QUERIES)})
    assert np.array_equal(matrix(encoder(topics)["query_vec"]), encoder.encode_queries(QUERIES))
    n = len(QUERIES)
    both = pd.DataFrame(
        {"qid": column(["q"] * n), "docno": column(list("abcdef")), "query": column(QUERIES), "text": column(TEXTS[:n])}
    )
    products = (encoder.encode_queries(QUERIES) * encoder.encode_docs(TEXTS[:n])).sum(axis=1)
    scores = encoder(both).set_index("docno")["score"]
    np.testing.assert_allclose([scores[d] for d in "abcdef"], products, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ([1, 2, 3], "int"),
        ([1.5, 2.5, 3.5], "float"),
        ([True, False, True], "bool"),
        ([b"a", "bal", ["x"]], "bytes, list"),
    ],
)
def test_texts_that_are_no_strings(encoder: FairBiEncoder, values: list[Any], kinds: str) -> None:
    named = "'a', 'c'" if "bytes" in kinds else "'a', 'b', 'c'"
    docs = pd.DataFrame({"docno": list("abc"), "text": values})
    for transformer in (encoder, encoder.doc_encoder()):
        with pytest.raises(TypeError, match=re.escape(f"text: expected str, got {kinds} (docno {named})")):
            transformer(docs)
    topics = pd.DataFrame({"qid": list("abc"), "query": values})
    with pytest.raises(TypeError, match=re.escape(f"query: expected str, got {kinds} (qid {named})")):
        encoder(topics)


@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA, np.nan, pd.NaT])
@pytest.mark.parametrize("dtype", ["object", "str", "string", "category"])
def test_missing_texts_are_named(encoder: FairBiEncoder, missing: Any, dtype: str) -> None:
    values = pd.Series(["bal", missing, "gos", missing], dtype=object).astype(dtype)
    text = re.escape("text: 2 of 4 texts are missing (docno 'b', 'd'); drop these records, or give them the text ''")
    docs = pd.DataFrame({"docno": list("abcd"), "text": values})
    for transformer in (encoder, encoder.doc_encoder()):
        with pytest.raises(ValueError, match=text):
            transformer(docs)
    topics = pd.DataFrame({"qid": list("abcd"), "query": values})
    for transformer in (encoder, encoder.query_encoder()):
        with pytest.raises(ValueError, match=re.escape("query: 2 of 4 texts are missing (qid 'b', 'd')")):
            transformer(topics)
    both = pd.DataFrame({"qid": ["q"] * 4, "query": ["bal"] * 4, "docno": list("abcd"), "text": values})
    with pytest.raises(ValueError, match=text):
        encoder(both)
    assert len(encoder(docs.dropna(subset=["text"]))) == 2


def test_errors_name_the_first_few_records(encoder: FairBiEncoder) -> None:
    docs = pd.DataFrame({"docno": list(range(10, 18)), "text": [None] * 8})
    text = "text: 8 of 8 texts are missing (docno 10, 11, 12, 13, 14, ...)"
    with pytest.raises(ValueError, match=re.escape(text)):
        encoder.doc_encoder()(docs)


def test_errors_without_a_docno_name_the_rows(encoder: FairBiEncoder) -> None:
    docs = pd.DataFrame({"text": ["bal", None, "gos"]}, index=[5, 5, 6])
    with pytest.raises(ValueError, match=re.escape("text: 1 of 3 texts are missing (row 5)")):
        encoder.doc_encoder()(docs)


@pytest.mark.parametrize("index", [[7] * 8, list(range(20, 28)), list("abcdefgh"), [3, 1, 3, 0, 2, 2, 9, 1]])
def test_any_index(encoder: FairBiEncoder, docs: pd.DataFrame, index: list[Any]) -> None:
    docs.index = pd.Index(index)
    result = encoder.doc_encoder()(docs)
    assert list(result.index) == index
    assert np.array_equal(matrix(result["doc_vec"]), encoder.encode_docs(TEXTS))
    topics = docs.rename(columns={"docno": "qid", "text": "query"})
    result = encoder.query_encoder()(topics)
    assert list(result.index) == index
    assert np.array_equal(matrix(result["query_vec"]), encoder.encode_queries(TEXTS))
    scored = encoder(docs.assign(qid="q", query=QUERIES[0])).set_index("docno")["score"]
    products = encoder.encode_docs(TEXTS) @ encoder.encode_queries(QUERIES[:1])[0]
    np.testing.assert_allclose([scored[f"d{i}"] for i in range(8)], products, atol=1e-6)


def test_missing_texts_in_a_frame_with_a_duplicate_index(encoder: FairBiEncoder) -> None:
    docs = pd.DataFrame({"docno": list("abc"), "text": ["bal", None, "gos"]}, index=[0, 0, 0])
    with pytest.raises(ValueError, match=re.escape("text: 1 of 3 texts are missing (docno 'b')")):
        encoder.doc_encoder()(docs)


def test_duplicates(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder()
    docs = pd.DataFrame({"docno": ["a", "b", "a", "a"], "text": [TEXTS[0], TEXTS[1], TEXTS[0], TEXTS[2]]})
    result = encoder(docs)
    assert list(result["docno"]) == list(docs["docno"])
    assert np.array_equal(matrix(result["doc_vec"]), encoder.encode_docs(TEXTS[:3])[[0, 1, 0, 2]])
    encoder = make_encoder()
    encoder(docs)
    assert encoder.counts.documents == 3  # every distinct text once
    topics = pd.DataFrame({"qid": ["1", "2", "1"], "query": ["bal", "gos", "bal"]})
    assert np.array_equal(matrix(encoder(topics)["query_vec"]), encoder.encode_queries(["bal", "gos"])[[0, 1, 0]])


def test_a_document_retrieved_by_many_queries_is_encoded_once(make_encoder: MakeEncoder, pairs: pd.DataFrame) -> None:
    encoder = make_encoder()
    encoder(pairs)
    assert encoder.counts.documents == len(TEXTS)


def test_empty_text(encoder: FairBiEncoder) -> None:
    docs = pd.DataFrame({"docno": list("abc"), "text": ["", " ", TEXTS[0]]})
    vectors = matrix(encoder(docs)["doc_vec"])
    assert np.isfinite(vectors).all()
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    topics = pd.DataFrame({"qid": ["q"], "query": [""]})
    assert np.array_equal(matrix(encoder(topics)["query_vec"]), encoder.encode_queries([""]))


def test_integer_ids(encoder: FairBiEncoder, pairs: pd.DataFrame) -> None:
    pairs = pairs.assign(qid=pairs["qid"].str[1:].astype(int), docno=pairs["docno"].str[1:].astype(int))
    result = encoder(pairs)
    assert set(result["docno"]) == set(range(len(TEXTS)))
    assert result.groupby("qid")["rank"].max().eq(len(TEXTS) - 1).all()


def test_one_row(encoder: FairBiEncoder, pairs: pd.DataFrame) -> None:
    result = encoder(pairs.iloc[:1])
    assert list(result["rank"]) == [0]


# Settings are read when a part runs


class BatchSizes:
    """Records the size of every forward pass of an encoder."""

    def __init__(self, encoder: FairBiEncoder) -> None:
        self.sizes: list[int] = []
        encoder.calibrated_model()[0].register_forward_pre_hook(self._record)

    def _record(self, _module: torch.nn.Module, args: tuple[dict[str, torch.Tensor]]) -> None:
        self.sizes.append(args[0]["input_ids"].shape[0])

    def take(self) -> list[int]:
        sizes, self.sizes = self.sizes, []
        return sizes


def test_batch_size_is_live(make_encoder: MakeEncoder, docs: pd.DataFrame, topics: pd.DataFrame) -> None:
    encoder = make_encoder()
    doc_encoder, query_encoder, scorer = encoder.doc_encoder(), encoder.query_encoder(), encoder.scorer()
    sizes = BatchSizes(encoder)
    doc_encoder(docs)
    assert sizes.take() == [8]
    encoder.batch_size = 3
    for transformer in (doc_encoder, query_encoder, scorer):
        assert transformer.batch_size == 3
    doc_encoder(docs)
    assert sizes.take() == [3, 3, 2]
    query_encoder(topics)
    assert sizes.take() == [3, 3]
    scorer(docs.assign(qid="q", query="bal"))
    assert sizes.take() == [1, 3, 3, 2]
    doc_encoder.batch_size = 4
    doc_encoder(docs)
    assert sizes.take() == [4, 4]
    assert encoder.batch_size == 3
    encoder.doc_encoder(batch_size=5)(docs)
    assert sizes.take() == [5, 3]
    encoder.query_encoder(batch_size=4)(topics)
    assert sizes.take() == [4, 2]
    encoder.scorer(batch_size=8)(docs.assign(qid="q", query="bal"))
    assert sizes.take() == [1, 8]


def test_text_field_is_live(make_encoder: MakeEncoder, docs: pd.DataFrame) -> None:
    encoder = make_encoder()
    doc_encoder, scorer = encoder.doc_encoder(), encoder.scorer()
    frame = docs.rename(columns={"text": "body"}).assign(text="bal", qid="q", query=QUERIES[0])
    encoder.text_field = "body"
    expected = encoder.encode_docs(TEXTS)
    assert doc_encoder.text_field == scorer.text_field == "body"
    assert np.array_equal(matrix(doc_encoder(frame)["doc_vec"]), expected)
    products = expected @ encoder.encode_queries(QUERIES[:1])[0]
    for transformer in (scorer, encoder):
        scores = transformer(frame).set_index("docno")["score"]
        np.testing.assert_allclose([scores[f"d{i}"] for i in range(8)], products, atol=1e-6)
    with pytest.raises(ValueError, match=re.escape("body: 1 of 1 texts are missing (docno 'x')")):
        doc_encoder(pd.DataFrame({"docno": ["x"], "body": [None]}))


def test_verbose_is_live(
    make_encoder: MakeEncoder,
    docs: pd.DataFrame,
    topics: pd.DataFrame,
    pairs: pd.DataFrame,
    capsys: pytest.CaptureFixture[str],
) -> None:
    encoder = make_encoder()
    runs = [
        (encoder.doc_encoder(), docs),
        (encoder.query_encoder(), topics),
        (encoder.scorer(), pairs),
        (encoder, docs),
        (encoder, pairs),
    ]
    capsys.readouterr()
    for transformer, frame in runs:
        transformer(frame)
        captured = capsys.readouterr()
        assert captured.out + captured.err == ""
    encoder.verbose = True
    for transformer, frame in runs:
        transformer(frame)
        assert "100%" in capsys.readouterr().err
    encoder.doc_encoder(verbose=False)(docs)
    encoder.query_encoder(verbose=False)(topics)
    encoder.scorer(verbose=False)(pairs)
    assert capsys.readouterr().err == ""
    encoder.verbose = False
    encoder.scorer(verbose=True)(pairs)
    assert capsys.readouterr().err.count("100%") >= 2


# Equality, hash, repr


def test_equal_settings_are_equal(make_encoder: MakeEncoder) -> None:
    one, other = make_encoder(), make_encoder()
    for part in ("query_encoder", "doc_encoder", "scorer"):
        a, b = getattr(one, part)(), getattr(other, part)()
        assert a == b
        assert hash(a) == hash(b)
        assert repr(a) == repr(b) == f"{one!r}.{part}()"
        assert a != one
        assert a != "part"


def test_two_strengths_are_unequal(make_encoder: MakeEncoder) -> None:
    one, other = make_encoder(strength=0.5), make_encoder(strength=1.0)
    for part in ("doc_encoder", "scorer"):
        a, b = getattr(one, part)(), getattr(other, part)()
        assert a != b
        assert hash(a) != hash(b)
        assert repr(a) != repr(b)
        assert "strength=0.5" in repr(a)
    assert len({one.doc_encoder(), other.doc_encoder(), one.doc_encoder()}) == 2


def test_query_encoders_are_equal_whatever_the_calibration(make_encoder: MakeEncoder) -> None:
    one, other = make_encoder().query_encoder(), make_encoder(strength=0.1, basket_size=50, layers=1).query_encoder()
    assert one == other
    assert hash(one) == hash(other)
    assert np.array_equal(one.encode(QUERIES), other.encode(QUERIES))


@pytest.mark.parametrize(("name", "value"), [("max_seq_length", 4), ("normalize", False)])
def test_query_encoders_are_unequal_where_queries_differ(make_encoder: MakeEncoder, name: str, value: Any) -> None:
    one, other = make_encoder().query_encoder(), make_encoder(**{name: value}).query_encoder()
    assert one != other
    assert not np.allclose(one.encode(QUERIES), other.encode(QUERIES))


def test_query_encoders_of_other_models_are_unequal(make_encoder: MakeEncoder) -> None:
    assert make_encoder("bert", "cls").query_encoder() != make_encoder("bert", "mean").query_encoder()


def test_equality_follows_the_settings(make_encoder: MakeEncoder) -> None:
    one, other = make_encoder(strength=0.5), make_encoder(strength=1.0)
    doc_encoder, scorer = one.doc_encoder(), one.scorer()
    one.strength = 1.0
    assert doc_encoder == other.doc_encoder()
    assert scorer == other.scorer()
    assert hash(doc_encoder) == hash(other.doc_encoder())
    one.text_field = "body"
    assert doc_encoder != other.doc_encoder()
    assert scorer != other.scorer()


def test_the_parts_are_unequal_to_each_other(encoder: FairBiEncoder) -> None:
    parts = [encoder, encoder.query_encoder(), encoder.doc_encoder(), encoder.scorer()]
    assert len(set(parts)) == 4
