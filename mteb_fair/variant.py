"""`Variant`: the name and the experiment settings under which MTEB keeps the results of a base model with settings.

`mteb.evaluate` keeps results by name, revision and experiment settings, `MTEB(...).run` by name and revision alone.
So the settings are part of both the name and the experiment settings, and the revision tells the weights apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fair_calibration import EvenChunks, FairConfig
from fair_calibration.fingerprint import digest_text
from fair_calibration.settings import Settings, setting_names, settings_from_dict
from fair_calibration.validation import validate_positive_int

PREFIX = "mteb_fair/"
EVEN_CHUNKS = "even_chunks"
"""The part of a name that stands for an `EvenChunks`; without it the settings are a `FairConfig`."""
PROMPTS_DIGEST = "prompts_digest"
_HASHED = "settings"
_MAX_LENGTH = 200  # MTEB makes folders of names, and file systems take 255 bytes


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A base model with settings. Equal settings give equal names, whether defaults were given or left out.

    Attributes:
        base_name: The base model, such as "BAAI/bge-m3" or "local/<folder>".
        config: The settings, a `FairConfig` or an `EvenChunks`.
        calibrate_untyped: Whether texts that are neither queries nor documents are encoded as documents.
        max_seq_length: The number of tokens at which texts are truncated; None for that of the base model.
        embed_dim: The number of dimensions kept of each vector; None for all.
        model_prompts: The prompts; None for those of the base model.
    """

    base_name: str
    config: Settings
    calibrate_untyped: bool = True
    max_seq_length: int | None = None
    embed_dim: int | None = None
    model_prompts: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if "/" not in self.base_name:
            raise ValueError(f"base_name: expected 'organization/name', got {self.base_name!r}")
        for name in ("max_seq_length", "embed_dim"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, validate_positive_int(name, value))

    @classmethod
    def from_name(cls, name: str) -> Variant:
        """Builds the variant that a name stands for; the first "__" separates organization and model.

        Raises:
            ValueError: The name does not start with "mteb_fair/", a setting in it is unknown or out of range, or it
                holds a hash instead of settings or prompts.
        """
        base, separator, listed = name.removeprefix(PREFIX).rpartition("@")
        if not name.startswith(PREFIX) or not separator or "__" not in base:
            raise ValueError(f"name: expected '{PREFIX}<organization>__<model>@<settings>', got {name!r}")
        parts = listed.split(",")
        kind: type[Settings] = EvenChunks if EVEN_CHUNKS in parts else FairConfig
        values = dict(part.partition("=")[::2] for part in parts if part != EVEN_CHUNKS)
        if hashed := [key for key in (_HASHED, PROMPTS_DIGEST) if key in values]:
            raise ValueError(f"name: {hashed} in {name!r} is a hash, from which the settings cannot be read back")
        others = {
            key: _read(values.pop(key)) for key in ("calibrate_untyped", "max_seq_length", "embed_dim") if key in values
        }
        config = settings_from_dict({**kind().to_dict(), **{key: _read(value) for key, value in values.items()}})
        variant = cls(base_name=base.replace("__", "/", 1), config=config, **others)
        if variant.name != name:
            raise ValueError(f"name: {name!r} is not how these settings are written; write {variant.name!r}")
        return variant

    @property
    def name(self) -> str:
        """The name in MTEB: the strength and every setting that is not the default, or a hash of them if it is long."""
        parts = [EVEN_CHUNKS] if isinstance(self.config, EvenChunks) else []
        defaults = type(self.config)()
        settings: dict[str, Any] = {"strength": self.config.strength}
        for setting in setting_names(self.config):
            if (value := getattr(self.config, setting)) != getattr(defaults, setting):
                settings[setting] = value
        if not self.calibrate_untyped:
            settings["calibrate_untyped"] = False
        settings |= self._overrides()
        listed = ",".join([*parts, *(f"{name}={_write(value)}" for name, value in settings.items())])
        name = f"{PREFIX}{self.base_name.replace('/', '__')}@"
        if len(name + listed) > _MAX_LENGTH:
            listed = ",".join([*parts, f"strength={self.config.strength}", f"{_HASHED}={digest_text(listed)}"])
        return name + listed

    @property
    def experiment_kwargs(self) -> dict[str, Any]:
        """All settings, defaults included, so that results stay apart even if a default changes some day."""
        settings = {**self.config.to_dict(), "calibrate_untyped": self.calibrate_untyped, **self._overrides()}
        return {name: value for name, value in settings.items() if value is not None}

    def _overrides(self) -> dict[str, Any]:
        overrides: dict[str, Any] = {"max_seq_length": self.max_seq_length, "embed_dim": self.embed_dim}
        if self.model_prompts is not None:
            overrides[PROMPTS_DIGEST] = digest_text(json.dumps(dict(self.model_prompts), sort_keys=True))
        return {name: value for name, value in overrides.items() if value is not None}


def _write(value: Any) -> str:
    # "at6" is the layer with index 6, "6" the last six layers.
    return "at" + "+".join(str(item) for item in value) if isinstance(value, (list, tuple)) else str(value)


def _read(text: str) -> Any:
    if text.startswith("at") and all(part.isdigit() for part in text[2:].split("+")):
        return [int(part) for part in text[2:].split("+")]
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text  # a word such as "all", or an error in `FairConfig`
