"""A window of documents, tokenized once: rows without padding, from which batches of any size are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from fair_calibration.access.discovery import PROBE_TEXTS
from fair_calibration.even_chunks.chunks import Frame

_TOKENIZED_AT_ONCE = 256  # documents, of like length, so that little of what is kept of them is padding


@dataclass(frozen=True)
class Window:
    """Documents that are batched together.

    Attributes:
        names: What they are called.
        texts: Their texts.
        lengths: The tokens of each, or an estimate where they are not tokenized.
        rows: The features of each by name, (length,), without padding; None where they are not tokenized.
        shared: The features that are no tensors, the same for all.
        n_truncated: How many documents were cut off at max_seq_length; None for a plain model.
    """

    names: Sequence[object]
    texts: Sequence[str]
    lengths: list[int]
    rows: list[dict[str, torch.Tensor]] | None = None
    shared: dict[str, Any] | None = None
    n_truncated: int | None = None


@dataclass(frozen=True)
class RowTokenizer:
    """Tokenizes documents into rows, and pads rows to batches as the model itself does.

    Attributes:
        preprocess: Texts to features.
        padding: The value that pads each of the features.
        side: Where it stands, "left" or "right".
    """

    preprocess: Callable[[list[str]], dict[str, Any]]
    padding: dict[str, int]
    side: str

    @classmethod
    def of(cls, preprocess: Callable[[list[str]], dict[str, Any]]) -> RowTokenizer | None:
        """Reads off two texts of different length how they are padded; None if the features are not of that kind."""
        tensors, others = _split(preprocess(list(PROBE_TEXTS)))
        mask = tensors.get("attention_mask")
        if mask is None or mask.ndim != 2 or any(tensor.shape != (2, mask.shape[1]) for tensor in tensors.values()):
            return None
        hidden = mask == 0
        values = {name: list(set(tensor[hidden].tolist())) for name, tensor in tensors.items()}
        if any(len(value) != 1 for value in values.values()):
            return None
        if any(not isinstance(value, (int, str, Frame)) for value in others.values()):
            return None
        side = "left" if hidden[:, 0].any() else "right"
        return cls(preprocess, {name: value[0] for name, value in values.items()}, side)

    def tokenize(self, texts: Sequence[str], names: Sequence[object]) -> Window:
        """Tokenizes documents."""
        rows: list[dict[str, torch.Tensor]] = [{} for _ in texts]
        shared: dict[str, Any] = {}
        n_truncated = None
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in range(0, len(order), _TOKENIZED_AT_ONCE):
            numbers = order[start : start + _TOKENIZED_AT_ONCE]
            tensors, shared = _split(self.preprocess([texts[i] for i in numbers]))
            if "n_truncated" in shared:
                n_truncated = (n_truncated or 0) + shared.pop("n_truncated")
            firsts = tensors["attention_mask"].argmax(dim=1).tolist()
            lengths = tensors["attention_mask"].sum(dim=1).tolist()
            for row, (i, first, length) in enumerate(zip(numbers, firsts, lengths, strict=True)):
                rows[i] = {name: tensor[row, first : first + length] for name, tensor in tensors.items()}
        return Window(names, texts, [len(row["attention_mask"]) for row in rows], rows, shared, n_truncated)

    def batch(self, rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Returns the features of a batch by name, (B, L), padded to its longest row, but at least to one token.

        Texts without a single token are rows of padding, as they are beside others.
        """
        features = {}
        for name, value in self.padding.items():
            own = [row[name] for row in rows]
            tensor = pad_sequence(own, batch_first=True, padding_value=value, padding_side=self.side)
            features[name] = tensor if tensor.shape[1] else tensor.new_full((len(rows), 1), value)
        return features


def check_texts(texts: Sequence[object], names: Sequence[object]) -> None:
    """Checks that documents are texts.

    Raises:
        TypeError: One is no string.
        ValueError: One has a lone surrogate, which tokenizers do not take, or the names are not as many.
    """
    if isinstance(texts, str):
        raise TypeError(f"texts: expected a sequence of str, got one str, {texts[:40]!r}")
    if len(texts) != len(names):
        raise ValueError(f"names: expected one for each of {len(texts)} texts, got {len(names)}")
    for text, name in zip(texts, names, strict=True):
        if not isinstance(text, str):
            raise TypeError(f"texts: expected str, got {type(text).__name__} (document {name!r})")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"texts: document {name!r} has a lone surrogate, which is no text") from error


def _split(features: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {name: value for name, value in features.items() if torch.is_tensor(value)}
    return tensors, {name: value for name, value in features.items() if name not in tensors}
