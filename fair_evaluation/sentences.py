"""Where the sentences of a text are: a small rule, good enough to hold sentences out as queries.

A sentence ends at . ! ? or an ellipsis, with closing quotes and brackets, before white space that no lowercase letter
follows; at their fullwidth forms and the ideographic full stop, with or without white space; and at an empty line. A
full stop after a single letter or one of a few English abbreviations does not end one. Other abbreviations before a
capital letter do, wrongly.
"""

from __future__ import annotations

import re

_END = re.compile(r"""[.!?…]+["'”’»)\]]*\s+|[。！？]+["”’」』）]*\s*|\n[^\S\n]*\n\s*""")  # noqa: RUF001
_ABBREVIATION = re.compile(
    r"(?<!\w)(?:[^\W\d_]|mr|mrs|ms|dr|prof|st|vs|e\.g|i\.e|cf|fig|vol|pp|approx|ca)\.$", re.IGNORECASE
)


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Returns the first character of each sentence and the one behind it; white space between sentences is in none."""
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
    # The end of the search is the end of the text to the pattern.
    return _ABBREVIATION.search(text, max(0, match.start() - 10), match.start() + 1) is None
