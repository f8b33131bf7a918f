from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fair_calibration import FairConfig
from fair_calibration.validation import validate_strength


def test_defaults_are_the_published_ones() -> None:
    config = FairConfig()
    assert (config.strength, config.basket_size, config.layers) == (0.5, 128, 0.5)
    assert (config.pooling, config.isolate, config.isolated_share) == ("auto", "auto", "preserve")
    assert (config.last_basket, config.min_content, config.min_content_tokens) == ("equal", None, 128)
    assert FairConfig(min_content=5).min_content_tokens == 5


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"strength": 1.5}, ValueError, r"strength: expected a number in \[0, 1\], got 1.5"),
        ({"strength": -0.1}, ValueError, r"strength: expected a number in \[0, 1\], got -0.1"),
        ({"strength": float("nan")}, ValueError, r"strength: expected a number in \[0, 1\], got nan"),
        ({"strength": "0.5"}, TypeError, r"strength: expected a number in \[0, 1\], got '0.5' \(str\)"),
        ({"strength": True}, TypeError, r"strength: expected a number in \[0, 1\], got True \(bool\)"),
        ({"strength": None}, TypeError, r"strength: .* got None \(NoneType\)"),
        ({"basket_size": 0}, ValueError, "basket_size: expected an integer of at least 1, got 0"),
        ({"basket_size": 2.0}, TypeError, r"basket_size: expected an integer of at least 1, got 2.0 \(float\)"),
        ({"basket_size": True}, TypeError, r"basket_size: .* got True \(bool\)"),
        ({"min_content": 0}, ValueError, "min_content: expected an integer of at least 1, got 0"),
        ({"min_content": "9"}, TypeError, r"min_content: .* got '9' \(str\)"),
        ({"layers": 0}, ValueError, "layers: expected an integer of at least 1, got 0"),
        ({"layers": -3}, ValueError, "layers: expected an integer of at least 1, got -3"),
        ({"layers": 0.0}, ValueError, r"layers: expected a fraction in \(0, 1\], got 0.0; a count of layers is an int"),
        ({"layers": 6.0}, ValueError, r"layers: expected a fraction in \(0, 1\], got 6.0; a count of layers is an int"),
        ({"layers": float("nan")}, ValueError, r"layers: expected a fraction in \(0, 1\], got nan"),
        ({"layers": "half"}, ValueError, r"layers: expected one of \['all'\], got 'half'"),
        ({"layers": ()}, ValueError, "layers: expected at least one layer, got an empty sequence; use strength=0"),
        ({"layers": (1, 2.0)}, TypeError, r"layers: expected layer indices as integers, got \(1, 2.0\)"),
        ({"layers": [True]}, TypeError, r"layers: expected layer indices as integers, got \[True\]"),
        ({"layers": None}, TypeError, r"layers: expected a fraction .* got None \(NoneType\)"),
        ({"layers": True}, TypeError, r"layers: expected a fraction .* got True \(bool\)"),
        ({"pooling": "max"}, ValueError, r"pooling: expected one of \['auto', 'cls', 'last', 'mean'\], got 'max'"),
        ({"isolate": "eos"}, ValueError, r"isolate: expected one of \['auto', 'none', 'bos', 'bos_eos'\], got 'eos'"),
        (
            {"attention": "local"},
            ValueError,
            r"attention: expected one of \['any', 'global'\], got 'local'",
        ),
        (
            {"last_basket": "merge"},
            ValueError,
            r"last_basket: expected one of \['equal', 'proportional', 'halves'\], got 'merge'",
        ),
        ({"isolated_share": "own"}, ValueError, r"isolated_share: expected one of \['preserve', 'equal'\], got 'own'"),
        ({"isolated_share": 1.0}, ValueError, r"isolated_share: expected .* a number in \[0, 1\), got 1.0"),
        ({"isolated_share": -0.5}, ValueError, r"isolated_share: expected .* a number in \[0, 1\), got -0.5"),
        ({"isolated_share": float("nan")}, ValueError, "isolated_share: .* got nan"),
        ({"isolated_share": None}, TypeError, r"isolated_share: expected .*, got None \(NoneType\)"),
        ({"isolated_share": False}, TypeError, r"isolated_share: expected .*, got False \(bool\)"),
        (
            {"isolated_share": 0.5, "isolate": "bos_eos"},
            ValueError,
            r"isolated_share: two isolated tokens \(isolate='bos_eos'\) need a share below 0.5 each, got 0.5",
        ),
    ],
)
def test_errors(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        FairConfig(**settings)


def test_settings_are_keywords_only() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        FairConfig(0.5)  # type: ignore[misc]


def test_frozen() -> None:
    with pytest.raises(AttributeError, match="cannot assign to field 'strength'"):
        FairConfig().strength = 0.1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"strength": 1}, {"strength": 1.0}),
        ({"strength": -0.0}, {"strength": 0}),
        ({"strength": np.float64(0.25)}, {"strength": 0.25}),
        ({"strength": np.float32(0.5)}, {"strength": Fraction(1, 2)}),
        ({"strength": np.int64(1)}, {"strength": 1.0}),
        ({"basket_size": np.int32(64)}, {"basket_size": 64}),
        ({"min_content": np.int64(64)}, {"min_content": 64}),
        ({"layers": 1.0}, {"layers": "all"}),
        ({"layers": np.float64(1.0)}, {"layers": "all"}),
        ({"layers": np.int64(3)}, {"layers": 3}),
        ({"layers": [3, 1, 3]}, {"layers": (1, 3)}),
        ({"layers": range(2)}, {"layers": (0, 1)}),
        ({"layers": (np.int64(1),)}, {"layers": (1,)}),
        ({"isolated_share": 0}, {"isolated_share": 0.0}),
        ({"isolated_share": -0.0}, {"isolated_share": 0.0}),
        ({"isolated_share": np.float32(0.25)}, {"isolated_share": 0.25}),
    ],
)
def test_equal_settings_are_one_value(one: dict[str, Any], other: dict[str, Any]) -> None:
    a, b = FairConfig(**one), FairConfig(**other)
    assert a == b
    assert hash(a) == hash(b)
    assert repr(a) == repr(b)
    assert a.to_json() == b.to_json()
    assert len({a, b}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"layers": 1}, {"layers": "all"}),
        ({"layers": 1}, {"layers": (1,)}),
        ({"strength": 0.5}, {"strength": 0.51}),
        ({"isolated_share": 0.0}, {"isolated_share": "preserve"}),
        ({"min_content": 128}, {}),
    ],
)
def test_other_settings_are_other_values(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert FairConfig(**one) != FairConfig(**other)
    assert FairConfig(**one).to_json() != FairConfig(**other).to_json()


def test_canonical_types() -> None:
    config = FairConfig(
        strength=np.float32(1), basket_size=np.int64(8), layers=[np.int64(2)], isolated_share=0, min_content=np.int8(3)
    )
    assert [type(v) for v in (config.strength, config.basket_size, config.isolated_share, config.min_content)] == [
        float,
        int,
        float,
        int,
    ]
    assert config.layers == (2,)
    assert type(config.layers[0]) is int  # type: ignore[index]


def configs() -> st.SearchStrategy[FairConfig]:
    return st.builds(
        FairConfig,
        strength=st.floats(0, 1),
        basket_size=st.integers(1, 10**6),
        layers=st.just("all")
        | st.integers(1, 99)
        | st.floats(0, 1, exclude_min=True)
        | st.lists(st.integers(-99, 99), min_size=1).map(tuple),
        pooling=st.sampled_from(["auto", "cls", "last", "mean"]),
        isolate=st.sampled_from(["auto", "none", "bos", "bos_eos"]),
        isolated_share=st.sampled_from(["preserve", "equal"]) | st.floats(0, 0.5, exclude_max=True),
        attention=st.sampled_from(["any", "global"]),
        last_basket=st.sampled_from(["equal", "proportional", "halves"]),
        min_content=st.none() | st.integers(1, 10**6),
    )


@given(config=configs())
def test_round_trips(config: FairConfig) -> None:
    for again in (
        FairConfig.from_json(config.to_json()),
        FairConfig.from_dict(config.to_dict()),
        FairConfig.from_dict(json.loads(json.dumps(config.to_dict()))),
        eval(repr(config), {"FairConfig": FairConfig}),
    ):
        assert again == config
        assert hash(again) == hash(config)
        assert again.to_json() == config.to_json()
    assert "\n" not in config.to_json()
    assert list(json.loads(config.to_json())) == sorted(config.to_dict())


def test_from_dict_takes_defaults_and_refuses_the_rest() -> None:
    assert FairConfig.from_dict({"strength": 0.1}) == FairConfig(strength=0.1)
    with pytest.raises(ValueError, match=r"unknown FairConfig settings \['baskets', 'size'\]; the settings are \['str"):
        FairConfig.from_dict({"size": 1, "baskets": 2})
    with pytest.raises(TypeError, match="values: expected a mapping of setting names to values, got list"):
        FairConfig.from_dict([("strength", 0.1)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="values: expected a mapping of setting names to values, got int"):
        FairConfig.from_json("3")
    with pytest.raises(ValueError, match="strength: expected"):
        FairConfig.from_json('{"strength": 3}')


@pytest.mark.parametrize(
    ("layers", "n_layers", "expected"),
    [
        ("all", 3, (0, 1, 2)),
        (1.0, 3, (0, 1, 2)),
        (0.5, 6, (3, 4, 5)),
        (0.5, 12, tuple(range(6, 12))),
        (0.5, 1, (0,)),
        (0.5, 5, (2, 3, 4)),  # half rounds up
        (0.5, 7, (3, 4, 5, 6)),
        (0.01, 6, (5,)),  # at least one
        (0.34, 3, (2,)),
        (2, 6, (4, 5)),
        (6, 6, (0, 1, 2, 3, 4, 5)),
        ((0, 2), 4, (0, 2)),
        ((-1, 0), 4, (0, 3)),
        ((3, -1), 4, (3,)),
        ((-4,), 4, (0,)),
    ],
)
def test_select_layers(layers: Any, n_layers: int, expected: tuple[int, ...]) -> None:
    assert FairConfig(layers=layers).select_layers(n_layers) == expected


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (7, "layers: the model has 6 attention layers, got a count of 7"),
        ((0, 6), r"layers: expected indices in \[-6, 6\) for 6 attention layers, got \[6\]"),
        ((-7, 1, 9), r"got \[-7, 9\]"),
    ],
)
def test_select_layers_errors(layers: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FairConfig(layers=layers).select_layers(6)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("all", (0, 3, 6)), (0.5, (3, 6)), (0.01, (6,)), (1, (6,)), (3, (0, 3, 6)), ((3, -1), (3, 6))],
)
def test_global_layers(layers: Any, expected: tuple[int, ...]) -> None:
    windows = (None, 65, 65, None, 65, 65, None)
    assert FairConfig(layers=layers, attention="global").select_layers(7, windows=windows) == expected
    assert FairConfig(layers=layers).select_layers(7, windows=windows) == FairConfig(layers=layers).select_layers(7)


@pytest.mark.parametrize(
    ("layers", "windows", "text"),
    [
        (0.5, None, "which layers of this model are global is not known, .* name the layers by their indices"),
        (0.5, (12, 16), "no global attention layers; in each .* fewer than 16 positions away"),
        (2, (None, 12), "layers: the model has 1 global attention layers, got a count of 2"),
        ((0, 1), (None, 12), r"layers: with attention='global' expected layers among \[0\], got \[1\]"),
    ],
)
def test_global_layers_errors(layers: Any, windows: tuple[int | None, ...] | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FairConfig(layers=layers, attention="global").select_layers(2, windows=windows)


@given(fraction=st.floats(0, 1, exclude_min=True), n_layers=st.integers(1, 60))
def test_a_fraction_selects_last_layers(fraction: float, n_layers: int) -> None:
    selected = FairConfig(layers=fraction).select_layers(n_layers)
    assert 1 <= len(selected) <= n_layers
    assert selected == tuple(range(n_layers - len(selected), n_layers))
    assert len(selected) == 1 or abs(len(selected) - fraction * n_layers) <= 0.5 + 1e-9


@pytest.mark.parametrize(("pooling", "isolate"), [("cls", "bos"), ("last", "bos_eos"), ("mean", "none")])
def test_resolve(pooling: str, isolate: str) -> None:
    resolved = FairConfig(strength=0.2).resolve(pooling)
    assert resolved == FairConfig(strength=0.2, pooling=pooling, isolate=isolate)  # type: ignore[arg-type]
    assert resolved.resolve("cls") == resolved  # nothing is left to resolve
    assert FairConfig(isolate="bos").resolve(pooling).isolate == "bos"


def test_resolve_prefers_what_is_set() -> None:
    resolved = FairConfig(pooling="cls").resolve("mean")
    assert (resolved.pooling, resolved.isolate) == ("cls", "bos")


def test_resolve_errors() -> None:
    with pytest.raises(ValueError, match=r"pooling: expected one of \['cls', 'last', 'mean'\], got 'max'"):
        FairConfig().resolve("max")
    assert FairConfig(isolated_share=0.7).resolve("cls").isolated_share == 0.7
    with pytest.raises(ValueError, match=r"isolated_share: two isolated tokens .* got 0.7"):
        FairConfig(isolated_share=0.7).resolve("last")


def test_validate_strength() -> None:
    assert type(validate_strength(np.float32(0.5))) is float
    assert str(validate_strength(-0.0)) == "0.0"
    for bad in ("1", None, False, [0.5]):
        with pytest.raises(TypeError, match="strength: expected a number"):
            validate_strength(bad)  # type: ignore[arg-type]
