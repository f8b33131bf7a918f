"""`Variant`: the name and the experiment settings under which MTEB keeps the results of a base model with settings.

`mteb.evaluate` keeps results by name, revision and experiment settings, `MTEB(...).run` by name and revision alone.
So the settings are part of both the name and the experiment settings, and the revision tells the weights apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mteb.models import ModelMeta

from fair_calibration import EvenChunks
from fair_calibration.fingerprint import digest_text
from fair_calibration.settings import Settings, setting_names
from fair_calibration.validation import validate_positive_int

PREFIX = "mteb_fair/"
PROMPTS_DIGEST = "prompts_digest"
_BASE_NAME = re.compile(r"[^/@,=]+/[^/@,=]+")
_HASHED = "settings"
_COMPRESSION = ("output_dtypes", "clipping_margin")  # what MTEB's CompressionWrapper adds to the experiment settings
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
        passage_size: The most tokens of a passage; None for one vector per document.
    """

    base_name: str
    config: Settings
    calibrate_untyped: bool = True
    max_seq_length: int | None = None
    embed_dim: int | None = None
    model_prompts: Mapping[str, str] | None = None
    passage_size: int | None = None

    def __post_init__(self) -> None:
        if _BASE_NAME.fullmatch(self.base_name) is None or ".." in self.base_name.split("/"):
            raise ValueError(
                f"base_name: expected 'organization/name' without '@', ',' and '=' in it, got {self.base_name!r}"
            )
        if not isinstance(self.calibrate_untyped, bool):
            raise TypeError(f"calibrate_untyped: expected True or False, got {self.calibrate_untyped!r}")
        for name in ("max_seq_length", "embed_dim", "passage_size"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, validate_positive_int(name, value))
        prompts: Any = {} if self.model_prompts is None else self.model_prompts
        if not isinstance(prompts, Mapping) or not all(isinstance(t, str) for pair in prompts.items() for t in pair):
            raise TypeError(f"model_prompts: expected a dict from names to texts, got {prompts!r}")

    @property
    def name(self) -> str:
        """The name in MTEB: the strength and every setting that is not the default, or a hash of them if it is long."""
        parts = ["even_chunks"] if isinstance(self.config, EvenChunks) else []
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

    def identify(self, meta: ModelMeta) -> ModelMeta:
        """Returns metadata with the name and the experiment settings of this variant, and those of compression."""
        compression = compression_of(meta)
        name = self.name + "".join(f",{name}={value}" for name, value in compression.items())
        return meta.model_copy(update={"name": name, "experiment_kwargs": {**self.experiment_kwargs, **compression}})

    def _overrides(self) -> dict[str, Any]:
        overrides: dict[str, Any] = {
            name: getattr(self, name) for name in ("max_seq_length", "embed_dim", "passage_size")
        }
        if self.model_prompts is not None:
            overrides[PROMPTS_DIGEST] = digest_text(json.dumps(dict(self.model_prompts), sort_keys=True))
        return {name: value for name, value in overrides.items() if value is not None}


def _write(value: Any) -> str:
    # "at6" is the layer with index 6, "6" the last six layers.
    return "at" + "+".join(str(item) for item in value) if isinstance(value, (list, tuple)) else str(value)


def compression_of(meta: ModelMeta) -> dict[str, Any]:
    """Returns the experiment settings that MTEB's CompressionWrapper has added, if the model is in one."""
    given = meta.experiment_kwargs or {}
    return {name: given[name] for name in _COMPRESSION if name in given}
