"""Encodes a stream of documents window by window: the next one is tokenized while one is encoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from fair_calibration.config import validate_positive_int
from fair_indexing.background import Background
from fair_indexing.encoding import DocumentEncoder, Vectors
from fair_indexing.pool import PoolEncoder, check_devices
from fair_indexing.window import Window

T = TypeVar("T")
NamesT = TypeVar("NamesT", bound=Sequence[Any])
WINDOW = 4096
_WINDOW_CHARACTERS = 2**24  # bounds the memory of a window of very long documents: some 100 MB of tokens


class EncodedWindow(NamedTuple):
    """Documents in the order of the stream: ``docnos``, and ``vectors``, float32 (n, D)."""

    docnos: list[str]
    vectors: Vectors


def encode_stream(
    model: SentenceTransformer,
    records: Iterable[tuple[str, str]],
    *,
    window: int = WINDOW,
    tokens_per_batch: int | None = None,
    max_documents: int | None = None,
    normalize: bool | None = None,
    strength: float | None = None,
    show_progress_bar: bool = True,
    total: int | None = None,
    devices: Sequence[str] | None = None,
) -> Iterator[EncodedWindow]:
    """Encodes a stream of documents.

    Args:
        model: A calibrated or a plain model. While a plain one is at work here, no other thread may tokenize with it.
        records: The documents: (docno, text). Read in the caller's thread, one window ahead.
        window: How many documents are sorted by length and batched together; fewer where they have over 16 million
            characters together.
        tokens_per_batch: As all settings down to ``strength`` see `encode_documents`.
        max_documents: See `encode_documents`.
        normalize: See `encode_documents`.
        strength: See `encode_documents`.
        show_progress_bar: Whether to show a bar with documents per second and the time left.
        total: The number of documents, for the time left; None if it is not known, or is that of sized ``records``.
        devices: Devices such as ["cuda:0", "cuda:1"] to encode on, in a process each; None for the model's own. A
            script that uses them needs the usual ``if __name__ == "__main__":``.

    Yields:
        The documents, in order, one window after the other.

    Raises:
        TypeError: As all errors see `encode_documents`; documents are named by docno.
        ValueError: See `encode_documents`.
        MemoryError: See `encode_documents`.
    """
    validate_positive_int("window", window)
    if devices is not None:
        check_devices(devices)
    settings: dict[str, Any] = {
        "tokens_per_batch": tokens_per_batch,
        "max_documents": max_documents,
        "normalize": normalize,
        "strength": strength,
    }
    encoder = DocumentEncoder(model, **settings)  # what is wrong with the settings is said now, not at the first window
    if total is None and isinstance(records, Sized):
        total = len(records)

    def stream() -> Iterator[EncodedWindow]:
        bar = tqdm(total=total, desc="Encoding", unit="doc", smoothing=0, disable=not show_progress_bar)
        with bar, PoolEncoder(model, devices, **settings) if devices is not None else nullcontext(encoder) as used:
            for docnos, vectors in encode_windows(used, cut_windows(records, window), progress=bar.update):
                yield EncodedWindow(docnos, vectors)

    return stream()


def encode_windows(
    encoder: DocumentEncoder,
    windows: Iterable[tuple[NamesT, Sequence[str]]],
    *,
    progress: Callable[[int], object] | None = None,
) -> Iterator[tuple[NamesT, Vectors]]:
    """Encodes windows, tokenizing the next one in another thread while one is encoded.

    Args:
        encoder: What encodes.
        windows: Names and texts of the documents of each.
        progress: Called with the number of documents that were encoded since the last call.

    Yields:
        Names and vectors, float32 (n, D), of each window.
    """
    with Background() as background:
        prepared: deque[tuple[NamesT, Future[Window]]] = deque()
        for names, texts in windows:
            prepared.append((names, background.submit(encoder.prepare, texts, names)))
            if len(prepared) > 1:
                yield _encode(encoder, *prepared.popleft(), progress)
        while prepared:
            yield _encode(encoder, *prepared.popleft(), progress)


def _encode(
    encoder: DocumentEncoder, names: NamesT, window: Future[Window], progress: Callable[[int], object] | None
) -> tuple[NamesT, Vectors]:
    return names, encoder.encode(window.result(), progress=progress)


def cut_windows(records: Iterable[tuple[T, str]], size: int) -> Iterator[tuple[list[T], list[str]]]:
    """Cuts a stream of documents, each with whatever identifies it, into windows; sizes as in `encode_stream`."""
    keys: list[T] = []
    texts: list[str] = []
    n_characters = 0
    for key, text in records:
        keys.append(key)
        texts.append(text)
        n_characters += len(text) if isinstance(text, str) else 0  # what is no text is said when it is tokenized
        if len(texts) == size or n_characters >= _WINDOW_CHARACTERS:
            yield keys, texts
            keys, texts, n_characters = [], [], 0
    if texts:
        yield keys, texts
