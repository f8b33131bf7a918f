"""Cuts documents into segments of equal token count, and gives the orders in which they are joined again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

Orders = NDArray[np.int64]


def cut_segments(model: SentenceTransformer, text: str, n_segments: int, *, min_tokens: int = 1) -> list[str] | None:
    """Cuts a text into segments of equal token count.

    Cuts are moved to the nearest token next to white space within a quarter of a segment; if there is none, as in
    scripts without spaces, they stay at the exact place.

    Args:
        model: The model whose tokenizer counts the tokens.
        text: The text.
        n_segments: The number of segments.
        min_tokens: The least number of tokens per segment.

    Returns:
        The segments without white space at their ends, or None if the text has fewer than ``n_segments * min_tokens``
        tokens.

    Raises:
        ValueError: The model has a slow tokenizer, which gives no character offsets.
    """
    if not model.tokenizer.is_fast:
        raise ValueError(
            f"model: cutting documents needs the character offsets of a fast tokenizer, "
            f"{type(model.tokenizer).__name__} is a slow one"
        )
    offsets = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = [start for start, _ in offsets["offset_mapping"]]
    if len(starts) < n_segments * min_tokens:
        return None
    reach = len(starts) // (4 * n_segments)
    cuts = [0]
    for i in range(1, n_segments):
        exact = i * len(starts) // n_segments
        nearest = sorted(range(exact - reach, exact + reach + 1), key=lambda token: abs(token - exact))
        cuts.append(starts[next((token for token in nearest if _at_space(text, starts[token])), exact)])
    return [text[a:b].strip() for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _at_space(text: str, position: int) -> bool:
    # In some tokenizers, a token includes the space before the word.
    return text[position].isspace() or (position > 0 and text[position - 1].isspace())


def rotated_orders(n_segments: int, n_rounds: int, rng: np.random.Generator) -> Orders:
    """Returns orders in which every segment stands equally often at every position.

    Args:
        n_segments: The number of segments, n.
        n_rounds: The number of rounds. The first has the n rotations of the original order, every further one those of
            a random order.
        rng: Draws the random orders.

    Returns:
        The index of the segment at each position, int64, shape (n * n_rounds, n). The first order is the original one.
    """
    bases = [np.arange(n_segments), *(rng.permutation(n_segments) for _ in range(n_rounds - 1))]
    return np.stack([np.roll(base, -shift) for base in bases for shift in range(n_segments)])
