from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pyterrier as pt
import pytest

from pyterrier_fair import FairBiEncoder
from tests.core.tiny_models import document, documents

MakeEncoder = Callable[..., FairBiEncoder]
TEXTS = documents([50, 12, 30, 90, 64, 21, 77, 41])
QUERIES = [document(n, seed=90 + n) for n in (3, 5, 2, 6, 4, 8)]


@pytest.fixture(scope="session", autouse=True)
def offline_documentation() -> Iterator[None]:
    """Keeps schematics from downloading PyTerrier's inventory of documentation pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pt.documentation, "_cached_objects_inv", {})
        patch.setenv("PT_TEST_TRANSFORMER_REPORTS", "0")
        yield


@pytest.fixture(scope="session")
def make_encoder(tiny_folder: Callable[..., Path]) -> MakeEncoder:
    """Returns a function that builds an encoder of a tiny model from its folder: (family, pooling, **FairBiEncoder's).

    Baskets of 8 tokens and strength 0.8 unless said otherwise.
    """

    def make(family: str = "bert", pooling: str = "cls", /, **settings: object) -> FairBiEncoder:
        settings = {"basket_size": 8, "strength": 0.8, "device": "cpu", **settings}
        return FairBiEncoder(str(tiny_folder(family, pooling)), **settings)  # type: ignore[arg-type]

    return make


@pytest.fixture
def docs() -> pd.DataFrame:
    return pd.DataFrame({"docno": [f"d{i}" for i in range(len(TEXTS))], "text": TEXTS})


@pytest.fixture
def topics() -> pd.DataFrame:
    return pd.DataFrame({"qid": [f"q{i}" for i in range(len(QUERIES))], "query": QUERIES})


@pytest.fixture
def pairs(topics: pd.DataFrame, docs: pd.DataFrame) -> pd.DataFrame:
    """Every query with every document."""
    return topics.merge(docs, how="cross").assign(score=0.0, rank=0)


@pytest.fixture
def candidates(pairs: pd.DataFrame) -> pt.Transformer:
    """A first stage that retrieves everything."""
    return pt.Transformer.from_df(pairs.drop(columns=["query"]))


@pytest.fixture
def qrels() -> pd.DataFrame:
    """Two documents of different relevance per query."""
    rows = [(f"q{i}", f"d{(3 * i + j) % len(TEXTS)}", 2 - j) for i in range(len(QUERIES)) for j in range(2)]
    return pd.DataFrame(rows, columns=["qid", "docno", "label"])
