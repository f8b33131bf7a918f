"""What an index depends on: the encoder, its calibration, and how the collection is cut into shards."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from fair_calibration import FairConfig, FairSentenceTransformer
from fair_calibration.config import validate_positive_int
from fair_calibration.fingerprint import fingerprint_weights, model_facts
from fair_calibration.prompts import document_prompt, query_prompt
from fair_indexing.encoding import resolve_normalize

_PACKAGES = ("torch", "transformers", "sentence-transformers", "fair-calibration")
_SHOWN = 60


class DifferentEncoderError(ValueError):
    """An index was made with another encoder, or with other settings."""


@dataclass(frozen=True, kw_only=True)
class EncoderRecord:
    """All that the vectors of an encoder depend on, in JSON's types.

    Attributes:
        model: What the model is called; copies of one model may have several names, so this is never compared.
        weights: A hash of the weights.
        dtype: The type of the weights.
        modules: The modules and the network with their settings, by their names.
        tokenizer: A hash of the tokenizer's state and its sides of truncation and padding.
        adapters: The active adapters, layer by layer.
        max_seq_length: Where texts are truncated, in tokens.
        truncate_dim: How many dimensions are kept; None is all.
        normalize: Whether vectors get unit length.
        similarity: What the model's vectors are compared with.
        document_prompt: What is put before every document.
        query_prompt: What is put before every query.
        fair_config: The calibration of documents (`FairConfig.to_dict`); None is a plain model.
    """

    model: str
    weights: str
    dtype: str
    modules: Mapping[str, Any]
    tokenizer: str
    adapters: tuple[str, ...]
    max_seq_length: int | None
    truncate_dim: int | None
    normalize: bool
    similarity: str
    document_prompt: str
    query_prompt: str
    fair_config: Mapping[str, Any] | None

    @classmethod
    def of(
        cls,
        model: SentenceTransformer,
        *,
        name: str | None = None,
        strength: float | None = None,
        normalize: bool | None = None,
    ) -> EncoderRecord:
        """Describes a model as it is now. The weights are read once, a few seconds for a billion.

        Args:
            model: Calibrated or plain.
            name: What it is called; None is the name that its network was loaded by.
            strength: Overrides that of the model's config, as in ``encode_document(..., strength=...)``.
            normalize: Whether vectors get unit length; None does so where the model's similarity is the cosine.

        Raises:
            ValueError: A plain model is given a strength, or the strength is outside [0, 1].
        """
        facts = model_facts(model)
        config = model.fair_config if isinstance(model, FairSentenceTransformer) else None
        if strength is not None:
            if config is None:
                raise ValueError(f"strength: a plain model has none, got {strength!r}; calibrate(model) it first")
            config = replace(config, strength=strength)
        modules = {name or "model": {"class": kind, **settings} for name, kind, settings in facts["modules"]}
        return cls(
            model=name or _name_of(model),
            weights=fingerprint_weights(model),
            dtype=str(model.dtype).removeprefix("torch."),
            modules=json.loads(json.dumps(modules, sort_keys=True, default=str)),
            tokenizer=" ".join(map(str, [facts["tokenizer"], *facts["sides"]])),
            adapters=tuple(facts["adapters"]),
            max_seq_length=facts["max_seq_length"],
            truncate_dim=facts["truncate_dim"],
            normalize=resolve_normalize(model, normalize),
            similarity=str(facts["similarity"]),
            document_prompt=document_prompt(model),
            query_prompt=query_prompt(model),
            fair_config=None if config is None else config.to_dict(),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the values as a dict that `json.dumps` takes and `from_dict` reads back."""
        return {**self.__dict__, "modules": dict(self.modules), "adapters": list(self.adapters)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EncoderRecord:
        """Reads `to_dict`'s output; settings of the calibration that it does not know have their defaults."""
        config = values["fair_config"]
        config = None if config is None else FairConfig.from_dict(config).to_dict()
        return cls(**{**values, "adapters": tuple(values["adapters"]), "fair_config": config})

    def document_differences(self, other: EncoderRecord) -> list[str]:
        """Returns what may make document vectors differ, and what makes query vectors differ, one line each."""
        return _differences(self._compared(), other._compared())

    def query_differences(self, other: EncoderRecord) -> list[str]:
        """Returns what makes query vectors differ, one line each: not the calibration, nor the prompt of documents."""
        only_documents = ("fair_config", "document_prompt")
        own, others = (
            {key: value for key, value in record._compared().items() if key not in only_documents}
            for record in (self, other)
        )
        return _differences(own, others)

    def _compared(self) -> dict[str, Any]:
        return {key: value for key, value in self.to_dict().items() if key != "model"}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a build is made of; two builds with the same one, of the same source, have equal shards.

    Attributes:
        encoder: The encoder.
        shard_size: Documents per shard. Every shard is encoded by itself, so it decides which documents share batches.
        source: What is encoded, as it was called and as far as known; its records are compared shard by shard.
        environment: Versions, device, threads and batches, which decide the last bits of a float: differences are no
            error.
    """

    encoder: EncoderRecord
    shard_size: int
    source: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        validate_positive_int("shard_size", self.shard_size)

    def to_dict(self) -> dict[str, Any]:
        """Returns the values as a dict that `json.dumps` takes and `from_dict` reads back."""
        return {
            "format": 1,
            "encoder": self.encoder.to_dict(),
            "shard_size": self.shard_size,
            "source": dict(self.source),
            "environment": dict(self.environment),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Manifest:
        """Reads `to_dict`'s output.

        Raises:
            ValueError: It was written by a later version.
        """
        if values["format"] != 1:
            raise ValueError(f"format: this version reads 1, got {values['format']!r}; update fair-calibration")
        rest = {key: values[key] for key in ("shard_size", "source", "environment")}
        return cls(encoder=EncoderRecord.from_dict(values["encoder"]), **rest)


def check_same(old: Manifest, new: Manifest, *, what: str) -> None:
    """Checks that a build can go on with what is there.

    Args:
        old: Of what is there.
        new: Of what is to be added.
        what: What is there, for the error.

    Raises:
        DifferentEncoderError: The encoder or the size of the shards differs; every difference is named.
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
    """Returns what may change the last bits of the vectors, one line each."""
    return _differences(dict(old.environment), dict(new.environment))


def describe_environment(
    model: SentenceTransformer, devices: Sequence[str] | None = None, **settings: Any
) -> dict[str, Any]:
    """Returns what decides the last bits of a float: versions, the kind of device, and the settings given.

    Args:
        model: Encodes on its own device where there are no others.
        devices: Those of a pool of processes, whose kinds and number decide how batches are cut.
        **settings: What else decides them.
    """
    fair = model.fair if isinstance(model, FairSentenceTransformer) else None
    pool = Counter(torch.device(device).type for device in devices or ())
    kinds = " and ".join(f"{n} {kind}" for kind, n in sorted(pool.items()))
    return {
        "device": f"pool of {kinds}" if pool else str(model.device.type),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "pooled_row_only": fair is not None and fair.is_pooled_row_only,
        "versions": {package: _version(package) for package in _PACKAGES},
        **settings,
    }


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    before, after = dict(_flat(old)), dict(_flat(new))
    absent = object()
    return [
        f"{key}: {_shown(before, key)} there, {_shown(after, key)} now"
        for key in dict.fromkeys([*before, *after])
        if before.get(key, absent) != after.get(key, absent)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _shown(values: Mapping[str, Any], key: str) -> str:
    text = repr(values[key]) if key in values else "nothing"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _name_of(model: SentenceTransformer) -> str:
    card: Any = model.model_card_data
    network = getattr(getattr(next(iter(model.children())), "model", None), "config", None)
    return str(getattr(card, "base_model", None) or getattr(network, "_name_or_path", None) or type(model).__name__)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
