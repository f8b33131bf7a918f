from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fair_evaluation.position_collections import Passage, Question


def count_words(text: str) -> int:
    return len(text.split())


def passage(number: int, n_sentences: int = 3) -> Passage:
    text = " ".join(f"Sentence {i} of passage p{number}." for i in range(n_sentences))
    question = Question(id=f"q{number}", text=f"p{number}?", answer=f"p{number}", answer_start=text.index(f"p{number}"))
    return Passage(article=f"a{number}", passage_id=f"p{number}", text=text, questions=(question,))


@pytest.fixture
def data() -> Any:
    from rotations import Geometry, build_rotations

    geometry = Geometry(n_places=4, least=5, most=20, low=20, high=80)
    return build_rotations([passage(i) for i in range(9)], geometry, count_words)


def test_every_passage_stands_once_in_every_place(data: Any) -> None:
    assert (data.n_documents, len(data.texts), len(data.questions)) == (2, 8, 8)
    for rotation, texts in enumerate(np.split(np.array(data.texts), 4)):
        for question, document, index in zip(data.questions, data.documents, data.indices, strict=True):
            assert question.answer in texts[document].split("\n\n")[(index + rotation) % 4]


def test_collections_have_the_places_of_the_rotations() -> None:
    from rotations import Geometry, build_rotations

    geometry = Geometry(n_places=3, least=5, most=20, low=15, high=60)
    data = build_rotations([passage(i) for i in range(7)], geometry, count_words)
    assert [len(collection.documents) for collection in data.collections] == [2, 2, 2]
    queries = list(itertools.chain.from_iterable(collection.queries for collection in data.collections))
    assert len({query.qid for query in queries}) == len(queries) == 18
    texts = {d["docno"]: d["text"] for collection in data.collections for d in collection.documents}
    for query in queries:
        assert f"passage p{query.question[1:]}." in texts[query.docno].split("\n\n")[query.index]
        assert query.place == ("beginning", "middle", "end")[query.index]


def test_scores_by_place(data: Any) -> None:
    # The relevant document is ranked first where its passage stands first, and second elsewhere.
    similarities = np.zeros((len(data.questions), len(data.texts)))
    for i, (document, index) in enumerate(zip(data.documents, data.indices, strict=True)):
        for rotation in range(4):
            first = (index + rotation) % 4 == 0
            similarities[i, rotation * data.n_documents + (document if first else 1 - document)] = 1
    result = data.evaluate(similarities)
    np.testing.assert_allclose(result.groups["mean"], [1.0, *[1 / np.log2(3)] * 3])


def test_a_difference_to_itself_is_zero(data: Any) -> None:
    from rotations import compare

    result = data.evaluate(np.random.default_rng(0).random((len(data.questions), len(data.texts))))
    assert compare(result, result) == {"ndcg": [0.0, 0.0, 0.0], "psi": [0.0, 0.0, 0.0]}


def test_what_is_recorded_is_not_measured_again(tmp_path: Path) -> None:
    from rotations import Record

    key = {"encoder": "minilm", "way": "plain"}
    Record(tmp_path / "r.jsonl").get(key, lambda: {"ndcg": 0.123456, "to_plain": {"psi": [0.00004]}})
    row = Record(tmp_path / "r.jsonl").get(key, lambda: pytest.fail("measured twice"))
    assert (row["ndcg"], row["to_plain"]) == (0.1235, {"psi": [0.0]})
    assert {"torch", "transformers", "python"} <= set(row)


@pytest.mark.parametrize("n_words", [10, 200, 500])
def test_chunks_are_even_and_lose_nothing(n_words: int, minilm_path: Path) -> None:
    from rotations import token_counter
    from sentence_transformers import SentenceTransformer
    from ways import cut_chunks

    model = SentenceTransformer(str(minilm_path), device="cpu")
    text = " ".join(f"unbelievable{i}" for i in range(n_words))
    chunks = cut_chunks(model, text)
    count = token_counter(model)
    assert " ".join(chunks) == text
    assert len(chunks) == -(-count(text) // 128)
    assert max(map(count, chunks)) - min(map(count, chunks)) <= 20  # cuts move to the beginnings of words


def test_tables_of_the_records() -> None:
    """Without a measurement: every study prints what its record in the repository has."""
    import dart
    import pipelines
    import tuning
    import ways
    from rotations import Record

    def record(name: str) -> Any:
        return Record(Path(ways.__file__).parent / "records" / f"{name}.jsonl")

    assert ".823 (+.016 [+.004, +.029]) | .141 (-.104 [-.129, -.079])" in ways.tables(record("ways"), "plain")
    assert ".800 (-.091 [" in dart.table(record("dart"))
    assert "| dense | .807 | .823 (+.016 [" in pipelines.table(record("pipelines"))
    assert "0.819 / 0.061" in tuning.table(record("tune"), record("ways"), "xquad-dev.en")
