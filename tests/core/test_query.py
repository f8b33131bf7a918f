"""What is a query: the plain model's vectors show whether a text was encoded as one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from fair_calibration import EvenChunks, FairConfig, FairSentenceTransformer, calibrate
from fair_calibration.query import is_query_task, task_of_call
from tests.conftest import TinyModel
from tests.core.tiny_models import document

TEXTS = [document(60)]
PROMPTS = {"query": "bal ", "passage": "dan ", "web_search_query": "fel "}


def make(
    tiny_model: TinyModel, default: str | None, config: Any
) -> tuple[SentenceTransformer, FairSentenceTransformer]:
    plain = tiny_model("bert", "cls", prompts=PROMPTS, default_prompt_name=default)
    return plain, calibrate(plain, config)


@pytest.mark.parametrize("config", [FairConfig(basket_size=8), EvenChunks(chunk_size=8)])
@pytest.mark.parametrize(
    ("default", "arguments", "is_query"),
    [
        ("query", {}, True),
        ("web_search_query", {}, True),
        ("passage", {}, False),
        (None, {}, False),
        (None, {"prompt_name": "query"}, True),
        ("passage", {"prompt_name": "web_search_query"}, True),
        ("query", {"prompt_name": "passage"}, False),
        ("query", {"prompt": "bal "}, False),  # a text has no name
        ("query", {"task": "document"}, False),
        (None, {"task": "query"}, True),
    ],
)
def test_the_rule(
    default: str | None, arguments: dict[str, Any], is_query: bool, config: Any, tiny_model: TinyModel
) -> None:
    plain, fair = make(tiny_model, default, config)
    expected = plain.encode(TEXTS, **arguments)
    assert np.array_equal(fair.encode(TEXTS, **arguments), expected) == is_query
    assert fair.counts.documents == (0 if is_query else 1)


def test_encode_query_and_encode_document_do_not_depend_on_the_default(tiny_model: TinyModel) -> None:
    for default in ("query", "passage", None):
        plain, fair = make(tiny_model, default, FairConfig(basket_size=8))
        assert np.array_equal(fair.encode_query(TEXTS), plain.encode_query(TEXTS))
        assert not np.array_equal(fair.encode_document(TEXTS), plain.encode_document(TEXTS))


def test_tasks() -> None:
    assert is_query_task("query", has_own_tasks=False)
    assert not is_query_task(None, has_own_tasks=False)
    assert is_query_task("retrieval.query", has_own_tasks=True)
    assert not is_query_task("retrieval.passage", has_own_tasks=True)
    with pytest.raises(
        ValueError, match=r"task: expected 'query', 'document' or None, got 'retrieval\.query'; queries"
    ):
        is_query_task("retrieval.query", has_own_tasks=False)


def test_a_task_that_is_given_decides(tiny_model: TinyModel) -> None:
    _, fair = make(tiny_model, "query", FairConfig(basket_size=8))
    assert task_of_call(fair, task="document", prompt_name="query", prompt=None) == "document"
    assert task_of_call(fair, task=None, prompt_name=None, prompt=None) == "query"
