"""Batches by tokens: documents of like length together, as many as a budget of tokens holds."""

from __future__ import annotations

from collections.abc import Sequence

from fair_calibration.config import validate_positive_int


def token_batches(
    lengths: Sequence[int], *, tokens_per_batch: int, max_documents: int | None = None
) -> list[list[int]]:
    """Divides documents into batches that hold, padding included, at most ``tokens_per_batch`` tokens.

    Longest first, so that a batch that does not fit into memory is met at the start.

    Args:
        lengths: The tokens of each document.
        tokens_per_batch: The most tokens of a batch: its documents times its longest. A document longer than that is
            a batch by itself.
        max_documents: The most documents of a batch; None for no limit.

    Returns:
        The numbers of the documents of each batch. All documents occur, each in one batch, by falling length, those of
        equal length in their order.

    Raises:
        ValueError: A limit or a length is out of range.
        TypeError: A limit is no int.
    """
    validate_positive_int("tokens_per_batch", tokens_per_batch)
    if max_documents is not None:
        validate_positive_int("max_documents", max_documents)
    if len(lengths) and min(lengths) < 0:
        raise ValueError(f"lengths: expected numbers of tokens, got {min(lengths)}")
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches = []
    start = 0
    while start < len(order):
        n_documents = max(1, tokens_per_batch // max(1, lengths[order[start]]))
        stop = start + min(n_documents, max_documents or n_documents)
        batches.append(order[start:stop])
        start = stop
    return batches
