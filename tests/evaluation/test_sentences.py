from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fair_evaluation.position_collections import Passage, Question, load_passages
from fair_evaluation.sentences import excerpt, hold_out_sentences, sentence_spans


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


SENTENCES = [
    "The first sentence is about the bees of the north.",
    "The second sentence is about their dances.",
    "Short.",
    "The fourth sentence is about the sun and clouds.",
]


def passage(*sentences: str, name: str = "p") -> Passage:
    return Passage(
        article="A",
        passage_id=name,
        text=" ".join(sentences),
        questions=(Question(id="old", text="old?", answer="", answer_start=0),),
    )


class TestHoldingOut:
    def test_one_sentence_is_taken_out(self) -> None:
        taken = set()
        for seed in range(20):
            (held,) = hold_out_sentences([passage(*SENTENCES)], seed=seed)
            (asked,) = held.questions
            assert held.text == " ".join(s for s in SENTENCES if s != asked.text)
            assert (asked.id, asked.answer) == ("p-held-out", "")
            assert (held.article, held.passage_id) == ("A", "p")
            taken.add(asked.text)
        assert taken == {s for s in SENTENCES if len(s) >= 30}

    def test_the_choice_depends_on_nothing_but_seed_and_passage(self) -> None:
        one, two = passage(*SENTENCES, name="one"), passage(*SENTENCES, name="two")
        assert list(hold_out_sentences([one, two])) == list(hold_out_sentences([two, one]))[::-1]
        many = [passage(*SENTENCES, name=str(i)) for i in range(20)]
        assert list(hold_out_sentences(many)) != list(hold_out_sentences(many, seed=1))

    def test_a_sentence_that_stands_twice_is_not_taken(self) -> None:
        twice = passage(SENTENCES[0], SENTENCES[1], SENTENCES[0])
        for seed in range(10):
            (held,) = hold_out_sentences([twice], seed=seed)
            assert held.questions[0].text == SENTENCES[1]

    @pytest.mark.parametrize("sentences", [SENTENCES[:2], ["Short."] * 5, [SENTENCES[0]] * 4])
    def test_passages_that_have_none_stay_whole(self, sentences: list[str]) -> None:
        (held,) = hold_out_sentences([passage(*sentences)])
        assert (held.text, held.questions) == (" ".join(sentences), ())

    def test_limits(self) -> None:
        assert next(hold_out_sentences([passage(*SENTENCES[:2])], min_sentences=2)).questions
        assert not next(hold_out_sentences([passage(*SENTENCES)], min_characters=60)).questions
        with pytest.raises(ValueError, match="min_sentences: expected at least 2, of which one remains, got 1"):
            hold_out_sentences([], min_sentences=1)

    def test_the_embedded_passages(self) -> None:
        whole = {p.passage_id: p.text for p in load_passages()}
        held = list(hold_out_sentences(load_passages()))
        assert sum(len(p.questions) for p in held) == len(whole)
        texts = "\n".join(p.text for p in held)
        for p in held:
            assert p.questions[0].text in whole[p.passage_id]
            assert p.questions[0].text not in texts

    @given(
        st.lists(st.sampled_from(["Aa bb.", "Cc dd ee!", "Ff?", "Gg。", "hh"]), max_size=8),
        st.sampled_from([" ", "\n", "\n\n"]),
    )
    def test_nothing_else_is_lost(self, sentences: list[str], separator: str) -> None:
        text = separator.join(sentences) or "x"
        (held,) = hold_out_sentences([Passage(article="A", passage_id="p", text=text, questions=())], min_characters=1)
        assert sorted("".join((held.text + "".join(q.text for q in held.questions)).split())) == sorted(
            "".join(text.split())
        )
        assert all(q.text not in held.text for q in held.questions)


def test_an_excerpt_keeps_whole_sentences_around_the_answer() -> None:
    text = " ".join(f"Sentence {i} of the text." for i in range(5))
    question = Question(id="q", text="which?", answer="3", answer_start=text.index("3"))
    passage = Passage(article="a", passage_id="p", text=text, questions=(question,))

    def count_words(text: str) -> int:
        return len(text.split())

    found = excerpt(passage, 12, count_words)
    assert found is not None
    assert found.text == "Sentence 2 of the text. Sentence 3 of the text."
    assert found.text[found.questions[0].answer_start :].startswith("3 of")
    assert excerpt(passage, 25, count_words) is passage
    assert excerpt(passage, 4, count_words) is None
