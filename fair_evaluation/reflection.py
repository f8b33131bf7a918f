"""Segment reflection: how much of each part of a document is found again in the document's vector, by position.

The document is cut into segments; the cosine similarity of a segment's own vector to the document's says how well the
document vector reflects it (Schuhmacher et al. 2026, arXiv 2601.16934). What stands early may also be more typical of a
document, so the segments are permuted: over the permutations every segment stands at every position, and what then
still differs between the positions is the encoder's doing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import bootstrap
from sentence_transformers import SentenceTransformer
from tqdm.auto import tqdm

from fair_calibration import FairSentenceTransformer, uncalibrate
from fair_calibration.prompts import document_prompt
from fair_calibration.validation import validate_positive_int
from fair_evaluation.documents import batches, count_tokens, max_document_tokens
from fair_evaluation.measures import slope_of_rows
from fair_evaluation.segments import Orders, cut_segments, rotated_orders

logger = logging.getLogger("fair_evaluation")
Array = NDArray[np.float64]


class ReflectionCounts(NamedTuple):
    """What became of the documents.

    Attributes:
        documents: All of them.
        measured: Those whose figures are in the result.
        too_short: Left out: fewer tokens than ``n_segments * min_tokens``.
        truncated: Left out: in some order the model does not read them whole.
    """

    documents: int
    measured: int
    too_short: int
    truncated: int


class ReflectionSummary(NamedTuple):
    """How flat the reflection is over the positions, 0 to 1 from the first to the last, with content averaged out.

    Attributes:
        slope: Of the least-squares line: the change in similarity from the first position to the last; negative where
            the beginning is favoured.
        slope_low: Lower end of its interval.
        slope_high: Upper end.
        max_min: The largest difference between two positions; 0 is position-fair.
        spread: The standard deviation over the positions.
    """

    slope: float
    slope_low: float
    slope_high: float
    max_min: float
    spread: float


class Reflection(NamedTuple):
    """The figures as a frame (see `segment_reflection`), their summary, and what became of the documents."""

    frame: pd.DataFrame
    summary: ReflectionSummary
    counts: ReflectionCounts


def segment_reflection(
    model: SentenceTransformer,
    texts: Iterable[str],
    *,
    n_segments: int = 4,
    n_rounds: int = 1,
    min_tokens: int = 16,
    strength: float | None = None,
    confidence: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
    batch_size: int = 32,
    show_progress_bar: bool = True,
) -> Reflection:
    """Measures how similar document vectors are to the vectors of their own segments, by the segments' positions.

    Each document is cut into segments of equal token count, at the nearest white space where there is some, and put
    together again in ``n_segments * n_rounds`` orders: all rotations of the order as written, and of a random order of
    each document for every further round. In each round every segment so stands once at every position. Documents are
    encoded by the model, and the segments, as documents of their own, by the plain model; both with its prompt for
    documents.

    Args:
        model: The model under test, plain or calibrated.
        texts: The documents.
        n_segments: At least 2.
        n_rounds: Rounds of rotations. Rotations keep most neighbours together; further rounds do not.
        min_tokens: Documents with fewer tokens per segment are too short to be cut.
        strength: Overrides that of a calibrated model.
        confidence: Of the intervals.
        n_resamples: Of the bootstrap.
        seed: Of random orders and bootstrap.
        batch_size: Texts encoded at once.
        show_progress_bar: Whether to show a bar.

    Returns:
        The frame has one row per ``by`` and ``position`` (0 the first), with ``similarity``, the mean cosine over
        ``documents`` documents, and the ends ``low`` and ``high`` of its bootstrap interval (percentile, over
        documents). ``by`` is

        - "as_written": the document in its own order, where position and content are confounded;
        - "position": mean over the orders by the position in them: every segment counts equally at each;
        - "content": mean over the orders by the segment's position as written: what its content adds.

        The summary is of "position". Documents that are too short, and those that are truncated, are left out, counted,
        and logged as a warning.

    Raises:
        TypeError: ``texts`` is one string, or holds something else than strings.
        ValueError: An argument is out of range, ``strength`` is given for a plain model, the tokenizer gives no
            character offsets, fewer than two documents are left, or a vector is not finite.
    """
    if validate_positive_int("n_segments", n_segments) < 2:
        raise ValueError(f"n_segments: expected at least 2, got {n_segments}")
    for name, value in {"n_rounds": n_rounds, "min_tokens": min_tokens, "batch_size": batch_size}.items():
        validate_positive_int(name, value)
    plain = uncalibrate(model) if isinstance(model, FairSentenceTransformer) else model
    if strength is not None and plain is model:
        raise ValueError("strength: the model is plain; calibrate it first, with fair_calibration.calibrate(model)")
    under_test = {} if strength is None else {"strength": strength}
    rng = np.random.default_rng(seed)
    prompt, limit = document_prompt(model), max_document_tokens(model)
    similarities: list[_Similarities] = []
    n_documents = n_too_short = n_truncated = 0
    with tqdm(desc="reflection", unit="doc", disable=not show_progress_bar) as bar:
        for batch in batches(texts, batch_size):
            segments: list[str] = []
            documents: list[str] = []
            orders: list[Orders] = []
            for text in batch:
                pieces = cut_segments(model, text, n_segments, min_tokens=min_tokens)
                if pieces is None:
                    n_too_short += 1
                    continue
                these_orders = rotated_orders(n_segments, n_rounds, rng)
                reordered = [" ".join(pieces[i] for i in order) for order in these_orders]
                if limit is not None and max(count_tokens(model, reordered, prompt=prompt)) > limit:
                    n_truncated += 1
                    continue
                segments += pieces
                documents += reordered
                orders.append(these_orders)
            if orders:
                alone = _encode(plain, segments, batch_size).reshape(len(orders), n_segments, -1)
                whole = _encode(model, documents, batch_size, **under_test).reshape(len(orders), len(orders[0]), -1)
                similarities += map(_Similarities.of, whole, alone, orders)
            n_documents += len(batch)
            bar.update(len(batch))
    counts = ReflectionCounts(n_documents, len(similarities), n_too_short, n_truncated)
    if counts.measured < 2:
        raise ValueError(f"texts: at least two documents are needed that can be cut and are read whole, got {counts}")
    if counts.measured < counts.documents:
        logger.warning("Segment reflection leaves documents out: %s", counts)
    intervals = _Bootstrap(confidence, n_resamples, seed)
    values = {by: np.stack([getattr(document, by) for document in similarities]) for by in _Similarities._fields}
    frame = pd.concat([_table(by, of_documents, intervals) for by, of_documents in values.items()], ignore_index=True)
    return Reflection(frame, _summarize(values["position"], intervals), counts)


class _Bootstrap(NamedTuple):
    """Percentile intervals of means over documents."""

    confidence: float
    n_resamples: int
    seed: int

    def of_mean(self, values: Array) -> tuple[Any, Any]:
        """Returns the ends of the intervals of the means over the first axis."""
        interval = bootstrap(
            (values,),
            np.mean,
            axis=0,
            n_resamples=self.n_resamples,
            confidence_level=self.confidence,
            method="percentile",
            batch=100,  # resamples held at once
            rng=np.random.default_rng(self.seed),
        ).confidence_interval
        return interval.low, interval.high


def _table(by: str, values: Array, intervals: _Bootstrap) -> pd.DataFrame:
    """Makes the rows of the frame for the similarities (documents, n_segments)."""
    n_documents, n_segments = values.shape
    low, high = intervals.of_mean(values)
    columns = {"similarity": values.mean(0), "low": low, "high": high, "documents": n_documents}
    return pd.DataFrame({"by": by, "position": range(n_segments), **columns})


def _summarize(by_position: Array, intervals: _Bootstrap) -> ReflectionSummary:
    """Summarizes the similarities by position, (documents, n_segments)."""
    slopes = slope_of_rows(np.linspace(0, 1, by_position.shape[1]), by_position)
    means = by_position.mean(0)
    # The mean of the slopes is the slope of the means.
    figures = slopes.mean(), *intervals.of_mean(slopes), np.ptp(means), means.std()
    return ReflectionSummary(*(float(figure) for figure in figures))


class _Similarities(NamedTuple):
    """One document's mean similarities by position or segment, each float64 (n_segments,)."""

    as_written: Array
    position: Array
    content: Array

    @classmethod
    def of(cls, whole: Array, alone: Array, orders: Orders) -> _Similarities:
        """Averages the cosines of the vectors (orders, D) of the document and those (n_segments, D) of its segments."""
        by_segment = whole @ alone.T  # (orders, n_segments)
        by_position = np.take_along_axis(by_segment, orders, axis=1)
        return cls(as_written=by_segment[0], position=by_position.mean(0), content=by_segment.mean(0))


def _encode(model: SentenceTransformer, texts: list[str], batch_size: int, **settings: Any) -> Array:
    """Encodes documents, normalised, as float64 (texts, D)."""
    vectors = model.encode_document(
        texts, batch_size=batch_size, normalize_embeddings=True, show_progress_bar=False, **settings
    )
    if not np.isfinite(vectors).all():
        broken = [i for i, vector in enumerate(vectors) if not np.isfinite(vector).all()]
        raise ValueError(
            f"model: {len(broken)} of {len(texts)} vectors are not finite, the first of {texts[broken[0]][:60]!r}"
        )
    return np.asarray(vectors, dtype=np.float64)
