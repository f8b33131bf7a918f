"""An MTEB encoder whose rankings can be worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from mteb.models import ModelMeta

WORDS = ("red", "green", "blue", "black", "white", "gold", "grey", "pink", "cyan", "lime", "navy", "teal")


class KeywordEncoder:
    """Vectors are word counts and similarity is the dot product: the document with most of the query's word is first.

    Other words add nothing; a document without the word scores 0.
    """

    mteb_model_meta = ModelMeta.create_empty(overwrites={"name": "tests/keywords", "revision": "1"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.n_encoded: list[int] = []

    def encode(self, inputs: Any, **kwargs: Any) -> np.ndarray:  # noqa: ARG002
        texts = [text for batch in inputs for text in batch["text"]]
        self.n_encoded.append(len(texts))
        return np.array([[text.split().count(word) for word in WORDS] for text in texts], dtype=np.float32)

    def similarity(self, first: Any, second: Any) -> Any:
        import torch

        return torch.as_tensor(first) @ torch.as_tensor(second).T

    def similarity_pairwise(self, first: Any, second: Any) -> Any:
        import torch

        return (torch.as_tensor(first) * torch.as_tensor(second)).sum(-1)
