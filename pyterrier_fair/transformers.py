"""The transformers a `FairBiEncoder` hands out. They read its settings when they run, not when they are built."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np
import pandas as pd
import pyterrier as pt
from pyterrier_dr import SimFn
from pyterrier_dr.biencoder import BiDocEncoder, BiQueryEncoder, BiScorer
from tqdm import tqdm

from fair_calibration.texts import check_texts
from fair_indexing.encode import TextEncoder
from fair_indexing.stream import WINDOW, cut_windows, encode_windows
from pyterrier_fair.identity import settings_of
from pyterrier_fair.texts import check_columns, read_texts

if TYPE_CHECKING:
    from pyterrier_fair.encoder import FairBiEncoder


T = TypeVar("T")


class _LiveSetting(Generic[T]):
    """An attribute that is the encoder's, as it stands at that moment, unless it was set here."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: _LiveSettings | None, owner: type) -> T:
        if instance is None:  # asked of the class, it is itself, as a property is
            return cast(T, self)
        return cast(T, instance._own.get(self._name, getattr(instance.bi_encoder_model, self._name)))

    def __set__(self, instance: _LiveSettings, value: T) -> None:
        instance._own[self._name] = value


class _LiveSettings:
    """batch_size, text_field and verbose as given here, or else as they stand in the encoder at that moment."""

    bi_encoder_model: FairBiEncoder
    _own: dict[str, Any]
    batch_size = _LiveSetting[int]()
    text_field = _LiveSetting[str]()
    verbose = _LiveSetting[bool]()

    def _keep(self, encoder: FairBiEncoder, **own: Any) -> None:
        self.bi_encoder_model = encoder
        self._own = {name: value for name, value in own.items() if value is not None}

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
    """Adds ``doc_vec``, from the calibrated model.

    Streams of records are encoded window by window, 4096 documents sorted by length, the next ones tokenized meanwhile.
    ``doc_encoder() >> index`` hands the whole collection over as one stream. Behind other transformers PyTerrier hands
    over 100 documents at a time, or as many as ``index(..., batch_size=4096)`` says.
    """

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

    def transform_iter(self, inp: Iterable[dict[str, Any]] | pd.DataFrame) -> Iterator[dict[str, Any]]:
        """Encodes records, every distinct text of a window once; reads one window ahead.

        Raises:
            ValueError: The encoder was changed while its stream was read, or a text is missing.
            TypeError: A text is no string.
        """
        field = self.text_field
        encoder = self.bi_encoder_model
        inp = _records(inp, field)
        read: deque[tuple[list[dict[str, Any]], list[int]]] = deque()

        def windows() -> Iterator[tuple[list[object], list[str]]]:
            for records, texts in cut_windows(((record, cast(str, record.get(field))) for record in inp), WINDOW):
                with pt.validate.any(pd.DataFrame(records[:1])) as v:
                    v.document_frame(extra_columns=[field])
                    v.columns(includes=[field])
                names = [record.get("docno", number) for number, record in enumerate(records)]
                check_texts(texts, names, what=field, named="docno" if "docno" in records[0] else "row")
                first = dict(zip(reversed(texts), reversed(names), strict=True))  # the first document of each text
                place = {text: i for i, text in enumerate(first)}
                read.append((records, [place[text] for text in texts]))
                yield list(first.values()), list(first)

        model = encoder.calibrated_model()
        settings = settings_of(encoder)
        documents = TextEncoder(model, **encoder._encoding_settings(self.batch_size))
        total = len(inp) if isinstance(inp, Sized) else None
        with tqdm(total=total, desc="Encoding", unit="doc", smoothing=0, disable=not self.verbose) as bar:
            for _, vectors in encode_windows(documents, windows(), progress=bar.update):
                if settings_of(encoder) != settings:
                    raise ValueError(
                        f"encoder: {encoder!r} was changed while it encoded a stream, whose vectors would be of "
                        "several settings; change it before or after, or take another FairBiEncoder for the others"
                    )
                records, places = read.popleft()
                bar.update(len(records) - len(vectors))
                for record, i in zip(records, places, strict=True):
                    yield {**record, "doc_vec": vectors[i]}

    def __rshift__(self, right: pt.Transformer) -> pt.Transformer:
        if getattr(right, "encodes_documents", False):
            raise ValueError(
                f"{type(right).__name__} encodes the documents itself, with the encoder it was given; leave the doc "
                "encoder before it out"
            )
        return _Indexing(self, right) if isinstance(right, pt.Indexer) else super().__rshift__(right)

    def encode(self, texts: list[str]) -> np.ndarray:
        """Encodes document texts: float32 (n, D)."""
        return self.bi_encoder_model.encode_docs(texts, self.batch_size, verbose=self.verbose)

    def _key(self) -> Hashable:
        return (self.bi_encoder_model._doc_key(), self.batch_size, self.text_field)


class _Indexing(pt.Compose):
    """A doc encoder and an indexer. Other pipelines hand over 100 documents at a time, this one a stream."""

    def index(self, iter: Iterable[dict[str, Any]] | pd.DataFrame, batch_size: int | None = None) -> Any:
        encoder, indexer = cast(tuple[FairDocEncoder, pt.Indexer], tuple(self))
        if batch_size is not None:
            return super().index(_records(iter, encoder.text_field), batch_size)
        return indexer.index(encoder.transform_iter(iter))


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


def _records(inp: Iterable[dict[str, Any]] | pd.DataFrame, text_field: str) -> Iterable[dict[str, Any]]:
    if not isinstance(inp, pd.DataFrame):
        return inp
    check_columns(inp, "docno", text_field)
    return cast(list[dict[str, Any]], inp.to_dict(orient="records"))


def _encode_column(
    frame: pd.DataFrame, column: str, id_column: str, encoder: FairQueryEncoder | FairDocEncoder
) -> list[np.ndarray]:
    """Encodes a text column, every distinct text once, and returns a vector per row."""
    texts = read_texts(frame, column, id_column=id_column)
    place = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    vectors = encoder.encode(list(place))
    return [vectors[place[text]] for text in texts]
