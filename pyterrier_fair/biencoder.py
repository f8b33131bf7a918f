"""`FairBiEncoder`, a pyterrier_dr bi-encoder with position-fair documents, and the transformers that it makes."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Hashable, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyterrier as pt
import torch
from pyterrier_dr import BiEncoder, SimFn
from pyterrier_dr.biencoder import BiDocEncoder, BiQueryEncoder, BiScorer
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from fair_calibration import DocumentCounts, EvenChunks, EvenChunksSummary, FairConfig, FairSentenceTransformer, Summary
from fair_calibration.fingerprint import changeable_settings
from fair_calibration.identity import EncoderIdentity, resolve_normalize
from fair_calibration.model import calibrate
from fair_calibration.prompts import query_prompt
from fair_calibration.settings import Settings, SettingsAttributes, choose_settings, setting_names
from fair_calibration.texts import check_texts
from fair_calibration.validation import validate_positive_int
from fair_indexing.encode import encode_texts
from fair_indexing.text_encoder import Task, TextEncoder
from pyterrier_fair.columns import encode_column, encode_records, read_records
from pyterrier_fair.loading import load_calibrated

T = TypeVar("T")
_ENCODING = ("max_seq_length", "normalize", "batch_size", "text_field", "verbose", "device")


class FairBiEncoder(SettingsAttributes, BiEncoder):  # type: ignore[misc]
    """A dense bi-encoder for PyTerrier that finds what stands late in a document.

    As a transformer it encodes queries, encodes documents or scores pairs, depending on the columns it is given::

        fair_dense = FairBiEncoder("BAAI/bge-m3", strength=0.5)
        bm25 >> pt.text.get_text(dataset) >> fair_dense
        fair_dense.doc_encoder() >> FlexIndex("index.flex")
        fair_dense.query_encoder() >> FlexIndex("index.flex").np_retriever()

    The model's own prompts are used for queries and documents. The settings of ``config`` are attributes as well
    (``fair_dense.strength``). All attributes may be changed at any time, also by `pt.GridSearch`, and are read when
    documents are encoded. Encoders with equal settings are equal, so one grid search cannot vary two encoders in one
    pipeline that differ in nothing but the settings that are varied.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | SentenceTransformer,
        config: Settings | str | None = None,
        *,
        max_seq_length: int | None = None,
        normalize: bool | None = None,
        batch_size: int = 32,
        text_field: str = "text",
        verbose: bool = False,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        """Loads the model and calibrates it.

        Args:
            model: A Hugging Face name, a local folder, or a loaded SentenceTransformer, which stays as it is.
            config: A `FairConfig`, an `EvenChunks` or the name of a preset; None means the settings that the model was
                calibrated or saved with, or else the defaults.
            max_seq_length: The number of tokens at which texts are truncated; None means the model's own.
            normalize: Whether vectors get unit length, so that the dot product is the cosine; None means where the
                model's similarity is the cosine.
            batch_size: The most texts of a forward pass. Batches are bounded by tokens as well (see `encode_docs`), so
                on a GPU it may be high.
            text_field: The column with the documents' text.
            verbose: Whether to show progress bars.
            device: The device to run on; None means the model's device, or a GPU if there is one. A loaded model moves
                to it as well, as the weights are shared.
            **settings: Single settings of ``config``, such as ``strength=0.5``.

        Raises:
            TypeError: ``model`` is not a model name, a path or a SentenceTransformer, or a setting is unknown.
            ValueError: There is no such model, a setting is out of range, or the model cannot be calibrated.
        """
        super().__init__(batch_size=batch_size, text_field=text_field, verbose=verbose)
        _check_names(settings)  # before the model is loaded
        self.model = model
        self.device = device
        self._calibrated: FairSentenceTransformer
        self._plain_max_seq_length: int | None
        self._identity: tuple[Hashable, EncoderIdentity] | None = None
        self._load()
        self.config = choose_settings(config, settings, default=self._calibrated.fair_config)
        self.max_seq_length = max_seq_length
        self.normalize = normalize
        self._checked_batch_size(None)
        # Settings that do not fit the model are reported now, not when the first document is encoded.
        self.calibrated_model().preprocess([""], task="document")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "config":  # checked at once, and the name of a preset is replaced by its settings
            value = choose_settings(value, default=FairConfig())
        super().__setattr__(name, value)

    def attributes(self) -> list[pt.inspect.TransformerAttribute]:
        """Returns the arguments that make an equal encoder, each setting by its name, for `pt.inspect`."""
        names = ["model", *setting_names(self.config), *_ENCODING]
        kind = inspect.Parameter.KEYWORD_ONLY
        return [pt.inspect.TransformerAttribute(n, getattr(self, n), init_parameter_kind=kind) for n in names]

    def apply_attributes(self, **attributes: Any) -> FairBiEncoder:
        """Returns an encoder that has other values for some of the `attributes`, or another ``config``."""
        values = {name: getattr(self, name) for name in ("model", "config", *_ENCODING)} | attributes
        config = choose_settings(values.pop("config"), default=self.config)
        given = {name: values.pop(name) for name in setting_names(config) if name in values}
        return FairBiEncoder(config=replace(config, **given), **values)

    @property
    def fair_config(self) -> Settings:
        """The settings as they are now."""
        return self.config

    @property
    def model_name(self) -> str:
        """The name or path of the model, or the class and the `id` of a loaded one."""
        if isinstance(self.model, SentenceTransformer):
            return f"{type(self.model).__name__} at {id(self.model):#x}"
        return os.fspath(self.model)

    @property
    def sim_fn(self) -> SimFn:
        """The similarity of the vectors: the dot product, also for the cosine, where vectors have unit length."""
        similarity = self._calibrated.similarity_fn_name
        if similarity not in ("cosine", "dot"):
            raise ValueError(
                f"similarity: PyTerrier retrieves by dot product or cosine, the model is for {similarity!r}"
            )
        return SimFn.dot

    def calibrated_model(self) -> FairSentenceTransformer:
        """Returns the model with the settings as they are now.

        Raises:
            ValueError: A setting does not fit the model.
        """
        if self.model is not self._loaded[0] or self.device != self._loaded[1]:
            self._load()
        # Before calibrating, as chunks may fit only the length that is asked for.
        self._calibrated.max_seq_length = (
            self._plain_max_seq_length if self.max_seq_length is None else self.max_seq_length
        )
        # The strength is an argument of each call, so a new strength needs no new model.
        if replace(self.config, strength=self._calibrated.fair_config.strength) != self._calibrated.fair_config:
            self._calibrated = calibrate(self._calibrated, self.config)
        return self._calibrated

    def identity(self) -> EncoderIdentity:
        """Returns everything that the vectors depend on now. The weights are hashed again only after a change."""
        state = self._state()
        if self._identity is None or self._identity[0] != state:
            name = None if isinstance(self.model, SentenceTransformer) else os.fspath(self.model)
            identity = EncoderIdentity.of(
                self.calibrated_model(), name=name, strength=self.config.strength, normalize=self.normalize
            )
            self._identity = (state, identity)
        return self._identity[1]

    @property
    def counts(self) -> DocumentCounts:
        """The number of documents calibrated, too short or truncated, since a setting other than strength changed."""
        return self._calibrated.counts

    def summary(self) -> Summary | EvenChunksSummary:
        """Returns which layers, rows and mechanism are in use and what became of the documents; print it."""
        summary: Any = self.calibrated_model().summary()
        result: Summary | EvenChunksSummary = replace(
            summary, config=replace(summary.config, strength=self.config.strength)
        )
        return result

    def query_encoder(self, verbose: bool | None = None, batch_size: int | None = None) -> FairQueryEncoder:
        """Returns a transformer that adds ``query_vec``, from the plain model."""
        return FairQueryEncoder(self, verbose=verbose, batch_size=batch_size)

    def doc_encoder(self, verbose: bool | None = None, batch_size: int | None = None) -> FairDocEncoder:
        """Returns a transformer that adds ``doc_vec``, from the calibrated model."""
        return FairDocEncoder(self, verbose=verbose, batch_size=batch_size)

    def text_scorer(
        self, verbose: bool | None = None, batch_size: int | None = None, sim_fn: SimFn | None = None
    ) -> FairScorer:
        """Returns a transformer that scores documents against queries."""
        return FairScorer(self, verbose=verbose, batch_size=batch_size, sim_fn=sim_fn)

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Encodes queries, encodes documents or scores pairs, depending on the columns.

        Raises:
            InputValidationError: Columns are missing, such as the text of retrieved documents.
        """
        # pyterrier_dr would take results without texts for queries, and return the scores of the first stage.
        if {"docno", "score"} <= set(inp.columns) and not {self.text_field, "doc_vec"} & set(inp.columns):
            return self.text_scorer().transform(inp)  # which raises
        return cast(pd.DataFrame, super().transform(inp))

    def encode_queries(
        self, texts: Iterable[str], batch_size: int | None = None, *, verbose: bool | None = None
    ) -> npt.NDArray[np.float32]:
        """Encodes queries with the plain model: float32 (n, D)."""
        return self._encode(texts, "query", batch_size, verbose)

    def encode_docs(
        self, texts: Iterable[str], batch_size: int | None = None, *, verbose: bool | None = None
    ) -> npt.NDArray[np.float32]:
        """Encodes documents with the calibrated model: float32 (n, D).

        They are batched by length, with at most 16384 tokens in a batch, 4096 on a CPU. A batch that runs out of memory
        is halved and tried again.

        Raises:
            ValueError: A text is missing or has a lone surrogate.
            TypeError: A text is not a string.
        """
        return self._encode(texts, "document", batch_size, verbose)

    def encode_queries_torch(self, texts: Sequence[str], batch_size: int | None = None) -> torch.Tensor:
        """Encodes queries with the plain model, keeping gradients: (n, D) on the model's device."""
        model = self.calibrated_model()
        texts = list(texts)
        size = self._checked_batch_size(batch_size)
        parts = []
        for start in range(0, len(texts), size):
            features = model.preprocess(texts[start : start + size], prompt=query_prompt(model) or None, task="query")
            features = {k: v.to(model.device) if torch.is_tensor(v) else v for k, v in features.items()}
            parts.append(model(features, task="query")["sentence_embedding"])
        if not parts:
            return torch.empty(0, model.get_embedding_dimension() or 0, device=model.device)
        vectors = torch.cat(parts)
        if model.truncate_dim is not None:
            vectors = vectors[..., : model.truncate_dim]
        return torch.nn.functional.normalize(vectors) if resolve_normalize(model, self.normalize) else vectors

    def _load(self) -> None:
        self._calibrated = load_calibrated(self.model, self.device)
        self._plain_max_seq_length = self._calibrated.max_seq_length
        self._loaded = (self.model, self.device)

    def _encode(
        self, texts: Iterable[str], task: Task, batch_size: int | None, verbose: bool | None
    ) -> npt.NDArray[np.float32]:
        texts = texts if isinstance(texts, str) else list(texts)
        check_texts(texts, named="number")
        show = self.verbose if verbose is None else verbose
        settings = self._encoding_settings(batch_size)
        return encode_texts(self.calibrated_model(), texts, task=task, show_progress_bar=show, **settings)

    def _encoding_settings(self, batch_size: int | None) -> dict[str, Any]:
        """Returns the settings of the encoding engine."""
        batch_size = self._checked_batch_size(batch_size)
        return {"batch_size": batch_size, "normalize": self.normalize, "strength": self.config.strength}

    def _checked_batch_size(self, given: int | None) -> int:
        return validate_positive_int("batch_size", self.batch_size if given is None else given)

    def _state(self) -> tuple[Any, ...]:
        """Returns everything that the vectors depend on, in a form that is cheap to compare."""
        settings = changeable_settings(self.calibrated_model())
        return (self.model, self.device, self.normalize, self.config, settings)

    def _query_key(self) -> Hashable:
        """Returns what query vectors depend on. The calibration is not part of it: queries are encoded plainly."""
        model = self.calibrated_model()
        prompts = tuple(sorted((name, prompt or "") for name, prompt in model.prompts.items()))
        unit_length = resolve_normalize(model, self.normalize)
        own = (model.max_seq_length, model.truncate_dim, prompts, model.default_prompt_name, unit_length)
        return (self.model_name, str(model.device), own)

    def _doc_key(self) -> Hashable:
        """Returns what document vectors depend on."""
        return (self._query_key(), self.config)

    def __str__(self) -> str:
        # `pt.GridSearch` prints this before "strength=...", when attributes have the values that were tried last.
        return f"FairBiEncoder({self.model_name!r})"

    def __repr__(self) -> str:
        default = type(self.config)()
        changed = [n for n in setting_names(self.config) if getattr(self.config, n) != getattr(default, n)]
        names = [*dict.fromkeys(["strength", *changed])]
        names += [name for name in ("max_seq_length", "normalize") if getattr(self, name) is not None]
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        way = "" if isinstance(self.config, FairConfig) else "'even_chunks', "
        return f"FairBiEncoder({self.model_name!r}, {way}{settings})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FairBiEncoder):
            return NotImplemented
        own, others = ((e._doc_key(), e.batch_size, e.text_field, e.verbose) for e in (self, other))
        return own == others

    def __hash__(self) -> int:
        # Only what does not change: a grid search keeps the encoder as a key while it changes the settings.
        return hash((FairBiEncoder, self.model_name))


class _LiveSetting(Generic[T]):
    """An attribute that has the encoder's value at that moment, unless it was set here."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: _LiveSettings | None, owner: type) -> T:
        if instance is None:  # accessed on the class, as with a property
            return cast(T, self)
        return cast(T, instance._own.get(self._name, getattr(instance.bi_encoder_model, self._name)))

    def __set__(self, instance: _LiveSettings, value: T) -> None:
        instance._own[self._name] = value


class _LiveSettings:
    """Settings of a transformer: those given to it, or else the encoder's when the transformer runs."""

    bi_encoder_model: FairBiEncoder
    _own: dict[str, Any]
    batch_size = _LiveSetting[int]()
    text_field = _LiveSetting[str]()
    verbose = _LiveSetting[bool]()

    def _keep(self, encoder: FairBiEncoder, **own: Any) -> None:
        self.bi_encoder_model = encoder
        self._own = {name: value for name, value in own.items() if value is not None}

    def _key(self) -> Hashable:
        """Returns what the result depends on."""
        raise NotImplementedError(type(self).__name__)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash((type(self), self._key()))


class FairQueryEncoder(_LiveSettings, BiQueryEncoder):  # type: ignore[misc]
    """Adds ``query_vec``. The calibration does not make two of one model differ, since queries are encoded plainly."""

    def __init__(
        self, bi_encoder_model: FairBiEncoder, verbose: bool | None = None, batch_size: int | None = None
    ) -> None:
        self._keep(bi_encoder_model, verbose=verbose, batch_size=batch_size)

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Encodes the column ``query``, every distinct query once."""
        with pt.validate.any(inp) as v:
            v.query_frame(extra_columns=["query"])
            v.columns(includes=["query"])
        return inp.assign(query_vec=cast(Any, encode_column(inp, "query", "qid", self.encode)))

    def encode(self, texts: list[str]) -> np.ndarray:
        """Encodes query texts: float32 (n, D)."""
        return self.bi_encoder_model.encode_queries(texts, self.batch_size, verbose=self.verbose)

    def _key(self) -> Hashable:
        return (self.bi_encoder_model._query_key(), self.batch_size)


class FairDocEncoder(_LiveSettings, BiDocEncoder):  # type: ignore[misc]
    """Adds ``doc_vec``, from the calibrated model.

    Streams of records are encoded in windows of 4096 documents sorted by length, and the next window is tokenized
    meanwhile. ``doc_encoder() >> index`` encodes the whole collection as one stream. After other transformers PyTerrier
    passes on 100 documents at a time, or as many as ``index(..., batch_size=4096)`` says.
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
        """Encodes the text column, every distinct text once."""
        with pt.validate.any(inp) as v:
            v.document_frame(extra_columns=[self.text_field])
            v.columns(includes=[self.text_field])
        return inp.assign(doc_vec=cast(Any, encode_column(inp, self.text_field, "docno", self.encode)))

    def transform_iter(self, inp: Iterable[dict[str, Any]] | pd.DataFrame) -> Iterator[dict[str, Any]]:
        """Encodes a stream of records, reading one window ahead.

        Raises:
            ValueError: The encoder was changed while its stream was read, or a text is missing.
            TypeError: A text is not a string.
        """
        encoder, field = self.bi_encoder_model, self.text_field
        records = read_records(inp, field)
        documents = TextEncoder(encoder.calibrated_model(), **encoder._encoding_settings(self.batch_size))
        state = encoder._state()
        total = len(records) if isinstance(records, Sized) else None
        with tqdm(total=total, desc="Encoding", unit="doc", smoothing=0, disable=not self.verbose) as bar:
            for window, vectors in encode_records(documents, records, field, bar.update):
                if encoder._state() != state:
                    raise ValueError(
                        f"encoder: {encoder!r} was changed while it encoded a stream, whose vectors would be of "
                        "several settings; change it before or after, or take another FairBiEncoder for the others"
                    )
                for record, vector in zip(window, vectors, strict=True):
                    yield {**record, "doc_vec": vector}

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
    """A doc encoder and an indexer, to which documents are passed as one stream instead of 100 at a time."""

    def index(self, iter: Iterable[dict[str, Any]] | pd.DataFrame, batch_size: int | None = None) -> Any:
        encoder, indexer = cast(tuple[FairDocEncoder, pt.Indexer], tuple(self))
        if batch_size is not None:
            return super().index(read_records(iter, encoder.text_field), batch_size)
        return indexer.index(encoder.transform_iter(iter))


class FairScorer(_LiveSettings, BiScorer):  # type: ignore[misc]
    """Scores documents against queries and ranks them, encoding queries and documents that have no vectors yet."""

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
        """Adds ``score`` and ``rank``.

        Raises:
            InputValidationError: Columns are missing, such as the text of retrieved documents.
        """
        encoder, field = self.bi_encoder_model, self.text_field
        try:
            with pt.validate.any(inp) as v:
                v.columns(includes=["query_vec", "doc_vec"])
                v.columns(includes=["query", "doc_vec"])
                v.columns(includes=["query_vec", field])
                v.columns(includes=["query", field])
        except pt.validate.InputValidationError as error:
            if "docno" not in inp.columns or {field, "doc_vec"} & set(inp.columns):
                raise
            raise pt.validate.InputValidationError(
                f"the documents have neither a column {field!r} (text_field) nor 'doc_vec'; load their texts first: "
                f"first_stage >> pt.text.get_text(dataset, {field!r}) >> encoder",
                error.modes,
            ) from None
        frame = inp
        if "query_vec" not in frame.columns:
            frame = FairQueryEncoder(encoder, self.verbose, self.batch_size)(frame)
        if "doc_vec" not in frame.columns:
            frame = FairDocEncoder(encoder, self.verbose, self.batch_size, field)(frame)
        pairs = zip(frame["query_vec"], frame["doc_vec"], strict=True)
        scores = np.fromiter((np.dot(q, d) for q, d in pairs), dtype=np.float64, count=len(frame))
        return pt.model.add_ranks(inp.assign(score=scores))

    def _key(self) -> Hashable:
        return (self.bi_encoder_model._doc_key(), self.batch_size, self.text_field, self.sim_fn)


def _check_names(settings: Iterable[str]) -> None:
    """Checks that every name is a setting of one of the two ways to encode documents."""
    known = {*setting_names(FairConfig), *setting_names(EvenChunks)}
    for name in settings:
        if name not in known:
            nearest = difflib.get_close_matches(name, [*known, *_ENCODING], n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; there are {sorted([*known, *_ENCODING])}"
            raise TypeError(f"{name}: not a setting of FairBiEncoder, FairConfig or EvenChunks{hint}")
