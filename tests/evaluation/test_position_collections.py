from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fair_evaluation.position_collections import (
    PLACES,
    Passage,
    PositionCollection,
    Question,
    build_collections,
    load_passages,
)

# load_passages

RECORD: dict[str, Any] = {
    "article": "A",
    "passage_id": "p0",
    "text": "one two three",
    "questions": [{"id": "q0", "text": "Which is second?", "answer": "two", "answer_start": 4}],
}


def changed(question: dict[str, Any] | None = None, **record: Any) -> dict[str, Any]:
    return {**RECORD, "questions": [{**RECORD["questions"][0], **(question or {})}], **record}


def write(folder: Path, *records: Any) -> Path:
    path = folder / "passages.jsonl"
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, RECORD, "", changed({"id": "q1"}, passage_id="p1", article="B"), "   ")
    expected = [
        Passage(
            article=article,
            passage_id=f"p{i}",
            text="one two three",
            questions=(Question(id=f"q{i}", text="Which is second?", answer="two", answer_start=4),),
        )
        for i, article in enumerate("AB")
    ]
    assert load_passages(path) == expected
    assert load_passages(str(path)) == expected


def test_offsets_are_characters_not_bytes(tmp_path: Path) -> None:
    record = changed({"answer": "zwölf", "answer_start": 6}, text="für 🐝 zwölf")
    assert load_passages(write(tmp_path, record))[0].questions[0].answer == "zwölf"


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85"])
def test_a_line_ends_at_a_newline_alone(tmp_path: Path, character: str) -> None:
    """JSON allows these unescaped inside a string."""
    text = f"one two{character}three"
    assert load_passages(write(tmp_path, changed(text=text)))[0].text == text


def test_a_passage_without_questions_and_an_empty_file(tmp_path: Path) -> None:
    assert load_passages(write(tmp_path, changed(questions=[])))[0].questions == ()
    assert load_passages(write(tmp_path)) == []


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("{not json", "JSONDecodeError"),
        ("[1, 2]", "TypeError"),
        ("7", "TypeError"),
        ({k: v for k, v in RECORD.items() if k != "text"}, "KeyError: 'text'"),
        ({k: v for k, v in RECORD.items() if k != "questions"}, "KeyError: 'questions'"),
        (changed(questions=[{"id": "q0", "text": "?", "answer": "two"}]), "KeyError: 'answer_start'"),
        (changed(questions=None), "TypeError"),
        (changed(questions="none"), "TypeError"),
        (changed({"answer_start": None}), "TypeError"),
    ],
)
def test_a_line_that_is_no_passage(tmp_path: Path, record: Any, reason: str) -> None:
    path = write(tmp_path, RECORD, record)
    expected = re.escape(f"{path}, line 2: expected a JSON object with article, passage_id, text and questions")
    with pytest.raises(ValueError, match=expected) as error:
        load_passages(path)
    assert reason in str(error.value)


def test_an_offset_that_is_no_number(tmp_path: Path) -> None:
    path = write(tmp_path, changed({"answer_start": "four"}))
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 1: ")):
        load_passages(path)


@pytest.mark.parametrize("record", [changed(text=None, questions=[]), changed({"text": None}), changed(article=None)])
def test_null_is_no_text(tmp_path: Path, record: dict[str, Any]) -> None:
    path = write(tmp_path, record)
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 1: ")):
        load_passages(path)


def test_an_answer_that_stands_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path, "", changed({"answer_start": 5}))
    expected = f"{path}, line 2: the answer of question 'q0' is 'two', but 'wo ' stands at character 5"
    with pytest.raises(ValueError, match=re.escape(expected)):
        load_passages(path)


def test_a_negative_offset(tmp_path: Path) -> None:
    path = write(tmp_path, changed({"answer": "thre", "answer_start": -5}))
    with pytest.raises(ValueError, match="-5"):
        load_passages(path)


@pytest.mark.parametrize(
    ("second", "twice"),
    [(changed({"id": "q1"}), "p0"), (changed(passage_id="p1"), "q0")],
)
def test_an_id_that_occurs_twice(tmp_path: Path, second: dict[str, Any], twice: str) -> None:
    path = write(tmp_path, RECORD, second)
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 2: the id '{twice}' occurs twice")):
        load_passages(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_passages(tmp_path / "none.jsonl")


# The embedded passages


@pytest.fixture(scope="module")
def embedded() -> list[Passage]:
    return load_passages()


def test_the_embedded_passages(embedded: list[Passage]) -> None:
    assert len(embedded) == 75
    assert len({p.article for p in embedded}) == 75
    assert sum(len(p.questions) for p in embedded) == 222
    assert all(2 <= len(p.questions) <= 3 for p in embedded)
    assert len({q.text for p in embedded for q in p.questions}) == 222
    assert len({p.text for p in embedded}) == 75


def test_the_embedded_passages_are_of_one_length(embedded: list[Passage]) -> None:
    lengths = {p.passage_id: len(p.text.split()) for p in embedded}
    assert {i: n for i, n in lengths.items() if not 110 <= n <= 150} == {}


def test_the_embedded_answers_stand_in_one_passage_alone(embedded: list[Passage]) -> None:
    for passage in embedded:
        for question in passage.questions:
            end = question.answer_start + len(question.answer)
            assert question.answer.strip()
            assert passage.text[question.answer_start : end] == question.answer
            whole = re.compile(rf"(?<!\w){re.escape(question.answer)}(?!\w)", re.IGNORECASE)
            assert [p.passage_id for p in embedded if whole.search(p.text)] == [passage.passage_id], question


# build_collections


def make_passages(*sizes: int, n_questions: int = 2) -> list[Passage]:
    """Makes one article per size, of so many passages."""
    return [
        Passage(
            article=f"a{article}",
            passage_id=f"a{article}p{number}",
            text=f"passage {number} of {article}.",
            questions=tuple(
                Question(id=f"a{article}p{number}q{i}", text=f"question {i}?", answer="passage", answer_start=0)
                for i in range(n_questions)
            ),
        )
        for article, size in enumerate(sizes)
        for number in range(size)
    ]


def layout(collection: PositionCollection) -> dict[str, list[str]]:
    """Returns the passages of every document in their order."""
    return {d["docno"]: d["text"].split("\n\n") for d in collection.documents}


CASES = [
    (make_passages(*[1] * 12), 2),
    (make_passages(*[1] * 12), 3),
    (make_passages(*[1] * 12), 4),
    (make_passages(3, 3, 3, 3), 3),
    (make_passages(4, 3, 2, 1, 1), 3),
    (make_passages(5, 2, 2), 2),
    (make_passages(1, 1, 1, 1, 1), 4),
]


@pytest.mark.parametrize(("passages", "k"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_passage_stands_once_at_every_place(passages: list[Passage], k: int, seed: int) -> None:
    collections = build_collections(passages, passages_per_document=k, seed=seed)
    assert len(collections) == k
    places: dict[str, list[int]] = {p.text: [] for p in passages}
    alone = set()
    for collection in collections:
        texts = [text for document in layout(collection).values() for text in document]
        assert sorted(texts) == sorted(p.text for p in passages)  # nothing lost, nothing twice
        for document in layout(collection).values():
            if len(document) == 1:
                alone.add(document[0])
            else:
                assert len(document) == k
                for place, text in enumerate(document):
                    places[text].append(place)
    for text, found in places.items():
        assert sorted(found) == ([] if text in alone else list(range(k)))


@pytest.mark.parametrize(("passages", "k"), CASES)
def test_the_rotation_is_the_documented_one(passages: list[Passage], k: int) -> None:
    first, *others = [list(layout(c).values()) for c in build_collections(passages, passages_per_document=k)]
    for rotation, documents in enumerate(others, start=1):
        for before, after in zip(first, documents, strict=True):
            assert [after[(i + rotation) % len(before)] for i in range(len(before))] == before


@pytest.mark.parametrize(("passages", "k"), CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_document_has_two_passages_of_one_article(passages: list[Passage], k: int, seed: int) -> None:
    article = {p.text: p.article for p in passages}
    for collection in build_collections(passages, passages_per_document=k, seed=seed):
        for document in layout(collection).values():
            assert len({article[text] for text in document}) == len(document)


@pytest.mark.parametrize(("passages", "k"), CASES)
def test_ids_are_unique_over_all_collections(passages: list[Passage], k: int) -> None:
    collections = build_collections(passages, passages_per_document=k)
    docnos = [d["docno"] for c in collections for d in c.documents]
    qids = [q.qid for c in collections for q in c.queries]
    assert len(set(docnos)) == len(docnos)
    assert len(set(qids)) == len(qids)


@pytest.mark.parametrize(("passages", "k"), CASES)
def test_queries_point_to_the_document_and_the_place_of_their_passage(passages: list[Passage], k: int) -> None:
    by_id = {q.id: (p.text, q.text) for p in passages for q in p.questions}
    asked: Counter[str] = Counter()
    for rotation, collection in enumerate(build_collections(passages, passages_per_document=k)):
        documents = layout(collection)
        for query in collection.queries:
            text, question = by_id[query.qid.removeprefix(f"r{rotation}")]
            document = documents[query.docno]
            index = document.index(text)
            assert query.query == question
            assert query.place == PLACES[0 if index == 0 else 2 if index == len(document) - 1 else 1]
            asked[text] += 1
        in_groups = {text for document in documents.values() if len(document) > 1 for text in document}
        assert {by_id[q.qid.removeprefix(f"r{rotation}")][0] for q in collection.queries} == in_groups
    assert set(asked.values()) == {2 * k}


def test_places_of_two_and_of_four() -> None:
    two = build_collections(make_passages(*[1] * 4), passages_per_document=2)
    assert Counter(q.place for c in two for q in c.queries) == {"beginning": 8, "end": 8}
    four = build_collections(make_passages(*[1] * 4), passages_per_document=4)
    assert Counter(q.place for c in four for q in c.queries) == {"beginning": 8, "middle": 16, "end": 8}


def test_passages_left_over_are_documents_without_queries() -> None:
    passages = make_passages(4, 1, 1)
    for collection in build_collections(passages, passages_per_document=3):
        documents = layout(collection)
        assert sorted(len(d) for d in documents.values()) == [1, 1, 1, 3]
        alone = {docno for docno, document in documents.items() if len(document) == 1}
        assert all(text.endswith("of 0.") for docno in alone for text in documents[docno])
        assert not alone & {q.docno for q in collection.queries}
        assert len(collection.queries) == 6


def test_as_many_documents_as_the_articles_allow() -> None:
    """Articles with many passages are drawn from first, or they would be left over."""
    for seed in range(10):
        collection = build_collections(make_passages(3, 1, 1, 1), passages_per_document=2, seed=seed)[0]
        assert sorted(len(d) for d in layout(collection).values()) == [2, 2, 2]


def test_the_seed_determines_the_collections() -> None:
    passages = make_passages(*[2] * 9)
    one, again, other = (build_collections(passages, seed=seed) for seed in (5, 5, 6))
    assert one == again
    assert one != other
    assert build_collections(passages) == build_collections(passages, passages_per_document=3, seed=0)
    assert passages == make_passages(*[2] * 9)


def test_the_embedded_collections(embedded: list[Passage]) -> None:
    collections = build_collections(embedded)
    assert [len(c.documents) for c in collections] == [25, 25, 25]
    for collection in collections:
        assert len(collection.queries) == 222
        assert {q.place for q in collection.queries} == set(PLACES)
    assert Counter(q.place for c in collections for q in c.queries) == dict.fromkeys(PLACES, 222)


@pytest.mark.parametrize("k", [1, 0, -2])
def test_too_few_passages_per_document(k: int) -> None:
    with pytest.raises(ValueError, match=f"passages_per_document: expected at least 2, got {k}"):
        build_collections(make_passages(1, 1), passages_per_document=k)


@pytest.mark.parametrize(
    ("passages", "k", "got"),
    [
        (make_passages(9, 9), 3, "18 passages of 2 articles"),
        (make_passages(1, 1, 1), 4, "3 passages of 3 articles"),
        ([], 2, "0 passages of 0 articles"),
    ],
)
def test_too_few_articles(passages: list[Passage], k: int, got: str) -> None:
    text = f"passages: {k} passages of different articles are needed for one document, got {got}"
    with pytest.raises(ValueError, match=text):
        build_collections(passages, passages_per_document=k)
