"""`FairBiEncoder`, a pyterrier_dr bi-encoder with position-fair documents, and the transformers that it makes."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Hashable, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from typing import Any, cast

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

_ENCODING = ("max_seq_length", "normalize", "batch_size", "text_field", "verbose", "device")


class FairBiEncoder(SettingsAttributes, BiEncoder):  # type: ignore[misc]
    """A dense bi-encoder for PyTerrier that finds what stands late in a document.

    As a transformer it encodes queries, encodes documents or scores pairs, depending on the columns it is given::

        fair_dense = FairBiEncoder("BAAI/bge-m3", strength=0.5)
        bm25 >> pt.text.get_text(dataset) >> fair_dense
        fair_dense.doc_encoder() >> FlexIndex("index.flex")
        fair_dense.query_encoder() >> FlexIndex("index.flex").np_retriever()

    Queries and documents get the model's own prompts. The settings of ``config`` are attributes as well
    (``fair_dense.strength``). All attributes may be changed at any time, also by `pt.GridSearch`, and are read when
    texts are encoded. Encoders with equal settings are equal, so one grid search cannot vary two encoders of one
    pipeline that differ only in the settings that it varies.
    """

    _calibrated: FairSentenceTransformer
    _loaded: tuple[Any, str | None]
    _own_max_seq_length: int | None

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
            model: A Hugging Face name, a local folder, or a loaded SentenceTransformer, which is not changed.
            config: A `FairConfig`, an `EvenChunks` or the name of a preset; None means the settings that the model was
                calibrated or saved with, or else the defaults.
            max_seq_length: The number of tokens at which texts are truncated; None means the model's own.
            normalize: Whether vectors get unit length, so that the dot product is the cosine; None means where the
                model's similarity is the cosine.
            batch_size: The most texts of a forward pass; `encode_docs` limits the tokens as well.
            text_field: The column with the documents' text.
            verbose: Whether to show progress bars.
            device: The device to run on; None means the model's device, or a GPU if there is one. A loaded model is
                moved to it, as its weights are shared.
            **settings: Single settings of ``config``, such as ``strength=0.5``.

        Raises:
            TypeError: ``model`` is not a model name, a path or a SentenceTransformer, or a setting is unknown.
            ValueError: There is no such model, a setting is out of range, or the model cannot be calibrated.
        """
        super().__init__(
            batch_size=validate_positive_int("batch_size", batch_size), text_field=text_field, verbose=verbose
        )
        known = sorted({*setting_names(FairConfig), *setting_names(EvenChunks), *_ENCODING})
        for name in settings:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {known}"
                raise TypeError(f"{name}: not a setting of FairBiEncoder, FairConfig or EvenChunks; {hint}")
        if config is not None:
            config, settings = choose_settings(config, settings, default=FairConfig()), {}
        self.model = model
        self.device = device
        self._identity: tuple[Hashable, EncoderIdentity] | None = None
        self._load(config)
        self.config = choose_settings(config, settings, default=self._calibrated.fair_config)
        self.max_seq_length = max_seq_length
        self.normalize = normalize
        # Settings that do not fit the model are reported now, not when the first document is encoded.
        self.calibrated_model().preprocess([""], task="document", counted=False)

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
    def model_name(self) -> str:
        """The name or path of the model, or the class and the `id` of a loaded one."""
        if isinstance(self.model, SentenceTransformer):
            return f"{type(self.model).__name__} at {id(self.model):#x}"
        return os.fspath(self.model)

    @property
    def sim_fn(self) -> SimFn:
        """The similarity of the vectors: the dot product, also for the cosine, where vectors have unit length."""
        if (similarity := self._calibrated.similarity_fn_name) not in ("cosine", "dot"):
            raise ValueError(f"similarity: PyTerrier retrieves by dot product or cosine, the model uses {similarity!r}")
        return SimFn.dot

    def calibrated_model(self) -> FairSentenceTransformer:
        """Returns the model with the settings as they are now.

        Raises:
            ValueError: A setting does not fit the model.
        """
        if self.model is not self._loaded[0] or self.device != self._loaded[1]:
            self._load(self.config)
        own = self._own_max_seq_length
        self._calibrated.max_seq_length = own if self.max_seq_length is None else self.max_seq_length
        # The strength is an argument of each call, so a new strength needs no new model.
        if replace(self.config, strength=self._calibrated.fair_config.strength) != self._calibrated.fair_config:
            self._calibrated = calibrate(self._calibrated, self.config)
        return self._calibrated

    def identity(self) -> EncoderIdentity:
        """Returns everything that the vectors depend on now. The weights are hashed again only after a change."""
        state = self._state()
        if self._identity is None or self._identity[0] != state:
            name = None if isinstance(self.model, SentenceTransformer) else os.fspath(self.model)
            settings: dict[str, Any] = {"strength": self.config.strength, "normalize": self.normalize}
            self._identity = (state, EncoderIdentity.of(self.calibrated_model(), name=name, **settings))
        return self._identity[1]

    @property
    def counts(self) -> DocumentCounts:
        """The number of documents calibrated, too short or truncated, since a setting other than strength changed."""
        return self._calibrated.counts

    def summary(self) -> Summary | EvenChunksSummary:
        """Returns which layers, rows and mechanism are in use and how many documents were calibrated; print it."""
        summary: Any = self.calibrated_model().summary()
        # The layers and the pooling of the summary's settings are resolved, and stay.
        now = replace(summary, config=replace(summary.config, strength=self.config.strength))
        return cast("Summary | EvenChunksSummary", now)

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
        # pyterrier_dr would encode the queries of results without texts, and return the scores of the first stage.
        if {"docno", "score"} <= set(inp.columns) and not {self.text_field, "doc_vec"} & set(inp.columns):
            return self.text_scorer().transform(inp)  # raises an error that names the missing columns
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

        Texts of similar length share a batch of at most 16384 tokens, 4096 on a CPU. A batch that runs out of memory is
        halved and encoded again.

        Raises:
            ValueError: A text is missing or has a lone surrogate.
            TypeError: A text is not a string.
        """
        return self._encode(texts, "document", batch_size, verbose)

    def encode_queries_torch(self, texts: Sequence[str], batch_size: int | None = None) -> torch.Tensor:
        """Encodes queries with the plain model, keeping gradients: (n, D) on the model's device."""
        model = self.calibrated_model()
        texts = list(texts)
        size = self._encoding_settings(batch_size)["batch_size"]
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

    def _load(self, config: Settings | str | None) -> None:
        """Loads the model and calibrates it at once with these settings, as others may not fit it."""
        if isinstance(self.model, SentenceTransformer):
            calibrated = calibrate(self.model, config)
            self._calibrated = calibrated if self.device is None else calibrated.to(self.device)
        elif isinstance(self.model, (str, os.PathLike)):
            self._calibrated = FairSentenceTransformer(cast(str, self.model), config=config, device=self.device)
        else:
            raise TypeError(
                f"model: expected a model name, a path or a SentenceTransformer, got {type(self.model).__name__}"
            )
        self._own_max_seq_length = self._calibrated.max_seq_length
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
        size = validate_positive_int("batch_size", self.batch_size if batch_size is None else batch_size)
        return {"batch_size": size, "normalize": self.normalize, "strength": self.config.strength}

    def _state(self) -> tuple[Any, ...]:
        """Returns everything that the vectors depend on, in a form that is cheap to compare."""
        return (self.model, self.device, self.normalize, self.config, changeable_settings(self.calibrated_model()))

    def _query_key(self) -> Hashable:
        """Returns what query vectors depend on, which is not the calibration. It is hashable, unlike `_state`."""
        model = self.calibrated_model()
        prompts = tuple(sorted((name, prompt or "") for name, prompt in model.prompts.items()))
        own = (model.max_seq_length, model.truncate_dim, prompts, model.default_prompt_name)
        return (self.model_name, str(model.device), *own, resolve_normalize(model, self.normalize))

    def _doc_key(self) -> Hashable:
        return (self._query_key(), self.config)

    def __str__(self) -> str:
        # `pt.GridSearch` prints this beside the best settings, while the attributes have the values tried last.
        return f"FairBiEncoder({self.model_name!r})"

    def __repr__(self) -> str:
        defaults = {**type(self.config)().to_dict(), "strength": None, "max_seq_length": None, "normalize": None}
        names = ["strength", *setting_names(self.config), "max_seq_length", "normalize"]
        changed = [name for name in dict.fromkeys(names) if getattr(self, name) != defaults[name]]
        preset = ["'even_chunks'"] if isinstance(self.config, EvenChunks) else []
        settings = [repr(self.model_name), *preset, *(f"{name}={getattr(self, name)!r}" for name in changed)]
        return f"FairBiEncoder({', '.join(settings)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FairBiEncoder):
            return NotImplemented
        own, others = ((e._doc_key(), e.batch_size, e.text_field, e.verbose) for e in (self, other))
        return own == others

    def __hash__(self) -> int:
        # Settings are left out, as a grid search keeps the encoder as a dictionary key while it changes them.
        return hash((FairBiEncoder, self.model_name))


class _Part:
    """What the three transformers share: settings that were not given are those of the encoder when they are read."""

    def __init__(
        self,
        bi_encoder_model: FairBiEncoder,
        verbose: bool | None = None,
        batch_size: int | None = None,
        text_field: str | None = None,
    ) -> None:
        self.bi_encoder_model = bi_encoder_model
        for name, value in {"verbose": verbose, "batch_size": batch_size, "text_field": text_field}.items():
            if value is not None:
                setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in ("verbose", "batch_size", "text_field"):  # not given
            return getattr(self.bi_encoder_model, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _key(self) -> Hashable:
        """Returns what the result depends on."""
        return (self.bi_encoder_model._doc_key(), self.batch_size, self.text_field)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash((type(self), self._key()))


class FairQueryEncoder(_Part, BiQueryEncoder):  # type: ignore[misc]
    """Adds ``query_vec``, without calibration, so that query encoders of all calibrations of a model are equal."""

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


class FairDocEncoder(_Part, BiDocEncoder):  # type: ignore[misc]
    """Adds ``doc_vec``, from the calibrated model.

    A stream of records is encoded in windows of 4096 documents, sorted by length, while the next window is tokenized.
    ``doc_encoder() >> index`` encodes the whole collection as one stream. After other transformers, PyTerrier passes on
    100 documents at a time, or as many as ``index(..., batch_size=4096)`` asks for.
    """

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
                        f"encoder: {encoder!r} was changed while it encoded a stream, which would mix vectors of "
                        "different settings; change it before or after the stream, or use two FairBiEncoders"
                    )
                for record, vector in zip(window, vectors, strict=True):
                    yield {**record, "doc_vec": vector}

    def __rshift__(self, right: pt.Transformer) -> pt.Transformer:
        return Indexing(self, right) if isinstance(right, pt.Indexer) else super().__rshift__(right)

    def encode(self, texts: list[str]) -> np.ndarray:
        """Encodes document texts: float32 (n, D)."""
        return self.bi_encoder_model.encode_docs(texts, self.batch_size, verbose=self.verbose)


class Indexing(pt.Compose):
    """What prepares documents and an indexer, which get them as one stream instead of 100 at a time."""

    def index(self, iter: Iterable[dict[str, Any]] | pd.DataFrame, batch_size: int | None = None) -> Any:
        """Indexes documents."""
        first, indexer = cast(tuple[Any, pt.Indexer], tuple(self))
        if batch_size is not None:
            return super().index(read_records(iter, first.text_field), batch_size)
        return indexer.index(first.transform_iter(iter))


class FairScorer(_Part, BiScorer):  # type: ignore[misc]
    """Scores documents against queries and ranks them, encoding queries and documents that have no vectors yet."""

    def __init__(
        self,
        bi_encoder_model: FairBiEncoder,
        verbose: bool | None = None,
        batch_size: int | None = None,
        text_field: str | None = None,
        sim_fn: SimFn | None = None,
    ) -> None:
        super().__init__(bi_encoder_model, verbose, batch_size, text_field)
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
        queries = docs = inp
        if "query_vec" not in inp.columns:
            queries = FairQueryEncoder(encoder, self.verbose, self.batch_size)(inp)
        if "doc_vec" not in inp.columns:
            docs = FairDocEncoder(encoder, self.verbose, self.batch_size, field)(inp)
        pairs = zip(queries["query_vec"], docs["doc_vec"], strict=True)
        scores = np.fromiter((np.dot(q, d) for q, d in pairs), dtype=np.float64, count=len(inp))
        return pt.model.add_ranks(inp.assign(score=scores))
