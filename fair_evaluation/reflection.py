"""Segment reflection: how well a document's vector reflects each part of the document, by position.

The document is cut into segments, and the cosine similarity of a segment's own vector to the document's vector says how
well the segment is reflected (Schuhmacher et al. 2026, arXiv 2601.16934). The beginning of a document may also be more
typical of its content. So the segments are rotated such that each stands at every position equally often; differences
between positions that remain are due to the encoder.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import bootstrap
from sentence_transformers import SentenceTransformer
from tqdm.auto import tqdm

from fair_calibration import FairSentenceTransformer, uncalibrate
from fair_calibration.prompts import document_prompt
from fair_calibration.validation import validate_positive_int
from fair_evaluation.cutting import cut_segments, rotated_orders
from fair_evaluation.documents import batches, count_tokens, encode_checked, max_document_tokens
from fair_evaluation.measures import Array, slope

logger = logging.getLogger("fair_evaluation")


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

    def __str__(self) -> str:
        return (
            f"{self.measured} of {self.documents} documents measured, {self.too_short} too short, "
            f"{self.truncated} truncated"
        )


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
    min_tokens: int = 16,
    strength: float | None = None,
    confidence: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
    batch_size: int = 32,
    show_progress_bar: bool = True,
) -> Reflection:
    """Measures how similar document vectors are to the vectors of their own segments, by position of the segment.

    Each document is cut into segments of equal token count, at white space if possible, and joined again in all
    rotations of the original order, so that every segment stands once at every position. The model encodes the
    documents, and the plain model the segments as documents of their own, both with the model's prompt for documents.

    Args:
        model: The model to measure, plain or calibrated.
        texts: The documents.
        n_segments: The number of segments per document, at least 2.
        min_tokens: The least number of tokens per segment; shorter documents are left out.
        strength: Overrides the strength of a calibrated model.
        confidence: The confidence level of the intervals.
        n_resamples: The number of resamples of the bootstrap.
        seed: Seed of the bootstrap.
        batch_size: The number of texts encoded at once.
        show_progress_bar: Whether to show a progress bar.

    Returns:
        The frame has one row per ``by`` and ``position`` (counted from 0) with ``similarity``, the mean cosine
        similarity over ``documents`` documents, and the bounds ``low`` and ``high`` of its bootstrap interval
        (percentile, over documents). ``by`` is

        - "as_written": documents in their original order, in which position and content are confounded;
        - "position": the mean over all rotations, by the position of the segment in the rotation;
        - "content": the mean over all rotations, by the original position of the segment.

        The summary is about "position". Documents that are too short or would be truncated are left out and counted,
        and a warning says how many.

    Raises:
        TypeError: ``texts`` is a single string, or has an element that is not a string.
        ValueError: An argument is out of range, ``strength`` is given for a plain model, the tokenizer gives no
            character offsets, fewer than two documents can be measured, or a vector is zero or not finite.
    """
    if validate_positive_int("n_segments", n_segments) < 2:
        raise ValueError(f"n_segments: expected at least 2, got {n_segments}")
    validate_positive_int("min_tokens", min_tokens)
    validate_positive_int("batch_size", batch_size)
    plain = uncalibrate(model) if isinstance(model, FairSentenceTransformer) else model
    if strength is not None and plain is model:
        raise ValueError("strength: the model is plain; calibrate it first, with fair_calibration.calibrate(model)")
    settings: dict[str, Any] = {"batch_size": batch_size, "normalize_embeddings": True}
    under_test = settings if strength is None else {**settings, "strength": strength}
    prompt, limit = document_prompt(model), max_document_tokens(model)
    orders = rotated_orders(n_segments)
    cosines: list[Array] = []  # of the rotations and segments of each document, shape (n_segments, n_segments)
    n_documents = n_too_short = n_truncated = 0
    with tqdm(desc="reflection", unit="doc", disable=not show_progress_bar) as bar:
        for batch in batches(texts, batch_size):
            segments: list[str] = []
            documents: list[str] = []
            for text in batch:
                pieces = cut_segments(model, text, n_segments, min_tokens=min_tokens)
                if pieces is None:
                    n_too_short += 1
                    continue
                rotations = [" ".join(pieces[i] for i in order) for order in orders]
                if limit is not None and max(count_tokens(model, rotations, prompt=prompt)) > limit:
                    n_truncated += 1
                    continue
                segments += pieces
                documents += rotations
            if documents:
                shape = len(documents) // n_segments, n_segments, -1
                alone = encode_checked(plain.encode_document, segments, **settings).reshape(shape)
                whole = encode_checked(model.encode_document, documents, **under_test).reshape(shape)
                cosines += [w @ a.T for w, a in zip(whole, alone, strict=True)]
            n_documents += len(batch)
            bar.update(len(batch))
    counts = ReflectionCounts(n_documents, len(cosines), n_too_short, n_truncated)
    if counts.measured < 2:
        raise ValueError(
            f"texts: at least two documents are needed that can be cut and are read whole, got {counts}"
            + (f"; the model truncates at max_seq_length={limit}: raise it if the model allows" if n_truncated else "")
        )
    if counts.measured < counts.documents:
        logger.warning("Segment reflection leaves documents out: %s", counts)
    by_segment = np.stack(cosines)
    by_position = np.take_along_axis(by_segment, orders[None], axis=2).mean(1)
    values = {"as_written": by_segment[:, 0], "position": by_position, "content": by_segment.mean(1)}

    def interval(values: Array) -> tuple[Any, Any]:
        """Returns the percentile interval of the means over documents, the first axis."""
        found = bootstrap(
            (values,),
            np.mean,
            axis=0,
            n_resamples=n_resamples,
            confidence_level=confidence,
            method="percentile",
            batch=100,  # resamples in memory at once
            rng=np.random.default_rng(seed),
        ).confidence_interval
        return found.low, found.high

    tables = []
    for by, of_documents in values.items():
        low, high = interval(of_documents)
        columns = {"similarity": of_documents.mean(0), "low": low, "high": high, "documents": counts.measured}
        tables.append(pd.DataFrame({"by": by, "position": range(n_segments), **columns}))
    slopes = slope(np.linspace(0, 1, n_segments), by_position)  # their mean is the slope of the means
    means = by_position.mean(0)
    figures = slopes.mean(), *interval(slopes), np.ptp(means), means.std()
    summary = ReflectionSummary(*(float(figure) for figure in figures))
    return Reflection(pd.concat(tables, ignore_index=True), summary, counts)
