"""Finds the transformer module in a model that encodes documents, and gives it settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from torch import nn

from fair_calibration.even_chunks.config import EvenChunks
from fair_calibration.even_chunks.transformer import EvenChunksTransformer
from fair_calibration.limits import position_limit, validate_max_seq_length
from fair_calibration.routes import document_path
from fair_calibration.settings import Settings
from fair_calibration.transformer import FairTransformer

# Exactly these classes: calibration would lose what a subclass adds.
_TRANSFORMERS = (Transformer, FairTransformer, EvenChunksTransformer)
_LATE_INTERACTION = "a late-interaction model keeps one vector per token, so it has no pooled token to calibrate"
_UNPOOLED = {
    "MultiVectorEncoder": _LATE_INTERACTION,
    "ColBERT": _LATE_INTERACTION,  # PyLate's
    "SparseEncoder": "a sparse encoder weighs the words of a vocabulary, so it has no pooled token to calibrate",
    "CrossEncoder": "a cross-encoder reads query and document together, so it encodes no documents to calibrate",
}


def find_transformer(modules: Iterable[nn.Module]) -> Transformer:
    """Returns the transformer that documents pass through.

    Raises:
        TypeError: Their first module is not a transformer, or they pass through two.
    """
    modules = list(modules)
    path = document_path(modules)
    if not path or type(path[0]) not in _TRANSFORMERS:
        where = "the first module that its Router has for documents" if path[:1] != modules[:1] else "its first module"
        got = f"{type(path[0]).__module__}.{type(path[0]).__name__}" if path else "no module"
        raise TypeError(
            f"model: {where} must be a sentence-transformers Transformer to be calibrated (other modules have no "
            f"attention, or run it in their own way: use the model as it is), got {got}"
        )
    if len(transformers := [module for module in path if isinstance(module, Transformer)]) > 1:
        raise TypeError(
            f"model: its documents pass through {len(transformers)} Transformers one after the other, which cannot be "
            "calibrated; calibrate a model with one"
        )
    return cast(Transformer, path[0])


def reason(*names: str) -> str:
    """Returns why a kind of model cannot be calibrated, by the names of its class and base classes, or ""."""
    return next((f": {_UNPOOLED[name]}" for name in names if name in _UNPOOLED), "")


def set_config(transformer: Transformer, config: Settings) -> FairTransformer | EvenChunksTransformer:
    """Turns a transformer module, in place, into one that encodes documents with these settings."""
    kind = EvenChunksTransformer if isinstance(config, EvenChunks) else FairTransformer
    return kind.adopt(transformer, config)


def set_max_seq_length(transformer: Transformer, value: int | None) -> None:
    """Sets the number of tokens at which documents are truncated, unless ``value`` is None.

    Raises:
        ValueError: The model has fewer positions.
    """
    if value is not None:
        transformer.max_seq_length = validate_max_seq_length(value, position_limit(transformer.model))


def is_pooled_row_only(module: nn.Module) -> bool:
    """Returns whether a module computes its last layer for the pooled rows alone."""
    return isinstance(module, FairTransformer) and module.is_pooled_row_only


def use_pooled_row_only(model: SentenceTransformer, module: nn.Module) -> None:
    """Computes the last layer of a model's transformer for the pooled rows alone from now on.

    Raises:
        ValueError: The settings are `EvenChunks`, or the model is not suited to it.
    """
    if not isinstance(module, FairTransformer):
        raise ValueError(
            "pooled_row_only: expected False with EvenChunks, whose chunks the plain model encodes in full, got True; "
            "set pooled_row_only=False, or calibrate with a FairConfig"
        )
    module.use_pooled_row_only(model)
