"""The manifest of a build: the encoder, the size of the shards, the source, and the environment."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from fair_calibration import FairSentenceTransformer
from fair_calibration.identity import DifferentEncoderError, EncoderIdentity, differences
from fair_calibration.transformer import FairTransformer
from fair_calibration.validation import validate_positive_int

_PACKAGES = ("torch", "transformers", "sentence-transformers", "fair-calibration")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes a build: two builds of the same source with equal manifests have equal shards.

    Attributes:
        encoder: The identity of the encoder.
        shard_size: The number of documents in a shard. Every shard is encoded by itself, so this decides which
            documents share batches.
        source: The name of the source, and what is known of it. Its documents are compared shard by shard.
        environment: Versions, device, threads and batch sizes, which decide the last bits of a vector. A difference is
            a warning, not an error.
    """

    encoder: EncoderIdentity
    shard_size: int
    source: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        validate_positive_int("shard_size", self.shard_size)

    def to_dict(self) -> dict[str, Any]:
        """Returns the values as a dict that `json.dumps` accepts and `from_dict` reads back."""
        return {
            "format": 1,
            "encoder": self.encoder.to_dict(),
            "shard_size": self.shard_size,
            "source": dict(self.source),
            "environment": dict(self.environment),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Manifest:
        """Builds a manifest from the output of `to_dict`.

        Raises:
            ValueError: The manifest was written by a later version of this package.
        """
        if values["format"] != 1:
            raise ValueError(f"format: this version reads 1, got {values['format']!r}; update fair-calibration")
        rest = {key: values[key] for key in ("shard_size", "source", "environment")}
        return cls(encoder=EncoderIdentity.from_dict(values["encoder"]), **rest)


def check_same(old: Manifest, new: Manifest, *, what: str) -> None:
    """Checks that an interrupted build can be resumed with the present settings.

    Args:
        old: The manifest of the interrupted build.
        new: The manifest of the present call.
        what: The name of the build, for the error message.

    Raises:
        DifferentEncoderError: The encoder or the size of the shards differs; the message names every difference.
    """
    lines = old.encoder.document_differences(new.encoder)
    if old.shard_size != new.shard_size:
        lines.append(f"shard_size: {old.shard_size} there, {new.shard_size} now")
    if lines:
        raise DifferentEncoderError(
            f"{what} was made by {old.encoder.model!r} with other settings than {new.encoder.model!r} has now: "
            f"{'; '.join(lines)}. Use the same settings, or another folder"
        )


def environment_differences(old: Manifest, new: Manifest) -> list[str]:
    """Returns the differences that may change the last bits of the vectors, one line each."""
    return differences(dict(old.environment), dict(new.environment))


def describe_environment(
    model: SentenceTransformer, devices: Sequence[str] | None = None, **settings: Any
) -> dict[str, Any]:
    """Returns what decides the last bits of the vectors: versions, the kind of device, and further settings.

    Args:
        model: The model; it encodes on its own device unless there are others.
        devices: The devices of a pool of processes, whose kinds and number decide how texts are batched.
        **settings: Further settings that decide the last bits.
    """
    fair = model.fair if isinstance(model, FairSentenceTransformer) else None
    pool = Counter(torch.device(device).type for device in devices or ())
    kinds = " and ".join(f"{n} {kind}" for kind, n in sorted(pool.items()))
    return {
        "device": f"pool of {kinds}" if pool else str(model.device.type),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "pooled_row_only": isinstance(fair, FairTransformer) and fair.is_pooled_row_only,
        "kernel": "torch" if fair is None else fair.kernel,
        "versions": {package: _version(package) for package in _PACKAGES},
        **settings,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
