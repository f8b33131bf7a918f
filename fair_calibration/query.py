"""Decides whether a text is a query, which is encoded as in the plain model, or a document.

A text is a query in three cases: it is encoded with ``task="query"``, as `encode_query` does; it is encoded without a
task, but with a prompt whose name ends in "query", which may be the model's default prompt; or the model has a `Router`
that sends it where queries go and documents do not. Everything else is a document.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sentence_transformers import SentenceTransformer
from torch import nn

from fair_calibration.routes import has_one_route, routes_of


def is_query_task(task: str | None, *, has_own_tasks: bool) -> bool:
    """Returns whether a task is that of queries; None is a document.

    ``has_own_tasks`` is whether the model has further tasks, such as "retrieval.query".

    Raises:
        ValueError: The task is unknown.
    """
    if has_own_tasks:
        return task is not None and task.rsplit(".", 1)[-1] == "query"
    if task not in (None, "query", "document"):
        raise ValueError(
            f"task: expected 'query', 'document' or None, got {task!r}; queries are encoded by the plain model and all "
            "other texts as documents"
        )
    return task == "query"


def task_of_call(
    model: SentenceTransformer, *, task: str | None, prompt_name: str | None, prompt: str | None
) -> str | None:
    """Returns the task for one call of ``model.encode``: the given one, or "query" if the prompt is one of queries.

    The arguments are those of the call. Without ``prompt_name`` and ``prompt`` the model's default prompt is used.
    """
    if task is not None or not has_one_route(model):
        return task
    if prompt_name is None and prompt is None:
        prompt_name = model.default_prompt_name
    return "query" if prompt_name is not None and prompt_name.lower().endswith("query") else None


def is_query_route(modules: Iterable[nn.Module], task: str | None, modality: Any) -> bool:
    """Returns whether a Router sends inputs of a task and modality where queries go, and documents do not."""
    modules = list(modules)
    routes = routes_of(modules, task, modality)
    of_queries, of_documents = (routes_of(modules, kind, modality) for kind in ("query", "document"))
    return None not in routes and routes == of_queries != of_documents
