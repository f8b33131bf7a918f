"""Checks that a model exists before it is loaded, since loading a name that does not exist takes over a minute."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT = 10.0  # seconds
_FILES = ("modules.json", "config.json")  # every model has one of them


class ModelNotFoundError(ValueError):
    """A model is neither a folder, nor in the local cache, nor on the Hugging Face hub."""


def is_hub_name(name: str) -> bool:
    """Returns whether a text has the form of a model's name on the hub: "model" or "owner/model"."""
    return _HUB_NAME.fullmatch(name) is not None


def is_commit(revision: object) -> bool:
    """Returns whether a revision is a full commit on the hub, which never moves, and no branch or tag."""
    return isinstance(revision, str) and _COMMIT.fullmatch(revision) is not None


def find_model(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_folder: str | None = None,
    token: str | bool | None = None,
) -> bool:
    """Checks that a model exists, with one short request to the hub unless it is a folder.

    Args:
        model: A local folder or the name of a model on the hub, as `SentenceTransformer` takes it.
        revision: A branch, tag or commit on the hub.
        cache_folder: The folder of the local cache; None means that of sentence-transformers and the hub.
        token: The hub's access token.

    Returns:
        Whether to load the model with ``local_files_only``: the hub does not answer, and the model is in the local
        cache.

    Raises:
        ModelNotFoundError: There is no such folder or model.
        ValueError: ``model`` is a file.
    """
    name = os.fspath(model)
    if name and Path(name).exists():
        if not Path(name).is_dir():
            raise ValueError(f"model: expected a folder or the name of a model on the hub, {name!r} is a file")
        return False  # its settings may still name code or a base model on the hub
    if isinstance(model, os.PathLike):
        raise _no_name(name)
    return isinstance(_find_on_hub(name, revision, cache_folder, token), Path)


def find_commit(name: str, *, revision: str | None = None, token: str | bool | None = None) -> str:
    """Returns the commit of a model on the hub, or of a branch or tag of it; without the hub, that in the local cache.

    Raises:
        ModelNotFoundError: The model is neither on the hub nor in the local cache.
    """
    found = _find_on_hub(name, revision, None, token)
    return found.parent.name if isinstance(found, Path) else str(found.sha)


def _find_on_hub(
    name: str, revision: str | None, cache_folder: str | None, token: str | bool | None
) -> ModelInfo | Path:
    """Returns the hub's information about a model or, without the hub, a file of the model in the local cache."""
    if not is_hub_name(name):
        raise _no_name(name)
    from huggingface_hub import model_info, try_to_load_from_cache

    names = [name] if "/" in name else [f"sentence-transformers/{name}", name]  # those that sentence-transformers tries
    for candidate in names:
        try:
            return model_info(candidate, revision=revision, token=token, timeout=_TIMEOUT)
        except Exception as error:  # OSErrors, ValueErrors and errors of the hub's HTTP client
            problem = error
    cache = cache_folder or os.environ.get("SENTENCE_TRANSFORMERS_HOME")
    cached = (try_to_load_from_cache(c, file, cache, revision) for c in names for file in _FILES)
    if (path := next((path for path in cached if isinstance(path, str)), None)) is not None:
        return Path(path)
    reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
    raise ModelNotFoundError(
        f"model: {name!r} is not a folder, not in the local cache, and was not found on the Hugging Face hub ({reason})"
        "; check the spelling, and the network if the model is to be downloaded"
    ) from problem


def _no_name(name: str) -> ModelNotFoundError:
    return ModelNotFoundError(f"model: there is no folder {name!r}, and it cannot be the name of a model on the hub")
