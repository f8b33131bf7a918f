"""Manifests and vectors without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fair_calibration import FairConfig
from fair_calibration.identity import EncoderIdentity
from fair_indexing.manifest import Manifest

RECORD = EncoderIdentity(
    model="some/model",
    weights="0123",
    dtype="float32",
    modules={"0": {"class": "Transformer", "network": {"hidden_size": 3}}, "1": {"class": "Pooling"}},
    tokenizer="abcd right right",
    adapters=(),
    max_seq_length=512,
    truncate_dim=None,
    normalize=True,
    similarity="cosine",
    document_prompt="",
    query_prompt="query: ",
    fair_config=FairConfig(layers=(3, 5)).to_dict(),
)


def manifest(**settings: Any) -> Manifest:
    return Manifest(**{"encoder": RECORD, "shard_size": 4, "source": {"name": "list", "documents": 10}, **settings})


def vectors(n: int, start: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(start).standard_normal((n, 3)).astype(np.float32)


def docnos(n: int, start: int = 0) -> list[str]:
    return [f"d{i}" for i in range(start, start + n)]


def texts(n: int, start: int = 0) -> list[str]:
    return [f"text {i}" for i in range(start, start + n)]
