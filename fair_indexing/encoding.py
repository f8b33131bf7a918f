"""Encodes documents in batches by tokens: tokenized once, batched by their actual lengths, halved where memory ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import batch_to_device, truncate_embeddings
from tqdm import tqdm

from fair_calibration import DocumentCounts, FairSentenceTransformer
from fair_calibration.config import validate_positive_int, validate_strength
from fair_calibration.prompts import document_prompt
from fair_indexing.batching import token_batches
from fair_indexing.window import RowTokenizer, Window, check_texts

logger = logging.getLogger("fair_indexing")

Vectors = npt.NDArray[np.float32]
TOKENS_PER_BATCH = 16384  # what fills a GPU
# On CPUs larger batches outgrow the caches: 16384 tokens took a quarter longer per token than 4096 (MiniLM, one core).
TOKENS_PER_CPU_BATCH = 4096
_BYTES_PER_TOKEN = 3  # of UTF-8, where texts are not tokenized here: few languages and vocabularies have fewer
_NAMED = 5  # how many documents an error names


def encode_documents(
    model: SentenceTransformer,
    texts: Sequence[str],
    *,
    tokens_per_batch: int | None = None,
    max_documents: int | None = None,
    normalize: bool | None = None,
    strength: float | None = None,
    show_progress_bar: bool = False,
    names: Sequence[object] | None = None,
) -> Vectors:
    """Encodes documents as ``model.encode_document`` does, in batches by tokens.

    Args:
        model: A calibrated or a plain model.
        texts: The documents.
        tokens_per_batch: The most tokens of a forward pass, padding included; None is 4096 on a CPU and
            16384 elsewhere. A batch that runs out of memory is halved and tried again, and those after it are as small.
        max_documents: The most documents of a forward pass; None for no limit.
        normalize: Whether vectors get unit length, so that the dot product is the cosine; None does so where the
            model's similarity is the cosine.
        strength: Overrides that of a calibrated model's config.
        show_progress_bar: Whether to show a bar with documents per second.
        names: What the documents are called in errors; None for their numbers.

    Returns:
        float32 (n, D), in the order of the texts; within rounding those of ``model.encode_document``.

    Raises:
        TypeError: A text is no string.
        ValueError: A setting is out of range, a text has a lone surrogate, or a vector is not finite.
        MemoryError: A document does not fit into memory by itself.
    """
    encoder = DocumentEncoder(
        model,
        tokens_per_batch=tokens_per_batch,
        max_documents=max_documents,
        normalize=normalize,
        strength=strength,
    )
    with tqdm(total=len(texts), desc="Encoding", unit="doc", smoothing=0, disable=not show_progress_bar) as bar:
        return encoder.encode(encoder.prepare(texts, names), progress=bar.update)


def resolve_normalize(model: SentenceTransformer, normalize: bool | None) -> bool:
    """Returns whether vectors get unit length; None is where the model's similarity is the cosine."""
    return model.similarity_fn_name == "cosine" if normalize is None else bool(normalize)


def default_tokens_per_batch(device: torch.device) -> int:
    """Returns the most tokens of a forward pass where none are given."""
    return TOKENS_PER_CPU_BATCH if device.type == "cpu" else TOKENS_PER_BATCH


class DocumentEncoder:
    """Encodes windows of documents with one model, in batches by tokens.

    Documents are tokenized here, once, wherever a model's features are tensors of one row per document. Otherwise
    (packed without padding, a subclass with an ``encode`` of its own) batches of texts are handed to the model's
    ``encode_document``, sized by an estimate of three bytes per token.

    Attributes:
        model: The model.
        tokens_per_batch: The most tokens of a forward pass; less than given once a batch ran out of memory.
        max_documents: The most documents of a forward pass; None for no limit.
        normalize: Whether vectors get unit length.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        *,
        tokens_per_batch: int | None = None,
        max_documents: int | None = None,
        normalize: bool | None = None,
        strength: float | None = None,
    ) -> None:
        """Takes a model and settings, see `encode_documents`."""
        if not isinstance(model, SentenceTransformer):
            raise TypeError(f"model: expected a SentenceTransformer, got {type(model).__name__}")
        self.model = model
        self.tokens_per_batch = (
            default_tokens_per_batch(model.device)
            if tokens_per_batch is None
            else validate_positive_int("tokens_per_batch", tokens_per_batch)
        )
        self.max_documents = None if max_documents is None else validate_positive_int("max_documents", max_documents)
        self.normalize = resolve_normalize(model, normalize)
        self._settings: dict[str, Any] = {}
        if strength is not None:
            if not isinstance(model, FairSentenceTransformer):
                raise ValueError("strength: the model is not calibrated and has none; see fair_calibration.calibrate")
            self._settings["strength"] = validate_strength(strength)
        self._warned = False
        self._tokenizer = RowTokenizer.of(self._preprocess) if _has_rows(model) else None

    def prepare(self, texts: Sequence[str], names: Sequence[object] | None = None) -> Window:
        """Tokenizes documents; in one other thread, if need be, while `encode` is at work in this one.

        Raises:
            TypeError: A text is no string.
            ValueError: A text has a lone surrogate.
        """
        names = range(len(texts)) if names is None else names
        check_texts(texts, names)
        if self._tokenizer is not None:
            return self._tokenizer.tokenize(texts, names)
        lengths = [1 + len(text.encode()) // _BYTES_PER_TOKEN for text in texts]
        limit = self.model.max_seq_length
        return Window(names, texts, lengths if limit is None else [min(length, limit) for length in lengths])

    def encode(self, window: Window, *, progress: Callable[[int], object] | None = None) -> Vectors:
        """Encodes a window.

        Args:
            window: As `prepare` returns it.
            progress: Called with the number of documents of each batch that is done.

        Returns:
            float32 (n, D), in the order of the window.

        Raises:
            ValueError: A vector is not finite.
            MemoryError: A document does not fit into memory by itself.
        """
        if not window.texts:
            return np.empty((0, self.model.get_embedding_dimension() or 0), dtype=np.float32)
        n_truncated = window.n_truncated
        done: list[int] = []
        parts: list[torch.Tensor] = []
        batches = self._batches(window, range(len(window.texts)))
        while batches:
            counts = self._counts()
            part = self._try(window, batches[0], n_truncated)
            if part is None:
                self._uncount(counts)
                self._halve(window, batches[0])
                batches = self._batches(window, [i for batch in batches for i in batch])
                continue
            batch = batches.pop(0)
            parts.append(part)
            done += batch
            n_truncated = None if n_truncated is None else 0  # counted with the first batch
            if progress is not None:
                progress(len(batch))
        order = torch.tensor(done, device=parts[0].device).argsort()
        vectors: Vectors = torch.cat(parts)[order].cpu().numpy()
        check_finite(vectors, window.names)
        return vectors

    def _preprocess(self, texts: list[str]) -> dict[str, Any]:
        prompt = document_prompt(self.model) or None
        return dict(self.model.preprocess(texts, prompt=prompt, task="document", **self._settings))

    def _batches(self, window: Window, numbers: Sequence[int]) -> list[list[int]]:
        lengths = [window.lengths[i] for i in numbers]
        batches = token_batches(lengths, tokens_per_batch=self.tokens_per_batch, max_documents=self.max_documents)
        return [[numbers[i] for i in batch] for batch in batches]

    def _try(self, window: Window, batch: list[int], n_truncated: int | None) -> torch.Tensor | None:
        """Encodes a batch; None where it does not fit into memory."""
        try:
            return self._encode(window, batch, n_truncated)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if len(batch) > 1:
                return None
            raise MemoryError(
                f"document {window.names[batch[0]]!r} ({window.lengths[batch[0]]} tokens) does not fit into the memory "
                f"of {self.model.device} by itself; lower model.max_seq_length, or leave the document out"
            ) from error

    @torch.inference_mode()
    def _encode(self, window: Window, batch: list[int], n_truncated: int | None) -> torch.Tensor:
        """Encodes a batch: float32 (B, D)."""
        vectors: torch.Tensor
        if window.rows is None or self._tokenizer is None:
            vectors = self.model.encode_document(
                [window.texts[i] for i in batch],
                batch_size=len(batch),
                normalize_embeddings=self.normalize,
                convert_to_tensor=True,
                show_progress_bar=False,
                **self._settings,
            )
            return vectors.float()
        features: dict[str, Any] = self._tokenizer.batch([window.rows[i] for i in batch])
        features |= window.shared or {}
        if n_truncated is not None:
            features["n_truncated"] = n_truncated
        # From here on as SentenceTransformer.encode
        self.model.eval()
        features = batch_to_device(features, self.model.device)
        vectors = self.model(features, task="document", **self._settings)["sentence_embedding"]
        if self.model.truncate_dim is not None:
            vectors = truncate_embeddings(vectors, self.model.truncate_dim)
        if self.normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=1)
        return vectors.float()

    def _halve(self, window: Window, batch: list[int]) -> None:
        tokens = len(batch) * max(window.lengths[i] for i in batch)
        self.tokens_per_batch = max(1, tokens // 2)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        if not self._warned:
            self._warned = True
            logger.warning(
                "Out of memory on %s with %s documents of together %s tokens: the batch is halved and tried again, and "
                "later ones are as small; tokens_per_batch=%s would have done. Said once.",
                self.model.device,
                len(batch),
                tokens,
                self.tokens_per_batch,
            )

    def _counts(self) -> DocumentCounts | None:
        return self.model.counts if isinstance(self.model, FairSentenceTransformer) else None

    def _uncount(self, before: DocumentCounts | None) -> None:
        """Takes back the count of a batch that ran out of memory after the transformer."""
        if before is not None and isinstance(self.model, FairSentenceTransformer):
            excess = DocumentCounts(*(b - now for b, now in zip(before, self.model.counts, strict=True)))
            self.model.fair.counter.add(excess, max_seq_length=self.model.max_seq_length)


def _has_rows(model: SentenceTransformer) -> bool:
    """Whether encoding is one forward pass over one row per document, on one device."""
    if type(model) not in (SentenceTransformer, FairSentenceTransformer):
        return False  # a subclass's encode may do anything
    return model._distributed_inference is None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ended."""
    # PyTorch has a class for those of CUDA only: CPUs "can't allocate memory", MPS is "out of memory".
    text = str(error).lower()
    of_class = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return of_class or "can't allocate memory" in text or "out of memory" in text


def check_finite(vectors: Vectors, names: Sequence[object]) -> None:
    """Raises a ValueError that names the documents whose vectors are not finite."""
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1)).tolist()
    if len(bad):
        raise ValueError(
            f"model: the vectors of {len(bad)} of {len(names)} documents are not finite (documents "
            f"{show_names(names[i] for i in bad)}); float16 overflows in some models: load them in bfloat16 or float32"
        )


def show_names(names: Iterable[object]) -> str:
    """Writes the names of the first few documents."""
    first = [repr(name) for name in islice(names, _NAMED + 1)]
    return ", ".join(first[:_NAMED]) + (", ..." if len(first) > _NAMED else "")
