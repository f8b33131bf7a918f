from __future__ import annotations

import itertools
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

from fair_evaluation.passages import hold_out_sentences
from fair_evaluation.position_collections import SEPARATOR, Passage, Question, load_passages
from fair_evaluation.probes import ProbeDocument, build_probes


def words(text: str) -> int:
    return len(text.split())


def ask(key: str, text: str) -> Question:
    return Question(id=key, text=text, answer="", answer_start=0)


def make(number: int, *, n_words: int = 5, article: str | None = None, n_questions: int = 1) -> Passage:
    """Makes a passage whose words are its own, so that it is found in a document; its answer is the last word."""
    text = " ".join(f"w{number}.{i}" for i in range(n_words))
    answer = text.split()[-1]
    return Passage(
        article=article or f"a{number}",
        passage_id=f"p{number}",
        text=text,
        questions=tuple(
            Question(id=f"p{number}q{i}", text=f"question {i}?", answer=answer, answer_start=len(text) - len(answer))
            for i in range(n_questions)
        ),
    )


def fill(number: int, *, n_words: int = 7, article: str | None = None) -> Passage:
    return replace(make(1000 + number, n_words=n_words, article=article), questions=())


def build(passages: Sequence[Passage], **settings: Any) -> list[ProbeDocument]:
    return list(build_probes(passages, **{"length": 15, "tokenizer": words, **settings}))


def layout(document: ProbeDocument) -> list[str]:
    return document.text.split(SEPARATOR)


class TestPlaces:
    @pytest.mark.parametrize("places", [2, 3, 5])
    def test_every_passage_stands_once_at_every_place(self, places: int) -> None:
        passages = [make(i) for i in range(4 * places)]
        documents = build(passages, length=5 * places, places=places)
        assert len(documents) == 4 * places
        found = defaultdict(list)
        for document in documents:
            for place, text in enumerate(layout(document)):
                found[text].append((document.rotation, place))
        assert set(found) == {p.text for p in passages}
        for stands in found.values():
            assert sorted(rotation for rotation, _ in stands) == list(range(places))
            assert sorted(place for _, place in stands) == list(range(places))

    def test_the_rotation_is_that_of_the_collections(self) -> None:
        """In rotation r what is number i stands at (i + r) mod places, as in `build_collections`."""
        first, second, third = build([make(i) for i in range(3)])
        order = layout(first)
        assert layout(second) == [order[2], order[0], order[1]]
        assert layout(third) == [order[1], order[2], order[0]]
        assert [d.rotation for d in (first, second, third)] == [0, 1, 2]

    def test_queries_know_where_their_answer_is(self) -> None:
        for document in build([make(i, n_words=3 + i % 3) for i in range(9)]):
            assert len(document.queries) == 3
            for query in document.queries:
                number = query.question.removeprefix("p").removesuffix("q0")
                assert query.qid == f"r{document.rotation}{query.question}"
                assert query.docno == document.docno
                assert query.index == [text.startswith(f"w{number}.") for text in layout(document)].index(True)
                assert query.place == ("beginning", "middle", "end")[query.index]
                answer = make(int(number), n_words=3 + int(number) % 3).questions[0].answer
                middle = document.text.index(answer) + len(answer) / 2
                assert query.position == pytest.approx(middle / len(document.text))

    def test_without_an_answer_it_is_the_middle_of_the_passage(self) -> None:
        passages = [Passage(article=n, passage_id=n, text=n * 10, questions=(ask(n, "?"),)) for n in "ab"]
        document = build(passages, length=2, places=2)[0]
        assert [q.position for q in document.queries] == pytest.approx([5 / 22, 17 / 22])

    def test_places_of_five(self) -> None:
        documents = build([make(i) for i in range(5)], length=25, places=5)
        assert Counter(q.place for d in documents for q in d.queries) == {"beginning": 5, "middle": 15, "end": 5}
        assert Counter(q.index for d in documents for q in d.queries) == dict.fromkeys(range(5), 5)

    def test_ids_are_unique(self) -> None:
        documents = build([make(i, n_questions=2) for i in range(12)])
        qids = [q.qid for d in documents for q in d.queries]
        assert len(set(qids)) == len(qids) == 12 * 2 * 3
        assert len({d.docno for d in documents}) == len(documents) == 12


class TestFilling:
    def test_whole_passages_are_packed(self) -> None:
        documents = build([make(i) for i in range(12)], length=30)  # two in each of three places of 10
        assert [d.n_tokens for d in documents] == [30] * 6
        assert [len(layout(d)) for d in documents] == [6] * 6
        places = defaultdict(list)
        for document in documents:
            for query in document.queries:
                places[query.question].append(query.index)
        assert set(map(tuple, map(sorted, places.values()))) == {(0, 1, 2)}
        assert len(places) == 12

    def test_filler_makes_the_length_exact(self) -> None:
        documents = build([make(i) for i in range(6)], filler=[fill(i) for i in range(30)], length=60)
        assert [d.n_tokens for d in documents] == [60] * 6
        for document in documents:
            assert len(document.queries) == 3
            texts = layout(document)
            assert sorted(words(text) for text in texts) == [1] * 3 + [5] * 3 + [7] * 6  # 20 = 5 + 7 + 7 + 1
            assert len({text.split(".")[0] for text in texts}) == 12

    def test_where_in_its_place_a_passage_stands_differs(self) -> None:
        documents = build([make(i) for i in range(30)], filler=[fill(i) for i in range(100)], length=36)
        first = [d for d in documents if d.rotation == 0]
        assert len({min(q.position for q in d.queries) for d in first}) > 1

    def test_long_filler_is_cut(self) -> None:
        documents = build([make(i) for i in range(3)], filler=[fill(i, n_words=10_000) for i in range(3)], length=300)
        assert [d.n_tokens for d in documents] == [300] * 3

    def test_a_place_that_is_full_takes_no_filler(self) -> None:
        documents = build([make(i) for i in range(3)], filler=[fill(0)])
        assert [d.n_tokens for d in documents] == [15] * 3

    def test_filler_that_does_not_fit_is_kept_for_the_next_place(self) -> None:
        def count(text: str) -> int:
            return 2 * words(text)  # one token is left in each place, and no word fits

        documents = build([make(i) for i in range(3)], filler=[fill(i) for i in range(1)], length=33, tokenizer=count)
        assert [d.n_tokens for d in documents] == [30] * 3

    @given(
        st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=25),
        st.integers(2, 4),
        st.integers(6, 12),
        st.sampled_from([None, 40]),
        st.integers(4, 8),
    )
    def test_whatever_comes(
        self, sizes: list[tuple[int, int]], places: int, room: int, n_filler: int | None, buffer_size: int
    ) -> None:
        passages = [make(i, n_words=n, article=f"a{article}") for i, (n, article) in enumerate(sizes)]
        filler = None if n_filler is None else [fill(i, article=f"f{i % 9}") for i in range(n_filler)]
        article = {p.text.split()[0].split(".")[0]: p.article for p in [*passages, *(filler or [])]}
        try:
            documents = build(passages, length=places * room, places=places, filler=filler, buffer_size=buffer_size)
        except ValueError as error:
            assert re.match("passages: a document needs|buffer_size: the document", str(error))  # noqa: PT017
            return
        asked = Counter(q.question for d in documents for q in d.queries)
        assert set(asked.values()) == {places}
        for document in documents:
            articles = [article[text.split(".")[0]] for text in layout(document)]
            assert len(set(articles)) == len(articles)
            assert document.n_tokens == words(document.text) <= places * room
            if filler:
                assert document.n_tokens == places * room
        for rotation in range(places):
            texts = [t for d in documents if d.rotation == rotation for t in layout(d)]
            assert len(set(texts)) == len(texts)  # no passage twice in one index


class TestArticles:
    def test_none_comes_twice_in_a_document(self) -> None:
        passages = [make(i, article=f"a{i % 4}") for i in range(24)]
        documents = build(passages, filler=[fill(i, article=f"a{i % 9}") for i in range(60)], length=30)
        for document in documents:
            numbers = [int(text.split(".")[0].removeprefix("w")) for text in layout(document)]
            articles = [n % 4 if n < 1000 else (n - 1000) % 9 for n in numbers]
            assert len(set(articles)) == len(articles)

    def test_a_sorted_source_that_fills_the_buffer(self) -> None:
        passages = [make(i, article=f"a{i // 10}") for i in range(40)]
        assert build(passages, buffer_size=40)
        message = (
            "buffer_size: the document already has passages of the articles of all 5 passages in the buffer of passages"
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            build(passages, buffer_size=5)
        with pytest.raises(ValueError, match=r"buffer_size: the document already has .* in the buffer of filler"):
            build(
                [make(i) for i in range(3)], length=60, filler=[fill(i, article="f") for i in range(40)], buffer_size=5
            )


class TestOrder:
    def test_the_seed_determines_all(self) -> None:
        passages, filler = [make(i) for i in range(20)], [fill(i) for i in range(60)]
        one, again, other = (build(passages, filler=filler, length=30, seed=seed) for seed in (5, 5, 6))
        assert one == again
        assert one != other
        assert passages == [make(i) for i in range(20)]

    def test_no_more_is_read_than_the_buffers_hold(self) -> None:
        read = Counter[str]()

        def endless(kind: str) -> Iterator[Passage]:
            for i in itertools.count():
                read[kind] += 1
                yield make(i) if kind == "passages" else fill(i)

        probes = build_probes(endless("passages"), filler=endless("filler"), length=60, tokenizer=words, buffer_size=50)
        for _ in range(3 * 100):
            next(probes)
        assert read["passages"] <= 3 * 100 + 50
        assert read["filler"] <= 9 * 100 + 50

    def test_what_is_left_over_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, logger="fair_evaluation"):
            assert len(build([make(i) for i in range(6)])) == 6
            assert caplog.messages == []
            assert len(build([make(i) for i in range(8)])) == 6
            assert caplog.messages == [
                "2 of 8 passages are in no document: no passages of other articles are left for them"
            ]
            caplog.clear()
            assert len(build([make(i) for i in range(9)], filler=[fill(i) for i in range(5)], length=36)) == 3
        assert caplog.messages == [
            "6 of 9 passages are in no document: no passages of other articles or no filler are left for them"
        ]


class TestErrors:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"places": 1}, "places: expected an integer of at least 2, got 1"),
            ({"places": 2.0}, "places: expected an integer of at least 2, got 2.0"),
            ({"length": 2}, "length: expected an integer of at least 3, got 2"),
            ({"buffer_size": 2}, "buffer_size: expected an integer of at least 3, got 2"),
        ],
    )
    def test_settings_are_checked_before_anything_is_read(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            build_probes([], **{"length": 15, "tokenizer": words, **settings})

    def test_the_tokenizer(self) -> None:
        with pytest.raises(TypeError, match="tokenizer: expected"):
            build_probes([], length=15, tokenizer=512)

    @pytest.mark.parametrize(
        ("passages", "message"),
        [
            ([], "passages: a document needs 3 of different articles, got 0 passages of 0 articles"),
            ([make(0), make(1)], "passages: a document needs 3 of different articles, got 2 passages of 2 articles"),
            ([make(i, article="a") for i in range(9)], "got 9 passages of 1 articles"),
            (
                [make(0), make(1, n_words=6)],
                "passages: 'p1' of the article 'a1' has 6 tokens, and a place 15 // 3 = 5;",
            ),
            ([make(0), make(0)], "passages: 'p0' of the article 'a0': the id 'p0' of a passage occurs twice"),
            ([make(0), replace(make(1), questions=make(0).questions)], "the id 'p0q0' of a question occurs twice"),
            ([replace(make(0), text=" ")], "passages: 'p0' of the article 'a0' has an empty text or question"),
            ([replace(make(0), questions=(ask("q", ""),))], "has an empty text or question"),
        ],
    )
    def test_passages(self, passages: list[Passage], message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            build(passages)

    def test_too_little_filler(self) -> None:
        message = "got 3 passages of 3 articles; and filler of further articles up to 60 tokens"
        with pytest.raises(ValueError, match=re.escape(message)):
            build([make(i) for i in range(3)], filler=[fill(i) for i in range(4)], length=60)


class TestEmbedded:
    def test_every_question_is_asked_once_at_every_place(self, minilm: SentenceTransformer) -> None:
        passages = {p.passage_id: p for p in load_passages()}
        documents = build(list(passages.values()), length=510, tokenizer=minilm)
        assert len(documents) == 75
        assert all(d.n_tokens <= 510 for d in documents)
        places: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for document in documents:
            texts = layout(document)
            for query in document.queries:
                assert texts[query.index] == passages[query.question.split("q")[0]].text
                places[query.question].append((query.index, document.rotation))
        assert len(places) == 222
        for found in places.values():
            assert sorted(index for index, _ in found) == [0, 1, 2]
            assert sorted(rotation for _, rotation in found) == [0, 1, 2]

    def test_held_out_sentences_in_documents_of_an_exact_length(self, minilm: SentenceTransformer) -> None:
        held = list(hold_out_sentences(load_passages()))
        documents = build(held[:20], filler=held[20:], length=1024, places=2, tokenizer=minilm)
        assert len(documents) == 18
        assert all(1024 - 8 <= d.n_tokens <= 1024 for d in documents)
        texts = "\n".join(d.text for d in documents)
        for document in documents:
            for query in document.queries:
                assert query.query not in texts
                assert held[int(query.question[1:3])].text in document.text
