"""Divides texts into batches by tokens: texts of similar length together, as many as fit into a token budget."""

from __future__ import annotations

from collections.abc import Sequence

from fair_calibration.validation import validate_positive_int


def token_batches(lengths: Sequence[int], *, tokens_per_batch: int, batch_size: int | None = None) -> list[list[int]]:
    """Divides texts into batches that hold, padding included, at most ``tokens_per_batch`` tokens.

    The longest texts come first, so that a batch that does not fit into memory shows at the start.

    Args:
        lengths: The number of tokens of each text.
        tokens_per_batch: The most tokens in a batch: its number of texts times the length of its longest text. A text
            that is longer than this forms a batch by itself.
        batch_size: The most texts in a batch; None for no limit.

    Returns:
        The indices of the texts in each batch. Every text is in exactly one batch; texts are ordered by decreasing
        length, and texts of equal length keep their order.

    Raises:
        ValueError: A limit is below 1.
        TypeError: A limit is not an integer.
    """
    validate_positive_int("tokens_per_batch", tokens_per_batch)
    if batch_size is not None:
        validate_positive_int("batch_size", batch_size)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches = []
    start = 0
    while start < len(order):
        n_texts = max(1, tokens_per_batch // max(1, lengths[order[start]]))
        stop = start + min(n_texts, batch_size or n_texts)
        batches.append(order[start:stop])
        start = stop
    return batches
