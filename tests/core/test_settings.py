from __future__ import annotations

from typing import Any

import pytest

from fair_calibration import PRESETS, EvenChunks, FairConfig
from fair_calibration.settings import (
    Settings,
    SettingsAttributes,
    choose_settings,
    settings_from_dict,
    settings_from_text,
)


def test_presets() -> None:
    assert set(PRESETS) == {"published", "full", "self_preserved", "even_chunks"}
    assert PRESETS["even_chunks"] == EvenChunks(strength=0.8, chunk_size=128, unit_size=32, ridge=1.0)
    assert PRESETS["published"] == FairConfig()
    full, preserved = PRESETS["full"], PRESETS["self_preserved"]
    assert full == FairConfig(strength=1.0, isolated_share="equal")
    assert preserved == FairConfig(strength=1.0, isolated_share="preserve")


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        (None, {}, FairConfig(strength=0.3)),
        (None, {"strength": None, "basket_size": 64}, FairConfig(strength=0.3, basket_size=64)),
        ("full", {}, FairConfig(strength=1.0, isolated_share="equal")),
        ("full", {"strength": 0}, FairConfig(strength=0.0, isolated_share="equal")),
        ("even_chunks", {"chunk_size": 64}, EvenChunks(chunk_size=64)),
        (FairConfig(layers=2), {"strength": 0.1}, FairConfig(layers=2, strength=0.1)),
        (EvenChunks(), {"strength": 0.1}, EvenChunks(strength=0.1)),
    ],
)
def test_choose_settings(config: Any, overrides: dict[str, Any], expected: Settings) -> None:
    assert choose_settings(config, overrides, default=FairConfig(strength=0.3)) == expected


@pytest.mark.parametrize(
    ("config", "overrides", "error", "message"),
    [
        ("fulll", {}, ValueError, r"config: expected the name of a preset, one of \['even_chunks', .* got 'fulll'"),
        (0.5, {}, TypeError, "config: expected a FairConfig, an EvenChunks or the name of a preset, got float"),
        (None, {"strenght": 1}, TypeError, "strenght: not a setting of FairConfig, .*; did you mean 'strength'?"),
        (None, {"chunk_size": 9}, TypeError, r"chunk_size: a setting of EvenChunks, .* give config=EvenChunks\(...\)"),
        ("even_chunks", {"layers": 9}, TypeError, "layers: a setting of FairConfig, but the settings here are a Even"),
        (None, {"strength": 3}, ValueError, "strength: expected a number in"),
    ],
)
def test_wrong_settings(config: Any, overrides: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose_settings(config, overrides, default=FairConfig())


@pytest.mark.parametrize("settings", [*PRESETS.values(), FairConfig(layers=(1, 2)), EvenChunks(ridge=1)])
def test_dicts_and_texts_are_read_back(settings: Settings) -> None:
    assert settings_from_dict(settings.to_dict()) == settings
    assert settings_from_text(settings.to_json()) == settings


def test_texts() -> None:
    assert settings_from_text("even_chunks") == EvenChunks()
    assert settings_from_text('{"strength": 0.25}') == FairConfig(strength=0.25)
    with pytest.raises(
        ValueError, match=r"config: expected the name of a preset, one of .* or settings in JSON .* got 'even'"
    ):
        settings_from_text("even")
    with pytest.raises(ValueError, match=r"config: expected the name of a preset"):
        settings_from_text("[" * 100_000)
    with pytest.raises(TypeError, match=r"config: expected a JSON object of settings, .* got .\[1\]"):
        settings_from_text("[1]")


class Owner(SettingsAttributes):
    def __init__(self, config: Settings) -> None:
        self.config = config
        self.other = 1


class TestSettingsAttributes:
    def test_reading_and_setting(self) -> None:
        owner = Owner(FairConfig(strength=0.25))
        assert (owner.strength, owner.layers, owner.other) == (0.25, 0.5, 1)
        owner.strength, owner.layers, owner.other = 1, 3, 2
        assert owner.config == FairConfig(strength=1.0, layers=3)
        assert owner.other == 2
        assert set(vars(owner)) == {"config", "other"}

    def test_only_the_settings_in_use_are_attributes(self) -> None:
        owner = Owner(EvenChunks())
        assert hasattr(owner, "chunk_size")
        assert not hasattr(owner, "basket_size")
        owner.config = FairConfig()
        assert not hasattr(owner, "chunk_size")
        with pytest.raises(AttributeError, match="'Owner' object has no attribute 'nothing'"):
            _ = owner.nothing

    def test_wrong_values_are_refused_and_change_nothing(self) -> None:
        owner = Owner(FairConfig())
        with pytest.raises(ValueError, match="strength: expected a number in"):
            owner.strength = 2
        assert owner.config == FairConfig()

    def test_copies(self) -> None:
        import copy
        import pickle

        owner = Owner(FairConfig(strength=0.1))
        for other in (copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
            assert other.strength == 0.1
