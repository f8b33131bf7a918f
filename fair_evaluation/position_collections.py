"""Collections in which the same passage stands at the beginning, in the middle and at the end of a document.

Passages about different subjects are joined into documents, and every document's passages are rotated through all
places, one collection per rotation. So position and topic are not confounded, and no two copies of a passage compete in
one index.
"""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

Place = Literal["beginning", "middle", "end"]
PLACES: tuple[Place, ...] = ("beginning", "middle", "end")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question whose answer stands in one passage; ``answer_start`` is its character offset there."""

    id: str
    text: str
    answer: str
    answer_start: int


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A passage of a text about one subject (``article``), with its questions."""

    article: str
    passage_id: str
    text: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, kw_only=True)
class PositionedQuery:
    """A question put to one collection: its relevant document, and where in it the answer's passage stands."""

    qid: str
    query: str
    docno: str
    place: Place


@dataclass(frozen=True, kw_only=True)
class PositionCollection:
    """One rotation: documents as ``{"docno", "text"}``, and the queries with their one relevant document each."""

    documents: tuple[dict[str, str], ...]
    queries: tuple[PositionedQuery, ...]


def load_passages(path: str | os.PathLike[str] | None = None) -> list[Passage]:
    """Reads passages with questions from JSON lines.

    Args:
        path: The file, with ``article``, ``passage_id``, ``text`` and ``questions`` (``id``, ``text``, ``answer``,
            ``answer_start``) in every object; None for the 75 passages with 222 questions that come with this package.

    Raises:
        ValueError: A line is no such object, an answer does not stand where it should, or an id occurs twice.
    """
    source = files("fair_evaluation").joinpath("data/passages.jsonl") if path is None else Path(path)
    passages, ids = [], set()
    for number, line in enumerate(source.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path or 'passages.jsonl'}, line {number}"
        try:
            passage = _parse(json.loads(line))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{where}: expected a JSON object with article, passage_id, text and questions (id, text, answer, "
                f"answer_start), got {line[:60]!r} ({type(error).__name__}: {error})"
            ) from error
        for question in passage.questions:
            found = passage.text[max(0, question.answer_start) :][: len(question.answer)]
            if question.answer_start < 0 or found != question.answer:
                raise ValueError(
                    f"{where}: the answer of question {question.id!r} is {question.answer!r}, but {found!r} stands at "
                    f"character {question.answer_start}"
                )
        for key in (passage.passage_id, *(question.id for question in passage.questions)):
            if key in ids:
                raise ValueError(f"{where}: the id {key!r} occurs twice")
            ids.add(key)
        passages.append(passage)
    return passages


def _parse(record: dict[str, Any]) -> Passage:
    return Passage(
        article=_text(record, "article"),
        passage_id=_text(record, "passage_id"),
        text=_text(record, "text"),
        questions=tuple(
            Question(
                id=_text(question, "id"),
                text=_text(question, "text"),
                answer=_text(question, "answer"),
                answer_start=int(question["answer_start"]),
            )
            for question in record["questions"]
        ),
    )


def _text(record: dict[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, not a string")
    return value


def build_collections(
    passages: Sequence[Passage], *, passages_per_document: int = 3, seed: int = 0
) -> list[PositionCollection]:
    """Joins passages of different articles into documents and rotates them through all places.

    Args:
        passages: The passages.
        passages_per_document: How many passages make a document, at least 2.
        seed: Of the choice of passages that come together.

    Returns:
        One collection per rotation, ``passages_per_document`` of them, with the same passages grouped the same way: in
        rotation r the passage that is number i of its document stands at place (i + r) mod ``passages_per_document``.
        Query and document ids are unique over all of them. A passage that finds no partners of other articles any more
        makes a document of its own without queries in each collection, so that nothing is lost from the haystack.

    Raises:
        ValueError: There are fewer articles than passages in a document, or fewer than 2 passages in a document.
    """
    if passages_per_document < 2:
        raise ValueError(f"passages_per_document: expected at least 2, got {passages_per_document}")
    groups, rest = _group(passages, passages_per_document, seed)
    if not groups:
        raise ValueError(
            f"passages: {passages_per_document} passages of different articles are needed for one document, got "
            f"{len(passages)} passages of {len({p.article for p in passages})} articles"
        )
    collections = []
    for rotation in range(passages_per_document):
        documents: list[dict[str, str]] = []
        queries: list[PositionedQuery] = []
        for number, group in enumerate([*groups, *([passage] for passage in rest)]):
            docno = f"r{rotation}d{number:04d}"
            shift = -rotation % len(group)
            ordered = group[shift:] + group[:shift]
            documents.append({"docno": docno, "text": "\n\n".join(passage.text for passage in ordered)})
            if len(group) == 1:
                continue
            for index, passage in enumerate(ordered):
                place: Place = "beginning" if index == 0 else "end" if index == len(ordered) - 1 else "middle"
                queries += [
                    PositionedQuery(qid=f"r{rotation}{q.id}", query=q.text, docno=docno, place=place)
                    for q in passage.questions
                ]
        collections.append(PositionCollection(documents=tuple(documents), queries=tuple(queries)))
    return collections


def _group(passages: Sequence[Passage], size: int, seed: int) -> tuple[list[list[Passage]], list[Passage]]:
    """Groups passages so that no group has two of one article, drawing from the fullest articles first."""
    shuffle = random.Random(seed)
    by_article: dict[str, list[Passage]] = defaultdict(list)
    for passage in passages:
        by_article[passage.article].append(passage)
    for article in by_article.values():
        shuffle.shuffle(article)
    order = list(by_article)
    groups: list[list[Passage]] = []
    while len(order) >= size:
        shuffle.shuffle(order)
        order.sort(key=lambda article: -len(by_article[article]))  # stable: ties stay shuffled
        group = [by_article[article].pop() for article in order[:size]]
        shuffle.shuffle(group)
        groups.append(group)
        order = [article for article in order if by_article[article]]
    return groups, [passage for article in order for passage in by_article[article]]
