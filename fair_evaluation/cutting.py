"""Counts the tokens of texts, and cuts texts to a number of tokens or into segments of equal token count."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

TokenCounter = Callable[[str], int]
_REACH = 40  # a cut moves back to white space by at most so many characters


def token_counter(tokenizer: Any) -> TokenCounter:
    """Returns a function that counts the tokens of a text, without special tokens.

    Args:
        tokenizer: A SentenceTransformer, a tokenizer of transformers or tokenizers, or a function that returns the
            number of tokens of a text.

    Raises:
        TypeError: ``tokenizer`` has another type. A function that does not return an integer raises it when called.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a SentenceTransformer's
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        # verbose: transformers would warn of texts longer than the model's.
        return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if hasattr(tokenizer, "token_to_id"):
        return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
    if not callable(tokenizer):
        raise TypeError(
            "tokenizer: expected a SentenceTransformer, a tokenizer, or a function from a text to its number of "
            f"tokens, got {type(tokenizer).__name__}"
        )

    def count(text: str) -> int:
        n = tokenizer(text)
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"tokenizer: expected a function that returns a number of tokens, got {type(n).__name__}")
        return n

    return count


def cut_text(text: str, n_tokens: int, count: TokenCounter) -> str:
    """Returns the longest beginning of a text with at most ``n_tokens`` tokens; "" if there is none.

    The text is cut at the last white space, or between any two characters if there is none within 40 characters, as in
    scripts without spaces. Only the beginning of a long text is tokenized.
    """
    end, reach = 0, min(len(text), 64)
    while count(text[:reach]) <= n_tokens:  # try longer and longer beginnings
        if reach == len(text):
            return text
        end, reach = reach, min(len(text), 2 * reach)
    while reach - end > 1:
        middle = (end + reach) // 2
        end, reach = (middle, reach) if count(text[:middle]) <= n_tokens else (end, middle)
    while count(cut := _before_space(text, end)) > n_tokens:  # rare: a shorter text can have more tokens
        end = len(cut) - 1
    return cut


def _before_space(text: str, end: int) -> str:
    space = next((i for i in range(end, max(0, end - _REACH), -1) if text[i : i + 1].isspace()), end)
    return text[:space].rstrip()


def cut_segments(model: SentenceTransformer, text: str, n_segments: int, *, min_tokens: int = 1) -> list[str] | None:
    """Cuts a text into segments of equal token count.

    Cuts are moved to white space near by (`fair_calibration.passages.cut_evenly`).

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
    from fair_calibration.passages import cut_evenly, token_starts  # imports torch, which the rest does without

    starts = token_starts(model, text)
    return None if len(starts) < n_segments * min_tokens else cut_evenly(text, starts, n_segments)


def rotated_orders(n_segments: int) -> NDArray[np.int64]:
    """Returns the rotations of 0 to n - 1, shape (n, n), in which every segment stands once at every position."""
    return np.stack([np.roll(np.arange(n_segments), -shift) for shift in range(n_segments)])
