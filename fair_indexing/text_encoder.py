"""`TextEncoder`: tokenizes texts once, batches them by their lengths, and halves batches that run out of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import batch_to_device, truncate_embeddings

from fair_calibration import DocumentCounts, FairSentenceTransformer
from fair_calibration.access.discovery import PROBE_TEXTS
from fair_calibration.identity import resolve_normalize
from fair_calibration.limits import has_limit
from fair_calibration.prompts import document_prompt, query_prompt
from fair_calibration.texts import check_texts, show_names
from fair_calibration.validation import validate_choice, validate_positive_int, validate_strength
from fair_indexing.checkpoints import Checkpoint
from fair_indexing.token_batches import token_batches
from fair_indexing.tokenized import RowTokenizer, TokenizedTexts

logger = logging.getLogger("fair_indexing")

Vectors = npt.NDArray[np.float32]
Task = Literal["document", "query"] | None
TOKENS_PER_BATCH = 16384  # fills a GPU
# On CPUs larger batches outgrow the caches: 16384 tokens took a quarter longer per token than 4096 (MiniLM, one core).
TOKENS_PER_CPU_BATCH = 4096
_BYTES_PER_TOKEN = 3  # of UTF-8, to estimate lengths where texts are not tokenized here; rarely fewer


class TextEncoder:
    """Encodes documents or queries with one model, in batches by tokens.

    Texts are tokenized here, once, if the model's features are tensors with one row per text. Otherwise (inputs packed
    without padding, or a subclass with an ``encode`` method of its own) the model's ``encode_document`` or
    ``encode_query`` gets batches of texts, whose lengths are estimated at three bytes per token.

    Attributes:
        model: The model.
        task: "document", "query", or None for neither.
        tokens_per_batch: The most tokens of a forward pass. It shrinks when a batch runs out of memory.
        batch_size: The most texts of a forward pass; None for no limit.
        normalize: Whether vectors are scaled to unit length.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        *,
        task: Task = "document",
        prompt: str | None = None,
        batch_size: int | None = None,
        tokens_per_batch: int | None = None,
        normalize: bool | None = None,
        strength: float | None = None,
    ) -> None:
        """Takes the model and the settings; `fair_indexing.encode.encode_texts` describes them.

        Raises:
            TypeError: ``model`` is not a SentenceTransformer, or a setting has the wrong type.
            ValueError: A setting is out of range, or ``strength`` is given for a model that is not calibrated.
        """
        if not isinstance(model, SentenceTransformer):
            raise TypeError(f"model: expected a SentenceTransformer, got {type(model).__name__}")
        if task is not None:
            validate_choice("task", task, ("document", "query"))
        self.model = model
        self.task: Task = task
        self.tokens_per_batch = (
            default_tokens_per_batch(model.device)
            if tokens_per_batch is None
            else validate_positive_int("tokens_per_batch", tokens_per_batch)
        )
        self.batch_size = None if batch_size is None else validate_positive_int("batch_size", batch_size)
        self.normalize = resolve_normalize(model, normalize)
        self._prompt = prompt
        self._settings: dict[str, Any] = {}
        if strength is not None:
            if not isinstance(model, FairSentenceTransformer):
                raise ValueError("strength: the model is not calibrated; calibrate(model) it, or leave strength out")
            self._settings["strength"] = validate_strength(strength)
        self._warned = False
        self._tokenizer: RowTokenizer | None = None
        if _has_rows(model):
            uncounted = {"counted": False} if isinstance(model, FairSentenceTransformer) else {}
            self._tokenizer = RowTokenizer.of(self._preprocess, self._preprocess(list(PROBE_TEXTS), **uncounted))

    def prepare(self, texts: Sequence[str], names: Sequence[object] | None = None) -> TokenizedTexts:
        """Checks and tokenizes texts. One other thread may do so while `encode` runs in this one.

        Args:
            texts: The texts.
            names: What errors call them; None for their indices.

        Raises:
            TypeError: A text is not a string.
            ValueError: A text is missing or has a lone surrogate, or there are more or fewer names than texts.
        """
        names = range(len(texts)) if names is None else names
        check_texts(texts, names, named=self._noun)
        if self._tokenizer is not None:
            return self._tokenizer.tokenize(texts, names)
        lengths = [1 + len(text.encode()) // _BYTES_PER_TOKEN for text in texts]
        limit = self.model.max_seq_length
        if limit is not None and has_limit(limit):
            lengths = [min(length, limit) for length in lengths]
        return TokenizedTexts(names, texts, lengths)

    def encode(
        self,
        tokenized: TokenizedTexts,
        *,
        progress: Callable[[int], object] | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> Vectors:
        """Encodes texts that `prepare` has tokenized.

        Args:
            tokenized: The texts.
            progress: Called after each batch with its number of texts.
            checkpoint: Keeps the vectors of each batch on disk, and has those of an interrupted run; None for neither.

        Returns:
            float32 vectors of shape (n, D), in the order of the texts.

        Raises:
            ValueError: A vector has NaN or infinite values.
            MemoryError: A text does not fit into memory by itself.
        """
        if not tokenized.texts:
            return np.empty((0, self.model.get_embedding_dimension() or 0), dtype=np.float32)
        try:
            vectors = self._encode_batches(tokenized, progress, checkpoint)
        except BaseException:
            if checkpoint is not None:
                with suppress(OSError):  # the error or the interruption itself is raised
                    checkpoint.save()
            raise
        self._check_finite(vectors, tokenized.names)
        return vectors

    def _encode_batches(
        self, tokenized: TokenizedTexts, progress: Callable[[int], object] | None, checkpoint: Checkpoint | None
    ) -> Vectors:
        done: list[int] = []
        parts: list[torch.Tensor] = []
        batches = self._batches(tokenized, range(len(tokenized.texts)))
        while batches:
            part = self._checkpointed(checkpoint, batches[0])
            if part is None:
                counts = self._counts()
                part = self._try(tokenized, batches[0])
                if part is None:
                    self._take_back(counts)
                    self._halve(tokenized, batches[0])
                    batches = self._batches(tokenized, [i for batch in batches for i in batch])
                    continue
                if checkpoint is not None:
                    checkpoint.add(batches[0], part)
            batch = batches.pop(0)
            parts.append(part)
            done += batch
            if progress is not None:
                progress(len(batch))
        order = torch.tensor(done, device=parts[0].device).argsort()
        vectors: Vectors = torch.cat(parts)[order].cpu().numpy()
        return vectors

    def _checkpointed(self, checkpoint: Checkpoint | None, batch: list[int]) -> torch.Tensor | None:
        vectors = None if checkpoint is None else checkpoint.get(batch)
        return None if vectors is None else torch.from_numpy(vectors).to(self.model.device)

    @property
    def _noun(self) -> str:
        return "query" if self.task == "query" else "document"

    def _preprocess(self, texts: list[str], **kwargs: Any) -> dict[str, Any]:
        prompt = self._resolve_prompt() or None
        return dict(self.model.preprocess(texts, prompt=prompt, **self._call_kwargs(), **kwargs))

    def _call_kwargs(self) -> dict[str, Any]:
        return self._settings if self.task is None else {"task": self.task, **self._settings}

    def _resolve_prompt(self) -> str:
        # Read at every call, as the model's prompts may be changed.
        if self._prompt is not None:
            return self._prompt
        if self.task is None:
            name = self.model.default_prompt_name
            return (self.model.prompts.get(name) if name is not None else None) or ""
        return query_prompt(self.model) if self.task == "query" else document_prompt(self.model)

    def _batches(self, tokenized: TokenizedTexts, indices: Sequence[int]) -> list[list[int]]:
        lengths = [tokenized.lengths[i] for i in indices]
        batches = token_batches(lengths, tokens_per_batch=self.tokens_per_batch, batch_size=self.batch_size)
        return [[indices[i] for i in batch] for batch in batches]

    def _try(self, tokenized: TokenizedTexts, batch: list[int]) -> torch.Tensor | None:
        """Encodes a batch; returns None if it does not fit into memory."""
        try:
            return self._encode(tokenized, batch)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if len(batch) > 1:
                return None
            raise MemoryError(
                f"{self._noun} {tokenized.names[batch[0]]!r} ({tokenized.lengths[batch[0]]} tokens) does not fit into "
                f"the memory of {self.model.device} by itself; lower model.max_seq_length, or leave it out"
            ) from error

    @torch.inference_mode()
    def _encode(self, tokenized: TokenizedTexts, batch: list[int]) -> torch.Tensor:
        """Encodes a batch: float32 (B, D)."""
        if tokenized.rows is None or self._tokenizer is None:
            texts = [tokenized.texts[i] for i in batch]
            encoded: torch.Tensor = self._encode_texts(texts, batch_size=len(batch), convert_to_tensor=True)
            return encoded.float()
        features: dict[str, Any] = self._tokenizer.batch([tokenized.rows[i] for i in batch])
        features |= tokenized.shared or {}
        # From here on the same steps as in SentenceTransformer.encode.
        self.model.eval()
        features = batch_to_device(features, self.model.device)
        vectors: torch.Tensor = self.model(features, **self._call_kwargs())["sentence_embedding"]
        if self.model.truncate_dim is not None:
            vectors = truncate_embeddings(vectors, self.model.truncate_dim)
        if self.normalize:
            vectors = torch.nn.functional.normalize(vectors, dim=1)
        return vectors.float()

    def _encode_texts(self, texts: list[str], **settings: Any) -> Any:
        """Encodes texts by the model's own method, which tokenizes them itself."""
        methods: dict[str, Any] = {"document": self.model.encode_document, "query": self.model.encode_query}
        encode = methods.get(self.task or "", self.model.encode)
        prompt = {} if self._prompt is None else {"prompt": self._prompt}
        return encode(
            texts,
            normalize_embeddings=self.normalize,
            show_progress_bar=False,
            **prompt,
            **settings,
            **self._settings,
        )

    def _halve(self, tokenized: TokenizedTexts, batch: list[int]) -> None:
        tokens = len(batch) * max(tokenized.lengths[i] for i in batch)
        self.tokens_per_batch = max(1, tokens // 2)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        if not self._warned:
            self._warned = True
            logger.warning(
                "A batch of %s texts, %s tokens together, ran out of memory on %s. It is halved and tried again, and "
                "later batches are as small; tokens_per_batch=%s would have avoided this. Reported once.",
                len(batch),
                tokens,
                self.model.device,
                self.tokens_per_batch,
            )

    def _counts(self) -> DocumentCounts | None:
        return self.model.counts if isinstance(self.model, FairSentenceTransformer) else None

    def _take_back(self, before: DocumentCounts | None) -> None:
        """Takes back what a batch that ran out of memory has added to the model's counts."""
        if before is not None and isinstance(self.model, FairSentenceTransformer):
            excess = DocumentCounts(*(b - now for b, now in zip(before, self.model.counts, strict=True)))
            if self._tokenizer is not None:  # truncated texts were counted in advance, when they were tokenized
                excess = excess._replace(truncated=0, truncated_queries=0)
            self.model.fair.counter.add(excess, max_seq_length=self.model.max_seq_length)

    def _check_finite(self, vectors: Vectors, names: Sequence[object]) -> None:
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1)).tolist()
        if bad:
            dtype = str(self.model.dtype).removeprefix("torch.")
            raise ValueError(
                f"model: the vectors of {len(bad)} of {len(names)} texts have NaN or infinite values ({self._noun} "
                f"{show_names([names[i] for i in bad])}); the model computes in {dtype}"
                + ("; load it in bfloat16 or float32" if dtype == "float16" else "")
            )


def default_tokens_per_batch(device: torch.device) -> int:
    """Returns the most tokens of a forward pass if the caller gives no number."""
    return TOKENS_PER_CPU_BATCH if device.type == "cpu" else TOKENS_PER_BATCH


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means that memory ran out."""
    # PyTorch has an error class for CUDA only: CPUs "can't allocate memory", MPS is "out of memory".
    text = str(error).lower()
    has_class = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return has_class or "can't allocate memory" in text or "out of memory" in text


def _has_rows(model: SentenceTransformer) -> bool:
    """Returns whether encoding is one forward pass over one row per text, on one device."""
    if type(model) not in (SentenceTransformer, FairSentenceTransformer):
        return False  # a subclass may encode in any way
    return model._distributed_inference is None
