"""`FairBiEncoder`: a pyterrier_dr bi-encoder whose documents are encoded with calibrated attention."""

from __future__ import annotations

import inspect
import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyterrier as pt
import torch
from pyterrier_dr import BiEncoder, SimFn
from sentence_transformers import SentenceTransformer

from fair_calibration import DocumentCounts, EvenChunksSummary, FairConfig, FairSentenceTransformer, Summary, calibrate
from fair_calibration.identity import resolve_normalize
from fair_calibration.prompts import query_prompt
from fair_calibration.settings import Settings, SettingsAttributes, choose_settings, setting_names
from fair_calibration.texts import check_texts
from fair_calibration.validation import validate_positive_int
from fair_indexing.encode import Task, encode_texts
from pyterrier_fair.transformers import FairDocEncoder, FairQueryEncoder, FairScorer

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
            batch_size: The most texts of a forward pass. Batches of documents are bounded by tokens as well (see
                `encode_docs`), so on a GPU it may be high.
            text_field: The column with the documents' text.
            verbose: Whether to show progress bars.
            device: The device to run on; None means the model's device, or a GPU if there is one. A loaded model moves
                to it as well, as the weights are shared.
            **settings: Single settings of ``config``, such as ``strength=0.5``.

        Raises:
            TypeError: ``model`` is not a model name, a path or a SentenceTransformer, or a setting is unknown.
            ValueError: A setting is out of range, or the model cannot be calibrated.
        """
        super().__init__(batch_size=batch_size, text_field=text_field, verbose=verbose)
        self.model = model
        self.device = device
        self._calibrated: FairSentenceTransformer
        self._plain_max_seq_length: int | None
        self._load()
        self.config = choose_settings(config, settings, default=self._calibrated.fair_config)
        self.max_seq_length = max_seq_length
        self.normalize = normalize
        self._checked_batch_size(None)
        # Settings that do not fit the model are reported now, not when the first document is encoded.
        self.calibrated_model().preprocess([""], task="document")

    def attributes(self) -> list[pt.inspect.TransformerAttribute]:
        """Returns the arguments that make this encoder, each setting by its name, for `pt.inspect` and schematics."""
        names = ["model", *setting_names(self.config), *_ENCODING]
        return [
            pt.inspect.TransformerAttribute(
                name, getattr(self, name), init_parameter_kind=inspect.Parameter.KEYWORD_ONLY
            )
            for name in names
        ]

    def apply_attributes(self, **attributes: Any) -> FairBiEncoder:
        """Returns an encoder with some of the `attributes` changed."""
        values = {attribute.name: attribute.value for attribute in self.attributes()} | attributes
        config = type(self.config)(**{name: values.pop(name) for name in setting_names(self.config)})
        return FairBiEncoder(config=config, **values)

    @property
    def fair_config(self) -> Settings:
        """The settings as they are now."""
        return self.config

    @property
    def model_name(self) -> str:
        """What the model is called: its name or path, or the class and identity of a loaded one."""
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

    def _load(self) -> None:
        self._calibrated = _load(self.model, self.device)
        self._plain_max_seq_length = self._calibrated.max_seq_length
        self._loaded = (self.model, self.device)

    def _checked_batch_size(self, given: int | None) -> int:
        return validate_positive_int("batch_size", self.batch_size if given is None else given)

    @property
    def counts(self) -> DocumentCounts:
        """How many documents were calibrated, too short or truncated since the last change of layout settings."""
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

    def encode_queries(
        self, texts: Iterable[str], batch_size: int | None = None, *, verbose: bool | None = None
    ) -> npt.NDArray[np.float32]:
        """Encodes queries with the plain model: float32 (n, D)."""
        return self._encode(texts, "query", batch_size, verbose)

    def encode_docs(
        self, texts: Iterable[str], batch_size: int | None = None, *, verbose: bool | None = None
    ) -> npt.NDArray[np.float32]:
        """Encodes documents with the calibrated model: float32 (n, D).

        They are batched by length, at most 16384 tokens to a batch, 4096 on a CPU; what runs out of memory is halved.

        Raises:
            ValueError: A text is None or NaN.
            TypeError: A text is no string.
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
        return torch.nn.functional.normalize(vectors) if self._unit_length(model) else vectors

    def _encode(
        self, texts: Iterable[str], task: Task, batch_size: int | None, verbose: bool | None
    ) -> npt.NDArray[np.float32]:
        model = self.calibrated_model()
        if isinstance(texts, str):
            raise TypeError(f"texts: expected a list of str, got one str, {texts[:40]!r}")
        texts = list(texts)
        check_texts(texts, named="number")
        vectors: npt.NDArray[np.float32] = encode_texts(
            model,
            texts,
            task=task,
            show_progress_bar=self.verbose if verbose is None else verbose,
            **self._encoding_settings(batch_size),
        )
        return vectors

    def _encoding_settings(self, batch_size: int | None) -> dict[str, Any]:
        """Returns the settings of the encoding engine."""
        return {
            "batch_size": self._checked_batch_size(batch_size),
            "normalize": self._unit_length(self._calibrated),
            "strength": self.config.strength,
        }

    def _unit_length(self, model: FairSentenceTransformer) -> bool:
        return resolve_normalize(model, self.normalize)

    def _query_key(self) -> Hashable:
        """What the query vectors depend on. The calibration is not part of it: queries are encoded plainly."""
        model = self.calibrated_model()
        prompts = tuple(sorted((name, prompt or "") for name, prompt in model.prompts.items()))
        unit_length = self._unit_length(model)
        own = (model.max_seq_length, model.truncate_dim, prompts, model.default_prompt_name, unit_length)
        return (self.model_name, str(model.device), own)

    def _doc_key(self) -> Hashable:
        """What the document vectors depend on."""
        return (self._query_key(), self.fair_config)

    def __repr__(self) -> str:
        default = type(self.config)()
        changed = [n for n in setting_names(self.config) if getattr(self.config, n) != getattr(default, n)]
        settings = [f"{name}={getattr(self.config, name)!r}" for name in dict.fromkeys(["strength", *changed])]
        settings += [
            f"{name}={value!r}"
            for name in ("max_seq_length", "normalize")
            if (value := getattr(self, name)) is not None
        ]
        way = "" if isinstance(self.config, FairConfig) else "EvenChunks, "
        return f"FairBiEncoder({self.model_name!r}, {way}{', '.join(settings)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FairBiEncoder):
            return NotImplemented
        own, others = ((e._doc_key(), e.batch_size, e.text_field, e.verbose) for e in (self, other))
        return own == others

    def __hash__(self) -> int:
        # Only what does not change: a grid search keeps the encoder as a key while it changes the settings.
        return hash((FairBiEncoder, self.model_name))


def _load(model: object, device: str | None) -> FairSentenceTransformer:
    if isinstance(model, SentenceTransformer):
        fair = calibrate(model)
        return fair if device is None else fair.to(device)
    if isinstance(model, (str, os.PathLike)):
        return FairSentenceTransformer(os.fspath(model), device=device)
    raise TypeError(f"model: expected a model name, a path or a SentenceTransformer, got {type(model).__name__}")
