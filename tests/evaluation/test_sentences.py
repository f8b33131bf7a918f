from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fair_evaluation.sentences import sentence_spans


def split(text: str) -> list[str]:
    return [text[start:end] for start, end in sentence_spans(text)]


@pytest.mark.parametrize(
    "sentences",
    [
        ["One is here.", "Two is there!", "Is three?", "Four"],
        ["He said “Stop.”", "(She went on.)", "'Why?'", "It ends."],
        ["It cost 3.5 million.", "The U.S. Army paid.", "Dr. No and J. R. Smith left."],
        ["Some, e.g. bees, i.e. insects, dance.", "Others (cf. Fig. 3) sleep."],
        ["They waited... and left.", "Then… silence."],
        ["It was iPhone vs. Android.", "2 of 3 agreed.", "Éva too."],
        ["No end"],
    ],
)
def test_sentences(sentences: list[str]) -> None:
    assert split(" ".join(sentences)) == sentences
    assert split("  " + "\n".join(sentences) + "\n") == sentences


def test_scripts_without_white_space() -> None:
    assert split("雨が降った。「本当？」彼は笑った！終わり") == ["雨が降った。", "「本当？」", "彼は笑った！", "終わり"]  # noqa: RUF001


def test_an_empty_line_ends_a_sentence() -> None:
    assert split("A heading\n\nIt begins\nhere.\n \nand again") == ["A heading", "It begins\nhere.", "and again"]


@pytest.mark.parametrize("text", ["", "   ", "\n\n"])
def test_no_text(text: str) -> None:
    assert sentence_spans(text) == []


@given(st.text(alphabet="aA. !?。\n”'1é", max_size=40))
def test_nothing_but_white_space_is_lost(text: str) -> None:
    spans = sentence_spans(text)
    ends = [0, *(bound for span in spans for bound in span), len(text)]
    assert ends == sorted(ends)
    assert "".join(text[a:b] for a, b in spans).split() == [] or "".join(
        "".join(text[a:b].split()) for a, b in spans
    ) == "".join(text.split())
    assert all(text[a:b] == text[a:b].strip() != "" for a, b in spans)
