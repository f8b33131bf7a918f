"""Counts how much of documents is lost by truncation: text after ``max_seq_length`` tokens cannot be found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sentence_transformers import SentenceTransformer
from tqdm.auto import tqdm

from fair_calibration.prompts import document_prompt
from fair_calibration.validation import validate_positive_int
from fair_evaluation.documents import batches, count_tokens, max_document_tokens


class TruncationSummary(NamedTuple):
    """How much of a collection is lost by truncation.

    Attributes:
        documents: The number of documents.
        truncated: The number of documents that lose tokens.
        tokens: The number of tokens of all documents, with prompts and special tokens.
        lost: The number of tokens that the model does not read.
        longest: The number of tokens of the longest document.
        max_tokens: The number of tokens at which the model truncates; None if it does not.
    """

    documents: int
    truncated: int
    tokens: int
    lost: int
    longest: int
    max_tokens: int | None

    @property
    def share_truncated(self) -> float:
        """The share of documents that lose tokens; 0 if there are no documents."""
        return self.truncated / self.documents if self.documents else 0.0

    @property
    def share_lost(self) -> float:
        """The share of tokens that are lost; 0 if there are no documents."""
        return self.lost / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        return (
            f"{self.truncated} of {self.documents} documents ({self.share_truncated:.1%}) lose {self.lost} of "
            f"{self.tokens} tokens ({self.share_lost:.1%}) at max_seq_length {self.max_tokens}; the longest has "
            f"{self.longest}"
        )


def summarize_truncation(
    model: SentenceTransformer, texts: Iterable[str], *, batch_size: int = 64, show_progress_bar: bool = False
) -> TruncationSummary:
    """Counts how much a collection of any size loses by truncation, one batch in memory at a time.

    Documents are tokenized by the model's own preprocessing with its prompt for documents, and not encoded.

    Args:
        model: The model, plain or calibrated.
        texts: The documents, in any iterable.
        batch_size: The number of documents that are tokenized at once.
        show_progress_bar: Whether to show a progress bar.

    Returns:
        The counts; print them for a sentence.

    Raises:
        TypeError: ``texts`` is a single string, or has an element that is not a string.
        ValueError: ``batch_size`` is below 1.
    """
    validate_positive_int("batch_size", batch_size)
    prompt, limit = document_prompt(model), max_document_tokens(model)
    documents = truncated = total = lost = longest = 0
    with tqdm(desc="tokens", unit="doc", disable=not show_progress_bar) as bar:
        for batch in batches(texts, batch_size):
            for tokens in count_tokens(model, batch, prompt=prompt):
                cut = 0 if limit is None else max(0, tokens - limit)
                documents += 1
                truncated += cut > 0
                total += tokens
                lost += cut
                longest = max(longest, tokens)
            bar.update(len(batch))
    return TruncationSummary(documents, truncated, total, lost, longest, limit)
