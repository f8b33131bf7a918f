from __future__ import annotations

from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from mteb_fair.loading import load_base, revision_of


@pytest.mark.parametrize(
    ("source", "name"),
    [("BAAI/bge-m3", "BAAI/bge-m3"), ("", "local/BertModel"), ("/somewhere/else/my-model", "local/my-model")],
)
def test_names_of_loaded_models(tiny_path: Path, source: str, name: str) -> None:
    model = SentenceTransformer(str(tiny_path), device="cpu")
    model[0].model.config._name_or_path = source
    assert load_base(model, None, None, {})[1] == name


def test_revisions(tiny_path: Path) -> None:
    fair, name = load_base(tiny_path, None, "cpu", {})
    assert name == f"local/{tiny_path.name}"
    weights = revision_of(fair, tiny_path, None, {})
    assert revision_of(fair, str(tiny_path), "ignored for folders", {}) == weights
    # A hub model is known by its commit; what changes its vectors is said beside it.
    assert revision_of(fair, "org/model", "abc123", {}) == "abc123"
    assert revision_of(fair, "org/model", "abc123", {"token": "x"}) == "abc123"
    assert revision_of(fair, "org/model", "abc123", {"model_kwargs": {}}) == f"abc123-{weights}"
    fair[0].model.config._commit_hash = "def456"
    assert revision_of(fair, "org/model", None, {}) == "def456"
