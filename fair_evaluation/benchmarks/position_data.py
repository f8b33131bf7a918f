"""`PositionData`: the documents, queries, judgements and answer positions of a benchmark, checked as they are added."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

logger = logging.getLogger("fair_evaluation")
_NAMED = 5
PART_END = "/"
"""Ends the name of the part that an id starts with, in a benchmark whose parts are searched by themselves."""


@dataclass(kw_only=True)
class PositionData:
    """One subset of a benchmark, collected row by row and checked as a whole by `check`; faults are ValueErrors.

    ``where`` is the start of error messages, such as the file or the task.

    Attributes:
        corpus: The text of each document.
        queries: The text of each query.
        relevant: The relevant documents of each query.
        labels: The position groups of each query.
        positions: The relative position of each answer in its document, in [0, 1], where the benchmark has it.
        lengths: The length of the document of each query in tokens, where the benchmark has it.
    """

    corpus: dict[str, str] = field(default_factory=dict)
    queries: dict[str, str] = field(default_factory=dict)
    relevant: dict[str, dict[str, int]] = field(default_factory=dict)
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    positions: dict[str, float] = field(default_factory=dict)
    lengths: dict[str, float] = field(default_factory=dict)
    _ids: dict[str, str] = field(default_factory=dict)

    def document_of(self, text: Any, *, what: str, where: object) -> str:
        """Returns the id of the document with this text, which is added if it is new."""
        if not isinstance(text, str):
            raise ValueError(f"{where}: expected a string as {what}, got {text!r} ({type(text).__name__})")
        identifier = self._ids.setdefault(text, f"d{len(self._ids)}")
        self.corpus[identifier] = text
        return identifier

    def add_document(self, identifier: str, text: Any, *, where: object) -> None:
        """Adds a document, whose text must be a string and whose id must be new."""
        _add(self.corpus, identifier, text, f"{where}: document")

    def add_query(self, identifier: str, text: Any, *, labels: Sequence[str], where: object) -> None:
        """Adds a query with at least one position group; its text must not be empty and its id must be new."""
        _add(self.queries, identifier, text, f"{where}: query")
        if not text.strip():
            raise ValueError(f"{where}: query {identifier!r} is empty")
        if not labels:
            raise ValueError(f"{where}: query {identifier!r} belongs to no position group")
        self.labels[identifier] = tuple(labels)

    def add_judgement(self, query: str, document: str, grade: Any, *, where: object) -> None:
        """Adds how relevant a document is to a query: an integer, once for each pair."""
        if isinstance(grade, bool) or not isinstance(grade, Real) or not float(grade).is_integer():
            raise ValueError(f"{where}: expected an integer score of query {query!r} and {document!r}, got {grade!r}")
        judged = self.relevant.setdefault(query, {})
        if document in judged:
            raise ValueError(f"{where}: query {query!r} and document {document!r} are judged twice")
        judged[document] = int(float(grade))

    def check(self, where: str) -> None:
        """Checks that there are documents and queries, each query has a relevant document, and judged ones exist."""
        if not self.corpus:
            raise ValueError(f"{where}: the corpus is empty")
        if not self.queries:
            raise ValueError(f"{where}: there are no queries")
        bare = [q for q in self.queries if not any(grade > 0 for grade in self.relevant.get(q, {}).values())]
        if bare:
            raise ValueError(f"{where}: {len(bare)} queries have no relevant document, such as {bare[:_NAMED]}")
        if strangers := [q for q in self.relevant if q not in self.queries]:
            raise ValueError(f"{where}: {len(strangers)} judged queries do not exist, such as {strangers[:_NAMED]}")
        positive = (d for judged in self.relevant.values() for d, grade in judged.items() if grade > 0)
        if lost := [d for d in positive if d not in self.corpus]:
            raise ValueError(f"{where}: {len(lost)} relevant documents are not in the corpus, such as {lost[:_NAMED]}")
        if empty := [d for d, text in self.corpus.items() if not text.strip()]:
            logger.warning(
                "%s: %d of %d documents are empty, such as %s. They stay in the corpus.",
                where, len(empty), len(self.corpus), empty[:_NAMED],
            )  # fmt: skip


def _add(texts: dict[str, str], identifier: str, text: Any, what: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{what} {identifier!r}: expected a text, got {text!r} ({type(text).__name__})")
    if identifier in texts:
        raise ValueError(f"{what} {identifier!r} occurs twice")
    texts[identifier] = text
