"""Decides whether a text is a query, which the plain model encodes, or a document. Every such decision is made here.

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
    """Returns whether a task is that of queries.

    Args:
        task: The task given to the model; None is a document.
        has_own_tasks: Whether the model knows tasks of its own, such as "retrieval.query".

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
    """Returns the task for one call of ``model.encode``: "query" for texts that only their prompt's name tells so.

    Args:
        model: The model.
        task: The task given in the call, which decides.
        prompt_name: The prompt's name given in the call; without it and ``prompt`` the model's default prompt is used.
        prompt: The prompt's text given in the call, which has no name.
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
