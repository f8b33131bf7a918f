from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from sentence_transformers import SentenceTransformer

from fair_calibration import FairSentenceTransformer
from fair_calibration.model_source import ModelNotFoundError
from mteb_fair.loading import commit_of, load_base, local_name


@pytest.mark.parametrize(
    ("source", "name"),
    [("BAAI/bge-m3", "BAAI/bge-m3"), ("", "local/BertModel"), ("/somewhere/else/my-model", "local/my-model")],
)
def test_names_of_loaded_models(tiny_path: Path, source: str, name: str) -> None:
    model = SentenceTransformer(str(tiny_path), device="cpu")
    model[0].model.config._name_or_path = source
    assert load_base(model)[1].name == name


def test_revisions(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = load_base(tiny_path, device="cpu")[1]
    assert meta.name == f"local/{tiny_path.name}"
    weights = meta.revision
    fair = FairSentenceTransformer(str(tiny_path), device="cpu")
    monkeypatch.setattr("mteb_fair.loading.FairSentenceTransformer", lambda *_, **__: fair)
    commit = "0123456789abcdef0123456789abcdef01234567"
    # A hub model is known by its commit; arguments that change its vectors are known by a hash beside it.
    assert load_base("org/model", commit)[1].revision == commit
    assert load_base("org/model", commit, loading={"token": "x"})[1].revision == commit
    assert load_base("org/model", commit, loading={"model_kwargs": {}})[1].revision == f"{commit}-{weights}"


def test_revisions_of_loaded_models(tiny_path: Path) -> None:
    model = SentenceTransformer(str(tiny_path), device="cpu")
    weights = load_base(model)[1].revision
    model.model_card_data.base_model_revision = "def456"  # as loading from the hub does
    # It may have been changed since.
    assert load_base(model, base_name="org/loaded")[1].revision == f"def456-{weights}"


class TestCommits:
    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def test_a_commit_needs_no_hub(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.model_info", None)
        assert commit_of("org/model", self.COMMIT) == self.COMMIT

    def test_the_hub_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def model_info(name: str, revision: str | None, token: object, **_: object) -> SimpleNamespace:
            asked.append((name, revision, token))
            return SimpleNamespace(sha=self.COMMIT)

        monkeypatch.setattr("huggingface_hub.model_info", model_info)
        assert commit_of("org/model", None) == commit_of("org/model", "main") == self.COMMIT
        assert asked == [("org/model", None, None), ("org/model", "main", None)]

    def test_offline_the_cache_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # The layout of the hub's cache.
        model = tmp_path / "models--org--model"
        snapshot = model / "snapshots" / self.COMMIT
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(self.COMMIT)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        assert commit_of("org/model", None) == self.COMMIT
        with pytest.raises(ModelNotFoundError, match="'org/other' is not a folder, not in the local cache"):
            commit_of("org/other", None)

    def test_a_name_without_an_owner(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def model_info(name: str, **_: object) -> SimpleNamespace:
            if name != "sentence-transformers/some-model":
                raise OSError("no such model")
            return SimpleNamespace(sha=self.COMMIT)

        monkeypatch.setattr("huggingface_hub.model_info", model_info)
        assert commit_of("some-model", None) == self.COMMIT

    def test_what_cannot_be_a_name(self) -> None:
        with pytest.raises(ModelNotFoundError, match="there is no folder 'a/b/c', and it cannot be"):
            commit_of("a/b/c", None)


def test_a_name_that_mteb_knows_is_not_said_to_be_near_itself() -> None:
    with pytest.raises(ModelNotFoundError, match="not in the local cache") as error:
        commit_of("BAAI/bge-m3", None)
    assert "nearest" not in str(error.value)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/models/my-model", "my-model"),
        ("/runs/run1/final", "run1-final"),
        ("/runs/run1/checkpoints/checkpoint-500", "run1-checkpoints-checkpoint-500"),
        ("/runs/run1/500", "run1-500"),
        ("/final", "final"),
        ("/models/finalist", "finalist"),
    ],
)
def test_names_of_folders(folder: str, name: str) -> None:
    assert local_name(folder) == f"local/{name}"
