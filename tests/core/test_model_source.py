"""Finding a model by its folder or its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fair_calibration import FairSentenceTransformer
from fair_calibration.model_source import ModelNotFoundError, find_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that the hub, which cannot be reached, was asked for."""
    names: list[str] = []

    def model_info(name: str, **_: Any) -> None:
        names.append(name)
        raise OSError("no route\nto the host")

    monkeypatch.setattr("huggingface_hub.model_info", model_info)
    return names


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of the hub with the model ``org/model``, in the hub's own layout."""
    model = tmp_path / "models--org--model"
    (model / "snapshots" / COMMIT).mkdir(parents=True)
    (model / "snapshots" / COMMIT / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    return tmp_path


def test_a_folder_is_a_model_and_a_file_is_none(tmp_path: Path, asked: list[str]) -> None:
    assert not find_model(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"expected a folder or the name of a model on the hub, '.*file' is a file"):
        find_model(tmp_path / "file")
    assert not asked


@pytest.mark.parametrize(
    "name", ["./nope", "../nope", "/nope/nope", "~/nope", "a/b/c", "nope/", r"C:\nope", "", Path("nope")]
)
@pytest.mark.parametrize("find", [find_model, FairSentenceTransformer])
def test_a_path_is_not_taken_for_a_name(find: Any, name: str | Path, asked: list[str]) -> None:
    with pytest.raises(ModelNotFoundError, match=r"model: there is no folder .* cannot be the name of a model"):
        find(name)
    assert not asked


def test_an_unknown_name_costs_one_request_for_each_name_that_it_could_mean(asked: list[str]) -> None:
    for name, names in {"nope/typo": ["nope/typo"], "typo": ["sentence-transformers/typo", "typo"]}.items():
        asked.clear()
        with pytest.raises(
            ModelNotFoundError, match=rf"'{name}' is not a folder, not in the local .* \(no route\); ch"
        ):
            FairSentenceTransformer(name)
        assert asked == names


def test_the_cache_is_used_while_the_hub_does_not_answer(cache: Path, asked: list[str]) -> None:
    assert find_model("org/model", cache_folder=str(cache))
    assert find_model("org/model", cache_folder=str(cache), revision=COMMIT)
    assert asked == ["org/model"] * 2
    with pytest.raises(ModelNotFoundError):
        find_model("org/model", cache_folder=str(cache), revision="v2")


def test_a_model_that_the_hub_has_is_loaded_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("huggingface_hub.model_info", lambda *_, **kwargs: given.update(kwargs))
    assert not find_model("org/model", revision="v2", token="secret")
    assert (given["revision"], given["token"]) == ("v2", "secret")
