"""Cuts documents into passages of about equal length, to be encoded as several vectors per document."""

from __future__ import annotations

from sentence_transformers import SentenceTransformer

from fair_calibration.access.unpadded import sequence_lengths
from fair_calibration.limits import has_limit
from fair_calibration.prompts import document_prompt
from fair_calibration.texts import tokenizer_lock
from fair_calibration.validation import validate_positive_int


def cut_passages(model: SentenceTransformer, text: str, *, chunk_size: int = 128) -> list[str]:
    """Cuts a text into as few passages as possible that differ little in their number of tokens.

    Passages end at white space. In scripts without spaces, and in words longer than a quarter of a passage, they end
    between two tokens. Only white space at the ends of passages is left out.

    Args:
        model: The model, whose tokenizer counts the tokens.
        text: The text.
        chunk_size: The most tokens of a passage, without the model's prompt and special tokens.

    Returns:
        The passages in the order of the text. A text that is short enough, or empty, is one passage, and unchanged.

    Raises:
        ValueError: The model has a slow tokenizer, which gives no character offsets.
    """
    starts = token_starts(model, text)
    n = -(-len(starts) // chunk_size)
    while 1 < n < len(starts):
        passages = cut_evenly(text, starts, n)
        # Passages may be longer than a share of the tokens, as they end at white space and are tokenized by themselves.
        with tokenizer_lock:
            tokenized = model.tokenizer(passages, add_special_tokens=False, verbose=False)["input_ids"]
        if max(map(len, tokenized)) <= chunk_size:
            return [passage for passage in passages if passage]  # some may have been white space alone
        n += 1
    return [text]


def check_chunk_size(model: SentenceTransformer, chunk_size: int, *, setting: str = "chunk_size") -> None:
    """Checks that passages of ``chunk_size`` tokens are not truncated by the model; errors call it ``setting``.

    Raises:
        TypeError: ``chunk_size`` is not an integer.
        ValueError: ``chunk_size`` is below 1, or does not fit into ``max_seq_length`` together with the model's prompt
            for documents and its special tokens.
    """
    validate_positive_int(setting, chunk_size)
    limit = model.max_seq_length
    if limit is None or not has_limit(limit):
        return
    features = model.preprocess([""], prompt=document_prompt(model) or None, task="document")
    n_others = int(sequence_lengths(features).sum())
    if chunk_size + n_others > limit:
        raise ValueError(
            f"{setting}: expected at most {limit - n_others}, as the model reads {limit} tokens (max_seq_length), of "
            f"which the prompt and special tokens take {n_others}, got {chunk_size}"
        )


def token_starts(model: SentenceTransformer, text: str) -> list[int]:
    """Returns where each token of a text begins, as character offsets.

    Raises:
        ValueError: The model has a slow tokenizer, which gives no character offsets.
    """
    if not model.tokenizer.is_fast:
        raise ValueError(
            f"model: cutting documents needs the character offsets of a fast tokenizer, "
            f"{type(model.tokenizer).__name__} is a slow one"
        )
    with tokenizer_lock:
        offsets = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [start for start, _ in offsets["offset_mapping"]]


def cut_evenly(text: str, starts: list[int], n_pieces: int) -> list[str]:
    """Cuts a text into pieces of equal token count.

    Each cut is moved to the nearest token that is next to white space, by at most a quarter of a piece. A cut without
    such a token near it stays where it is, between two tokens.

    Args:
        text: The text.
        starts: Where each token begins, at least one token for each piece.
        n_pieces: The number of pieces.

    Returns:
        The pieces without white space at their ends.
    """
    reach = len(starts) // (4 * n_pieces)
    cuts = [0]
    for i in range(1, n_pieces):
        exact = i * len(starts) // n_pieces
        nearest = sorted(range(exact - reach, exact + reach + 1), key=lambda token: abs(token - exact))
        cuts.append(starts[next((token for token in nearest if _at_space(text, starts[token])), exact)])
    return [text[a:b].strip() for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _at_space(text: str, position: int) -> bool:
    # In some tokenizers, a token includes the space before the word.
    return text[position].isspace() or (position > 0 and text[position - 1].isspace())
