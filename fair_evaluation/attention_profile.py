"""Measures how much attention each part of a document gets in each layer, before and after calibration."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, cast

import numpy as np
import pandas as pd
from sentence_transformers import SentenceTransformer
from tqdm.auto import tqdm

from fair_calibration import FairConfig, FairSentenceTransformer, calibrate
from fair_calibration.prompts import document_prompt
from fair_calibration.validation import validate_positive_int
from fair_evaluation.attention_shares import Array, ShareObserver
from fair_evaluation.documents import batches
from fair_evaluation.observation import Batch, load_batch, observe_attention

logger = logging.getLogger("fair_evaluation")

COLUMNS = (
    "n_baskets",
    "calibrated",
    "segment",
    "basket",
    "first_token",
    "last_token",
    "tokens",
    "documents",
    "share_plain",
    "share_calibrated",
)


def attention_profile(
    model: SentenceTransformer,
    texts: Iterable[str],
    *,
    config: FairConfig | None = None,
    per_head: bool = False,
    prompt: str | None = None,
    batch_size: int = 16,
    show_progress_bar: bool = False,
) -> pd.DataFrame:
    """Measures the attention that the baskets of documents get, in the plain and in the calibrated model.

    With cls and last-token pooling this is the attention of the pooled token, with mean pooling the mean over all valid
    tokens. The plain and the calibrated model run in a forward pass each; so in a layer above a calibrated one the
    input differs as well. Shares are computed in log space from float32 logits, also if the model runs in half
    precision, and without an L x L matrix in memory.

    Args:
        model: A plain or calibrated model that `fair_calibration.calibrate` accepts. It is not changed.
        texts: The documents.
        config: The settings of the calibration; None means the model's own, or the defaults.
        per_head: Whether to give a row for each head instead of the mean over heads.
        prompt: The text that is put before every document; None means the prompt of ``model.encode_document``.
        batch_size: The number of documents per forward pass.
        show_progress_bar: Whether to show a progress bar.

    Returns:
        One row per layer (and head), kind of document and segment, with the columns

        - ``layer`` and, if ``per_head``, ``head``, both counted from 0;
        - ``n_baskets``: the number of baskets of the documents in this row; documents with different numbers are not
          averaged; ``calibrated``: whether these documents are long enough to be calibrated;
        - ``segment``: "bos", "basket", "eos", or "prompt" (the whole prompt, if pooling leaves it out); ``basket``: the
          basket's number from 0, missing for other segments; ``first_token`` and ``last_token``: the content tokens of
          the basket in the longest of the documents, counted from 0;
        - ``tokens``: the mean number of tokens of the segment; ``documents``: the number of documents;
        - ``share_plain`` and ``share_calibrated``: mean shares over documents (and heads). They sum to 1 over the
          segments.

    Raises:
        TypeError: ``texts`` is a single string or has an element that is not a string, or the settings are not a
            `FairConfig`.
        ValueError: The model cannot be calibrated with these settings, or there are no texts.
    """
    batch_size = validate_positive_int("batch_size", batch_size)
    fair = calibrate(model, config).eval()
    settings = cast(FairConfig, fair.fair_config)  # `load_batch` refuses others
    prompt = document_prompt(model) if prompt is None else prompt
    groups: dict[tuple[int, bool], _Group] = {}
    n_documents = n_truncated = 0
    with tqdm(desc="attention", unit="doc", disable=not show_progress_bar) as bar:
        for texts_of_batch in batches(texts, batch_size):
            batch = load_batch(fair, texts_of_batch, prompt=prompt)
            plain, calibrated = ShareObserver(batch, 0.0), ShareObserver(batch, settings.strength)
            observe_attention(fair, batch, plain)
            observe_attention(fair, batch, calibrated, strength=settings.strength)
            for i, is_calibrated in enumerate(batch.baskets.is_calibrated):
                segments = _segments(batch, i)
                n_baskets = sum(segment.name == "basket" for segment in segments)
                group = groups.setdefault((n_baskets, is_calibrated), _Group(len(segments)))
                group.add(segments, plain.of_document(i), calibrated.of_document(i))
            n_documents += len(texts_of_batch)
            n_truncated += batch.n_truncated
            bar.update(len(texts_of_batch))
    if not n_documents:
        raise ValueError("texts: expected at least one document, got none")
    if n_truncated:
        logger.warning(
            "%d of %d documents are truncated at max_seq_length=%s tokens; the profile describes what the model reads.",
            n_truncated,
            n_documents,
            fair.max_seq_length,
        )
    frames = [
        group.frame(per_head=per_head).assign(n_baskets=n_baskets, calibrated=calibrated)
        for (n_baskets, calibrated), group in sorted(groups.items())
    ]
    by = ["layer", "head"] if per_head else ["layer"]
    frame = pd.concat(frames, ignore_index=True).sort_values(by, kind="stable", ignore_index=True)
    return frame[[*by, *COLUMNS]]


def count_baskets(fair: FairSentenceTransformer, texts: Iterable[str], *, batch_size: int = 64) -> dict[int, int]:
    """Counts documents by their number of baskets in a calibrated model, without encoding them.

    Args:
        fair: The model.
        texts: The documents.
        batch_size: The number of texts tokenized at once.

    Returns:
        The number of documents for each number of baskets, in ascending order.
    """
    prompt = document_prompt(fair)
    counts: Counter[int] = Counter()
    for texts_of_batch in batches(texts, batch_size):
        batch = load_batch(fair, texts_of_batch, prompt=prompt)
        for i in range(len(texts_of_batch)):
            counts[sum(segment.name == "basket" for segment in _segments(batch, i))] += 1
    return dict(sorted(counts.items()))


class _Segment(NamedTuple):
    """A basket, an isolated token or a prompt: its indices among baskets and isolated tokens, and its length."""

    name: str
    indices: list[int]
    n_tokens: int


def _segments(batch: Batch, sequence: int) -> list[_Segment]:
    """Lists the segments of one document in their order in the text; a prompt comes last."""
    baskets, isolate = batch.baskets, batch.config.isolate
    first_isolated, n_isolated = baskets.n_baskets, baskets.isolated.shape[1]
    counts = baskets.segment_of_key[sequence].bincount(minlength=first_isolated + n_isolated + 1).tolist()
    named = [("basket", [n]) for n in range(first_isolated) if counts[n]]
    if isolate != "none":
        named.insert(0, ("bos", [first_isolated]))
    if isolate == "bos_eos":
        named.append(("eos", [first_isolated + 1]))
    if baskets.n_kept:
        named.append(("prompt", list(range(first_isolated + n_isolated - baskets.n_kept, first_isolated + n_isolated))))
    return [_Segment(name, indices, sum(counts[i] for i in indices)) for name, indices in named]


class _Group:
    """Sums of shares over documents with the same number of segments."""

    def __init__(self, n_segments: int) -> None:
        self.names: list[str] = []
        self.documents = 0
        self.tokens = np.zeros(n_segments)
        self.most_tokens = np.zeros(n_segments, dtype=np.int64)
        self.plain: Array | float = 0.0  # (layers, H, segments)
        self.calibrated: Array | float = 0.0

    def add(self, segments: list[_Segment], plain: Array, calibrated: Array) -> None:
        """Adds the shares of a document, shape (layers, H, N + I)."""
        self.names = [segment.name for segment in segments]
        self.documents += 1
        n_tokens = [segment.n_tokens for segment in segments]
        self.tokens += n_tokens
        self.most_tokens = np.maximum(self.most_tokens, n_tokens)
        self.plain += _sum_indices(plain, segments)
        self.calibrated += _sum_indices(calibrated, segments)

    def frame(self, *, per_head: bool) -> pd.DataFrame:
        """Returns the mean shares, one row per layer (and head) and segment."""
        plain, calibrated = (np.asarray(sums) / self.documents for sums in (self.plain, self.calibrated))
        if not per_head:
            plain, calibrated = (shares.mean(1, keepdims=True) for shares in (plain, calibrated))
        layer, head, segment = (index.ravel() for index in np.indices(plain.shape))
        is_basket = np.array(self.names) == "basket"
        basket = np.cumsum(is_basket) - 1
        by_segment = pd.DataFrame({"segment": self.names, "tokens": self.tokens / self.documents})
        stops = np.cumsum(self.most_tokens * is_basket)
        for name, values in {
            "basket": basket,
            "first_token": stops - self.most_tokens,
            "last_token": stops - 1,
        }.items():
            by_segment[name] = pd.array(values, dtype="Int64")
            by_segment.loc[~is_basket, name] = pd.NA
        frame = by_segment.iloc[segment].reset_index(drop=True)
        return frame.assign(
            layer=layer,
            head=head,
            documents=self.documents,
            share_plain=plain.ravel(),
            share_calibrated=calibrated.ravel(),
        )


def _sum_indices(shares: Array, segments: list[_Segment]) -> Array:
    """Sums shares of shape (..., N + I) over the indices of each segment."""
    return np.stack([shares[..., segment.indices].sum(-1) for segment in segments], axis=-1)
