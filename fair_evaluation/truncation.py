"""How much of the documents a model never reads: what stands behind max_seq_length cannot be found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sentence_transformers import SentenceTransformer
from tqdm.auto import tqdm

from fair_calibration.prompts import document_prompt
from fair_calibration.validation import validate_positive_int
from fair_evaluation.documents import batches, count_tokens, max_document_tokens


class DocumentTokens(NamedTuple):
    """The tokens of one document, prompt and special tokens included: ``tokens`` = ``kept`` + ``lost``."""

    tokens: int
    kept: int
    lost: int


class TruncationSummary(NamedTuple):
    """What truncation takes from a collection.

    Attributes:
        documents: How many there are.
        truncated: How many of them lose tokens.
        tokens: The tokens of all documents, prompts and special tokens included.
        lost: How many of these the model never reads.
        longest: The tokens of the longest document.
        max_tokens: Where the model truncates; None where it does not.
    """

    documents: int
    truncated: int
    tokens: int
    lost: int
    longest: int
    max_tokens: int | None

    @property
    def share_truncated(self) -> float:
        """The share of documents that lose tokens; 0 without documents."""
        return self.truncated / self.documents if self.documents else 0.0

    @property
    def share_lost(self) -> float:
        """The share of tokens that are lost; 0 without documents."""
        return self.lost / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        return (
            f"{self.truncated} of {self.documents} documents ({self.share_truncated:.1%}) lose {self.lost} of "
            f"{self.tokens} tokens ({self.share_lost:.1%}) at max_seq_length {self.max_tokens}; the longest has "
            f"{self.longest}"
        )


def iterate_truncation(
    model: SentenceTransformer,
    texts: Iterable[str],
    *,
    prompt: str | None = None,
    batch_size: int = 64,
    show_progress_bar: bool = False,
) -> Iterator[DocumentTokens]:
    """Yields what every document loses, in order, holding one batch of texts at a time.

    Nothing is encoded, and the model's own preprocessing makes the tokens.

    Args:
        model: Plain or calibrated; ``max_seq_length`` is read when the first document is.
        texts: The documents, also from an iterator.
        prompt: Put before every text; None is the prompt of ``model.encode_document``.
        batch_size: Texts tokenized at once.
        show_progress_bar: Whether to show a bar.

    Raises:
        TypeError: ``texts`` is one string, or holds something else than strings.
        ValueError: ``batch_size`` is below 1.
    """
    batch_size = validate_positive_int("batch_size", batch_size)
    prompt = document_prompt(model) if prompt is None else prompt
    limit = max_document_tokens(model)
    with tqdm(desc="tokens", unit="doc", disable=not show_progress_bar) as bar:
        for batch in batches(texts, batch_size):
            for tokens in count_tokens(model, batch, prompt=prompt):
                kept = tokens if limit is None else min(tokens, limit)
                yield DocumentTokens(tokens, kept, tokens - kept)
            bar.update(len(batch))


def summarize_truncation(
    model: SentenceTransformer,
    texts: Iterable[str],
    *,
    prompt: str | None = None,
    batch_size: int = 64,
    show_progress_bar: bool = False,
) -> TruncationSummary:
    """Adds up `iterate_truncation`, whose arguments it takes, over a collection of any size."""
    documents = truncated = total = lost = longest = 0
    for document in iterate_truncation(
        model, texts, prompt=prompt, batch_size=batch_size, show_progress_bar=show_progress_bar
    ):
        documents += 1
        truncated += document.lost > 0
        total += document.tokens
        lost += document.lost
        longest = max(longest, document.tokens)
    return TruncationSummary(documents, truncated, total, lost, longest, max_document_tokens(model))
