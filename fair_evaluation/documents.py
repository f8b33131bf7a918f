"""What the measurements do with documents: batches, token counts as the model counts them, and checked vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from fair_calibration.access.unpadded import sequence_lengths
from fair_calibration.document_transformer import DocumentTransformer
from fair_calibration.even_chunks.transformer import EvenChunksTransformer
from fair_calibration.limits import has_limit
from fair_calibration.routes import document_path


def max_document_tokens(model: SentenceTransformer) -> int | None:
    """Returns how many tokens of a document a model reads, with prompt and special tokens; None without a limit."""
    first = document_path(model)[0]
    if isinstance(first, EvenChunksTransformer) and first.fair_config.strength > 0:
        return None  # documents are cut into chunks, and all of these are read
    limit = getattr(first, "document_length", None)  # the transformer's own limit for documents, if it has one
    limit = getattr(first, "max_seq_length", None) if limit is None else limit
    return limit if has_limit(limit) else None


def count_tokens(model: SentenceTransformer, texts: Sequence[str], *, prompt: str) -> list[int]:
    """Counts the tokens of documents before truncation.

    Args:
        model: The model, whose own preprocessing tokenizes the documents.
        texts: One batch of documents.
        prompt: The text that is put before every document.

    Returns:
        The number of tokens of each document, with prompt and special tokens.
    """
    settings: dict[str, Any] = {
        "prompt": prompt or None,
        "task": "document",
        # verbose: transformers would warn of sequences longer than the model's.
        "processing_kwargs": {"text": {"truncation": False, "verbose": False}},
    }
    first = document_path(model)[0]
    if isinstance(first, DocumentTransformer):  # without counting documents as encoded by the model
        features = first.tokenize_documents(list(texts), strength=0.0, **settings).features
    else:
        features = model.preprocess(list(texts), **settings)
    counts: list[int] = sequence_lengths(features).tolist()
    return counts


def batches(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yields lists of ``size`` texts; the last one may be shorter.

    Raises:
        TypeError: ``texts`` is a single string, or has an element that is not a string.
    """
    if isinstance(texts, str):
        raise TypeError("texts: expected an iterable of strings, got one string; put it into a list")
    iterator = iter(texts)
    while batch := list(islice(iterator, size)):
        for text in batch:
            if not isinstance(text, str):
                raise TypeError(f"texts: expected strings, got {text!r} ({type(text).__name__})")
        yield batch


def encode_checked(
    encode: Callable[..., Any], texts: list[str], *, batch_size: int, **settings: Any
) -> NDArray[np.float64]:
    """Encodes texts as float64 vectors, shape (texts, D), of which none is zero or not finite."""
    vectors = np.asarray(encode(texts, batch_size=batch_size, show_progress_bar=False, **settings), dtype=np.float64)
    norms = np.linalg.norm(vectors, axis=1)
    if broken := [text for text, norm in zip(texts, norms, strict=True) if not 0 < norm < np.inf]:
        raise ValueError(
            f"model: {len(broken)} of {len(texts)} vectors are zero or not finite, the first of {broken[0][:60]!r}"
        )
    return vectors
