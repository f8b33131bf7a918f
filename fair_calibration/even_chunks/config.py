"""`EvenChunks`: the settings of encoding in even chunks, as one frozen, validated and hashable value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from fair_calibration.json_settings import JsonSettings
from fair_calibration.validation import validate_positive_int, validate_strength


@dataclass(frozen=True, kw_only=True)
class EvenChunks(JsonSettings):
    """The settings of encoding documents in even chunks: another way to one position-fair vector, without calibration.

    A document is cut into as few chunks of equal length as possible. The plain model encodes each chunk by itself, and
    the chunks are joined into the one vector that is about equally similar to all parts of the document. The model's
    ``max_seq_length`` limits a chunk, not the document, so that nothing of a document is cut off.

    Attributes:
        strength: A number in [0, 1], the weight of the joined vector against the plain model's vector of the whole
            document: 0 is the plain model, and 1 saves encoding the document as a whole. Documents that do not fit into
            one input of the model have no vector as a whole, and get the joined vector alone.
        chunk_size: The largest number of tokens in a chunk, without special tokens and prompt. Documents that fit into
            one chunk are encoded by the plain model.
        unit_size: With mean pooling, the number of tokens in each of the parts that the vector is to be similar to.
            With cls and last-token pooling the chunks themselves are the parts.
        ridge: A number above 0: how much the mean of the parts is preferred to equal similarity.
    """

    strength: float = 0.8
    chunk_size: int = 128
    unit_size: int = 32
    ridge: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "strength", validate_strength(self.strength))
        object.__setattr__(self, "chunk_size", validate_positive_int("chunk_size", self.chunk_size))
        object.__setattr__(self, "unit_size", validate_positive_int("unit_size", self.unit_size))
        object.__setattr__(self, "ridge", _validate_ridge(self.ridge))


def _validate_ridge(ridge: Any) -> float:
    if isinstance(ridge, bool) or not isinstance(ridge, Real):
        raise TypeError(f"ridge: expected a number above 0, got {ridge!r} ({type(ridge).__name__})")
    if not 0.0 < float(ridge) < math.inf:
        raise ValueError(f"ridge: expected a finite number above 0, got {ridge!r}")
    return float(ridge)
