"""The modules that a text passes through in a model with a `Router`, which may depend on its task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from sentence_transformers.base.modules import Router
from torch import nn


def document_path(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the modules that a document passes through, in order.

    In a `Router` these are the modules of the route for ``task="document"``, or else of that for texts without a task.

    Raises:
        TypeError: A Router has no route for documents.
    """
    path: list[nn.Module] = []
    for module in modules:
        if not isinstance(module, Router):
            path.append(module)
            continue
        query, document, default = (_route(module, task) for task in ("query", "document", None))
        route = document if document is not None else default
        if route is None or (document is None and route == query):
            raise TypeError(
                f"the Router has no route for documents among {list(module.sub_modules)}: name one 'document', or map "
                "it with route_mappings={('document', None): ...}"
            )
        path.extend(_modules(module, route))
    return path


def has_one_route(modules: Iterable[nn.Module]) -> bool:
    """Returns whether the task of a text does not matter for its route, as in models without a Router."""
    modules = list(modules)
    routes = routes_of(modules, None)
    return None not in routes and routes == routes_of(modules, "query") == routes_of(modules, "document")


def routes_of(modules: Iterable[nn.Module], task: str | None, modality: Any = "text") -> list[str | None]:
    """Returns the names of the routes that inputs of a task and modality take, one per Router; None means no route."""
    return [_route(module, task, modality) for module in modules if isinstance(module, Router)]


def own_tasks(modules: Iterable[nn.Module]) -> frozenset[str]:
    """Returns the names of tasks and routes in the Routers of a model."""
    routers = [module for module in modules if isinstance(module, Router)]
    mapped = {task for router in routers for task, _ in router.route_mappings if task is not None}
    return frozenset(mapped.union(*(router.sub_modules for router in routers)))


def check_route(modules: Iterable[nn.Module], calibrated: nn.Module, task: str | None, modality: Any) -> None:
    """Raises a ValueError if inputs take a route past the calibrated module, such as one for images."""
    router = next(iter(modules))
    route = _route(router, task, modality) if isinstance(router, Router) else None
    if route is not None and calibrated not in _modules(cast(Router, router), route):
        raise ValueError(
            f"the Router sends inputs of task {task!r} and modality {modality!r} to its route {route!r}, which is not "
            "calibrated: encode documents with encode_document or task='document', and other inputs with the plain "
            "model (uncalibrate returns it)"
        )


def _route(router: Router, task: str | None, modality: Any = "text") -> str | None:
    """Returns the name of the route that inputs take, or None if there is no route for them."""
    try:
        return router._resolve_route(task=task, modality=modality)
    except ValueError:  # an unknown task, or no default route
        return None


def _modules(router: Router, route: str) -> list[nn.Module]:
    return list(cast(nn.Sequential, router.sub_modules[route]))
