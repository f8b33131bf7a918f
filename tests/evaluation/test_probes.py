from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pyterrier as pt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

from fair_evaluation import from_run
from fair_evaluation.position_collections import SEPARATOR, Passage, PositionCollection, Question, load_passages
from fair_evaluation.probes import build_probes
from fair_evaluation.sentences import hold_out_sentences
from pyterrier_fair import PositionDataset


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


def build(passages: Sequence[Passage], **settings: Any) -> list[PositionCollection]:
    return build_probes(passages, **{"length": 15, "tokenizer": words, **settings})


def texts(collection: PositionCollection) -> list[str]:
    return [document["text"] for document in collection.documents]


class TestPlaces:
    @pytest.mark.parametrize("places", [2, 3, 5])
    def test_every_passage_stands_once_at_every_place(self, places: int) -> None:
        passages = [make(i) for i in range(4 * places)]
        collections = build(passages, length=5 * places, places=places)
        assert [len(c.documents) for c in collections] == [4] * places
        found = defaultdict(list)
        for rotation, collection in enumerate(collections):
            for document in texts(collection):
                for place, text in enumerate(document.split(SEPARATOR)):
                    found[text].append((rotation, place))
        assert set(found) == {p.text for p in passages}
        for stands in found.values():
            assert sorted(rotation for rotation, _ in stands) == list(range(places))
            assert sorted(place for _, place in stands) == list(range(places))

    def test_the_rotation_is_that_of_the_collections(self) -> None:
        """In rotation r what is number i stands at (i + r) mod places, as in `build_collections`."""
        first, second, third = (texts(c)[0].split(SEPARATOR) for c in build([make(i) for i in range(3)]))
        assert second == [first[2], first[0], first[1]]
        assert third == [first[1], first[2], first[0]]

    def test_queries_know_where_their_answer_is(self) -> None:
        collections = build([make(i) for i in range(9)])
        for rotation, collection in enumerate(collections):
            assert len(collection.queries) == 9
            by_docno = {document["docno"]: document["text"] for document in collection.documents}
            for query in collection.queries:
                number = query.question.removeprefix("p").removesuffix("q0")
                assert query.qid == f"r{rotation}{query.question}"
                layout = by_docno[query.docno].split(SEPARATOR)
                assert query.index == [text.startswith(f"w{number}.") for text in layout].index(True)
                assert query.place == ("beginning", "middle", "end")[query.index]

    def test_places_of_five(self) -> None:
        queries = [q for c in build([make(i) for i in range(5)], length=25, places=5) for q in c.queries]
        assert Counter(q.place for q in queries) == {"beginning": 5, "middle": 15, "end": 5}
        assert Counter(q.index for q in queries) == dict.fromkeys(range(5), 5)

    def test_ids_are_unique(self) -> None:
        collections = build([make(i, n_questions=2) for i in range(12)])
        qids = [q.qid for c in collections for q in c.queries]
        assert len(set(qids)) == len(qids) == 12 * 2 * 3
        docnos = [document["docno"] for c in collections for document in c.documents]
        assert len(set(docnos)) == len(docnos) == 12


class TestFilling:
    def test_passages_without_questions_make_the_length_exact(self) -> None:
        collections = build([*(make(i) for i in range(6)), *(fill(i) for i in range(30))], length=60)
        for collection in collections:
            assert len(collection.queries) == 6
            assert [words(text) for text in texts(collection)] == [60, 60]
            for text in texts(collection):
                assert len({part.split(".")[0] for part in text.split(SEPARATOR)}) >= 3 * 3

    def test_passages_with_questions_fill_up_when_none_are_left(self) -> None:
        passages = [make(i) for i in range(20)]
        collections = build(passages, length=30)  # two passages at each place
        asked = Counter(q.question for c in collections for q in c.queries)
        assert set(asked.values()) == {3}
        assert len(asked) == 9
        assert {words(text) for c in collections for text in texts(c)} == {30}

    def test_what_is_cut_off_fills_another_document(self) -> None:
        collections = build([*(make(i) for i in range(6)), *(fill(i, n_words=40) for i in range(3))], length=39)
        assert [len(c.documents) for c in collections] == [2] * 3
        for collection in collections:
            found = " ".join(texts(collection)).split()
            assert len(set(found)) == len(found)

    def test_where_in_its_place_a_passage_stands_differs(self) -> None:
        first, *_ = build([*(make(i) for i in range(30)), *(fill(i) for i in range(100))], length=36)
        starts = {text.split(".")[0] in {f"w{i}" for i in range(30)} for text in texts(first)}
        assert starts == {True, False}

    def test_long_filler_is_cut(self) -> None:
        passages = [*(make(i) for i in range(3)), *(fill(i, n_words=10_000) for i in range(3))]
        assert [words(text) for c in build(passages, length=300) for text in texts(c)] == [300] * 3

    def test_a_place_that_is_full_takes_no_filler(self) -> None:
        collections = build([*(make(i) for i in range(3)), fill(0)])
        assert [words(text) for c in collections for text in texts(c)] == [15] * 3

    def test_places_with_room_for_less_than_a_word(self) -> None:
        def count(text: str) -> int:
            return 2 * words(text)  # one token is left in each place, and no word fits

        passages = [*(make(i) for i in range(3)), *(fill(i) for i in range(3))]
        collections = build(passages, length=33, tokenizer=count)
        assert [count(text) for c in collections for text in texts(c)] == [30] * 3

    @given(
        st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=25),
        st.integers(2, 4),
        st.integers(6, 12),
        st.sampled_from([0, 40]),
    )
    def test_whatever_comes(self, sizes: list[tuple[int, int]], places: int, room: int, n_filler: int) -> None:
        passages = [make(i, n_words=n, article=f"a{article}") for i, (n, article) in enumerate(sizes)]
        passages += [fill(i, article=f"f{i % 9}") for i in range(n_filler)]
        article = {p.text.split()[0].split(".")[0]: p.article for p in passages}
        try:
            collections = build(passages, length=places * room, places=places)
        except ValueError as error:
            assert re.match("passages: a document needs", str(error))  # noqa: PT017
            return
        assert set(Counter(q.question for c in collections for q in c.queries).values()) == {places}
        for collection in collections:
            for text in texts(collection):
                articles = [article[part.split(".")[0]] for part in text.split(SEPARATOR)]
                assert len(set(articles)) == len(articles)
                assert words(text) == places * room
            found = " ".join(texts(collection)).split()
            assert len(set(found)) == len(found)  # no text twice in one index


class TestArticles:
    def test_none_comes_twice_in_a_document(self) -> None:
        passages = [make(i, article=f"a{i % 4}") for i in range(24)]
        for collection in build([*passages, *(fill(i, article=f"a{i % 9}") for i in range(60))], length=30):
            for text in texts(collection):
                numbers = [int(part.split(".")[0].removeprefix("w")) for part in text.split(SEPARATOR)]
                articles = [n % 4 if n < 1000 else (n - 1000) % 9 for n in numbers]
                assert len(set(articles)) == len(articles)

    def test_the_seed_determines_all(self) -> None:
        passages = [*(make(i) for i in range(20)), *(fill(i) for i in range(60))]
        one, again, other = (build(passages, length=30, seed=seed) for seed in (5, 5, 6))
        assert one == again
        assert one != other


class TestErrors:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"places": 1}, "places: expected an integer of at least 2, got 1"),
            ({"places": 2.0}, "places: expected an integer of at least 2, got 2.0"),
            ({"length": 2}, "length: expected an integer of at least 3, got 2"),
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
            (
                [],
                "passages: a document needs 3 passages with questions, and with further passages 15 tokens, all of "
                "different articles; got 0 passages of 0 articles",
            ),
            ([make(0), make(1)], "got 2 passages of 2 articles"),
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
        with pytest.raises(ValueError, match=r"with further passages 60 tokens, .* got 7 passages of 7 articles"):
            build([*(make(i) for i in range(3)), *(fill(i) for i in range(4))], length=60)


class TestEmbedded:
    def test_every_question_is_asked_once_at_every_place(self, minilm: SentenceTransformer) -> None:
        collections = build(load_passages(), length=510, tokenizer=minilm)
        places = defaultdict(list)
        for collection in collections:
            for query in collection.queries:
                places[query.question].append(query.index)
            for text in texts(collection):
                assert 510 - 12 <= len(minilm.tokenizer(text, add_special_tokens=False)["input_ids"]) <= 510
        assert len(places) > 150
        assert all(sorted(found) == [0, 1, 2] for found in places.values())

    def test_held_out_sentences(self, minilm: SentenceTransformer) -> None:
        held = list(hold_out_sentences(load_passages()))
        collections = build(held, length=1024, places=2, tokenizer=minilm)
        assert len(collections[0].documents) >= 8
        everything = "\n".join(text for c in collections for text in texts(c))
        for collection in collections:
            for query in collection.queries:
                assert query.query not in everything

    def test_they_are_what_an_evaluation_and_pyterrier_take(self) -> None:
        collections = build(load_passages(), length=600)
        topics = pd.DataFrame([vars(query) for c in collections for query in c.queries])
        qrels = topics[["qid", "docno"]].assign(label=1)
        found = qrels[topics["index"] != 2].assign(score=1.0)  # what stands last is not found
        result = from_run(found, qrels, positions=topics, unit="question")
        assert result.groups["mean"].tolist() == [1, 1, 0]
        dataset = PositionDataset(collections[0])
        assert len(pt.text.get_text(dataset)(dataset.get_qrels())) == len(collections[0].queries)
