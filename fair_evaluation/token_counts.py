"""Counts the tokens of texts with any kind of tokenizer, and cuts texts to a number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
