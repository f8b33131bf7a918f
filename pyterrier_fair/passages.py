"""`FairPassages`: cuts documents into passages by the tokens of a model, for several vectors per document."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from typing import Any

import pandas as pd
import pyterrier as pt

from fair_calibration import FairSentenceTransformer
from fair_calibration.passages import check_chunk_size, cut_passages
from fair_calibration.texts import check_texts
from pyterrier_fair.biencoder import FairBiEncoder, Indexing
from pyterrier_fair.columns import read_records, read_texts

_MARK = "%p"  # between docno and passage number, as `pt.text.max_passage` reads it


class FairPassages(pt.Transformer):
    """Cuts documents into passages of about equal length, with docnos such as ``d7%p0`` and ``d7%p1``.

    ``pt.text.sliding`` counts words; this counts the tokens of the model, so that no passage is truncated. It goes
    before an encoder that indexes, and `pt.text.max_passage` behind the retriever::

        plain = FairBiEncoder("BAAI/bge-m3", strength=0)
        index = FairIndex("passages.flex", plain)
        (FairPassages(plain) >> index).index(dataset.get_corpus_iter())
        retrieve = index.retriever(num_results=100) >> pt.text.max_passage() % 10

    Passages are short enough for the plain model: give them an encoder of strength 0.

    Documents are frames or records with ``docno`` and text; results with texts are cut as well, one row per query and
    passage. The other columns stay as they are.
    """

    def __init__(self, encoder: FairBiEncoder, *, chunk_size: int = 128) -> None:
        """Takes the encoder whose tokens are counted.

        Args:
            encoder: The encoder; its tokenizer, prompts, ``max_seq_length`` and ``text_field`` count here.
            chunk_size: The most tokens of a passage, without the model's prompt and special tokens.

        Raises:
            TypeError: ``encoder`` is not a FairBiEncoder, or ``chunk_size`` is not an integer.
            ValueError: ``chunk_size`` is below 1 or too large for the model's ``max_seq_length``.
        """
        if not isinstance(encoder, FairBiEncoder):
            raise TypeError(f"encoder: expected a FairBiEncoder, got {type(encoder).__name__}")
        self.encoder = encoder
        self.chunk_size = chunk_size
        check_chunk_size(encoder.calibrated_model(), chunk_size)

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Returns one row per passage.

        Raises:
            ValueError: A text is missing, a docno has "%p" in it, the documents have vectors already (``doc_vec``), or
                ``chunk_size`` no longer fits the model.
            TypeError: A text or a docno is not a string.
        """
        field = self.text_field
        with pt.validate.any(inp, context=self) as v:
            v.document_frame(extra_columns=[field])
            v.result_frame(extra_columns=[field])
        _check_no_vectors(inp.columns)
        texts = read_texts(inp, field)
        model = self._model()
        passages = {text: cut_passages(model, text, chunk_size=self.chunk_size) for text in dict.fromkeys(texts)}
        docnos = [_check_docno(docno) for docno in inp["docno"]]
        cut: Any = {"docno": docnos, field: [passages[text] for text in texts]}
        rows = inp.reset_index(drop=True).assign(**cut).explode(field)
        numbers = rows.groupby(level=0).cumcount()
        return rows.assign(docno=[f"{d}{_MARK}{n}" for d, n in zip(rows["docno"], numbers, strict=True)]).reset_index(
            drop=True
        )

    def transform_iter(self, inp: Iterable[dict[str, Any]] | pd.DataFrame) -> Iterator[dict[str, Any]]:
        """Yields one record per passage of a stream of records; errors are those of `transform`."""
        field, model = self.text_field, self._model()
        for number, record in enumerate(read_records(inp, field)):
            if not isinstance(record, Mapping):
                raise TypeError(f"record {number}: expected a dict with 'docno' and {field!r}, got {record!r:.40}")
            _check_no_vectors(record)
            if missing := {"docno", field} - record.keys():
                raise ValueError(f"record {number}: expected 'docno' and {field!r}, {sorted(missing)} are missing")
            docno, text = _check_docno(record["docno"]), record[field]
            check_texts([text], [docno], what=field, named="docno")
            for i, passage in enumerate(cut_passages(model, text, chunk_size=self.chunk_size)):
                yield {**record, "docno": f"{docno}{_MARK}{i}", field: passage}

    def __rshift__(self, right: pt.Transformer) -> pt.Transformer:
        return Indexing(self, right) if isinstance(right, pt.Indexer) else super().__rshift__(right)

    @property
    def text_field(self) -> str:
        """The column of the texts, the encoder's."""
        return str(self.encoder.text_field)

    def _model(self) -> FairSentenceTransformer:
        model = self.encoder.calibrated_model()
        check_chunk_size(model, self.chunk_size)  # max_seq_length may have been changed
        return model

    def _key(self) -> Hashable:
        return (self.encoder._query_key(), self.chunk_size, self.text_field)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, FairPassages) else NotImplemented

    def __hash__(self) -> int:
        return hash((FairPassages, self.encoder))  # the chunk size may be changed, as by a grid search

    def __repr__(self) -> str:
        return f"FairPassages({self.encoder!r}, chunk_size={self.chunk_size})"


def _check_no_vectors(columns: Container[str]) -> None:
    if "doc_vec" in columns:
        raise ValueError("doc_vec: these are the vectors of whole documents; cut passages before they are encoded")


def _check_docno(docno: Any) -> str:
    if not isinstance(docno, str):
        raise TypeError(f"docno: expected str, got {docno!r} ({type(docno).__name__}); write docnos as strings")
    if _MARK in docno:
        raise ValueError(
            f"docno: {docno!r} has {_MARK!r} in it, which separates docno and passage number: these are passages "
            "already, or the docnos have to be changed"
        )
    return docno
