"""The settings of a model, which are a `FairConfig` or an `EvenChunks`: presets, choosing and reading them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from fair_calibration.config import FairConfig
from fair_calibration.even_chunks.config import EvenChunks

Settings = FairConfig | EvenChunks

PRESETS: Mapping[str, Settings] = {
    # Michail et al. 2026: partial calibration, the published default.
    "published": FairConfig(),
    # Schuhmacher et al. 2026: full equalisation; the pooled token's own share is that of a basket.
    "full": FairConfig(strength=1.0, isolated_share="equal"),
    # Full equalisation of the content; isolated tokens keep the attention that they have in the plain model.
    "self_preserved": FairConfig(strength=1.0, isolated_share="preserve"),
    # Ours, and not attention calibration.
    "even_chunks": EvenChunks(),
}
"""Settings by name: the variants that the papers compare, and even chunks."""


def setting_names(settings: Settings | type[Settings]) -> tuple[str, ...]:
    """Returns the names of the settings of `FairConfig` or `EvenChunks`."""
    return tuple(field.name for field in fields(settings))


def choose_settings(
    config: Settings | str | None, overrides: Mapping[str, Any] | None = None, *, default: Settings
) -> Settings:
    """Returns the settings that a user gave as an object, as the name of a preset, or one by one.

    Args:
        config: The settings, the name of a preset in `PRESETS`, or None for ``default``.
        overrides: Single settings that replace those of ``config``; None replaces nothing.
        default: The settings where ``config`` is None, such as those that a model was saved with.

    Raises:
        TypeError: ``config`` has another type, or a name in ``overrides`` is not a setting of it.
        ValueError: There is no such preset, or a value is out of range.
    """
    if isinstance(config, str):
        if config not in PRESETS:
            raise ValueError(f"config: expected the name of a preset, one of {sorted(PRESETS)}, got {config!r}")
        config = PRESETS[config]
    elif config is None:
        config = default
    elif not isinstance(config, Settings):
        raise TypeError(
            f"config: expected a FairConfig, an EvenChunks or the name of a preset, got {type(config).__name__}"
        )
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    for name in given:
        if name not in setting_names(config):
            raise TypeError(_unknown_setting(name, config))
    return replace(config, **given)


def _unknown_setting(name: str, config: Settings) -> str:
    """Returns the error message for a name that is not among the settings in use."""
    own, kind = setting_names(config), type(config).__name__
    other = EvenChunks if isinstance(config, FairConfig) else FairConfig
    if name in setting_names(other):
        return (
            f"{name}: a setting of {other.__name__}, but the settings here are a {kind}; give "
            f"config={other.__name__}(...)"
        )
    nearest = difflib.get_close_matches(name, own, n=1)
    return f"{name}: not a setting of {kind}, which has {list(own)}" + (
        f"; did you mean {nearest[0]!r}?" if nearest else ""
    )


def settings_from_dict(values: Mapping[str, Any]) -> Settings:
    """Builds settings from the output of ``to_dict``: an `EvenChunks` where there is a ``chunk_size``.

    Raises:
        TypeError: ``values`` is not a mapping.
        ValueError: A setting is unknown or a value is out of range.
    """
    is_chunks = isinstance(values, Mapping) and "chunk_size" in values
    return EvenChunks.from_dict(values) if is_chunks else FairConfig.from_dict(values)


def settings_from_text(text: str) -> Settings:
    """Builds settings from the name of a preset or from the output of ``to_json``.

    Raises:
        TypeError: The JSON is not an object.
        ValueError: The text is neither, a setting is unknown, or a value is out of range.
    """
    if text in PRESETS:
        return PRESETS[text]
    try:
        values = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise ValueError(
            f"config: expected the name of a preset, one of {sorted(PRESETS)}, or settings in JSON "
            f"(FairConfig.to_json), got {text[:60]!r} ({error})"
        ) from error
    if not isinstance(values, dict):
        raise TypeError(
            f"config: expected a JSON object of settings, as FairConfig.to_json writes it, got {text[:60]!r}"
        )
    return settings_from_dict(values)


class SettingsAttributes:
    """Gives an object an attribute for each of the settings in its attribute ``config``, to be read and set.

    Setting one replaces the frozen ``config`` by one with the new value, which is checked at once. So
    `pyterrier.GridSearch`, which sets attributes, can vary the settings.
    """

    config: Settings

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for names that it does not find otherwise.
        config = self.__dict__.get("config")
        if config is not None and name in setting_names(config):
            return getattr(config, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        config = self.__dict__.get("config")
        if config is not None and name in setting_names(config):
            name, value = "config", replace(config, **{name: value})
        super().__setattr__(name, value)
