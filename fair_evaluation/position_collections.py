"""Collections in which the same passage stands at the beginning, in the middle and at the end of a document.

Passages about different subjects are joined into documents, and the passages of each document are rotated through all
places, with one collection per rotation. So a difference between the places is due to position and not to content, and
no two copies of a passage compete in one index.
"""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

Place = Literal["beginning", "middle", "end"]
PLACES: tuple[Place, ...] = ("beginning", "middle", "end")
SEPARATOR = "\n\n"
"""Stands between the passages of a document."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question that one passage answers; ``answer_start`` is the character offset of the answer in the passage."""

    id: str
    text: str
    answer: str
    answer_start: int


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A passage of a text about one subject, which ``article`` names, with its questions."""

    article: str
    passage_id: str
    text: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, kw_only=True)
class PositionQuery:
    """A query of one collection.

    Attributes:
        qid: The id of the query, unique over all rotations.
        query: The text of the query.
        docno: The id of its one relevant document.
        place: The place of the answer's passage in that document.
        index: The number of the place, counted from 0.
        question: The id of the question, which is the same in all rotations: the unit of resampling.
    """

    qid: str
    query: str
    docno: str
    place: Place
    index: int
    question: str


@dataclass(frozen=True, kw_only=True)
class PositionCollection:
    """One rotation: documents as dicts of ``docno`` and ``text``, and queries with one relevant document each."""

    documents: tuple[dict[str, str], ...]
    queries: tuple[PositionQuery, ...]


def load_passages(path: str | os.PathLike[str] | None = None) -> list[Passage]:
    """Reads passages with questions from JSON lines.

    Args:
        path: The file. Every line has ``article``, ``passage_id``, ``text`` and ``questions`` (``id``, ``text``,
            ``answer``, ``answer_start``). None means the 75 passages with 222 questions that come with this package.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is not such an object, an answer is not at its ``answer_start``, or an id occurs twice.
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
    questions = tuple(
        Question(**_texts(question, "id", "text", "answer"), answer_start=int(question["answer_start"]))
        for question in record["questions"]
    )
    return Passage(**_texts(record, "article", "passage_id", "text"), questions=questions)


def _texts(record: dict[str, Any], *names: str) -> dict[str, str]:
    for name in names:
        if not isinstance(record[name], str):
            raise TypeError(f"{name} is {record[name]!r}, not a string")
    return {name: record[name] for name in names}


def build_collections(
    passages: Sequence[Passage], *, passages_per_document: int = 3, seed: int = 0
) -> list[PositionCollection]:
    """Joins passages of different articles into documents and rotates them through all places.

    Args:
        passages: The passages.
        passages_per_document: The number of passages in a document, at least 2.
        seed: Seed of the random choice of the passages that are joined.

    Returns:
        One collection per rotation, ``passages_per_document`` of them, all with the same groups of passages: in
        rotation r, passage i of a group stands at place (i + r) mod ``passages_per_document``. Query and document ids
        are unique over all collections. Passages left over, for which no passages of other articles remain, are
        documents of their own without queries, so that every collection has the text of all passages.

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
    return rotate_places([[[passage] for passage in group] for group in groups], rest)


def rotate_places(
    groups: Sequence[Sequence[Sequence[Passage]]], rest: Iterable[Passage] = ()
) -> list[PositionCollection]:
    """Makes one collection per rotation; what is at place i stands at place (i + r) mod P in rotation r.

    Args:
        groups: For each document the passages at each of its P places.
        rest: Passages that are documents of their own, without queries.
    """
    collections = []
    n_places = len(groups[0])
    for rotation in range(n_places):
        documents: list[dict[str, str]] = []
        queries: list[PositionQuery] = []
        for number, group in enumerate(groups):
            docno = f"r{rotation}d{number:04d}"
            ordered = [group[(index - rotation) % n_places] for index in range(n_places)]
            documents.append({"docno": docno, "text": SEPARATOR.join(p.text for place in ordered for p in place)})
            queries += [
                PositionQuery(
                    qid=f"r{rotation}{question.id}",
                    query=question.text,
                    docno=docno,
                    place="beginning" if index == 0 else "end" if index == n_places - 1 else "middle",
                    index=index,
                    question=question.id,
                )
                for index, place in enumerate(ordered)
                for passage in place
                for question in passage.questions
            ]
        for number, passage in enumerate(rest, start=len(groups)):
            documents.append({"docno": f"r{rotation}d{number:04d}", "text": passage.text})
        collections.append(PositionCollection(documents=tuple(documents), queries=tuple(queries)))
    return collections


def _group(passages: Sequence[Passage], size: int, seed: int) -> tuple[list[list[Passage]], list[Passage]]:
    """Draws groups without two passages of one article, from the articles with the most passages left first.

    Returns:
        The groups, and the passages left over.
    """
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
