"""Position probes: documents of a chosen length, in which each passage stands once at every place.

A document has a fixed number of places of equally many tokens. Each place holds one passage with questions and is
filled up with other text. The contents of the places then rotate through the document, as in
`fair_evaluation.position_collections.build_collections`, which does the same with passages alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fair_evaluation.cutting import TokenCounter, cut_text, token_counter
from fair_evaluation.position_collections import SEPARATOR, Passage, PositionCollection, rotate_places


def build_probes(
    passages: Iterable[Passage], *, length: int, tokenizer: Any, places: int = 3, seed: int = 0
) -> list[PositionCollection]:
    """Joins passages into documents of a given length and rotates them through all places.

    Args:
        passages: The passages, which are read into memory. Those without questions fill up the places. When none are
            left, passages with questions fill up as well, and their questions are not asked.
        length: The number of tokens of a document, without special tokens. A place has ``length // places`` tokens; the
            last passage in a place is cut to fit, so that documents are at most a few tokens shorter than ``length``.
        tokenizer: Counts tokens: a SentenceTransformer, a tokenizer, or a function that returns the number of tokens of
            a text.
        places: The number of places in a document, at least 2.
        seed: Seed of the drawing.

    Returns:
        One collection per rotation, as `build_collections` makes them. No document has two passages of one article, and
        no text is in two documents of a collection. Passages left over at the end are in no document.

    Raises:
        TypeError: ``tokenizer`` has none of the types above.
        ValueError: There are too few passages for one document, a text is empty, an id occurs twice, or a passage with
            questions is longer than a place.
    """
    for name, value, least in (("places", places, 2), ("length", length, places)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
    count, passages = token_counter(tokenizer), list(passages)
    _check(passages, length, places, count)
    shuffle = random.Random(seed)
    pool = shuffle.sample(passages, len(passages))
    asked, spare = [p for p in pool if p.questions], [p for p in pool if not p.questions]
    groups = []
    while (group := _draw(asked, spare, length // places, places, count)) is not None:
        for place in group:
            shuffle.shuffle(place)  # the passage is not always the first of its place
        groups.append(group)
    if not groups:
        raise ValueError(
            f"passages: a document needs {places} passages with questions, and with further passages {length} tokens, "
            f"all of different articles; got {len(passages)} passages of {len({p.article for p in passages})} articles"
        )
    return rotate_places(groups)


def _check(passages: list[Passage], length: int, places: int, count: TokenCounter) -> None:
    ids: set[tuple[str, str]] = set()
    for passage in passages:
        name = f"passages: {passage.passage_id!r} of the article {passage.article!r}"
        if not passage.text.strip() or not all(question.text.strip() for question in passage.questions):
            raise ValueError(f"{name} has an empty text or question; leave it out")
        for key in [("passage", passage.passage_id), *(("question", question.id) for question in passage.questions)]:
            if key in ids:
                raise ValueError(f"{name}: the id {key[1]!r} of a {key[0]} occurs twice")
            ids.add(key)
        if passage.questions and (n_tokens := count(SEPARATOR + passage.text)) > length // places:
            raise ValueError(
                f"{name} has {n_tokens} tokens, and a place {length} // {places} = {length // places}; make longer "
                "documents or fewer places, or leave the passage out"
            )


def _draw(
    asked: list[Passage], spare: list[Passage], room: int, places: int, count: TokenCounter
) -> list[list[Passage]] | None:
    """Takes the passages of each place of the next document; None if too few are left."""
    articles: set[str] = set()
    group: list[list[Passage]] = []
    for _ in range(places):
        if (passage := _take(asked, articles)) is None:
            return None
        group.append([passage])
    for place in group:
        left = room - count(SEPARATOR + place[0].text)
        while left > 0:
            if (filler := _take(spare, articles) or _take(asked, articles)) is None:
                return None
            text = cut_text(SEPARATOR + filler.text, left, count)
            start = text.strip()
            rest = filler.text.strip()[len(start) :].lstrip()
            if start:
                place.append(replace(filler, text=start, questions=()))
            if rest:  # for another document
                spare.append(replace(filler, text=rest, questions=()))
            left = 0 if rest else left - count(text)
    return group


def _take(passages: list[Passage], articles: set[str]) -> Passage | None:
    """Removes the last passage of a further article, and adds its article to ``articles``."""
    for i in reversed(range(len(passages))):
        if passages[i].article not in articles:
            articles.add(passages[i].article)
            return passages.pop(i)
    return None
