"""`Dart`, a PyTerrier transformer that reranks the results of a dense retriever by adapting the scoring to them."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyterrier as pt
from pyterrier_dr import FlexIndex, SimFn

from pyterrier_fair.columns import check_columns
from pyterrier_fair.dart_scoring import Array, DartSettings, DartState, adapted_scores
from pyterrier_fair.index import FairIndex


class Dart(pt.Transformer):
    """Reranks the results of a dense retriever with a scoring that it adapts to each query, without labels.

    DART (Dense Adaptive Reranking at Test-time; Liu and Li 2026, arXiv 2606.01070) takes the documents ranked first as
    relevant and those ranked last as not relevant, and adapts the matrix W of the score ``q^T W d`` to separate them.
    It needs vectors, and no texts::

        retriever % 100 >> Dart(index)
        retriever % 100 >> index.vec_loader() >> Dart()

    The paper reranks 100 candidates. Queries with fewer than ``settings.n_pos + settings.n_neg`` candidates keep their
    scores and ranks, and nothing is learned from them.

    By default the adaptation is carried from query to query, so **scores depend on the queries before**, and on their
    order. ``state`` says how far:

    - ``"stream"``: within one call of `transform`, over its queries in order of first appearance. A call gives the same
      result each time, but `pt.Experiment` with ``batch_size`` makes one call per batch, each of which starts anew.
    - a `DartState`: across calls, so that batches continue one stream. Every call changes the state: give each pipeline
      and each run of an experiment a state of its own, and do not cache the results.
    - ``"stateless"``: not at all. Each query starts from the identity and is ranked by its own matrix, so its result
      depends on neither order nor batches.

    Two of them are equal if their index, settings and state are; a `DartState` is equal to itself alone. All attributes
    are read when results are reranked, so that `pt.GridSearch` can vary ``settings``.
    """

    def __init__(
        self,
        index: FlexIndex | FairIndex | None = None,
        settings: DartSettings | None = None,
        *,
        state: Literal["stream", "stateless"] | DartState = "stream",
        verbose: bool = False,
    ) -> None:
        """Takes the index and the settings; nothing is read yet.

        Args:
            index: The index that has the vectors of the documents, found by docno. Its ``sim_fn`` decides whether the
                dot product or the cosine is used. None means the column ``doc_vec`` and the dot product.
            settings: The settings of DART; None means the defaults.
            state: What is carried from query to query, as above.
            verbose: Whether to show a progress bar.

        Raises:
            TypeError: ``index`` or ``settings`` is of another type.
            ValueError: ``state`` is not "stream", "stateless" or a DartState.
        """
        self.index = index
        self.settings = DartSettings() if settings is None else settings
        self.state = state
        self.verbose = verbose
        self._check()

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Returns the same rows in the same order with new values in ``score`` and ``rank``.

        Ranks start at 0; equal scores are ranked in the order of the rows. If there is an error, the state stays as it
        was.

        Args:
            inp: Results with ``qid``, ``docno``, ``score``, ``rank``, ``query_vec`` and, without an index, ``doc_vec``.

        Raises:
            InputValidationError: Columns are missing.
            ValueError: A score is missing, a vector is not finite or has another dimension than the query, a query has
                several vectors, a document is not in the index, the state is of another dimension, or scores overflow.
        """
        columns = ["score", "rank", "query_vec", *(["doc_vec"] if self.index is None else [])]
        with pt.validate.any(inp, context=self) as v:
            v.result_frame(extra_columns=columns)
        self._check()
        check_columns(inp, "qid", "docno", *columns)
        try:
            scores = inp["score"].to_numpy(dtype=np.float64, copy=True)
        except (TypeError, ValueError) as error:
            raise ValueError(f"score: expected numbers, got a column of {inp['score'].dtype}: {error}") from error
        ranks = inp["rank"].to_numpy(copy=True)
        if ranks.dtype.kind in "iu":
            ranks = ranks.astype(np.int64)  # a small type might not hold the new ranks
        if (missing := np.flatnonzero(np.isnan(scores))).size:
            row = inp.iloc[missing[0]]
            raise ValueError(f"score: qid {row['qid']!r}, docno {row['docno']!r} has no score (NaN)")
        state = self._working_state()
        settings, index = self.settings, None if inp.empty else self._open_index()
        groups: Iterable[npt.NDArray[np.intp]] = _rows_by_query(inp["qid"])
        if self.verbose:
            groups = pt.tqdm(groups, desc="Dart", unit="q")
        for rows in groups:
            results = inp.iloc[rows]
            query = _query_vector(results)
            documents = _document_vectors(results, len(query), index)
            if index is not None and index.sim_fn == SimFn.cos:
                query, documents = _unit_length(query), _unit_length(documents)
            if len(rows) >= settings.n_pos + settings.n_neg:
                scores[rows] = adapted_scores(query, documents, settings, state)
                if not np.isfinite(scores[rows]).all():
                    raise ValueError(
                        f"settings: the scores of qid {results['qid'].tolist()[0]!r} overflow; lower learning_rate, "
                        f"which is {settings.learning_rate:g}, or scale the vectors down"
                    )
                ranks[rows[np.argsort(-scores[rows], kind="stable")]] = np.arange(len(rows)) + pt.model.FIRST_RANK
        if isinstance(self.state, DartState):  # no error has occurred: the given object takes over the copy's matrices
            vars(self.state).update(vars(state))
        return inp.assign(score=scores, rank=ranks)

    def _working_state(self) -> DartState | None:
        """Returns the state for one call: a copy of the given one, so that an error leaves that as it was."""
        if isinstance(self.state, DartState):
            return copy.deepcopy(self.state)
        return DartState() if self.state == "stream" else None

    def _open_index(self) -> FlexIndex | None:
        return self.index.flex() if isinstance(self.index, FairIndex) else self.index

    def _check(self) -> None:
        if not (self.index is None or isinstance(self.index, FlexIndex | FairIndex)):
            raise TypeError(f"index: expected a FlexIndex or a FairIndex, got {type(self.index).__name__}")
        if not isinstance(self.settings, DartSettings):
            raise TypeError(f"settings: expected DartSettings, got {type(self.settings).__name__}")
        if not (isinstance(self.state, DartState) or self.state in ("stream", "stateless")):
            raise ValueError(f"state: expected 'stream', 'stateless' or a DartState, got {self.state!r}")

    def _index_key(self) -> Hashable:
        if self.index is None:
            return None
        if isinstance(self.index, FairIndex):
            return (str(self.index.path), SimFn.dot)
        return (str(self.index.index_path), self.index.sim_fn)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Dart):
            return NotImplemented
        return (self._index_key(), self.settings, self.state) == (other._index_key(), other.settings, other.state)

    def __hash__(self) -> int:
        return hash((Dart, self._index_key()))  # settings and state may be changed, as by a grid search

    def __repr__(self) -> str:
        return f"Dart({self.index!r}, {self.settings!r}, state={self.state!r})"


def _rows_by_query(qids: pd.Series[Any]) -> list[npt.NDArray[np.intp]]:
    """Returns the row numbers of each query, queries in order of first appearance."""
    if qids.empty:
        return []
    codes = pd.factorize(qids, use_na_sentinel=False)[0]
    return np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])


def _query_vector(results: pd.DataFrame) -> Array:
    """Returns the vector of the query, float64, after checking that it is the same in all rows."""
    vectors, name = results["query_vec"].tolist(), f"qid {results['qid'].tolist()[0]!r}"
    if np.ndim(vectors[0]) != 1:
        raise ValueError(f"query_vec: {name} has a vector of shape {np.shape(vectors[0])}, expected one dimension")
    query: Array = _matrix(vectors[:1], np.size(vectors[0]), "query_vec", [name])[0]
    if not all(vector is vectors[0] or np.array_equal(vector, vectors[0]) for vector in vectors):
        raise ValueError(f"query_vec: {name} has different vectors in its rows; rerank the results of one encoder")
    return query


def _document_vectors(results: pd.DataFrame, dimension: int, index: FlexIndex | None) -> Array:
    """Returns the vectors of the documents, (K, D), float64, from the column ``doc_vec`` or the index."""
    docnos, qid = results["docno"].tolist(), results["qid"].tolist()[0]
    names = [f"qid {qid!r}, docno {docno!r}" for docno in docnos]
    if index is None:
        return _matrix(results["doc_vec"].tolist(), dimension, "doc_vec", names)
    # By docno, since the column docid may be that of another index. The loader of pyterrier_dr is not used, as it
    # returns the vector of some other document for a docno that the index does not have.
    docids = np.asarray(index.docnos().inv[docnos])
    if (unknown := np.flatnonzero(docids < 0)).size:
        raise ValueError(f"docno: {names[unknown[0]]} is not in {index!r}; give the index that was retrieved from")
    return _matrix(index.np_vecs()[docids], dimension, "vector in the index", names)


def _matrix(vectors: Any, dimension: int, what: str, names: list[str]) -> Array:
    """Returns vectors as a matrix after checking them; errors name the first wrong one."""
    for vector, name in zip(vectors, names, strict=True):
        if np.shape(vector) != (dimension,):
            raise ValueError(
                f"{what}: {name} has a vector of shape {np.shape(vector)}, expected ({dimension},) as the query; use "
                "the vectors of one encoder"
            )
        if (kind := np.asarray(vector).dtype).kind not in "fiuO":
            raise ValueError(f"{what}: {name} has values of the type {kind}, expected real numbers")
    matrix: Array = np.stack(vectors).astype(np.float64)
    if (wrong := np.flatnonzero(~np.isfinite(matrix).all(axis=1))).size:
        raise ValueError(f"{what}: {names[wrong[0]]} has NaN or infinite values")
    return matrix


def _unit_length(vectors: Array) -> Array:
    """Returns vectors at unit length; zeros stay as they are."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit: Array = vectors / np.where(lengths == 0, 1, lengths)
    return unit
