"""`JsonSettings`: frozen settings that are written to and read from JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class JsonSettings:
    """The base of frozen dataclasses whose values are numbers, strings, None or tuples of numbers."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as a dict that `json.dumps` accepts and `from_dict` reads back."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Builds the settings from the output of `to_dict`; settings that are left out get their defaults.

        Raises:
            TypeError: ``values`` is not a mapping.
            ValueError: A setting is unknown or a value is out of range.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"values: expected a mapping of setting names to values, got {type(values).__name__}")
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(names)):
            raise ValueError(f"unknown {cls.__name__} settings {unknown}; the settings are {names}")
        return cls(**values)

    def to_json(self) -> str:
        """Returns the settings as one line of JSON with sorted keys, which is the same for equal settings."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Builds the settings from the output of `to_json`."""
        return cls.from_dict(json.loads(text))
