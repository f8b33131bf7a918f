"""Segment reflection: how well a document's vector reflects each part of the document, by position.

The document is cut into segments, and the cosine similarity of a segment's own vector to the document's vector says how
well the segment is reflected (Schuhmacher et al. 2026, arXiv 2601.16934). The beginning of a document may also be more
typical of its content. So the segments are permuted such that each stands at every position equally often; differences
between positions that remain are due to the encoder.
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
from fair_evaluation.measures import slope
from fair_evaluation.segments import Orders, cut_segments, rotated_orders

logger = logging.getLogger("fair_evaluation")
Array = NDArray[np.float64]


class ReflectionCounts(NamedTuple):
    """The number of documents that were measured, and of those left out.

    Attributes:
        documents: All documents.
        measured: The documents that the result is about.
        too_short: Documents left out since they have fewer than ``n_segments * min_tokens`` tokens.
        truncated: Documents left out since the model would truncate them in at least one order of the segments.
    """

    documents: int
    measured: int
    too_short: int
    truncated: int


class ReflectionSummary(NamedTuple):
    """How much the similarity differs between positions, with content averaged out.

    All positions can be equally similar and yet less similar than before: then the vectors became less specific. So
    look at the similarities in the frame as well.

    Attributes:
        slope: The slope of the least-squares line: the change in similarity from the first to the last position;
            negative if the beginning is favoured.
        slope_low: The lower end of the slope's interval.
        slope_high: The upper end of the slope's interval.
        max_min: The largest difference between two positions; 0 is position-fair.
        spread: The standard deviation over the positions.
    """

    slope: float
    slope_low: float
    slope_high: float
    max_min: float
    spread: float


class Reflection(NamedTuple):
    """The result of `segment_reflection`: similarities as a frame, their summary, and counts of documents."""

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
    """Measures how similar document vectors are to the vectors of their own segments, by position of the segment.

    Each document is cut into segments of equal token count, at white space if possible, and joined again in
    ``n_segments * n_rounds`` orders: all rotations of the original order and, in every further round, of a random
    order. In each round, every segment stands once at every position. The documents are encoded by the model, and the
    segments by the plain model as documents of their own, both with the model's prompt for documents.

    Args:
        model: The model to measure, plain or calibrated.
        texts: The documents.
        n_segments: The number of segments per document, at least 2.
        n_rounds: The number of rounds. In rotations most segments keep their neighbours; in further rounds they do not.
        min_tokens: The least number of tokens per segment; shorter documents are left out.
        strength: Overrides the strength of a calibrated model.
        confidence: The confidence level of the intervals.
        n_resamples: The number of resamples of the bootstrap.
        seed: Seed of the random orders and of the bootstrap.
        batch_size: The number of texts encoded at once.
        show_progress_bar: Whether to show a progress bar.

    Returns:
        The frame has one row per ``by`` and ``position`` (counted from 0) with ``similarity``, the mean cosine
        similarity over ``documents`` documents, and the bounds ``low`` and ``high`` of its bootstrap interval
        (percentile, over documents). ``by`` is

        - "as_written": documents in their original order, in which position and content are confounded;
        - "position": the mean over all orders, by the position of the segment in the order;
        - "content": the mean over all orders, by the original position of the segment.

        The summary is about "position". Documents that are too short or would be truncated are left out and counted,
        and a warning says how many.

    Raises:
        TypeError: ``texts`` is a single string, or has an element that is not a string.
        ValueError: An argument is out of range, ``strength`` is given for a plain model, the tokenizer gives no
            character offsets, fewer than two documents can be measured, or a vector is not finite.
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
        raise ValueError(
            f"texts: at least two documents are needed that can be cut and are read whole, got {counts}"
            + (f"; the model truncates at max_seq_length={limit}: raise it if the model allows" if n_truncated else "")
        )
    if counts.measured < counts.documents:
        logger.warning("Segment reflection leaves documents out: %s", counts)
    intervals = _Bootstrap(confidence, n_resamples, seed)
    values = {by: np.stack([getattr(document, by) for document in similarities]) for by in _Similarities._fields}
    frame = pd.concat([_table(by, of_documents, intervals) for by, of_documents in values.items()], ignore_index=True)
    return Reflection(frame, _summarize(values["position"], intervals), counts)


class _Bootstrap(NamedTuple):
    """Computes percentile intervals of means over documents."""

    confidence: float
    n_resamples: int
    seed: int

    def of_mean(self, values: Array) -> tuple[Any, Any]:
        """Returns the lower and upper bounds for the means over the first axis."""
        interval = bootstrap(
            (values,),
            np.mean,
            axis=0,
            n_resamples=self.n_resamples,
            confidence_level=self.confidence,
            method="percentile",
            batch=100,  # resamples in memory at once
            rng=np.random.default_rng(self.seed),
        ).confidence_interval
        return interval.low, interval.high


def _table(by: str, values: Array, intervals: _Bootstrap) -> pd.DataFrame:
    """Returns the rows of the frame for similarities of shape (documents, n_segments)."""
    n_documents, n_segments = values.shape
    low, high = intervals.of_mean(values)
    columns = {"similarity": values.mean(0), "low": low, "high": high, "documents": n_documents}
    return pd.DataFrame({"by": by, "position": range(n_segments), **columns})


def _summarize(by_position: Array, intervals: _Bootstrap) -> ReflectionSummary:
    """Summarizes similarities by position, shape (documents, n_segments)."""
    slopes = slope(np.linspace(0, 1, by_position.shape[1]), by_position)
    means = by_position.mean(0)
    # The mean of the slopes is the slope of the means.
    figures = slopes.mean(), *intervals.of_mean(slopes), np.ptp(means), means.std()
    return ReflectionSummary(*(float(figure) for figure in figures))


class _Similarities(NamedTuple):
    """The mean similarities of one document by position or segment, each float64 of shape (n_segments,)."""

    as_written: Array
    position: Array
    content: Array

    @classmethod
    def of(cls, whole: Array, alone: Array, orders: Orders) -> _Similarities:
        """Averages the cosines of document vectors, shape (orders, D), and segment vectors, shape (n_segments, D)."""
        by_segment = whole @ alone.T  # (orders, n_segments)
        by_position = np.take_along_axis(by_segment, orders, axis=1)
        return cls(as_written=by_segment[0], position=by_position.mean(0), content=by_segment.mean(0))


def _encode(model: SentenceTransformer, texts: list[str], batch_size: int, **settings: Any) -> Array:
    """Encodes documents as normalized float64 vectors, shape (texts, D)."""
    vectors = model.encode_document(
        texts, batch_size=batch_size, normalize_embeddings=True, show_progress_bar=False, **settings
    )
    if not np.isfinite(vectors).all():
        broken = [i for i, vector in enumerate(vectors) if not np.isfinite(vector).all()]
        raise ValueError(
            f"model: {len(broken)} of {len(texts)} vectors are not finite, the first of {texts[broken[0]][:60]!r}"
        )
    return np.asarray(vectors, dtype=np.float64)
