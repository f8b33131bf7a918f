"""The settings of attention calibration: one frozen, validated, hashable value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args

Pooling = Literal["auto", "cls", "last", "mean"]
Isolate = Literal["auto", "none", "bos", "bos_eos"]
LastBasket = Literal["equal", "proportional"]


@dataclass(frozen=True, kw_only=True)
class FairConfig:
    """How the attention of pooled tokens is calibrated (Schuhmacher et al. 2026, Michail et al. 2026).

    The defaults are the published ones (arXiv 2606.02737): baskets of 128 tokens, strength 0.5, half of the layers.

    Attributes:
        strength: In [0, 1]. The attention row used is ``(1 - strength) * plain + strength * calibrated``;
            0 is the plain model, bit for bit, 1 the fully calibrated one.
        basket_size: Tokens per basket, at least 1.
        layers: Which attention layers are calibrated: a float in (0, 1) is the fraction of the model's depth, an int
            the number of layers, both counted from the last layer back; ``"all"`` (or 1.0) is every layer; a tuple of
            ints is the explicit layers, 0 the first and -1 the last.
        pooling: Which rows are calibrated: the pooled token's (``"cls"``, ``"last"``), or every row (``"mean"``).
            ``"auto"`` reads it from the model's pooling module.
        isolate: Which tokens stand outside the baskets: none, the first (BOS or CLS), or the first and the last (EOS).
            ``"auto"`` is ``"bos"`` for cls, ``"bos_eos"`` for last and ``"none"`` for mean pooling.
        isolated_share: What an isolated token gets of the attention: its own mass as in the plain model
            (``"preserve"``), as much as a basket (``"equal"``), or a fixed share in [0, 1).
        last_basket: ``"equal"``: every basket gets the same share, also the short last one, as published.
            ``"proportional"``: a basket's share is proportional to the number of its tokens that the row can see.
        min_content: Documents with fewer content tokens are left as they are; None means one basket, or with
            ``chunk_size`` one token more than a chunk.
        chunk_size: Not attention calibration, but another way to one position-fair vector: documents are cut into as
            few chunks of equal length as possible, of at most this many tokens, which are encoded each by itself and
            joined into the vector that is about equally similar to all of their parts (even chunks). No
            attention is calibrated then, and ``max_seq_length`` limits a chunk and not the document. The strength
            weighs it against the plain vector. None is attention calibration.
        unit_size: With ``chunk_size`` and mean pooling, the tokens per part that the vector is to be similar to. With
            cls and last-token pooling the chunks are the parts.
        ridge: With ``chunk_size``, above 0: how much the parts' mean is preferred to equal similarity.
    """

    strength: float = 0.5
    basket_size: int = 128
    layers: float | int | Literal["all"] | tuple[int, ...] = 0.5
    pooling: Pooling = "auto"
    isolate: Isolate = "auto"
    isolated_share: Literal["preserve", "equal"] | float = "preserve"
    last_basket: LastBasket = "equal"
    min_content: int | None = None
    chunk_size: int | None = None
    unit_size: int = 32
    ridge: float = 0.3

    def __post_init__(self) -> None:
        # Canonical types, so that equal settings are equal, hash alike and give the same JSON (0, 0.0, numpy scalars).
        object.__setattr__(self, "strength", validate_strength(self.strength))
        object.__setattr__(self, "basket_size", validate_positive_int("basket_size", self.basket_size))
        object.__setattr__(self, "layers", _validate_layers(self.layers))
        _one_of("pooling", self.pooling, get_args(Pooling))
        _one_of("isolate", self.isolate, get_args(Isolate))
        _one_of("last_basket", self.last_basket, get_args(LastBasket))
        object.__setattr__(self, "isolated_share", _validate_isolated_share(self.isolated_share))
        if isinstance(self.isolated_share, float) and self.isolate == "bos_eos" and self.isolated_share >= 0.5:
            raise ValueError(
                f"isolated_share: two isolated tokens (isolate='bos_eos') need a share below 0.5 each, "
                f"got {self.isolated_share!r}"
            )
        if self.min_content is not None:
            object.__setattr__(self, "min_content", validate_positive_int("min_content", self.min_content))
        object.__setattr__(self, "unit_size", validate_positive_int("unit_size", self.unit_size))
        object.__setattr__(self, "ridge", _validate_ridge(self.ridge))
        if self.chunk_size is not None:
            object.__setattr__(self, "chunk_size", validate_positive_int("chunk_size", self.chunk_size))
            if self.min_content is not None and self.min_content > self.chunk_size + 1:
                raise ValueError(
                    f"min_content: with chunk_size={self.chunk_size} expected at most {self.chunk_size + 1}, since "
                    f"longer documents have to be cut, got {self.min_content}"
                )

    @property
    def min_content_tokens(self) -> int:
        """The number of content tokens from which on a document is calibrated, or cut into chunks."""
        if self.min_content is not None:
            return self.min_content
        return self.basket_size if self.chunk_size is None else self.chunk_size + 1

    def resolve(self, pooling: str) -> FairConfig:
        """Returns the config with ``pooling`` and ``isolate`` made explicit for a model that pools by ``pooling``.

        Raises:
            ValueError: The isolated tokens' fixed share does not fit how many there are.
        """
        resolved = self.pooling if self.pooling != "auto" else pooling
        _one_of("pooling", resolved, ["cls", "last", "mean"])
        isolate = (
            {"cls": "bos", "last": "bos_eos", "mean": "none"}[resolved] if self.isolate == "auto" else self.isolate
        )
        return replace(self, pooling=resolved, isolate=isolate)  # type: ignore[arg-type]

    def select_layers(self, n_layers: int) -> tuple[int, ...]:
        """Returns the indices, ascending, of the calibrated ones among ``n_layers`` attention layers.

        Raises:
            ValueError: ``layers`` asks for more layers, or for other ones, than there are.
        """
        if self.layers == "all":
            return tuple(range(n_layers))
        if isinstance(self.layers, tuple):
            if out_of_range := [i for i in self.layers if not -n_layers <= i < n_layers]:
                raise ValueError(
                    f"layers: expected indices in [-{n_layers}, {n_layers}) for {n_layers} attention layers, "
                    f"got {out_of_range}"
                )
            return tuple(sorted({i % n_layers for i in self.layers}))
        if isinstance(self.layers, float):
            count = max(1, math.floor(self.layers * n_layers + 0.5))
        else:
            count = self.layers
            if count > n_layers:
                raise ValueError(f"layers: the model has {n_layers} attention layers, got a count of {count}")
        return tuple(range(n_layers - count, n_layers))

    def updated(self, **settings: Any) -> FairConfig:
        """Returns a config with the settings that are not None in place of its own.

        Raises:
            TypeError: A name is unknown, or a value of the wrong type.
            ValueError: A value is out of range.
        """
        return replace(self, **{name: value for name, value in settings.items() if value is not None})

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as a dict that `json.dumps` takes and `from_dict` reads back."""
        values = asdict(self)
        if isinstance(self.layers, tuple):
            values["layers"] = list(self.layers)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FairConfig:
        """Builds a config from `to_dict`'s output; names that are left out take their defaults.

        Raises:
            TypeError: ``values`` is no mapping.
            ValueError: A name is unknown or a value is out of range.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"values: expected a mapping of setting names to values, got {type(values).__name__}")
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(names)):
            raise ValueError(f"unknown FairConfig settings {unknown}; the settings are {names}")
        return cls(**values)

    def to_json(self) -> str:
        """Returns the settings as one line of JSON with sorted keys, the same for equal configs."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> FairConfig:
        """Builds a config from `to_json`'s output."""
        return cls.from_dict(json.loads(text))


def validate_strength(strength: float) -> float:
    """Returns ``strength`` as a float.

    Raises:
        TypeError: It is no real number.
        ValueError: It is outside [0, 1] (NaN included).
    """
    if isinstance(strength, bool) or not isinstance(strength, Real):
        raise TypeError(f"strength: expected a number in [0, 1], got {strength!r} ({type(strength).__name__})")
    if not 0.0 <= float(strength) <= 1.0:
        raise ValueError(f"strength: expected a number in [0, 1], got {strength!r}")
    return float(strength) + 0.0  # -0.0 would be equal to 0.0, but another text in JSON


def validate_positive_int(name: str, value: Any) -> int:
    """Returns ``value`` as an int; ``name`` is what errors call it.

    Raises:
        TypeError: It is no integer.
        ValueError: It is below 1.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected an integer of at least 1, got {value!r} ({type(value).__name__})")
    if value < 1:
        raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}")
    return int(value)


def _one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {list(choices)}, got {value!r}")


def _validate_layers(layers: Any) -> float | int | Literal["all"] | tuple[int, ...]:
    if isinstance(layers, str):
        _one_of("layers", layers, ["all"])
        return "all"
    if isinstance(layers, Sequence):
        if not layers:
            raise ValueError("layers: expected at least one layer, got an empty sequence; use strength=0 for no effect")
        if any(isinstance(i, bool) or not isinstance(i, Integral) for i in layers):
            raise TypeError(f"layers: expected layer indices as integers, got {layers!r}")
        return tuple(sorted({int(i) for i in layers}))
    if isinstance(layers, Integral) and not isinstance(layers, bool):
        return validate_positive_int("layers", layers)
    if isinstance(layers, bool) or not isinstance(layers, Real):
        raise TypeError(
            f"layers: expected a fraction in (0, 1], a count, 'all' or a sequence of indices, "
            f"got {layers!r} ({type(layers).__name__})"
        )
    if not 0.0 < float(layers) <= 1.0:
        raise ValueError(f"layers: expected a fraction in (0, 1], got {layers!r}; a count of layers is an int")
    # 1.0 == 1 in Python: kept as a float, "every layer" would equal "one layer" as a key.
    return "all" if layers == 1.0 else float(layers)


def _validate_isolated_share(share: Any) -> Literal["preserve", "equal"] | float:
    if isinstance(share, str):
        _one_of("isolated_share", share, ["preserve", "equal"])
        return "preserve" if share == "preserve" else "equal"
    if isinstance(share, bool) or not isinstance(share, Real):
        raise TypeError(
            f"isolated_share: expected 'preserve', 'equal' or a number in [0, 1), "
            f"got {share!r} ({type(share).__name__})"
        )
    if not 0.0 <= float(share) < 1.0:
        raise ValueError(f"isolated_share: expected 'preserve', 'equal' or a number in [0, 1), got {share!r}")
    return float(share) + 0.0  # as for the strength


def _validate_ridge(ridge: Any) -> float:
    if isinstance(ridge, bool) or not isinstance(ridge, Real):
        raise TypeError(f"ridge: expected a number above 0, got {ridge!r} ({type(ridge).__name__})")
    if not 0.0 < float(ridge) < math.inf:
        raise ValueError(f"ridge: expected a finite number above 0, got {ridge!r}")
    return float(ridge)


PRESETS: Mapping[str, FairConfig] = {
    # Michail et al. 2026: partial calibration, the published default.
    "published": FairConfig(),
    # Schuhmacher et al. 2026: full equalisation; the pooled token's own mass is that of a basket.
    "full": FairConfig(strength=1.0, isolated_share="equal"),
    # Full equalisation of the content; isolated tokens keep their own mass.
    "self_preserved": FairConfig(strength=1.0, isolated_share="preserve"),
    # Ours, and no attention calibration: the best single vector for documents of several subjects that we found.
    "even_chunks": FairConfig(strength=1.0, chunk_size=128),
}
"""The variants that the papers compare, and our own, by name."""
