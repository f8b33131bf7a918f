"""Position collections as PyTerrier datasets, and what datasets of texts share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pandas as pd
import pyterrier as pt
from pyterrier.datasets import Dataset

from fair_evaluation.position_collections import PositionCollection


class TextDataset(Dataset):
    """A dataset whose documents have the field ``text``, which `pt.text.get_text` accepts as well."""

    def text_loader(self, fields: list[str] | str | Literal["*"] = "*", *, verbose: bool = False) -> PositionTextLoader:
        """Returns a transformer that adds ``text`` by ``docno``.

        Raises:
            ValueError: ``fields`` names a field other than ``text``.
        """
        if fields not in ("*", "text", ["text"]):
            raise ValueError(f"fields: the documents have the field 'text' alone, got {fields!r}")
        return PositionTextLoader(self, verbose=verbose)

    def _describe_component(self, component: str) -> bool | None:
        return True if component in ("topics", "qrels", "corpus") else None


class PositionDataset(TextDataset):
    """A `PositionCollection` as a PyTerrier dataset."""

    def __init__(self, collection: PositionCollection) -> None:
        """Takes a collection made by `fair_evaluation.position_collections.build_collections`."""
        self.collection = collection

    def get_corpus_iter(self, *, verbose: bool = True) -> Iterator[dict[str, str]]:
        """Yields the documents as ``docno`` and ``text``."""
        documents = self.collection.documents
        yield from pt.tqdm(documents, desc="documents", unit="doc", disable=not verbose)

    def get_topics(self, variant: str | None = None) -> pd.DataFrame:
        """Returns ``qid``, ``query`` and ``place``, the place of the answer in the relevant document."""
        check_no_variant(variant)
        rows = [(q.qid, q.query, q.place) for q in self.collection.queries]
        return pd.DataFrame(rows, columns=["qid", "query", "place"])

    def get_qrels(self, variant: str | None = None) -> pd.DataFrame:
        """Returns ``qid``, ``docno`` and ``label``; every query has one relevant document."""
        check_no_variant(variant)
        rows = [(q.qid, q.docno, 1) for q in self.collection.queries]
        return pd.DataFrame(rows, columns=["qid", "docno", "label"])


class PositionTextLoader(pt.Transformer):
    """Adds the text of documents by ``docno``."""

    schematic = {"label": "TextLoader"}

    def __init__(self, dataset: TextDataset, *, verbose: bool = False) -> None:
        """Takes the dataset whose texts it adds."""
        self.dataset = dataset
        self.verbose = verbose
        self._texts = {document["docno"]: document["text"] for document in dataset.get_corpus_iter(verbose=False)}

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Adds the column ``text``.

        Raises:
            ValueError: A document is not in the dataset.
        """
        pt.validate.columns(inp, includes=["docno"])
        if unknown := sorted(set(inp["docno"]) - self._texts.keys(), key=repr):
            raise ValueError(f"docno: {len(unknown)} documents are not in the dataset, such as {unknown[:5]}")
        docnos = pt.tqdm(inp["docno"], desc="texts", unit="doc", disable=not self.verbose)
        return inp.assign(text=pd.Series([self._texts[d] for d in docnos], index=inp.index, dtype=object))


def check_no_variant(variant: str | None) -> None:
    """Raises a ValueError if a variant of topics or judgements is named."""
    if variant is not None:
        raise ValueError(f"variant: this dataset has no variants, got {variant!r}")
