"""What tells one result from another: the name, revision and experiment settings of a calibrated model in MTEB.

`mteb.evaluate` keeps results by name, revision and experiment settings, `MTEB(...).run` by name and revision alone. So
the settings stand in the name and in the experiment settings, and the weights in the revision.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fair_calibration import FairConfig
from fair_calibration.config import validate_positive_int
from fair_calibration.fingerprint import digest_text

PREFIX = "mteb_fair/"
PROMPTS_DIGEST = "prompts_digest"
OVERRIDES = ("max_seq_length", "embed_dim", PROMPTS_DIGEST)
"""What a name says beside the calibration, where it is not the base model's own."""
_DEFAULTS = FairConfig()
_MAX_LENGTH = 200  # MTEB makes folders of names, and file systems take 255 bytes


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A base model with settings; equal settings make equal names, whether defaults were given or left out.

    Attributes:
        base_name: The base model, such as "BAAI/bge-m3"; "local/<folder>" for local ones.
        config: The calibration.
        calibrate_untyped: Whether texts that are neither queries nor documents are calibrated.
        max_seq_length: Where texts are truncated, in tokens; None is the base model's.
        embed_dim: The dimensions kept of each vector; None is the base model's.
        model_prompts: The prompts; None is the base model's.
    """

    base_name: str
    config: FairConfig
    calibrate_untyped: bool = True
    max_seq_length: int | None = None
    embed_dim: int | None = None
    model_prompts: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name in ("max_seq_length", "embed_dim"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, validate_positive_int(name, value))

    def _overrides(self) -> dict[str, Any]:
        overrides: dict[str, Any] = {"max_seq_length": self.max_seq_length, "embed_dim": self.embed_dim}
        if self.model_prompts is not None:
            overrides[PROMPTS_DIGEST] = digest_text(json.dumps(dict(self.model_prompts), sort_keys=True))
        return {name: value for name, value in overrides.items() if value is not None}

    @property
    def name(self) -> str:
        """The name in MTEB, with the strength and every setting that is not the default, hashed where they are many."""
        settings = {"strength": self.config.strength}
        for field in fields(FairConfig):
            if (value := getattr(self.config, field.name)) != getattr(_DEFAULTS, field.name):
                settings[field.name] = value
        if not self.calibrate_untyped:
            settings["calibrate_untyped"] = False
        settings |= self._overrides()
        listed = ",".join(f"{name}={_short(value)}" for name, value in settings.items())
        name = f"{PREFIX}{self.base_name.replace('/', '__')}@"
        if len(name + listed) > _MAX_LENGTH:
            listed = f"strength={self.config.strength},settings={digest_text(listed)}"
        return name + listed

    @property
    def experiment_kwargs(self) -> dict[str, Any]:
        """All settings, defaults included, so that results stay apart even if a default changes some day."""
        settings = {**self.config.to_dict(), "calibrate_untyped": self.calibrate_untyped, **self._overrides()}
        if self.config.chunk_size is None:  # the two say nothing then, and MTEB makes a folder's name of it all
            del settings["unit_size"], settings["ridge"]
        return {name: value for name, value in settings.items() if value is not None}

    @property
    def loader_kwargs(self) -> dict[str, Any]:
        """The arguments of `load_variant` that make this variant, in JSON's types."""
        settings = {
            "settings": self.config.to_dict(),  # whole: None is not what a model was saved with
            "calibrate_untyped": self.calibrate_untyped,
            "max_seq_length": self.max_seq_length,
            "embed_dim": self.embed_dim,
            "model_prompts": None if self.model_prompts is None else dict(self.model_prompts),
        }
        return {name: value for name, value in settings.items() if value is not None}


def _short(value: Any) -> str:
    # The layer 6 is not 6 layers.
    return "at" + "+".join(str(item) for item in value) if isinstance(value, (list, tuple)) else str(value)
