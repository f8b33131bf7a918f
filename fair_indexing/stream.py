"""Encodes streams of texts window by window: the next window is tokenized while one is encoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from fair_calibration.validation import validate_positive_int
from fair_indexing.background import Background
from fair_indexing.checkpoints import Checkpoint
from fair_indexing.pool import PoolEncoder, check_devices
from fair_indexing.text_encoder import Task, TextEncoder, Vectors
from fair_indexing.tokenized import TokenizedTexts

T = TypeVar("T")
NamesT = TypeVar("NamesT", bound=Sequence[Any])
WINDOW = 4096  # texts
_WINDOW_CHARACTERS = 2**24  # bounds the memory of a window of very long texts: some 100 MB of tokens


class EncodedWindow(NamedTuple):
    """Encoded documents in the order of the stream: their ``docnos``, and ``vectors``, float32 (n, D)."""

    docnos: list[str]
    vectors: Vectors


def encode_stream(
    model: SentenceTransformer,
    records: Iterable[tuple[str, str]],
    *,
    window: int = WINDOW,
    task: Task = "document",
    prompt: str | None = None,
    batch_size: int | None = None,
    tokens_per_batch: int | None = None,
    normalize: bool | None = None,
    strength: float | None = None,
    show_progress_bar: bool = True,
    total: int | None = None,
    devices: Sequence[str] | None = None,
) -> Iterator[EncodedWindow]:
    """Encodes a stream of documents, keeping two windows of them in memory.

    Args:
        model: A calibrated or a plain model. While it encodes here, no other thread may tokenize with a plain one.
        records: The documents as (docno, text). They are read in the caller's thread, one window ahead.
        window: How many documents are sorted by length and batched together. A window ends earlier when it holds over
            16 million characters.
        task: "document", "query", or None for neither, as for `fair_indexing.encode.encode_texts`.
        prompt: What is put before every text; None for the model's own prompt for the task.
        batch_size: The most texts of a forward pass; None for no limit.
        tokens_per_batch: The most tokens of a forward pass, padding included; None for a default by device.
        normalize: Whether vectors are scaled to unit length; None does so if the model's similarity is the cosine.
        strength: Overrides the strength of a calibrated model's settings.
        show_progress_bar: Whether to show a bar with documents per second and the time left.
        total: The number of documents, for the time left; None for that of ``records`` if they have a length.
        devices: Devices such as ["cuda:0", "cuda:1"], each of which encodes in a process of its own; None for the
            model's device. Scripts that use this need the usual ``if __name__ == "__main__":``.

    Yields:
        The documents in order, one window after the other.

    Raises:
        TypeError: A text is not a string, or a setting has the wrong type.
        ValueError: A text is missing or has a lone surrogate, a setting is out of range, or a vector has NaN or
            infinite values. Settings are checked by the call itself, texts window by window.
        MemoryError: A document does not fit into memory by itself.
    """
    validate_positive_int("window", window)
    if devices is not None:
        check_devices(devices)
    settings: dict[str, Any] = {
        "task": task,
        "prompt": prompt,
        "batch_size": batch_size,
        "tokens_per_batch": tokens_per_batch,
        "normalize": normalize,
        "strength": strength,
    }
    encoder = TextEncoder(model, **settings)  # here, so that errors in settings are raised now
    if total is None and isinstance(records, Sized):
        total = len(records)

    def stream() -> Iterator[EncodedWindow]:
        bar = tqdm(total=total, desc="Encoding", unit="doc", smoothing=0, disable=not show_progress_bar)
        with bar, PoolEncoder(model, devices, **settings) if devices is not None else nullcontext(encoder) as used:
            for docnos, vectors in encode_windows(used, cut_windows(records, window), progress=bar.update):
                yield EncodedWindow(docnos, vectors)

    return stream()


def encode_windows(
    encoder: TextEncoder,
    windows: Iterable[tuple[NamesT, Sequence[str]]],
    *,
    progress: Callable[[int], object] | None = None,
    checkpoint: Callable[[TokenizedTexts], Checkpoint] | None = None,
) -> Iterator[tuple[NamesT, Vectors]]:
    """Encodes windows of texts, tokenizing the next window in another thread while one is encoded.

    Args:
        encoder: Encodes the texts.
        windows: The names and the texts of each window.
        progress: Called with the number of texts that were encoded since the last call.
        checkpoint: Gives the checkpoint of each window when it is about to be encoded; None for none.

    Yields:
        The names and the vectors, float32 (n, D), of each window.
    """

    def encode(tokenized: TokenizedTexts) -> Vectors:
        kept = None if checkpoint is None else checkpoint(tokenized)
        return encoder.encode(tokenized, progress=progress, checkpoint=kept)

    with Background() as background:
        prepared: deque[tuple[NamesT, Future[TokenizedTexts]]] = deque()
        for names, texts in windows:
            prepared.append((names, background.submit(encoder.prepare, texts, names)))
            if len(prepared) > 1:
                ready, tokenized = prepared.popleft()
                yield ready, encode(tokenized.result())
        for ready, tokenized in prepared:
            yield ready, encode(tokenized.result())


def cut_windows(records: Iterable[tuple[T, str]], size: int) -> Iterator[tuple[list[T], list[str]]]:
    """Cuts a stream of (name, text) into windows of at most ``size`` texts and some 16 million characters."""
    keys: list[T] = []
    texts: list[str] = []
    n_characters = 0
    for key, text in records:
        keys.append(key)
        texts.append(text)
        n_characters += len(text) if isinstance(text, str) else 0  # others raise an error when they are tokenized
        if len(texts) == size or n_characters >= _WINDOW_CHARACTERS:
            yield keys, texts
            keys, texts, n_characters = [], [], 0
    if texts:
        yield keys, texts
