"""Splits texts into sentences by a simple rule, which suffices to take sentences out of passages as queries.

A sentence ends at one of . ! ? or an ellipsis, and the closing quotes and brackets after it, if white space follows and
then no lowercase letter; at the fullwidth forms of these marks and the ideographic full stop, also without white space;
and at an empty line. A full stop after a single letter or one of a few English abbreviations does not end a sentence.
Other abbreviations before a capital letter are mistaken for the end of one.
"""

from __future__ import annotations

import re

_END = re.compile(r"""[.!?…]+["'”’»)\]]*\s+|[。！？]+["”’」』）]*\s*|\n[^\S\n]*\n\s*""")  # noqa: RUF001
_ABBREVIATION = re.compile(
    r"(?<!\w)(?:[^\W\d_]|mr|mrs|ms|dr|prof|st|vs|e\.g|i\.e|cf|fig|vol|pp|approx|ca)\.$", re.IGNORECASE
)


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
