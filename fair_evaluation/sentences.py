"""Takes sentences out of passages to use them as queries, and shortens passages; a simple rule finds the sentences.

A sentence ends at one of . ! ? or an ellipsis, and the closing quotes and brackets after it, if white space follows and
then no lowercase letter; at the fullwidth forms of these marks and the ideographic full stop, also without white space;
and at an empty line. A full stop after a single letter or one of a few English abbreviations does not end a sentence.
Other abbreviations before a capital letter are mistaken for the end of one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from fair_evaluation.cutting import TokenCounter
from fair_evaluation.position_collections import Passage, Question

_END = re.compile(r"""[.!?…]+["'”’»)\]]*\s+|[。！？]+["”’」』）]*\s*|\n[^\S\n]*\n\s*""")  # noqa: RUF001
_ABBREVIATION = re.compile(
    r"(?<!\w)(?:[^\W\d_]|mr|mrs|ms|dr|prof|st|vs|e\.g|i\.e|cf|fig|vol|pp|approx|ca)\.$", re.IGNORECASE
)


def hold_out_sentences(
    passages: Iterable[Passage], *, seed: int = 0, min_characters: int = 30, min_sentences: int = 3
) -> Iterator[Passage]:
    """Takes one sentence out of each passage and makes it the passage's only question.

    So passages need no questions: the rest of a passage is about the same subject as the sentence taken out of it.

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


def excerpt(passage: Passage, max_tokens: int, count: TokenCounter) -> Passage | None:
    """Shortens a passage to consecutive whole sentences that answer as many of its questions as possible.

    Among excerpts that answer equally many, the longest is taken, and then the first.

    Args:
        passage: The passage.
        max_tokens: The most tokens of an excerpt.
        count: Returns the number of tokens of a text, as `fair_evaluation.cutting.token_counter` makes it for a model.

    Returns:
        The passage itself if it is short enough, or an excerpt with the questions that it answers, or None if no
        excerpt answers any.
    """
    if count(passage.text) <= max_tokens:
        return passage
    spans = sentence_spans(passage.text)
    best, best_key = None, (0, 0)
    for i, (start, _) in enumerate(spans):
        for _, end in spans[i:]:
            if count(passage.text[start:end]) > max_tokens:
                break
            kept = [q for q in passage.questions if start <= q.answer_start and q.answer_start + len(q.answer) <= end]
            if kept and (len(kept), end - start) > best_key:
                best_key = (len(kept), end - start)
                questions = tuple(replace(q, answer_start=q.answer_start - start) for q in kept)
                best = replace(passage, text=passage.text[start:end], questions=questions)
    return best


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Returns the start and the end of each sentence as character offsets, without the white space between them."""
    spans, start = [], 0
    for match in _END.finditer(text):
        if _ends_sentence(text, match):
            spans.append((start, match.start() + len(match.group().rstrip())))
            start = match.end()
    spans.append((start, len(text)))
    stripped = ((a + len(text[a:b]) - len(text[a:b].lstrip()), a + len(text[a:b].rstrip())) for a, b in spans)
    return [(a, b) for a, b in stripped if a < b]


def _ends_sentence(text: str, match: re.Match[str]) -> bool:
    if match.group()[0] not in ".!?…" or match.group().count("\n") > 1:
        return True
    if text[match.end() : match.end() + 1].islower():
        return False
    # The pattern's "$" matches at the end of the searched region.
    return _ABBREVIATION.search(text, max(0, match.start() - 10), match.start() + 1) is None
