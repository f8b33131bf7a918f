from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fair_evaluation.passages import hold_out_sentences, read_passages
from fair_evaluation.position_collections import Passage, Question, load_passages

DANCE = {"text": "When?", "id": "q", "answer": "at noon", "answer_start": 11}
RECORDS: list[dict[str, Any]] = [
    {
        "docno": "d1",
        "text": "Bees dance at noon.",
        "title": "Bees",
        "page": "P",
        "asked": ["Who dances?", DANCE],
    },
    {"docno": 2, "text": "Foxes sleep.", "title": "Foxes", "page": "P", "asked": []},
]


def question(key: str, text: str, answer: str = "", start: int = 0) -> Question:
    return Question(id=key, text=text, answer=answer, answer_start=start)


class TestReading:
    def test_by_hand(self) -> None:
        first, second = read_passages(RECORDS, passage_id="docno", article="page", questions="asked")
        asked = (question("d1q0", "Who dances?"), question("q", "When?", "at noon", 11))
        assert first == Passage(article="P", passage_id="d1", text="Bees dance at noon.", questions=asked)
        assert second == Passage(article="P", passage_id="2", text="Foxes sleep.", questions=())

    def test_text_alone(self) -> None:
        assert list(read_passages([{"body": "a"}, {"body": "b"}], text="body")) == [
            Passage(article="p0", passage_id="p0", text="a", questions=()),
            Passage(article="p1", passage_id="p1", text="b", questions=()),
        ]

    def test_titles_are_known_items(self) -> None:
        first, second = read_passages(RECORDS, passage_id="docno", title="title")
        assert first.questions == (question("d1-title", "Bees"),)
        assert second.questions == (question("2-title", "Foxes"),)
        assert first.article == "d1"

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "records.jsonl"
        path.write_text("\n".join([*map(json.dumps, RECORDS), "", ""]))
        assert list(read_passages(path, passage_id="docno")) == list(read_passages(RECORDS, passage_id="docno"))
        path.write_text(json.dumps({"text": "a\u2028b"}, ensure_ascii=False), encoding="utf-8")
        assert next(read_passages(str(path))).text == "a\u2028b"

    def test_one_at_a_time(self) -> None:
        def endless() -> Any:
            while True:
                yield {"text": "a"}

        passages = read_passages(endless())
        assert [next(passages).passage_id for _ in range(3)] == ["p0", "p1", "p2"]

    @pytest.mark.parametrize(
        ("record", "message"),
        [
            ({"docno": "x"}, "record 1 (docno 'x'): the field 'text' is missing, there are ['docno']"),
            ({"docno": "x", "text": " "}, "record 1 (docno 'x'): the text in 'text' is empty; leave the record out"),
            ({"docno": "x", "text": None}, "record 1 (docno 'x'): expected a text in 'text', got None (NoneType)"),
            ({"text": "a"}, "record 1: the field 'docno' is missing, there are ['text']"),
            ({"docno": 1.5, "text": "a"}, "record 1: expected a string or an integer in 'docno', got 1.5 (float)"),
            ("text", "record 1: expected a mapping with the field 'docno', got str"),
            ({"docno": "x", "text": "a", "title": "t"}, "record 1 (docno 'x'): the field 'asked' is missing"),
            ({"docno": "x", "text": "a", "asked": []}, "record 1 (docno 'x'): the field 'title' is missing"),
        ],
    )
    def test_records_that_are_wrong(self, record: Any, message: str) -> None:
        passages = read_passages([RECORDS[0], record], passage_id="docno", questions="asked", title="title")
        assert next(passages).passage_id == "d1"
        with pytest.raises(ValueError, match=re.escape(message)):
            next(passages)

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            ("who?", "expected a list of questions, got 'who?' (str)"),
            (None, "expected a list of questions, got None (NoneType)"),
            ([3], "record 0: question 0: expected a text or an object, got 3 (int)"),
            ([""], "record 0: the text in 'text' is empty"),
            ([{"id": "q"}], "the field 'text' is missing, there are ['id']"),
            (
                [DANCE, {**DANCE, "answer_start": 10}],
                "answer 'at noon' of question 1 is not at character 10 of",
            ),
            ([{**DANCE, "answer_start": -1}], "the answer 'at noon' of question 0 is not at character -1"),
            ([{**DANCE, "answer": None}], "the answer None of question 0 is not at character"),
            ([{**DANCE, "id": None}], "expected a string or an integer in 'id', got None"),
        ],
    )
    def test_questions_that_are_wrong(self, asked: Any, message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            list(read_passages([{"text": "Bees dance at noon.", "asked": asked}], questions="asked"))

    def test_lines_that_are_wrong(self, tmp_path: Path) -> None:
        path = tmp_path / "records.jsonl"
        path.write_text('{"text": "a"}\n\n{"text"\n')
        with pytest.raises(ValueError, match=re.escape(f"{path}, line 3: expected a JSON object, got '{{\"text\"\\n'")):
            list(read_passages(path))
        path.write_text('{"text": "a"}\n\n{"text": ""}\n')
        with pytest.raises(ValueError, match=re.escape(f"{path}, line 3: the text in 'text' is empty")):
            list(read_passages(path))


SENTENCES = [
    "The first sentence is about the bees of the north.",
    "The second sentence is about their dances.",
    "Short.",
    "The fourth sentence is about the sun and clouds.",
]


def passage(*sentences: str, name: str = "p") -> Passage:
    return Passage(article="A", passage_id=name, text=" ".join(sentences), questions=(question("old", "old?"),))


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
