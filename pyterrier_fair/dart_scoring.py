"""DART's scoring on arrays: a bilinear score ``q^T W d`` whose matrix a few gradient steps adapt to each query.

Source: Liu and Li 2026, "Test-Time Training for Zero-Resource Dense Retrieval Reranking" (arXiv 2606.01070). The
documents ranked first by ``q^T d`` are taken as relevant, those ranked last as not relevant, and ``W`` learns to
separate them by a margin.

Every gradient with respect to ``W`` is an outer product of ``q`` and a vector. So the steps of one query change ``W``
by ``outer(q, x)`` with a single vector ``x``, and need ``W^T q`` alone. Matrices are updated once per query, in the
state.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.blas import daxpy, dger
from scipy.special import softmax

from fair_calibration.validation import validate_number, validate_positive_int

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class DartSettings:
    """The settings of DART, under the names of the paper (arXiv 2606.01070).

    Published are the method and 5 steps on 100 candidates. The other values are not; the defaults are this project's
    choice. With them, ``beta_meta`` equals ``1 - alpha_ema``, and the two matrices of the state are the same. The
    paper's second optimizer, Lion, is left out.

    Attributes:
        n_pos: The number of documents ranked first that are taken as relevant.
        n_neg: The number of documents ranked last that are taken as not relevant.
        temperature: T, above 0: positives are weighted by softmax(s / T), negatives by softmax(-s / T).
        alpha_mar: The margin for a query whose best document has similarity 1.
        beta_mar: How much the margin grows as the best similarity falls: margin = alpha_mar + beta_mar (1 - s_top1).
        steps: The number of gradient steps per query.
        learning_rate: The step size, at least 0. A larger one moves the query further; where most pairs are within the
            margin, 0.1 moves a query of unit length by about 0.2.
        momentum: A number in [0, 1], the momentum of gradient descent within a query.
        beta_meta: A number in [0, 1]: how far the starting point of the next query moves towards the matrix that was
            adapted to this one, as in Reptile.
        alpha_ema: A number in [0, 1]: the weight of earlier queries in the moving average that ranks.
    """

    n_pos: int = 3
    n_neg: int = 20
    temperature: float = 0.05
    alpha_mar: float = 0.05
    beta_mar: float = 0.2
    steps: int = 5
    learning_rate: float = 0.1
    momentum: float = 0.9
    beta_meta: float = 0.1
    alpha_ema: float = 0.9

    def __post_init__(self) -> None:
        for name in (setting.name for setting in fields(self)):
            value = getattr(self, name)
            if name in ("n_pos", "n_neg", "steps"):
                checked: float = validate_positive_int(name, value)
            else:
                at_most = 1.0 if name in ("momentum", "beta_meta", "alpha_ema") else None
                checked = validate_number(name, value, at_most=at_most)
            object.__setattr__(self, name, checked)
        if self.temperature == 0:
            raise ValueError("temperature: expected a number above 0, got 0")


@dataclass(eq=False)
class DartState:
    """What DART carries from one query to the next: where it starts adapting, and the average that ranks.

    ``DartState()`` is the state before the first query, in which both matrices are the identity. Given matrices are
    copied, as a state changes its own. A state is equal to itself alone.

    Attributes:
        w_meta: The matrix from which the next query starts, shape (D, D), float64; (0, 0) before the first query.
        w_ema: The moving average of the adapted matrices, by which documents are ranked; same shape.
        n_queries: The number of queries that have been adapted to.

    Raises:
        ValueError: The matrices are not square, of one shape and finite, or ``n_queries`` is below 0.
    """

    w_meta: Array = field(default_factory=lambda: np.empty((0, 0)))
    w_ema: Array = field(default_factory=lambda: np.empty((0, 0)))
    n_queries: int = 0

    def __post_init__(self) -> None:
        self.w_meta, self.w_ema = (
            np.array(matrix, dtype=np.float64, order="C", ndmin=1) for matrix in (self.w_meta, self.w_ema)
        )
        shapes = self.w_meta.shape, self.w_ema.shape
        if shapes[0] != shapes[1] or shapes[0] != (len(self.w_meta.T),) * 2:
            raise ValueError(
                f"w_meta, w_ema: expected two square matrices of one shape, got {shapes[0]} and {shapes[1]}"
            )
        if not (np.isfinite(self.w_meta).all() and np.isfinite(self.w_ema).all()):
            raise ValueError("w_meta, w_ema: expected finite numbers, got NaN or infinite values")
        if self.n_queries < 0:
            raise ValueError(f"n_queries: expected at least 0, got {self.n_queries}")

    def update(self, query: Array, displacement: Array, settings: DartSettings) -> None:
        """Takes in the matrix that was adapted to a query, ``W* = w_meta + outer(query, displacement)``.

        These are ``w_ema = alpha_ema w_ema + (1 - alpha_ema) W*`` and ``w_meta += beta_meta (W* - w_meta)``, in place:
        temporary matrices would take most of the time.
        """
        new = 1 - settings.alpha_ema
        self.w_ema *= settings.alpha_ema
        self.w_ema = daxpy(self.w_meta.ravel(), self.w_ema.ravel(), a=new).reshape(self.w_ema.shape)
        self.w_ema = _add_outer(self.w_ema, new, query, displacement)
        self.w_meta = _add_outer(self.w_meta, settings.beta_meta, query, displacement)
        self.n_queries += 1

    def begin(self, dimension: int) -> None:
        """Makes the two matrices if there are none yet.

        Raises:
            ValueError: The state is of vectors of another dimension.
        """
        if not self.w_meta.size:
            self.w_meta, self.w_ema = np.eye(dimension), np.eye(dimension)
        elif len(self.w_meta) != dimension:
            raise ValueError(
                f"state: it was adapted to vectors of {len(self.w_meta)} dimensions, these have {dimension}; "
                "use one state per encoder"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the state to a file in NumPy's npz format, which `load` restores exactly."""
        with open(path, "wb") as file:
            np.savez(file, w_meta=self.w_meta, w_ema=self.w_ema, n_queries=np.int64(self.n_queries))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> DartState:
        """Reads a state that `save` wrote.

        Raises:
            ValueError: The file is damaged or holds something else.
            OSError: The file cannot be read.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return DartState(arrays["w_meta"], arrays["w_ema"], int(arrays["n_queries"]))
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"path: {os.fspath(path)} is not a state that DartState.save wrote: {error}") from error

    def __repr__(self) -> str:
        return f"DartState(n_queries={self.n_queries}, dimension={len(self.w_meta)})"


def adapt(query: Array, documents: Array, start: Array, settings: DartSettings) -> Array:
    """Adapts ``W`` to a query by gradient descent with momentum, and returns the change as a vector.

    The loss is the hinge ``sum_ij w+_i w-_j max(0, margin - s_i + s_j)`` over all pairs of a positive i and a negative
    j. Positives and negatives, their weights and the margin are fixed by the similarities ``q^T d``; the scores s are
    those of the matrix that is adapted.

    Args:
        query: The query vector q, shape (D,), float64.
        documents: The K vectors of its candidates, shape (K, D); K is at least n_pos + n_neg.
        start: ``W^T q`` of the matrix from which to start, shape (D,).
        settings: The settings of DART.

    Returns:
        The vector x, shape (D,), with which the adapted matrix is ``W + outer(q, x)``.
    """
    similarities = score(query, documents)
    order = np.argsort(-similarities, kind="stable")
    top, bottom = order[: settings.n_pos], order[-settings.n_neg :]
    positives, negatives = documents[top], documents[bottom]
    temperature = settings.temperature
    weights = np.outer(softmax(similarities[top] / temperature), softmax(-similarities[bottom] / temperature))
    margin = settings.alpha_mar + settings.beta_mar * (1 - similarities[order[0]])
    displacement, velocity = np.zeros_like(query), np.zeros_like(query)
    for _ in range(settings.steps):
        adapted = start + (query @ query) * displacement  # W^T q
        gaps = (positives @ adapted)[:, None] - negatives @ adapted
        pairs = weights * (gaps < margin)
        gradient = pairs.sum(0) @ negatives - pairs.sum(1) @ positives  # that of W is outer(q, gradient)
        velocity = settings.momentum * velocity + gradient
        displacement -= settings.learning_rate * velocity
    return displacement


def adapted_scores(query: Array, documents: Array, settings: DartSettings, state: DartState | None) -> Array:
    """Returns the scores of a query's candidates after adapting to them.

    Temperature and margin are made for cosines. So the query is scaled to unit length, and the documents by the largest
    length among them, which leaves vectors of unit length as they are and keeps the order of others. The scores
    are scaled back.

    Args:
        query: The query vector, shape (D,), float64.
        documents: The vectors of its candidates, shape (K, D); K is at least n_pos + n_neg.
        settings: The settings of DART.
        state: What is carried from query to query, and is updated; its average, this query included, ranks. None means
            to start from the identity and to rank by the matrix adapted to this query alone.

    Returns:
        The scores, shape (K,), float64.

    Raises:
        ValueError: The state is of vectors of another dimension.
    """
    length, longest = _length(query), _length(documents)
    query, documents = query / length, documents / longest
    if state is None:
        adapted = query + (query @ query) * adapt(query, documents, query, settings)
    else:
        state.begin(len(query))
        state.update(query, adapt(query, documents, query @ state.w_meta, settings), settings)
        adapted = query @ state.w_ema
    return score(adapted, documents) * (length * longest)


def _add_outer(matrix: Array, factor: float, a: Array, b: Array) -> Array:
    """Returns matrix + factor outer(a, b), in the memory of ``matrix``; BLAS takes it transposed, column by column."""
    result: Array = dger(factor, b, a, a=matrix.T, overwrite_a=True).T
    return result


def score(vector: Array, documents: Array) -> Array:
    """Returns the dot products of a vector (D,) and documents (K, D); equal documents get equal scores."""
    products: Array = np.einsum("kd,d->k", documents, vector)  # a matrix product may round equal rows differently
    return products


def _length(vectors: Array) -> float:
    """Returns the largest length of the vectors, or 1 where all are zero."""
    return float(np.linalg.norm(vectors, axis=-1).max()) or 1.0
