"""Retrieval from several corpora at once: a query is answered from the corpus of its own part alone."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from datasets import Dataset
from mteb.models import (
    CrossEncoderProtocol,
    EncoderProtocol,
    ModelMeta,
    SearchCrossEncoderWrapper,
    SearchEncoderWrapper,
    SearchProtocol,
)

SEPARATOR = "/"


def part_of(identifier: str) -> str:
    """Returns the part that a query or document id belongs to: what stands before its first slash."""
    return identifier.split(SEPARATOR, maxsplit=1)[0]


class PartitionedSearch:
    """An MTEB search model over a corpus in parts, such as PosIR's domains, each of which is searched by itself.

    The results are those of all parts together, so that MTEB's scores are over all queries.
    """

    def __init__(self, model: EncoderProtocol | CrossEncoderProtocol | SearchProtocol) -> None:
        """Searches with ``model``, as MTEB would.

        Raises:
            TypeError: ``model`` is none that MTEB can search with.
        """
        self._search: SearchProtocol
        if isinstance(model, SearchProtocol):
            self._search = model
        elif isinstance(model, EncoderProtocol):
            self._search = SearchEncoderWrapper(model)
        elif isinstance(model, CrossEncoderProtocol):
            self._search = SearchCrossEncoderWrapper(model)
        else:
            raise TypeError(f"model: expected an MTEB encoder or search model, got {type(model).__name__}")
        self._model = model
        self._corpora: dict[str, Dataset] = {}
        self._index_settings: dict[str, Any] = {}

    @property
    def mteb_model_meta(self) -> ModelMeta:
        """The model's."""
        return self._model.mteb_model_meta

    def index(self, corpus: Dataset, **kwargs: Any) -> None:
        """Splits the corpus; each part is indexed when it is searched."""
        self._corpora = _split(corpus)
        self._index_settings = kwargs

    def search(self, queries: Dataset, *, top_ranked: Any = None, **kwargs: Any) -> dict[str, dict[str, float]]:
        """Searches each part with its own queries."""
        results: dict[str, dict[str, float]] = {}
        for part, part_queries in _split(queries).items():
            if part not in self._corpora:
                raise ValueError(f"queries: {len(part_queries)} are of the part {part!r}, which has no documents")
            self._search.index(self._corpora[part], **self._index_settings)
            ranked = top_ranked and {query: top_ranked[query] for query in part_queries["id"]}
            results |= self._search.search(part_queries, top_ranked=ranked or None, **kwargs)
        return results


def _split(dataset: Dataset) -> dict[str, Dataset]:
    rows: dict[str, list[int]] = defaultdict(list)
    for row, identifier in enumerate(dataset["id"]):
        rows[part_of(identifier)].append(row)
    return {part: dataset.select(indices) for part, indices in rows.items()}
