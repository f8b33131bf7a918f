"""Documents as a model sees them: with its document prompt, its special tokens, and nothing cut off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from sentence_transformers import SentenceTransformer

from fair_calibration.routes import document_path

_UNLIMITED = 10**9  # transformers' tokenizers without a limit have one of 10^30


def max_document_tokens(model: SentenceTransformer) -> int | None:
    """Returns how many tokens of a document the model reads, prompt and special tokens included; None for all."""
    first = document_path(model)[0]
    limit = getattr(first, "document_length", None)  # the transformer's own limit for documents, if it has one
    limit = getattr(first, "max_seq_length", None) if limit is None else limit
    return None if limit is None or limit >= _UNLIMITED else int(limit)


def count_tokens(model: SentenceTransformer, texts: Sequence[str], *, prompt: str) -> list[int]:
    """Counts the tokens of documents before truncation.

    Args:
        model: Its own preprocessing makes the tokens, so that they are the ones it would encode.
        texts: One batch of documents.
        prompt: Put before every text.

    Returns:
        One number per text; prompt and special tokens are counted.
    """
    features = model.preprocess(
        list(texts),
        prompt=prompt or None,
        task="document",
        # verbose: transformers would warn of sequences longer than the model's.
        processing_kwargs={"text": {"truncation": False, "verbose": False}},
    )
    counts: list[int] = features["attention_mask"].sum(1).tolist()
    return counts


def batches(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yields lists of ``size`` texts, the last one shorter.

    Raises:
        TypeError: ``texts`` is one string, or holds something else than strings.
    """
    if isinstance(texts, str):
        raise TypeError("texts: expected an iterable of strings, got one string; put it into a list")
    iterator = iter(texts)
    while batch := list(islice(iterator, size)):
        for text in batch:
            if not isinstance(text, str):
                raise TypeError(f"texts: expected strings, got {text!r} ({type(text).__name__})")
        yield batch
