"""Reads the passages that probes are built from; questions, titles or held-out sentences become the queries."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fair_evaluation.position_collections import Passage, Question
from fair_evaluation.sentences import sentence_spans


def read_passages(
    records: Iterable[Mapping[str, Any]] | str | os.PathLike[str],
    *,
    text: str = "text",
    passage_id: str | None = None,
    article: str | None = None,
    questions: str | None = None,
    title: str | None = None,
) -> Iterator[Passage]:
    """Yields passages from records, one at a time.

    Args:
        records: Mappings, such as the rows of a data set or ``dataset.get_corpus_iter()``, or the path of JSON lines.
        text: The field of the text.
        passage_id: The field of the id, a string or an integer; None numbers the passages p0, p1, ...
        article: The field of the article. Passages of one article are never put into one document. None treats each
            passage as an article of its own.
        questions: The field of a list of questions. Each is a string, or an object with ``text`` and optionally ``id``,
            ``answer`` and ``answer_start``, the character offset of the answer in the passage.
        title: The field of a title, which becomes a question (a search for a known item).

    Raises:
        OSError: The file cannot be read.
        ValueError: A field is missing or has a wrong type, a text is empty, or an answer is not at its
            ``answer_start``. The message names the record.
    """
    for number, (where, record) in enumerate(_numbered(records)):
        try:
            name = f"p{number}" if passage_id is None else _identifier(record, passage_id)
            where = where if passage_id is None else f"{where} ({passage_id} {name!r})"
            content = _text(record, text)
            asked = [] if questions is None else list(_questions(_field(record, questions), name, content))
            if title is not None:
                asked.append(Question(id=f"{name}-title", text=_text(record, title), answer="", answer_start=0))
            of = name if article is None else str(_identifier(record, article))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
        yield Passage(article=of, passage_id=name, text=content, questions=tuple(asked))


def hold_out_sentences(
    passages: Iterable[Passage], *, seed: int = 0, min_characters: int = 30, min_sentences: int = 3
) -> Iterator[Passage]:
    """Takes one sentence out of each passage and makes it the passage's only question.

    So passages need no questions: the rest of a passage is about the same subject as the sentence taken out of it.
    `fair_evaluation.sentences` finds the sentences.

    Args:
        passages: The passages. Questions that they have are dropped.
        seed: Seed of the choice of the sentence, which depends on the passage's id and text besides.
        min_characters: Shorter sentences are not taken.
        min_sentences: A passage with fewer sentences stays whole and gets no question, as does a passage in which every
            sentence is too short or occurs twice. Such passages can still fill documents.

    Returns:
        An iterator over the passages, all of them, with the same ids.

    Raises:
        ValueError: ``min_sentences`` is below 2.
    """
    if min_sentences < 2:
        raise ValueError(f"min_sentences: expected at least 2, of which one remains, got {min_sentences}")
    return (_hold_out(passage, seed, min_characters, min_sentences) for passage in passages)


def _hold_out(passage: Passage, seed: int, min_characters: int, min_sentences: int) -> Passage:
    text, spans = passage.text, sentence_spans(passage.text)
    if len(spans) >= min_sentences:
        random.Random(f"{seed} {passage.passage_id}").shuffle(spans)
        for start, end in spans:
            sentence, rest = text[start:end], (text[:start] + text[end:].lstrip()).strip()
            if len(sentence) >= min_characters and sentence not in rest:
                question = Question(id=f"{passage.passage_id}-held-out", text=sentence, answer="", answer_start=0)
                return replace(passage, text=rest, questions=(question,))
    return replace(passage, questions=())


def _numbered(records: Iterable[Mapping[str, Any]] | str | os.PathLike[str]) -> Iterator[tuple[str, Any]]:
    if not isinstance(records, str | os.PathLike):
        yield from ((f"record {number}", record) for number, record in enumerate(records))
        return
    with Path(records).open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{os.fspath(records)}, line {number}"
                try:
                    yield where, json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{where}: expected a JSON object, got {line[:60]!r} ({error})") from error


def _field(record: Any, name: str) -> Any:
    if not isinstance(record, Mapping):
        raise TypeError(f"expected a mapping with the field {name!r}, got {type(record).__name__}")
    if name not in record:
        raise ValueError(f"the field {name!r} is missing, there are {list(record)}")
    return record[name]


def _text(record: Any, name: str) -> str:
    value = _field(record, name)
    if not isinstance(value, str):
        raise TypeError(f"expected a text in {name!r}, got {value!r} ({type(value).__name__})")
    if not value.strip():
        raise ValueError(f"the text in {name!r} is empty; leave the record out")
    return value


def _identifier(record: Any, name: str) -> str:
    value = _field(record, name)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise TypeError(f"expected a string or an integer in {name!r}, got {value!r} ({type(value).__name__})")
    return str(value)


def _questions(values: Any, name: str, content: str) -> Iterator[Question]:
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"expected a list of questions, got {values!r} ({type(values).__name__})")
    for number, value in enumerate(values):
        value = {"text": value} if isinstance(value, str) else value
        if not isinstance(value, Mapping):
            raise TypeError(f"question {number}: expected a text or an object, got {value!r} ({type(value).__name__})")
        answer, start = value.get("answer", ""), value.get("answer_start", 0)
        if (
            not isinstance(answer, str)
            or not isinstance(start, int)
            or start < 0
            or not content.startswith(answer, start)
        ):
            raise ValueError(f"the answer {answer!r} of question {number} is not at character {start!r} of the text")
        key = _identifier(value, "id") if "id" in value else f"{name}q{number}"
        yield Question(id=key, text=_text(value, "text"), answer=answer, answer_start=start)
