"""`PartitionedSearch`: retrieval from a corpus in parts, where each query searches only the documents of its part."""

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

from fair_evaluation.benchmarks.position_data import PART_END


def part_of(identifier: str) -> str:
    """Returns the part of the corpus that an id belongs to: the text before its first slash."""
    return identifier.split(PART_END, maxsplit=1)[0]


class PartitionedSearch:
    """An MTEB search model for a corpus in parts, such as PosIR's domains, each of which is searched by itself.

    The results of all parts are returned together, so that MTEB's scores cover all queries.
    """

    def __init__(self, model: EncoderProtocol | CrossEncoderProtocol | SearchProtocol) -> None:
        """Wraps an encoder, cross-encoder or search model of MTEB; anything else is a TypeError."""
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
        """MTEB's metadata of the wrapped model."""
        return self._model.mteb_model_meta

    def index(self, corpus: Dataset, **kwargs: Any) -> None:
        """Splits the corpus into its parts, each of which is indexed when it is searched."""
        self._corpora = _split(corpus)
        self._index_settings = kwargs

    def search(self, queries: Dataset, *, top_ranked: Any = None, **kwargs: Any) -> dict[str, dict[str, float]]:
        """Searches each part with its own queries, and returns the scores by query and document."""
        results: dict[str, dict[str, float]] = {}
        for part, part_queries in _split(queries).items():
            if part not in self._corpora:
                raise ValueError(f"queries: {len(part_queries)} belong to the part {part!r}, which has no documents")
            self._search.index(self._corpora[part], **self._index_settings)
            ranked = top_ranked and {query: top_ranked[query] for query in part_queries["id"]}
            results |= self._search.search(part_queries, top_ranked=ranked or None, **kwargs)
        return results


def _split(dataset: Dataset) -> dict[str, Dataset]:
    rows: dict[str, list[int]] = defaultdict(list)
    for row, identifier in enumerate(dataset["id"]):
        rows[part_of(identifier)].append(row)
    return {part: dataset.select(indices) for part, indices in rows.items()}
