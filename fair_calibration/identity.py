"""The identity of an encoder: everything that its vectors depend on.

Indexes and caches record it, so that vectors of two encoders, or of one with two settings, are never mixed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sentence_transformers import SentenceTransformer

from fair_calibration.fingerprint import fingerprint_weights, model_facts
from fair_calibration.prompts import document_prompt, query_prompt
from fair_calibration.sentence_transformer import FairSentenceTransformer
from fair_calibration.settings import settings_from_dict

_SHOWN = 60  # characters of a value in a message
_ONLY_DOCUMENTS = ("fair_config", "document_prompt")


class DifferentEncoderError(ValueError):
    """Vectors were made by another encoder, or by the same one with other settings."""


@dataclass(frozen=True, kw_only=True)
class EncoderIdentity:
    """Everything that the vectors of an encoder depend on, in the types of JSON."""

    model: str  # its name, which is never compared, since copies of one model may have several names
    weights: str  # a hash
    dtype: str  # of the weights
    modules: Mapping[str, Any]  # the modules and the network with their settings, by module name
    tokenizer: str  # a hash of its state, and the sides on which it truncates and pads
    adapters: tuple[str, ...]  # the active adapters, layer by layer
    max_seq_length: int | None  # in tokens
    truncate_dim: int | None  # how many dimensions of a vector are kept; None means all
    normalize: bool  # whether vectors are scaled to unit length
    similarity: str  # for which the model's vectors are made
    document_prompt: str
    query_prompt: str
    fair_config: Mapping[str, Any] | None  # the settings of the calibration; None for a plain model

    @classmethod
    def of(
        cls,
        model: SentenceTransformer,
        *,
        name: str | None = None,
        strength: float | None = None,
        normalize: bool | None = None,
    ) -> EncoderIdentity:
        """Returns the identity of a model as it is now. All weights are read, which takes seconds for large models.

        Args:
            model: A calibrated or a plain model.
            name: The name of the model; None means the name that its network was loaded by.
            strength: A strength that overrides that of the model's settings, as in ``encode(..., strength=...)``.
            normalize: As in `resolve_normalize`.

        Raises:
            ValueError: A plain model is given a strength, the strength is outside [0, 1], or the model cannot be
                identified (`fingerprint_weights`).
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
            similarity=str(facts["similarity_fn_name"]),
            document_prompt=document_prompt(model),
            query_prompt=query_prompt(model),
            fair_config=None if config is None else config.to_dict(),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the values as a dict that `json.dumps` accepts and `from_dict` reads back."""
        return {**self.__dict__, "modules": dict(self.modules), "adapters": list(self.adapters)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EncoderIdentity:
        """Builds an identity from the output of `to_dict`; missing calibration settings get their defaults."""
        config = values["fair_config"]
        config = None if config is None else settings_from_dict(config).to_dict()
        return cls(**{**values, "adapters": tuple(values["adapters"]), "fair_config": config})

    def digest(self) -> str:
        """Returns a hash of everything that document vectors depend on."""
        text = json.dumps(self._compared(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def document_differences(self, other: EncoderIdentity) -> list[str]:
        """Returns one line for each difference that may make document vectors differ."""
        return differences(self._compared(), other._compared())

    def query_differences(self, other: EncoderIdentity) -> list[str]:
        """Returns the same for query vectors, which depend neither on the calibration nor on the document prompt."""
        own, others = (
            {key: value for key, value in identity._compared().items() if key not in _ONLY_DOCUMENTS}
            for identity in (self, other)
        )
        return differences(own, others)

    def _compared(self) -> dict[str, Any]:
        return {key: value for key, value in self.to_dict().items() if key != "model"}


def resolve_normalize(model: SentenceTransformer, normalize: bool | None) -> bool:
    """Returns whether vectors are scaled to unit length: as given, or if the model's similarity is the cosine."""
    return model.similarity_fn_name == "cosine" if normalize is None else bool(normalize)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns the differences of two nested mappings, one line for each value that differs."""
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
