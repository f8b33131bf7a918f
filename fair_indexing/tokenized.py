"""Texts that are tokenized once and kept without padding, so that batches of any size can be made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from fair_calibration.even_chunks.chunks import Frame

_TOKENIZED_AT_ONCE = 256  # texts of similar length, so that little of what is kept in memory is padding


@dataclass(frozen=True)
class TokenizedTexts:
    """Texts that are sorted and batched together.

    Attributes:
        names: What errors call the texts, such as their docnos.
        texts: The texts.
        lengths: The number of tokens of each text, or an estimate where texts are not tokenized in advance.
        rows: The features of each text by name, tensors of shape (length,) without padding; None where texts are not
            tokenized in advance.
        shared: The features that are not tensors, which are the same for all texts.
    """

    names: Sequence[object]
    texts: Sequence[str]
    lengths: list[int]
    rows: list[dict[str, torch.Tensor]] | None = None
    shared: dict[str, Any] | None = None


@dataclass(frozen=True)
class RowTokenizer:
    """Tokenizes texts into rows without padding, and pads rows to batches in the way the model does.

    Attributes:
        preprocess: The model's own tokenization: a list of texts to features.
        padding: The padding value of each feature, by name.
        side: Where padding stands, "left" or "right".
    """

    preprocess: Callable[[list[str]], dict[str, Any]]
    padding: dict[str, int]
    side: str

    @classmethod
    def of(cls, preprocess: Callable[[list[str]], dict[str, Any]], example: dict[str, Any]) -> RowTokenizer | None:
        """Finds out from the features of two texts of different length how the model pads.

        Returns:
            The tokenizer, or None if the model's features are not one padded row per text.
        """
        tensors, others = _split(example)
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

    def tokenize(self, texts: Sequence[str], names: Sequence[object]) -> TokenizedTexts:
        """Tokenizes texts, each once."""
        rows: list[dict[str, torch.Tensor]] = [{} for _ in texts]
        shared: dict[str, Any] = {}
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in range(0, len(order), _TOKENIZED_AT_ONCE):
            indices = order[start : start + _TOKENIZED_AT_ONCE]
            tensors, shared = _split(self.preprocess([texts[i] for i in indices]))
            firsts = tensors["attention_mask"].argmax(dim=1).tolist()
            lengths = tensors["attention_mask"].sum(dim=1).tolist()
            for row, (i, first, length) in enumerate(zip(indices, firsts, lengths, strict=True)):
                rows[i] = {name: tensor[row, first : first + length] for name, tensor in tensors.items()}
        return TokenizedTexts(names, texts, [len(row["attention_mask"]) for row in rows], rows, shared)

    def batch(self, rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Pads rows to a batch.

        Returns:
            The features by name, tensors of shape (B, L), where L is the length of the longest row, and at least 1:
            texts without a single token become rows of padding, as they do beside longer texts.
        """
        features = {}
        for name, value in self.padding.items():
            own = [row[name] for row in rows]
            tensor = pad_sequence(own, batch_first=True, padding_value=value, padding_side=self.side)
            features[name] = tensor if tensor.shape[1] else tensor.new_full((len(rows), 1), value)
        return features


def _split(features: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {name: value for name, value in features.items() if torch.is_tensor(value)}
    return tensors, {name: value for name, value in features.items() if name not in tensors}
