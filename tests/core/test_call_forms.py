"""A calibrated model accepts every call that the plain model of the installed version accepts."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from fair_calibration import FairConfig, FairSentenceTransformer, calibrate
from tests.conftest import TinyModel
from tests.core.tiny_models import document

TEXTS = [document(9), document(5)]
PLAIN = FairConfig(strength=0)
METHODS = ("encode", "encode_query", "encode_document")


def renamed(method: Any) -> dict[str, str]:
    """Returns the deprecated names of a method's arguments, with the new ones, from its decorators."""
    names: dict[str, str] = {}
    while method is not None:
        closure = dict(zip(method.__code__.co_freevars, method.__closure__ or (), strict=True))
        if "renames" in closure:
            names |= closure["renames"].cell_contents
        method = getattr(method, "__wrapped__", None)
    return names


def overridden() -> list[str]:
    return [name for name in vars(FairSentenceTransformer) if callable(getattr(SentenceTransformer, name, None))]


@pytest.mark.parametrize("name", METHODS)
def test_deprecated_names(name: str, tiny_model: TinyModel) -> None:
    plain = tiny_model()
    fair = calibrate(plain, PLAIN)
    names = renamed(getattr(SentenceTransformer, name))
    assert "sentences" in names  # else sentence-transformers has removed it, and this test has nothing to show
    for old, new in names.items():
        expected = getattr(plain, name)(**{new: TEXTS})
        assert np.array_equal(getattr(fair, name)(**{old: TEXTS}), expected)
        assert np.array_equal(getattr(fair, name)(**{new: TEXTS}), expected)


@pytest.mark.parametrize("name", METHODS)
def test_arguments_by_position(name: str, tiny_model: TinyModel) -> None:
    plain = tiny_model()
    fair = calibrate(plain, PLAIN)
    parameters = inspect.signature(getattr(SentenceTransformer, name)).parameters.values()
    defaults = [p.default for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD][2:]
    for n in range(len(defaults) + 1):
        got = getattr(fair, name)(TEXTS, *defaults[:n])
        assert np.array_equal(got, getattr(plain, name)(TEXTS, *defaults[:n]))


def test_every_method_that_is_overridden_takes_the_same_arguments() -> None:
    """`encode` passes all arguments on, so that it needs no list of them; others must name the same ones."""
    for name in overridden():
        own, theirs = (inspect.signature(getattr(cls, name)) for cls in (FairSentenceTransformer, SentenceTransformer))
        kinds = {p.kind for p in own.parameters.values()}
        passes_on = inspect.Parameter.VAR_KEYWORD in kinds
        missing = [parameter for parameter in theirs.parameters if parameter not in own.parameters]
        assert passes_on or not missing, (name, missing)


def test_wrong_arguments_are_refused_as_by_the_plain_model(tiny_model: TinyModel) -> None:
    plain = tiny_model()
    fair = calibrate(plain, PLAIN)
    for arguments in ({"inputs": TEXTS, "no_such_argument": 1}, {}):
        messages = []
        for model in (plain, fair):
            with pytest.raises((TypeError, ValueError)) as caught:
                model.encode(**arguments)
            messages.append(type(caught.value))
        assert messages[0] == messages[1]


def test_a_pool_in_use_is_refused(tiny_model: TinyModel) -> None:
    """In the plain library two threads with one pool take each other's results."""
    fair = calibrate(tiny_model(), PLAIN)
    lock = threading.Lock()
    pool: Any = {"input": None, "output": None, "processes": [], "in_use": lock}
    with (
        lock,
        pytest.raises(ValueError, match="pool: another thread is encoding with this pool of processes; wait for"),
    ):
        fair.encode(TEXTS, pool=pool)
