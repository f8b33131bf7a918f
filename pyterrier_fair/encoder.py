"""`FairBiEncoder`: a pyterrier_dr bi-encoder whose documents are encoded with calibrated attention."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pyterrier_dr import BiEncoder, SimFn
from sentence_transformers import SentenceTransformer

from fair_calibration import DocumentCounts, FairConfig, FairSentenceTransformer, Summary, calibrate
from fair_calibration.config import validate_positive_int
from fair_indexing.encoding import encode_documents, resolve_normalize
from pyterrier_fair.texts import check_texts
from pyterrier_fair.transformers import FairDocEncoder, FairQueryEncoder, FairScorer

_CONFIG_FIELDS = tuple(field.name for field in fields(FairConfig))


class FairBiEncoder(BiEncoder):  # type: ignore[misc]
    """A dense bi-encoder that finds what stands late in a document.

    Used as a transformer it encodes queries, encodes documents or scores, by the columns it is given::

        fair_dense = FairBiEncoder("BAAI/bge-m3", strength=0.5)
        bm25 >> pt.text.get_text(dataset) >> fair_dense
        fair_dense.doc_encoder() >> FlexIndex("index.flex")
        fair_dense.query_encoder() >> FlexIndex("index.flex").np_retriever()

    The model's own prompts are used for queries and documents. Every setting is a plain attribute that may be changed
    at any time, by `pt.GridSearch` too, and is read when documents are encoded. Encoders with equal settings are
    equal, so one grid search cannot vary two encoders in one pipeline that differ in nothing but the settings varied.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | SentenceTransformer,
        *,
        strength: float | None = None,
        basket_size: int | None = None,
        layers: Any = None,
        pooling: str | None = None,
        isolate: str | None = None,
        isolated_share: str | float | None = None,
        last_basket: str | None = None,
        min_content: int | None = None,
        chunk_size: int | None = None,
        unit_size: int | None = None,
        ridge: float | None = None,
        max_seq_length: int | None = None,
        normalize: bool | None = None,
        batch_size: int = 32,
        text_field: str = "text",
        verbose: bool = False,
        device: str | None = None,
    ) -> None:
        """Loads the model and calibrates it.

        Args:
            model: A Hugging Face name, a local folder, or a loaded SentenceTransformer, which stays as it is.
            strength: As all settings down to ``ridge`` see `FairConfig`. None is what the model was calibrated or
                saved with, if it was, and else the default.
            basket_size: See `FairConfig`.
            layers: See `FairConfig`.
            pooling: See `FairConfig`.
            isolate: See `FairConfig`.
            isolated_share: See `FairConfig`.
            last_basket: See `FairConfig`.
            min_content: See `FairConfig`.
            chunk_size: See `FairConfig`.
            unit_size: See `FairConfig`.
            ridge: See `FairConfig`.
            max_seq_length: Where texts are truncated, in tokens; None is the model's.
            normalize: Whether vectors get unit length, so that the dot product is the cosine; None does so where the
                model's similarity is the cosine.
            batch_size: The most texts of a forward pass. Documents are bounded by tokens, too, see `encode_docs`: on a
                GPU it may be high, so that short ones fill a batch.
            text_field: The column of the documents' text.
            verbose: Whether to show progress bars.
            device: Where to run; None for the model's device, or a GPU if there is one. A loaded model moves along, as
                the weights are shared.

        Raises:
            TypeError: ``model`` is none of these.
            ValueError: A setting is out of range, or the model cannot be calibrated.
        """
        super().__init__(batch_size=batch_size, text_field=text_field, verbose=verbose)
        self.model = model
        self.device = device
        self._calibrated: FairSentenceTransformer
        self._plain_max_seq_length: int | None
        self._load()
        config = self._calibrated.fair_config.updated(
            strength=strength,
            basket_size=basket_size,
            layers=layers,
            pooling=pooling,
            isolate=isolate,
            isolated_share=isolated_share,
            last_basket=last_basket,
            min_content=min_content,
            chunk_size=chunk_size,
            unit_size=unit_size,
            ridge=ridge,
        )
        self.strength = config.strength
        self.basket_size = config.basket_size
        self.layers = config.layers
        self.pooling = config.pooling
        self.isolate = config.isolate
        self.isolated_share = config.isolated_share
        self.last_basket = config.last_basket
        self.min_content = config.min_content
        self.chunk_size = config.chunk_size
        self.unit_size = config.unit_size
        self.ridge = config.ridge
        self.max_seq_length = max_seq_length
        self.normalize = normalize
        self._checked_batch_size(None)
        # Settings that do not fit the model are said now, not at the first document.
        calibrated = self.calibrated_model()
        if self.chunk_size is not None:
            calibrated.preprocess([""], task="document")

    @classmethod
    def from_config(
        cls, model: str | os.PathLike[str] | SentenceTransformer, config: FairConfig, **kwargs: Any
    ) -> FairBiEncoder:
        """Builds an encoder from a `FairConfig`, such as one of `PRESETS`; ``kwargs`` are the other arguments."""
        encoder = cls(model, **{name: getattr(config, name) for name in _CONFIG_FIELDS}, **kwargs)
        encoder.min_content, encoder.chunk_size = config.min_content, config.chunk_size  # None is a setting here
        encoder.calibrated_model()
        return encoder

    @property
    def fair_config(self) -> FairConfig:
        """The settings as they stand now.

        Raises:
            TypeError: An attribute was set to a value of the wrong type.
            ValueError: An attribute was set to a value out of range.
        """
        return FairConfig(**{name: getattr(self, name) for name in _CONFIG_FIELDS})

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
        """Returns the model with the settings as they stand now.

        Raises:
            ValueError: A setting was set out of range, or does not fit the model.
        """
        if self.model is not self._loaded[0] or self.device != self._loaded[1]:
            self._load()
        config = self.fair_config
        # The strength is an argument of each call: no new model for it.
        if replace(config, strength=self._calibrated.fair_config.strength) != self._calibrated.fair_config:
            self._calibrated = calibrate(self._calibrated, config)
        if self.max_seq_length is not None:
            validate_positive_int("max_seq_length", self.max_seq_length)
        self._calibrated.max_seq_length = self.max_seq_length or self._plain_max_seq_length
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

    def summary(self) -> Summary:
        """Returns which layers, rows and mechanism are in use and what became of the documents; print it."""
        summary = self.calibrated_model().summary()
        return replace(summary, config=replace(summary.config, strength=self.fair_config.strength))

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
            features = model.preprocess(texts[start : start + size], prompt=model.prompts.get("query"), task="query")
            features = {k: v.to(model.device) if torch.is_tensor(v) else v for k, v in features.items()}
            parts.append(model(features, task="query")["sentence_embedding"])
        if not parts:
            return torch.empty(0, model.get_embedding_dimension() or 0, device=model.device)
        vectors = torch.cat(parts)
        if model.truncate_dim is not None:
            vectors = vectors[..., : model.truncate_dim]
        return torch.nn.functional.normalize(vectors) if self._unit_length(model) else vectors

    def _encode(
        self, texts: Iterable[str], task: str, batch_size: int | None, verbose: bool | None
    ) -> npt.NDArray[np.float32]:
        model = self.calibrated_model()
        if isinstance(texts, str):
            raise TypeError(f"texts: expected a list of str, got one str, {texts[:40]!r}")
        texts = list(texts)
        check_texts(texts, range(len(texts)), column="texts", id_column="number")
        size = self._checked_batch_size(batch_size)
        verbose = self.verbose if verbose is None else verbose
        if task == "document":
            return encode_documents(model, texts, show_progress_bar=verbose, **self._document_settings(size))
        if not texts:
            return np.empty((0, model.get_embedding_dimension() or 0), dtype=np.float32)
        vectors = model.encode_query(
            texts, batch_size=size, show_progress_bar=verbose, normalize_embeddings=self._unit_length(model)
        )
        return np.asarray(vectors, dtype=np.float32)

    def _document_settings(self, batch_size: int | None) -> dict[str, Any]:
        """The settings of `encode_documents`."""
        return {
            "max_documents": self._checked_batch_size(batch_size),
            "normalize": self._unit_length(self._calibrated),
            "strength": self.fair_config.strength,
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
        default = FairConfig()
        try:
            config: Any = self.fair_config
        except (TypeError, ValueError):
            config = self  # what is set now is no config, but can be shown
        settings = [f"strength={config.strength}"]
        settings += [
            f"{name}={value!r}"
            for name in _CONFIG_FIELDS[1:]
            if (value := getattr(config, name)) != getattr(default, name)
        ]
        settings += [
            f"{name}={value!r}"
            for name in ("max_seq_length", "normalize")
            if (value := getattr(self, name)) is not None
        ]
        return f"FairBiEncoder({self.model_name!r}, {', '.join(settings)})"

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
    raise TypeError(f"model: expected a name, a path or a SentenceTransformer, got {type(model).__name__}")
