"""The encoder inside of PyTerrier: experiments, grid searches, dense indexes, and BM25 before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from ir_measures import RR, Measure, nDCG
from pyterrier_dr import FlexIndex
from pyterrier_pisa import PisaIndex
from sentence_transformers import SentenceTransformer

from fair_evaluation import position_sensitivity_index
from fair_evaluation.position_collections import (
    PLACES,
    PositionCollection,
    PositionQuery,
    build_collections,
    load_passages,
)
from pyterrier_fair import FairBiEncoder, PositionDataset
from tests.conftest import TinyModel
from tests.core.tiny_models import document
from tests.pyterrier.conftest import QUERIES, TEXTS, MakeEncoder

MEASURES: list[Measure] = [nDCG @ 10, RR @ 10]
GRID_METRIC = "ndcg_cut_10"  # grids take names alone


def evaluate(pipelines: list[pt.Transformer], topics: pd.DataFrame, qrels: pd.DataFrame, **kwargs: Any) -> np.ndarray:
    """Returns the measures of every query, pipeline by pipeline."""
    names = [str(i) for i in range(len(pipelines))]
    frame = pt.Experiment(pipelines, topics, qrels, MEASURES, names=names, perquery=True, **kwargs)
    table = frame.pivot_table(index=["name", "measure"], columns="qid", values="value", aggfunc="sum")
    return np.stack([table.loc[name].to_numpy() for name in names])


def by_pair(result: pd.DataFrame) -> dict[tuple[str, str], float]:
    return dict(zip(zip(result["qid"], result["docno"], strict=True), result["score"], strict=True))


# Experiments


@pytest.mark.parametrize("options", [{}, {"plan": "tree"}, {"precompute_prefix": True}, {"batch_size": 2}])
@pytest.mark.parametrize("shape", ["encoder", "scorer", "doc_encoder"])
def test_two_strengths_of_one_model_in_one_experiment(
    tiny_model: TinyModel,
    candidates: pt.Transformer,
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
    shape: str,
    options: dict[str, Any],
) -> None:
    model = tiny_model("bert", "mean")
    encoders = [FairBiEncoder(model, basket_size=8, strength=strength) for strength in (0.0, 1.0)]
    scorer = encoders[0].scorer()

    def pipeline(encoder: FairBiEncoder) -> pt.Transformer:
        if shape == "doc_encoder":
            return candidates >> encoder.query_encoder() >> encoder.doc_encoder() >> scorer
        return candidates >> (encoder if shape == "encoder" else encoder.scorer())

    together = evaluate([pipeline(e) for e in encoders], topics, qrels, **options)
    apart = np.concatenate([evaluate([pipeline(e)], topics, qrels) for e in encoders])
    assert np.array_equal(together, apart)
    assert not np.array_equal(together[0], together[1])


def test_an_experiment_on_one_index_per_strength(
    make_encoder: MakeEncoder, topics: pd.DataFrame, docs: pd.DataFrame, qrels: pd.DataFrame, tmp_path: Path
) -> None:
    """The query encoder is shared: in a tree it runs once."""
    pipelines = []
    for strength in (0.0, 1.0):
        encoder = make_encoder("bert", "mean", strength=strength)
        index = FlexIndex(str(tmp_path / str(strength)), verbose=False)
        (encoder.doc_encoder() >> index).index(docs.to_dict(orient="records"))
        pipelines.append(encoder.query_encoder() >> index.np_retriever())
    tree = evaluate(pipelines, topics, qrels, plan="tree")
    apart = np.concatenate([evaluate([p], topics, qrels) for p in pipelines])
    assert np.array_equal(tree, apart)
    assert not np.array_equal(tree[0], tree[1])


# Grids

GRID = {"strength": [0.0, 0.5, 1.0], "basket_size": [8, 24]}


@pytest.fixture
def separate(
    tiny_model: TinyModel, candidates: pt.Transformer, topics: pd.DataFrame, qrels: pd.DataFrame
) -> tuple[SentenceTransformer, dict[tuple[float, int], float]]:
    """Returns a model, and the nDCG@10 of encoders of it built separately for every setting of the grid."""
    model = tiny_model("bert", "mean")
    scores = {
        (s, b): evaluate([candidates >> FairBiEncoder(model, strength=s, basket_size=b)], topics, qrels)[0, 1].mean()
        for s in GRID["strength"]
        for b in map(int, GRID["basket_size"])
    }
    return model, scores


@pytest.mark.parametrize("shape", ["encoder", "scorer", "doc_encoder"])
def test_a_grid_scan(
    separate: tuple[SentenceTransformer, dict[tuple[float, int], float]],
    candidates: pt.Transformer,
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
    shape: str,
) -> None:
    model, expected = separate
    encoder = FairBiEncoder(model, strength=0.3, basket_size=10)
    pipeline = {
        "encoder": candidates >> encoder,
        "scorer": candidates >> encoder.scorer(),
        "doc_encoder": candidates >> encoder.doc_encoder() >> encoder.scorer(),
    }[shape]
    table = pt.GridScan(pipeline, {encoder: GRID}, topics, qrels, [GRID_METRIC])
    found = {
        (s, b): v
        for s, b, v in zip(table["tran_0_strength"], table["tran_1_basket_size"], table[GRID_METRIC], strict=True)
    }
    assert found == pytest.approx(expected)
    assert len({round(v, 9) for (s, _), v in expected.items() if s > 0}) == 4
    assert expected[0.0, 8] == expected[0.0, 24]


def test_a_grid_search(
    separate: tuple[SentenceTransformer, dict[tuple[float, int], float]],
    candidates: pt.Transformer,
    topics: pd.DataFrame,
    qrels: pd.DataFrame,
) -> None:
    model, expected = separate
    encoder = FairBiEncoder(model, strength=0.3, basket_size=10)
    pipeline = candidates >> encoder
    best, value, settings = pt.GridSearch(pipeline, {encoder: GRID}, topics, qrels, GRID_METRIC, return_type="both")
    assert value == pytest.approx(max(expected.values()))
    found = {name: setting for _, name, setting in settings}
    assert expected[found["strength"], found["basket_size"]] == pytest.approx(value)
    assert best is pipeline
    assert (encoder.strength, encoder.basket_size) == (found["strength"], found["basket_size"])
    assert evaluate([pipeline], topics, qrels)[0, 1].mean() == pytest.approx(value)


def test_a_grid_of_two_encoders(
    tiny_model: TinyModel, candidates: pt.Transformer, topics: pd.DataFrame, qrels: pd.DataFrame
) -> None:
    """Encoders that differ in what the grid leaves alone: GridScan merges parameters of equal transformers."""
    model = tiny_model("bert", "mean")
    one, other = FairBiEncoder(model, basket_size=4), FairBiEncoder(model, basket_size=8, layers="all")
    grid = {one: {"strength": [0.0, 1.0]}, other: {"strength": [0.0, 1.0]}}
    table = pt.GridScan((candidates >> one) + (candidates >> other), grid, topics, qrels, [GRID_METRIC])
    columns = (table["tran_0_strength"], table["tran_1_strength"], table[GRID_METRIC])
    for strength, other_strength, value in zip(*columns, strict=True):
        first = candidates >> FairBiEncoder(model, basket_size=4, strength=strength)
        second = candidates >> FairBiEncoder(model, basket_size=8, layers="all", strength=other_strength)
        assert evaluate([first + second], topics, qrels)[0, 1].mean() == pytest.approx(value)
    assert len(table) == 4
    assert table[GRID_METRIC].nunique() > 1


def test_a_grid_of_the_settings_of_a_part(
    make_encoder: MakeEncoder, candidates: pt.Transformer, topics: pd.DataFrame, qrels: pd.DataFrame
) -> None:
    encoder = make_encoder()
    doc_encoder = encoder.doc_encoder()
    pipeline = candidates >> doc_encoder >> encoder.scorer()
    table = pt.GridScan(pipeline, {doc_encoder: {"batch_size": [1, 4]}}, topics, qrels, [GRID_METRIC])
    assert list(table["tran_0_batch_size"]) == [1, 4]
    assert table[GRID_METRIC].nunique() == 1
    assert (doc_encoder.batch_size, encoder.batch_size) == (4, 32)


def test_a_setting_that_there_is_not(
    make_encoder: MakeEncoder, candidates: pt.Transformer, topics: pd.DataFrame, qrels: pd.DataFrame
) -> None:
    encoder = make_encoder()
    with pytest.raises(ValueError, match="does not expose a parameter named stregth"):
        pt.GridScan(candidates >> encoder, {encoder: {"stregth": [0, 1]}}, topics, qrels, [GRID_METRIC])


# Dense retrieval


@pytest.mark.parametrize(("family", "pooling"), [("bert", "cls"), ("xlm_roberta", "mean"), ("qwen3", "lasttoken")])
def test_dense_retrieval_scores_as_the_scorer_and_as_the_model(
    make_encoder: MakeEncoder,
    family: str,
    pooling: str,
    docs: pd.DataFrame,
    topics: pd.DataFrame,
    pairs: pd.DataFrame,
    tmp_path: Path,
) -> None:
    encoder = make_encoder(family, pooling)
    index = FlexIndex(str(tmp_path / "index"), verbose=False)
    (encoder.doc_encoder() >> index).index(docs.to_dict(orient="records"))
    assert len(index) == len(TEXTS)
    retrieved = (encoder.query_encoder() >> index.np_retriever(num_results=20))(topics)
    reranked = encoder.scorer()(pairs)
    model = encoder.calibrated_model()
    vectors = model.encode_document(TEXTS, strength=0.8, normalize_embeddings=True)
    products = model.encode_query(QUERIES, normalize_embeddings=True) @ vectors.T
    expected = {(f"q{i}", f"d{j}"): products[i, j] for i in range(len(QUERIES)) for j in range(len(TEXTS))}
    for result in (retrieved, reranked, (encoder.query_encoder() >> index.np_scorer())(pairs)):
        assert by_pair(result) == pytest.approx(expected, abs=1e-5)
    tops = [r[r["rank"] == 0].set_index("qid")["docno"].sort_index() for r in (retrieved, reranked)]
    assert list(tops[0]) == list(tops[1])


def test_other_retrievers_of_the_index(
    make_encoder: MakeEncoder, docs: pd.DataFrame, topics: pd.DataFrame, tmp_path: Path
) -> None:
    encoder = make_encoder()
    index = FlexIndex(str(tmp_path / "index"), verbose=False)
    (encoder.doc_encoder() >> index).index(docs.to_dict(orient="records"))
    expected = by_pair((encoder.query_encoder() >> index.np_retriever(num_results=5))(topics))
    for retriever in (index.torch_retriever(num_results=5, device="cpu", fp16=False), index.retriever() % 5):
        assert by_pair((encoder.query_encoder() >> retriever)(topics)) == pytest.approx(expected, abs=1e-5)


def test_an_index_is_of_the_settings_when_it_was_built(
    make_encoder: MakeEncoder, docs: pd.DataFrame, tmp_path: Path
) -> None:
    encoder = make_encoder()
    doc_encoder = encoder.doc_encoder()
    for strength in (0.0, 1.0):
        encoder.strength = strength
        index = FlexIndex(str(tmp_path / str(strength)), verbose=False)
        (doc_encoder >> index).index(docs.to_dict(orient="records"))
        stored = np.stack([record["doc_vec"] for record in index.get_corpus_iter()])
        assert np.array_equal(stored, make_encoder(strength=strength).encode_docs(TEXTS))


class Chunks(FlexIndex):
    """Records how many documents the source had given away whenever a vector arrives."""

    def index(self, inp: Iterable[dict[str, Any]]) -> Any:
        return super().index(self._recorded(inp))

    def _recorded(self, inp: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for record in inp:
            self.read.append(self.given)
            yield record

    def give(self, n_documents: int) -> Iterator[dict[str, str]]:
        self.read: list[int] = []
        for self.given in range(1, n_documents + 1):
            yield {"docno": f"d{self.given}", "text": TEXTS[self.given % len(TEXTS)]}


def test_indexing_sees_the_whole_collection_as_one_stream(make_encoder: MakeEncoder, tmp_path: Path) -> None:
    doc_encoder = make_encoder().doc_encoder()
    index = Chunks(str(tmp_path / "index"), verbose=False)
    pipeline = doc_encoder >> index
    assert pipeline.index(index.give(250)) is index
    assert index.read == [250] * 250  # one window
    assert len(index) == 250
    stored = np.stack([record["doc_vec"] for record in index.get_corpus_iter()])
    texts = [TEXTS[i % len(TEXTS)] for i in range(1, 251)]
    np.testing.assert_allclose(stored, doc_encoder.encode(texts), atol=2e-6)
    assert isinstance(pipeline, pt.Compose)
    assert pipeline == pt.Compose(doc_encoder, index)
    assert repr(pipeline) == repr(pt.Compose(doc_encoder, index))
    # As many at a time as is said, or as PyTerrier takes.
    other = Chunks(str(tmp_path / "other"), verbose=False)
    (doc_encoder >> other).index(other.give(250), batch_size=50)
    assert sorted(set(other.read)) == [50, 100, 150, 200, 250]
    behind = Chunks(str(tmp_path / "behind"), verbose=False)
    (pt.Transformer.identity() >> (doc_encoder >> behind)).index(behind.give(250))
    assert sorted(set(behind.read)) == [100, 200, 250]


@pytest.mark.parametrize("batch_size", [None, 3])
def test_indexing_a_frame(
    make_encoder: MakeEncoder, docs: pd.DataFrame, tmp_path: Path, batch_size: int | None
) -> None:
    doc_encoder = make_encoder().doc_encoder()
    index = FlexIndex(str(tmp_path / "index"), verbose=False)
    (doc_encoder >> index).index(docs.assign(url="u"), batch_size=batch_size)
    stored = list(index.get_corpus_iter())
    assert [record["docno"] for record in stored] == list(docs["docno"])
    np.testing.assert_allclose(np.stack([record["doc_vec"] for record in stored]), doc_encoder.encode(TEXTS), atol=2e-6)
    twice = pd.concat([docs, docs[["text"]]], axis=1)
    with pytest.raises(ValueError, match="text: expected one column of this name, got 2; rename the others"):
        (doc_encoder >> FlexIndex(str(tmp_path / "other"))).index(twice, batch_size=batch_size)


def test_a_document_without_text_stops_the_index(make_encoder: MakeEncoder, tmp_path: Path) -> None:
    documents = [{"docno": "a", "text": "bal"}, {"docno": "b", "text": None}]
    index = FlexIndex(str(tmp_path / "index"), verbose=False)
    with pytest.raises(ValueError, match=r"text: 1 of 2 texts are missing \(docno 'b'\)"):
        (make_encoder().doc_encoder() >> index).index(documents)


# BM25 before it


@pytest.fixture
def dataset() -> PositionDataset:
    documents = tuple({"docno": f"d{i}", "text": text} for i, text in enumerate(TEXTS))
    queries = tuple(
        PositionQuery(
            qid=f"q{i}", query=" ".join(text.split()[-2:]), docno=f"d{i}", place="end", index=2, question=f"q{i}"
        )
        for i, text in enumerate(TEXTS)
    )
    return PositionDataset(PositionCollection(documents=documents, queries=queries))


def test_bm25_then_the_encoder(make_encoder: MakeEncoder, dataset: PositionDataset, tmp_path: Path) -> None:
    pisa = PisaIndex(str(tmp_path / "bm25"), text_field="text", overwrite=True)
    pisa.index(dataset.get_corpus_iter(verbose=False))
    bm25 = pisa.bm25(num_results=5)
    encoder = make_encoder()
    topics = dataset.get_topics()
    first = bm25(topics)
    result = (bm25 >> pt.text.get_text(dataset) >> encoder)(topics)
    assert {"qid", "query", "docno", "text", "score", "rank", "place"} <= set(result.columns)
    assert sorted(zip(result["qid"], result["docno"], strict=True)) == sorted(
        zip(first["qid"], first["docno"], strict=True)
    )
    assert len(result) > len(topics)
    queries = encoder.encode_queries(list(topics["query"]))
    vectors = encoder.encode_docs(TEXTS)
    expected = {(q, d): queries[int(q[1:])] @ vectors[int(d[1:])] for q, d in by_pair(result)}
    assert by_pair(result) == pytest.approx(expected, abs=1e-5)
    for _, ranked in result.groupby("qid"):
        assert sorted(ranked["rank"]) == list(range(len(ranked)))
        assert ranked.sort_values("rank")["score"].is_monotonic_decreasing
    nothing = (bm25 >> pt.text.get_text(dataset) >> encoder)(topics.assign(query=document(1, seed=3) + "xyz"))
    assert len(nothing) == 0
    table = pt.Experiment([bm25, bm25 >> pt.text.get_text(dataset) >> encoder], topics, dataset.get_qrels(), MEASURES)
    assert table["nDCG@10"].between(0, 1).all()


def test_calibration_makes_minilm_fairer(minilm: SentenceTransformer) -> None:
    """What all of this is for, on a part of the embedded passages."""
    collections = [PositionDataset(c) for c in build_collections(load_passages()[:24])]

    def ndcg_by_place(encoder: FairBiEncoder) -> dict[str, float]:
        frames = []
        for dataset in collections:
            documents = pd.DataFrame(dataset.get_corpus_iter(verbose=False))
            topics = dataset.get_topics()
            queries, vectors = encoder.query_encoder()(topics), encoder.doc_encoder()(documents)
            every = queries.merge(vectors.drop(columns="text"), how="cross")
            values = pd.DataFrame(
                nDCG(cutoff=3).iter_calc(
                    dataset.get_qrels().rename(columns={"qid": "query_id", "docno": "doc_id", "label": "relevance"}),
                    encoder.scorer()(every).rename(columns={"qid": "query_id", "docno": "doc_id"}),
                )
            )
            frames.append(topics.merge(values.rename(columns={"query_id": "qid"}), on="qid"))
        return dict(pd.concat(frames).groupby("place")["value"].mean())

    plain, fair = (ndcg_by_place(FairBiEncoder(minilm, strength=strength)) for strength in (0.0, 1.0))
    assert position_sensitivity_index([fair[p] for p in PLACES]) < position_sensitivity_index(
        [plain[p] for p in PLACES]
    )
    assert fair["end"] > plain["end"]


def test_a_pipeline_of_a_saved_calibrated_model(
    make_encoder: MakeEncoder, tiny_folder: Callable[..., Path], tmp_path: Path, pairs: pd.DataFrame
) -> None:
    encoder = make_encoder()
    encoder.calibrated_model().save(str(tmp_path / "saved"))
    again = FairBiEncoder(tmp_path / "saved", strength=0.8)
    assert again.config == encoder.config
    assert by_pair(again(pairs)) == by_pair(encoder(pairs))
    assert again != encoder  # another path
    assert FairBiEncoder(tiny_folder()).strength == 0.5
