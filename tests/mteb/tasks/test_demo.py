from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fair_evaluation.position_collections import build_collections, load_passages
from mteb_fair import PositionDemoRetrieval


def test_it_is_the_embedded_collection() -> None:
    task = PositionDemoRetrieval()
    task.load_data()
    split = task.dataset["default"]["test"]
    collections = build_collections(load_passages())
    assert len(split["corpus"]) == sum(len(collection.documents) for collection in collections)
    assert len(split["queries"]) == sum(len(collection.queries) for collection in collections)
    assert {name.split("/")[0] for name in split["corpus"]["id"]} == {"rotation0", "rotation1", "rotation2"}


def test_every_place_has_the_same_questions(evaluate: Callable[[Any], dict[str, dict[str, Any]]]) -> None:
    scores = evaluate(PositionDemoRetrieval())["default"]
    n_questions = len(build_collections(load_passages())[0].queries)
    assert [scores[f"{place}_n"] for place in ("beginning", "middle", "end")] == [n_questions] * 3
