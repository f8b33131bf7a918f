"""Position probes: documents of a chosen length, in which each passage stands once at every place.

A document has a fixed number of places of equally many tokens. Each place holds one passage, and is filled up with
further passages or with filler. The contents of the places then rotate through the document, one step per rotation (a
cyclic Latin square): every place holds every passage once, and a passage keeps its neighbours within its place. Every
rotation is a collection of its own, to be indexed by itself, so that no two copies of a passage compete.

`fair_evaluation.position_collections.build_collections` does the same with whole passages of any length.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fair_evaluation.position_collections import SEPARATOR, Passage, PositionQuery, Question, place_of, rotate
from fair_evaluation.token_counts import TokenCounter, cut_text, token_counter

logger = logging.getLogger("fair_evaluation")


@dataclass(frozen=True, kw_only=True)
class ProbeQuery(PositionQuery):
    """A query of one rotation.

    Attributes:
        index: The number of the place of its passage, counted from 0.
        position: The relative position in [0, 1]: the middle of the answer, or of the passage if the answer is not
            known, divided by the length of the document, both in characters.
        question: The id of the question, which is the same in all rotations: the unit of resampling.
    """

    index: int
    position: float
    question: str


@dataclass(frozen=True, kw_only=True)
class ProbeDocument:
    """A document of one rotation, with the queries to which it is relevant.

    Attributes:
        rotation: The number of the rotation, counted from 0; there are as many rotations as places.
        docno: The document's id.
        text: The document's text.
        n_tokens: The number of its tokens, without special tokens.
        queries: The queries to which it is relevant.
    """

    rotation: int
    docno: str
    text: str
    n_tokens: int
    queries: tuple[ProbeQuery, ...]


def build_probes(
    passages: Iterable[Passage],
    *,
    length: int,
    tokenizer: Any,
    places: int = 3,
    filler: Iterable[Passage] | None = None,
    buffer_size: int = 1000,
    seed: int = 0,
) -> Iterator[ProbeDocument]:
    """Yields the documents of all rotations, one group of passages after the other.

    Passages and filler are read as a stream: only the buffers and the ids read so far are kept in memory.

    Args:
        passages: Passages with questions; `fair_evaluation.passages` makes them of texts without questions. A passage
            without questions is placed like any other. Each passage stands whole in one document per rotation.
        length: The number of tokens of a document, without special tokens. A place has ``length // places`` tokens.
        tokenizer: Counts tokens: a SentenceTransformer, a tokenizer, or a function that returns the number of tokens of
            a text.
        places: The number of places in a document, at least 2.
        filler: Passages of other articles that fill up the places; their questions are not used, and the last one in a
            place is cut to fit, so that documents are at most a few tokens shorter than ``length``. None fills up with
            whole passages from ``passages`` as far as they fit, and documents are shorter.
        buffer_size: The number of passages (and of filler) among which the next one is drawn at random. If the source
            is sorted, shuffle it, or take a larger buffer.
        seed: Seed of the drawing. The same seed, buffer size and passages give the same documents.

    Yields:
        Documents with ids that are unique over all rotations. Passages at the end of the source for which no others or
        no filler remain are in no document, and a warning says how many.

    Raises:
        TypeError: ``tokenizer`` has none of the types above.
        ValueError: There are too few passages or too little filler for one document, the buffer holds too few different
            articles, a text is empty, an id occurs twice, or a passage is longer than a place.
    """
    for name, value, least in (("places", places, 2), ("length", length, places), ("buffer_size", buffer_size, places)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return _Builder(token_counter(tokenizer), length, places, seed).build(passages, filler, buffer_size)


class _Part(NamedTuple):
    """A passage and the number of its tokens, with those of the separator before it."""

    passage: Passage
    n_tokens: int


class _Buffer:
    """A buffer of the next ``size`` passages of a source, from which they are drawn at random."""

    def __init__(self, name: str, source: Iterator[_Part], size: int, shuffle: random.Random) -> None:
        self.name = name
        self.exhausted = False
        self._source, self._size, self._shuffle = source, size, shuffle
        self._parts: list[_Part] = []

    def take(self, fits: Callable[[_Part], bool]) -> _Part | None:
        """Removes and returns a passage for which ``fits`` holds, or None if the buffer has none."""
        while len(self._parts) < self._size and not self.exhausted:
            part = next(self._source, None)
            self.exhausted = part is None
            if part is not None:
                self._parts.append(part)
        n = len(self._parts)
        first = self._shuffle.randrange(n) if n else 0
        for i in (*range(first, n), *range(first)):
            if fits(self._parts[i]):
                self._parts[i], self._parts[-1] = self._parts[-1], self._parts[i]
                return self._parts.pop()
        return None

    def take_of_another(self, articles: set[str]) -> _Part | None:
        """Takes a passage of another article and adds its article to the set; None at the end of the source."""
        part = self.take(lambda part: part.passage.article not in articles)
        if part is None and not self.exhausted:
            raise ValueError(
                f"buffer_size: the document already has passages of the articles of all {self._size} passages in the "
                f"buffer of {self.name}; take a larger buffer, or shuffle the source"
            )
        if part is not None:
            articles.add(part.passage.article)
        return part

    def give_back(self, part: _Part) -> None:
        self._parts.append(part)


class _Builder:
    def __init__(self, count: TokenCounter, length: int, places: int, seed: int) -> None:
        self._count, self._length, self._places = count, length, places
        self._room = length // places
        self._shuffle = random.Random(seed)
        self._articles: set[str] = set()
        self._n_read = 0

    def build(
        self, passages: Iterable[Passage], filler: Iterable[Passage] | None, buffer_size: int
    ) -> Iterator[ProbeDocument]:
        source = _Buffer("passages", self._check(passages), buffer_size, self._shuffle)
        spare = None
        if filler is not None:
            spare = _Buffer("filler", (_Part(p, 0) for p in filler), buffer_size, self._shuffle)
        n_used = number = 0
        while (blocks := self._draw(source, spare)) is not None:
            yield from self._rotate(blocks, number)
            number += 1
            n_used += sum(len(block) for block in blocks) if spare is None else self._places
        if number == 0:
            raise ValueError(
                f"passages: a document needs {self._places} of different articles, got {self._n_read} passages of "
                f"{len(self._articles)} articles"
                + ("" if spare is None else f"; and filler of further articles up to {self._length} tokens")
            )
        if self._n_read > n_used:
            logger.warning(
                "%d of %d passages are in no document: no passages of other articles%s are left for them",
                self._n_read - n_used, self._n_read, "" if spare is None else " or no filler",
            )  # fmt: skip

    def _check(self, passages: Iterable[Passage]) -> Iterator[_Part]:
        ids: set[tuple[str, str]] = set()
        for passage in passages:
            name = f"passages: {passage.passage_id!r} of the article {passage.article!r}"
            if not passage.text.strip() or not all(question.text.strip() for question in passage.questions):
                raise ValueError(f"{name} has an empty text or question; leave it out")
            found = [("passage", passage.passage_id), *(("question", question.id) for question in passage.questions)]
            for key in found:
                if key in ids:
                    raise ValueError(f"{name}: the id {key[1]!r} of a {key[0]} occurs twice")
                ids.add(key)
            n_tokens = self._count(SEPARATOR + passage.text)
            if n_tokens > self._room:
                raise ValueError(
                    f"{name} has {n_tokens} tokens, and a place {self._length} // {self._places} = {self._room}; make "
                    "longer documents or fewer places, or leave the passage out"
                )
            self._articles.add(passage.article)
            self._n_read += 1
            yield _Part(passage, n_tokens)

    def _draw(self, source: _Buffer, spare: _Buffer | None) -> list[list[Passage]] | None:
        """Draws the passages of each place of the next document; None if too few are left."""
        articles: set[str] = set()
        first = [source.take_of_another(articles) for _ in range(self._places)]
        blocks = []
        for part in first:
            if part is None:
                return None
            more = self._pack(part, source, articles) if spare is None else self._fill(part, spare, articles)
            if more is None:
                return None
            block = [part.passage, *more]
            self._shuffle.shuffle(block)
            blocks.append(block)
        return blocks

    def _pack(self, first: _Part, source: _Buffer, articles: set[str]) -> list[Passage]:
        """Draws whole passages that fit into the first one's place."""
        room, packed = self._room - first.n_tokens, []
        while part := source.take(lambda p: p.passage.article not in articles and p.n_tokens <= room):  # noqa: B023
            articles.add(part.passage.article)
            packed.append(part.passage)
            room -= part.n_tokens
        return packed

    def _fill(self, first: _Part, spare: _Buffer, articles: set[str]) -> list[Passage] | None:
        """Draws filler up to the size of a place; None if too little is left."""
        room, filled = self._room - first.n_tokens, []
        while room > 0:
            if (part := spare.take_of_another(articles)) is None:
                return None
            text = cut_text(SEPARATOR + part.passage.text, room, self._count)
            if not text.strip():  # not even one word fits
                articles.remove(part.passage.article)
                spare.give_back(part)
                break
            filled.append(replace(part.passage, text=text.strip(), questions=()))
            room = room - self._count(text) if len(text) == len(SEPARATOR + part.passage.text) else 0
        return filled

    def _rotate(self, blocks: list[list[Passage]], number: int) -> Iterator[ProbeDocument]:
        for rotation in range(self._places):
            ordered = rotate(blocks, rotation)
            text = SEPARATOR.join(passage.text for block in ordered for passage in block)
            docno, queries, offset = f"r{rotation}d{number:06d}", [], 0
            for index, block in enumerate(ordered):
                place = place_of(index, self._places)
                for passage in block:
                    queries += [
                        ProbeQuery(
                            qid=f"r{rotation}{question.id}",
                            query=question.text,
                            docno=docno,
                            place=place,
                            index=index,
                            position=(offset + _middle(question, passage)) / len(text),
                            question=question.id,
                        )
                        for question in passage.questions
                    ]
                    offset += len(passage.text) + len(SEPARATOR)
            yield ProbeDocument(
                rotation=rotation, docno=docno, text=text, n_tokens=self._count(text), queries=tuple(queries)
            )


def _middle(question: Question, passage: Passage) -> float:
    """Returns the character in the middle of the answer, or of the passage if the answer is not known."""
    if not question.answer:
        return len(passage.text) / 2
    return question.answer_start + len(question.answer) / 2
