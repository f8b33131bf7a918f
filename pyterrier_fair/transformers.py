"""The transformers a `FairBiEncoder` hands out. They read its settings when they run, not when they are built."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd
import pyterrier as pt
from pyterrier_dr import SimFn
from pyterrier_dr.biencoder import BiDocEncoder, BiQueryEncoder, BiScorer

from pyterrier_fair.texts import check_texts

if TYPE_CHECKING:
    from pyterrier_fair.encoder import FairBiEncoder


class _LiveSettings:
    """batch_size, text_field and verbose as given here, or else as they stand in the encoder at that moment."""

    bi_encoder_model: FairBiEncoder
    _own: dict[str, Any]

    def _keep(self, encoder: FairBiEncoder, **own: Any) -> None:
        self.bi_encoder_model = encoder
        self._own = {name: value for name, value in own.items() if value is not None}

    @property
    def batch_size(self) -> int:
        """Texts per forward pass."""
        return cast(int, self._own.get("batch_size", self.bi_encoder_model.batch_size))

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        self._own["batch_size"] = value

    @property
    def text_field(self) -> str:
        """The column of the documents' text."""
        return cast(str, self._own.get("text_field", self.bi_encoder_model.text_field))

    @text_field.setter
    def text_field(self, value: str) -> None:
        self._own["text_field"] = value

    @property
    def verbose(self) -> bool:
        """Whether to show progress bars."""
        return cast(bool, self._own.get("verbose", self.bi_encoder_model.verbose))

    @verbose.setter
    def verbose(self, value: bool) -> None:
        self._own["verbose"] = value

    def _key(self) -> Hashable:
        """What the result depends on."""
        raise NotImplementedError(type(self).__name__)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash((type(self), self._key()))


class FairQueryEncoder(_LiveSettings, BiQueryEncoder):  # type: ignore[misc]
    """Adds ``query_vec``. Two of one model are equal whatever their calibration, since queries are encoded plainly."""

    def __init__(
        self, bi_encoder_model: FairBiEncoder, verbose: bool | None = None, batch_size: int | None = None
    ) -> None:
        self._keep(bi_encoder_model, verbose=verbose, batch_size=batch_size)

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Encodes the column ``query``; every distinct query once."""
        with pt.validate.any(inp) as v:
            v.query_frame(extra_columns=["query"])
            v.columns(includes=["query"])
        return inp.assign(query_vec=cast(Any, _encode_column(inp, "query", "qid", self)))

    def encode(self, texts: list[str]) -> np.ndarray:
        """Encodes query texts: float32 (n, D)."""
        return self.bi_encoder_model.encode_queries(texts, self.batch_size, verbose=self.verbose)

    def _key(self) -> Hashable:
        return (self.bi_encoder_model._query_key(), self.batch_size)


class FairDocEncoder(_LiveSettings, BiDocEncoder):  # type: ignore[misc]
    """Adds ``doc_vec``, from the calibrated model."""

    def __init__(
        self,
        bi_encoder_model: FairBiEncoder,
        verbose: bool | None = None,
        batch_size: int | None = None,
        text_field: str | None = None,
    ) -> None:
        self._keep(bi_encoder_model, verbose=verbose, batch_size=batch_size, text_field=text_field)

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Encodes the text column; every distinct text once."""
        with pt.validate.any(inp) as v:
            v.document_frame(extra_columns=[self.text_field])
            v.columns(includes=[self.text_field])
        return inp.assign(doc_vec=cast(Any, _encode_column(inp, self.text_field, "docno", self)))

    def encode(self, texts: list[str]) -> np.ndarray:
        """Encodes document texts: float32 (n, D)."""
        return self.bi_encoder_model.encode_docs(texts, self.batch_size, verbose=self.verbose)

    def _key(self) -> Hashable:
        return (self.bi_encoder_model._doc_key(), self.batch_size, self.text_field)


class FairScorer(_LiveSettings, BiScorer):  # type: ignore[misc]
    """Scores documents against queries, encoding what has no vector yet, and ranks them."""

    def __init__(
        self,
        bi_encoder_model: FairBiEncoder,
        verbose: bool | None = None,
        batch_size: int | None = None,
        text_field: str | None = None,
        sim_fn: SimFn | None = None,
    ) -> None:
        self._keep(bi_encoder_model, verbose=verbose, batch_size=batch_size, text_field=text_field)
        self.sim_fn = bi_encoder_model.sim_fn if sim_fn is None else sim_fn
        if self.sim_fn != SimFn.dot:
            raise ValueError(f"sim_fn: expected SimFn.dot (the cosine, of normalized vectors), got {self.sim_fn}")

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Adds ``score`` and ``rank``."""
        with pt.validate.any(inp) as v:
            v.columns(includes=["query_vec", "doc_vec"])
            v.columns(includes=["query", "doc_vec"])
            v.columns(includes=["query_vec", self.text_field])
            v.columns(includes=["query", self.text_field])
        encoder = self.bi_encoder_model
        frame = inp
        if "query_vec" not in frame.columns:
            frame = FairQueryEncoder(encoder, self.verbose, self.batch_size)(frame)
        if "doc_vec" not in frame.columns:
            frame = FairDocEncoder(encoder, self.verbose, self.batch_size, self.text_field)(frame)
        pairs = zip(frame["query_vec"], frame["doc_vec"], strict=True)
        scores = np.fromiter((np.dot(q, d) for q, d in pairs), dtype=np.float64, count=len(frame))
        return pt.model.add_ranks(inp.assign(score=scores))

    def _key(self) -> Hashable:
        return (self.bi_encoder_model._doc_key(), self.batch_size, self.text_field, self.sim_fn)


def _encode_column(
    frame: pd.DataFrame, column: str, id_column: str, encoder: FairQueryEncoder | FairDocEncoder
) -> list[np.ndarray]:
    """Encodes a text column, every distinct text once, and returns a vector per row."""
    if list(frame.columns).count(column) > 1:
        raise ValueError(f"{column}: expected one column of this name, got {list(frame.columns).count(column)}")
    texts = frame[column].tolist()
    check_texts(
        texts,
        frame[id_column].tolist() if id_column in frame.columns else frame.index.tolist(),
        column=column,
        id_column=id_column if id_column in frame.columns else "row",
    )
    place = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    vectors = encoder.encode(list(place))
    return [vectors[place[text]] for text in texts]
