from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from ir_measures import nDCG
from pyterrier_dr import FlexIndex

from pyterrier_fair import Dart, DartSettings, DartState, FairIndex
from pyterrier_fair.dart_scoring import adapted_scores
from tests.pyterrier.conftest import MakeEncoder

SETTINGS = DartSettings(n_pos=2, n_neg=4, temperature=0.3, alpha_mar=0.5)
N_QUERIES, N_DOCS, DIMENSION = 6, 9, 5


def vectors(rows: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).normal(size=(rows, DIMENSION)).astype(np.float32) + np.float32(0.5)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


QUERY_VECS, DOC_VECS = vectors(N_QUERIES, 1), vectors(N_DOCS, 2)


@pytest.fixture
def topics() -> pd.DataFrame:
    qids = [f"q{n}" for n in (3, 0, 5, 1, 4, 2)]
    return pd.DataFrame({"qid": qids, "query": [f"about {qid}" for qid in qids], "query_vec": list(QUERY_VECS)})


@pytest.fixture
def index(tmp_path: Path) -> FlexIndex:
    return make_index(tmp_path / "index.flex")


def make_index(path: Path, **settings: Any) -> FlexIndex:
    index = FlexIndex(str(path), verbose=False, **settings)
    index.index([{"docno": f"d{i}", "doc_vec": vector} for i, vector in enumerate(DOC_VECS)])
    return index


@pytest.fixture
def results(topics: pd.DataFrame, index: FlexIndex) -> pd.DataFrame:
    found = index.np_retriever()(topics)
    return index.vec_loader()(found)  # type: ignore[no-any-return]


def expected_scores(results: pd.DataFrame, state: DartState | None) -> list[float]:
    scores: list[float] = []
    for qid in results["qid"].unique():
        rows = results[results["qid"] == qid]
        query, documents = rows["query_vec"].iloc[0], np.stack(rows["doc_vec"])
        scores += adapted_scores(query.astype(float), documents.astype(float), SETTINGS, state).tolist()
    return scores


# Results


@pytest.mark.parametrize("with_index", [True, False])
def test_scores_and_ranks(results: pd.DataFrame, index: FlexIndex, with_index: bool) -> None:
    before = results.copy()
    inp = results.drop(columns="doc_vec") if with_index else results
    reranked = Dart(index if with_index else None, SETTINGS)(inp)
    assert reranked["score"].tolist() == expected_scores(results, DartState())
    ranks = reranked.groupby("qid", sort=False)["score"].rank(ascending=False, method="first").astype(int) - 1
    assert reranked["rank"].tolist() == ranks.tolist()
    assert (reranked["rank"] != inp["rank"]).any()
    assert list(reranked.columns) == list(inp.columns)
    others = [name for name in inp.columns if name not in ("score", "rank")]
    pd.testing.assert_frame_equal(reranked[others], inp[others])
    pd.testing.assert_frame_equal(results, before)  # the input stays as it is
    pd.testing.assert_frame_equal(Dart(index if with_index else None, SETTINGS)(inp), reranked)


def test_rows_may_come_in_any_order_and_with_any_index(results: pd.DataFrame) -> None:
    """Queries are taken in order of first appearance, here still the same one."""
    dart = Dart(None, SETTINGS)
    mixed = results.iloc[np.argsort(results["rank"], kind="stable")].set_index(np.arange(len(results)) * 2)
    assert mixed["qid"].unique().tolist() == results["qid"].unique().tolist()
    keys = ["qid", "docno"]
    pd.testing.assert_frame_equal(
        dart(mixed).sort_values(keys, ignore_index=True), dart(results).sort_values(keys, ignore_index=True)
    )
    assert dart(mixed).index.tolist() == mixed.index.tolist()


def test_the_frames_docids_are_not_used(results: pd.DataFrame, index: FlexIndex) -> None:
    """They may be those of the index of another first stage."""
    dart = Dart(index, SETTINGS)
    other = results.assign(docid=0)
    assert dart(other)["score"].tolist() == dart(results)["score"].tolist()


def test_an_index_with_the_cosine_compares_vectors_at_unit_length(
    tmp_path: Path, topics: pd.DataFrame, results: pd.DataFrame
) -> None:
    index = FlexIndex(str(tmp_path / "cos.flex"), sim_fn="cos", verbose=False)
    index.index([{"docno": f"d{i}", "doc_vec": (i + 1) * vector} for i, vector in enumerate(DOC_VECS)])
    retrieved = index.np_retriever()(topics.assign(query_vec=[3 * vector for vector in topics["query_vec"]]))
    same = results[["qid", "docno"]].merge(retrieved, on=["qid", "docno"])
    np.testing.assert_allclose(Dart(index, SETTINGS)(same)["score"], Dart(None, SETTINGS)(results)["score"], rtol=1e-5)


def test_a_fair_index(make_encoder: MakeEncoder, docs: pd.DataFrame, tmp_path: Path) -> None:
    encoder = make_encoder()
    fair = FairIndex(tmp_path / "fair", encoder)
    dart = Dart(fair, SETTINGS)  # before there is an index
    fair.index(docs.to_dict("records"))
    found = fair.retriever()(pd.DataFrame({"qid": ["a", "b"], "query": ["one two", "three"]}))
    expected = Dart(fair.flex(), SETTINGS)(found)
    pd.testing.assert_frame_equal(dart(found), expected)
    assert dart == Dart(fair.flex(), SETTINGS)
    assert expected["score"].tolist() != found["score"].tolist()


def test_few_candidates_pass_through_unchanged(results: pd.DataFrame) -> None:
    few = results[(results["qid"] != "q0") | (results["rank"] < 5)].reset_index(drop=True)
    few.loc[few["qid"] == "q0", "rank"] += 3  # as they were, even if they are odd
    state = DartState()
    reranked = Dart(None, SETTINGS, state=state)(few)
    is_few = few["qid"] == "q0"
    pd.testing.assert_frame_equal(reranked[is_few], few[is_few].astype({"score": np.float64}))
    assert state.n_queries == N_QUERIES - 1
    rest = results[results["qid"] != "q0"].reset_index(drop=True)
    pd.testing.assert_frame_equal(reranked[~is_few].reset_index(drop=True), Dart(None, SETTINGS)(rest))
    assert (results["rank"] < 6).any()
    enough = results[results["rank"] < 6].reset_index(drop=True)
    assert Dart(None, SETTINGS)(enough)["score"].tolist() != enough["score"].tolist()


@pytest.mark.parametrize("state", ["stream", "stateless"])
def test_one_query_one_candidate_and_equal_scores(results: pd.DataFrame, state: Any) -> None:
    dart = Dart(None, SETTINGS, state=state)
    one = results.iloc[[0]]
    pd.testing.assert_frame_equal(dart(one), one.astype({"score": np.float64}))
    query = results.iloc[:N_DOCS]
    assert sorted(dart(query)["rank"]) == list(range(N_DOCS))
    equal = query.assign(doc_vec=[DOC_VECS[0]] * N_DOCS)
    reranked = dart(equal.iloc[::-1])
    assert len(set(reranked["score"])) == 1
    assert reranked["rank"].tolist() == list(range(N_DOCS))  # in the order of the rows


def test_empty_frames(results: pd.DataFrame, tmp_path: Path) -> None:
    state = DartState()
    reranked = Dart(FlexIndex(str(tmp_path / "missing")), SETTINGS, state=state)(results.iloc[:0])
    assert list(reranked.columns) == list(results.columns)
    assert reranked.empty
    assert state.n_queries == 0


# State


def test_the_order_of_the_queries_matters_unless_stateless(results: pd.DataFrame) -> None:
    backwards = pd.concat([results[results["qid"] == qid] for qid in results["qid"].unique()[::-1]])
    for state, same in (("stream", False), ("stateless", True)):
        dart = Dart(None, SETTINGS, state=state)  # type: ignore[arg-type]
        assert np.array_equal(dart(backwards).sort_index()["score"], dart(results)["score"]) is same


def test_stateless_is_the_stream_that_forgets(results: pd.DataFrame) -> None:
    forgetful = DartSettings(n_pos=2, n_neg=4, temperature=0.3, alpha_mar=0.5, beta_meta=0, alpha_ema=0)
    stream = Dart(None, forgetful)(results)["score"]
    np.testing.assert_allclose(Dart(None, SETTINGS, state="stateless")(results)["score"], stream, rtol=1e-12)


def test_a_state_is_carried_on_and_saved(results: pd.DataFrame, tmp_path: Path) -> None:
    whole = Dart(None, SETTINGS)(results)
    parts = [results.iloc[: 2 * N_DOCS], results.iloc[2 * N_DOCS :]]
    state = DartState()
    dart = Dart(None, SETTINGS, state=state)
    first = dart(parts[0])
    state.save(tmp_path / "state.npz")
    pd.testing.assert_frame_equal(pd.concat([first, dart(parts[1])]), whole)
    loaded = DartState.load(tmp_path / "state.npz")
    pd.testing.assert_frame_equal(Dart(None, SETTINGS, state=loaded)(parts[1]), whole.iloc[2 * N_DOCS :])
    assert np.array_equal(loaded.w_meta, state.w_meta)
    assert np.array_equal(loaded.w_ema, state.w_ema)
    assert state.n_queries == N_QUERIES


def test_an_error_leaves_the_state_as_it_was(results: pd.DataFrame) -> None:
    state = DartState()
    dart = Dart(None, SETTINGS, state=state)
    dart(results.iloc[:N_DOCS])
    before = copy.deepcopy(state)
    wrong = [vector if i < len(results) - 1 else vector * np.nan for i, vector in enumerate(results["doc_vec"])]
    with pytest.raises(ValueError, match="NaN"):
        dart(results.assign(doc_vec=wrong))
    assert np.array_equal(state.w_ema, before.w_ema)
    assert state.n_queries == 1


def test_batches_of_an_experiment(topics: pd.DataFrame, index: FlexIndex) -> None:
    """A stream starts anew with each batch; a state continues, and goes on in the next experiment."""
    qrels = pd.DataFrame({"qid": topics["qid"], "docno": [f"d{i}" for i in range(N_QUERIES)], "label": 1})
    measured: list[list[float]] = []

    def run(state: Any, batch_size: int | None) -> pd.DataFrame:
        frames: list[pd.DataFrame] = []

        def keep(frame: pd.DataFrame) -> pd.DataFrame:
            frames.append(frame)
            return frame

        pipeline = (
            index.np_retriever() >> Dart(index, SETTINGS, state=state) >> pt.apply.generic(keep, required_columns=None)
        )
        measured.append(
            pt.Experiment([pipeline], topics, qrels, [nDCG @ 10], batch_size=batch_size)["nDCG@10"].tolist()
        )
        found = pd.concat(frames)
        return found.drop_duplicates(["qid", "docno"]).set_index(["qid", "docno"])["score"]  # type: ignore[return-value]

    whole = run("stream", None)
    assert not run("stream", 2).equals(whole)
    assert run("stateless", 2).equals(run("stateless", None))
    state = DartState()
    assert run(state, 2).equals(whole)
    assert state.n_queries == N_QUERIES
    assert not run(state, 2).equals(whole)


def test_compiled_pipelines_give_the_same(topics: pd.DataFrame, index: FlexIndex) -> None:
    """A cutoff behind it stays behind it, since the first results before and after are not the same."""
    for state in ("stream", "stateless"):
        dart = Dart(index, SETTINGS, state=state)  # type: ignore[arg-type]
        pipeline = index.np_retriever() >> dart % 3
        compiled = pipeline.compile()
        pd.testing.assert_frame_equal(compiled(topics), pipeline(topics))
        assert len(compiled(topics)) == 3 * N_QUERIES
        cut = (index.np_retriever() % 7 >> dart).compile()(topics)
        pd.testing.assert_frame_equal(cut, dart(index.np_retriever(num_results=7)(topics)))


# Equality


def test_equality(index: FlexIndex, tmp_path: Path) -> None:
    dart = Dart(index, SETTINGS)
    same = Dart(FlexIndex(str(index.index_path)), DartSettings(**vars(SETTINGS)), verbose=True)
    assert (dart, hash(dart)) == (same, hash(same))
    state = DartState()
    different = [
        Dart(None, SETTINGS),
        Dart(FlexIndex(str(tmp_path / "other")), SETTINGS),
        Dart(FlexIndex(str(index.index_path), sim_fn="cos"), SETTINGS),
        Dart(index),
        Dart(index, SETTINGS, state="stateless"),
        Dart(index, SETTINGS, state=state),
        Dart(index, SETTINGS, state=DartState()),
    ]
    assert all(dart != other for other in different)
    assert len(set(different)) == len(different)
    assert Dart(index, SETTINGS, state=state) == Dart(index, SETTINGS, state=state)
    assert dart != "dart"
    assert repr(different[5]).endswith("state=DartState(n_queries=0, dimension=0))")
    assert "n_pos=2" in repr(dart)


def test_a_tree_plan_keeps_settings_apart(topics: pd.DataFrame, index: FlexIndex) -> None:
    qrels = pd.DataFrame({"qid": topics["qid"], "docno": [f"d{i}" for i in range(N_QUERIES)], "label": 1})
    settings = [DartSettings(n_pos=2, n_neg=4, temperature=0.3, alpha_mar=0.5, learning_rate=r) for r in (0, 3.0)]
    systems = [index.np_retriever() >> Dart(index, setting) for setting in settings]
    tables = [
        pt.Experiment(systems, topics, qrels, [nDCG @ 10], names=["a", "b"], plan=plan)["nDCG@10"].tolist()
        for plan in ("tree", "linear")
    ]
    assert tables[0] == tables[1]
    assert tables[0][0] != tables[0][1]


def test_a_grid_search_varies_the_settings(topics: pd.DataFrame, index: FlexIndex) -> None:
    qrels = pd.DataFrame({"qid": topics["qid"], "docno": [f"d{i}" for i in range(N_QUERIES)], "label": 1})
    dart = Dart(index, SETTINGS)
    grid = [DartSettings(n_pos=2, n_neg=4, learning_rate=r, alpha_mar=0.5) for r in (0, 3.0)]
    scanned = pt.GridScan(
        index.np_retriever() >> dart, {dart: {"settings": grid}}, topics, qrels, ["ndcg_cut_10"], verbose=False
    )
    assert scanned["ndcg_cut_10"].nunique() == 2


# Errors


def change(column: str, row: int, value: Any) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def apply(frame: pd.DataFrame) -> pd.DataFrame:
        values = frame[column].tolist()
        values[row] = value
        return frame.assign(**{column: values})

    return apply


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (change("score", 10, np.nan), "score: qid 'q0', docno '.*' has no score"),
        (change("score", 10, None), "score: qid 'q0', docno '.*' has no score"),
        (change("doc_vec", 10, DOC_VECS[0] * np.nan), "doc_vec: qid 'q0', docno '.*' has NaN or infinite values"),
        (change("doc_vec", 10, DOC_VECS[0] * np.inf), "doc_vec: qid 'q0', docno '.*' has NaN or infinite values"),
        (
            change("doc_vec", 10, DOC_VECS[0][:3]),
            "doc_vec: qid 'q0', docno '.*' has a vector of shape \\(3,\\), expected",
        ),
        (change("doc_vec", 10, None), "doc_vec: qid 'q0', docno '.*' has a vector of shape \\(\\), expected \\(5,\\)"),
        (change("query_vec", 10, QUERY_VECS[0]), "query_vec: qid 'q0' has different vectors in its rows"),
        (lambda f: f.assign(query_vec=[np.full(5, np.nan)] * len(f)), "query_vec: qid 'q3' has NaN or infinite values"),
        (lambda f: f.assign(query_vec=np.nan), "query_vec: qid 'q3' has a vector of shape \\(\\)"),
        (
            lambda f: f.assign(query_vec=[QUERY_VECS[:1]] * len(f)),
            "query_vec: qid 'q3' has a vector of shape \\(1, 5\\)",
        ),
        (lambda f: pd.concat([f, f[["score"]]], axis=1), "score: expected one column of this name, got 2"),
        (lambda f: f.assign(score="high"), "score: expected numbers, got a column of .*'high'"),
        (change("doc_vec", 10, np.full(5, "a")), "doc_vec: qid 'q0', docno '.*' has values of the type <U1"),
        (change("doc_vec", 10, np.full(5, 1j)), "doc_vec: qid 'q0', docno '.*' has values of the type complex128"),
    ],
)
def test_wrong_values_are_named(results: pd.DataFrame, edit: Callable[[pd.DataFrame], pd.DataFrame], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Dart(None, SETTINGS)(edit(results))


def test_ranks_that_a_small_type_cannot_hold(results: pd.DataFrame) -> None:
    many = pd.concat([results.iloc[:N_DOCS]] * 20, ignore_index=True).astype({"rank": np.int8})
    assert sorted(Dart(None, SETTINGS)(many)["rank"]) == list(range(20 * N_DOCS))


def test_scores_that_overflow_are_an_error(results: pd.DataFrame) -> None:
    settings = DartSettings(n_pos=2, n_neg=4, alpha_mar=1e300, learning_rate=1e308)
    state = DartState()
    with (
        np.errstate(all="ignore"),
        pytest.raises(ValueError, match=r"scores of qid 'q3' overflow; lower learning_rate"),
    ):
        Dart(None, settings, state=state)(results)
    assert state.n_queries == 0


def test_documents_that_the_index_does_not_have(results: pd.DataFrame, index: FlexIndex) -> None:
    with pytest.raises(ValueError, match=r"docno: qid 'q0', docno 'd99' is not in FlexIndex\(.*give the index"):
        Dart(index, SETTINGS)(change("docno", 10, "d99")(results))


@pytest.mark.parametrize("missing", ["qid", "docno", "score", "rank", "query_vec", "doc_vec"])
def test_missing_columns(results: pd.DataFrame, index: FlexIndex, missing: str) -> None:
    frame = results.drop(columns=missing)
    with pytest.raises(pt.validate.InputValidationError, match=missing):
        Dart(None, SETTINGS)(frame)
    if missing == "doc_vec":
        Dart(index, SETTINGS)(frame)


def test_wrong_arguments(index: FlexIndex) -> None:
    with pytest.raises(TypeError, match="index: expected a FlexIndex or a FairIndex, got str"):
        Dart("index.flex")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="settings: expected DartSettings, got dict"):
        Dart(index, {"n_pos": 3})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state: expected 'stream', 'stateless' or a DartState, got None"):
        Dart(index, state=None)  # type: ignore[arg-type]
    dart = Dart(index)
    dart.state = "none"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="state: expected"):
        dart(pd.DataFrame(columns=["qid", "docno", "score", "rank", "query_vec"]))


# What PyTerrier asks of a transformer


def test_inspection(index: FlexIndex) -> None:
    columns = ["qid", "docno", "score", "rank", "query_vec"]
    assert pt.inspect.transformer_inputs(Dart(index)) == [columns]
    assert pt.inspect.transformer_inputs(Dart()) == [[*columns, "doc_vec"]]
    assert pt.inspect.transformer_outputs(Dart(index), [*columns, "url"]) == [*columns, "url"]
    dart = Dart(index, SETTINGS, state="stateless")
    found = {a.name: a.value for a in pt.inspect.transformer_attributes(dart)}
    assert found == {"index": index, "settings": SETTINGS, "state": "stateless", "verbose": False}
    assert pt.inspect.transformer_apply_attributes(dart) == dart
    assert pt.inspect.transformer_apply_attributes(dart, settings=DartSettings()) == Dart(index, state="stateless")
