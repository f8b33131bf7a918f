"""Fixtures of the MTEB tests: an encoder whose rankings are known beforehand, and tiny models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# The other packages are tested without MTEB, too.
collect_ignore_glob = [] if importlib.util.find_spec("mteb") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MTEB_FAIR_DATA", raising=False)


@pytest.fixture
def keyword_encoder() -> Any:
    """Returns an encoder by which documents rank by how often they hold the query's word."""
    from tests.mteb.keyword_encoder import KeywordEncoder

    return KeywordEncoder()


@pytest.fixture
def evaluate(keyword_encoder: Any) -> Callable[[Any], dict[str, dict[str, Any]]]:
    """Returns a function that evaluates the keyword encoder on a task and gives the scores of each subset."""
    import mteb

    def run(task: Any) -> dict[str, dict[str, Any]]:
        result = mteb.evaluate(keyword_encoder, task, cache=None, show_progress_bar=False, co2_tracker=False)
        return {entry["hf_subset"]: dict(entry) for entry in result.task_results[0].scores["test"]}

    return run


@pytest.fixture(scope="session")
def tiny_path(tiny_folder: Callable[..., Path]) -> Path:
    """Returns the folder of a tiny random model with mean pooling, whose attention is sharp."""
    return tiny_folder("bert", "mean")


@pytest.fixture(autouse=True)
def _no_names_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every test use the names of models that other tests have used for other models."""
    monkeypatch.setattr("mteb_fair.loading._revisions", {})
