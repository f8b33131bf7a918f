"""Finds the transformer that a model's documents pass through, or says why a model has none to calibrate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from sentence_transformers.base.modules import Transformer
from torch import nn

from fair_calibration.document_transformer import DocumentTransformer
from fair_calibration.even_chunks.config import EvenChunks
from fair_calibration.even_chunks.transformer import EvenChunksTransformer
from fair_calibration.routes import document_path
from fair_calibration.settings import Settings
from fair_calibration.transformer import FairTransformer

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
        TypeError: The first module that documents pass through is not a transformer, or they pass through two.
    """
    modules = list(modules)
    path = document_path(modules)
    # Other subclasses of Transformer are refused: calibration would lose what they add.
    if not path or not (type(path[0]) is Transformer or isinstance(path[0], DocumentTransformer)):
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


def adopt(
    transformer: Transformer, config: Settings, *, max_seq_length: int | None = None
) -> FairTransformer | EvenChunksTransformer:
    """Turns a transformer module, in place, into one that encodes documents with these settings, and returns it.

    Raises:
        ValueError: The model has fewer positions than ``max_seq_length``.
    """
    if isinstance(transformer, DocumentTransformer):
        transformer.release()
    transformer.__class__ = EvenChunksTransformer if isinstance(config, EvenChunks) else FairTransformer
    module = cast("FairTransformer | EvenChunksTransformer", transformer)
    module.attach(config)
    if max_seq_length is not None:
        module.max_seq_length = max_seq_length
    return module


def why_unsupported(*names: str) -> str:
    """Returns why a kind of model cannot be calibrated, given the names of its class and base classes, or ""."""
    return next((f": {_UNPOOLED[name]}" for name in names if name in _UNPOOLED), "")
