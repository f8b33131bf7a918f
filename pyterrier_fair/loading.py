"""Loads the model of a `FairBiEncoder`, and finds out in one request whether there is a model of that name."""

from __future__ import annotations

import os
import re

from sentence_transformers import SentenceTransformer

from fair_calibration import FairSentenceTransformer, calibrate

_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


def load_calibrated(model: object, device: str | None) -> FairSentenceTransformer:
    """Loads or takes over a model and calibrates it with its own settings, or else with the defaults.

    Args:
        model: A Hugging Face name, a local folder, or a loaded SentenceTransformer.
        device: The device to run on; None means the model's device, or a GPU if there is one.

    Raises:
        TypeError: ``model`` is not a model name, a path or a SentenceTransformer.
        ValueError: There is no folder and no model of this name, or the model cannot be calibrated.
    """
    if isinstance(model, SentenceTransformer):
        fair = calibrate(model)
        return fair if device is None else fair.to(device)
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"model: expected a model name, a path or a SentenceTransformer, got {type(model).__name__}")
    name = os.fspath(model)
    if not os.path.isdir(name):
        if isinstance(model, os.PathLike) or not _HUB_NAME.fullmatch(name):
            raise ValueError(f"model: there is no folder {name!r}, and it cannot be the name of a model on the hub")
        _check_available(name)
    return FairSentenceTransformer(name, device=device)


def _check_available(name: str) -> None:
    """Raises a ValueError if a model is neither in the cache nor on the hub; loading would retry for over a minute."""
    from huggingface_hub import model_info, try_to_load_from_cache

    # The same names that sentence-transformers tries.
    names = [name] if "/" in name else [name, f"sentence-transformers/{name}"]
    cache = os.environ.get("SENTENCE_TRANSFORMERS_HOME")
    files = ("modules.json", "config.json")
    if any(isinstance(try_to_load_from_cache(n, file, cache), str) for n in names for file in files):
        return
    for candidate in names:
        try:
            model_info(candidate)
        except Exception as error:  # the hub raises OSErrors, ValueErrors and errors of its HTTP client
            reason = error
        else:
            return
    raise ValueError(
        f"model: {name!r} is not a folder, not in the cache of the Hugging Face hub, and was not found on the hub "
        f"({' '.join(str(reason).split())})"
    ) from reason
