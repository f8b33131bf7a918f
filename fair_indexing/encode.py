"""`encode_texts`: encodes a list of texts that fits into memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sentence_transformers import SentenceTransformer
from tqdm import tqdm

from fair_calibration.texts import check_texts
from fair_indexing.stream import WINDOW, cut_windows, encode_windows
from fair_indexing.text_encoder import Task, TextEncoder, Vectors


def encode_texts(
    model: SentenceTransformer,
    texts: Sequence[str],
    *,
    task: Task = "document",
    prompt: str | None = None,
    batch_size: int | None = None,
    tokens_per_batch: int | None = None,
    normalize: bool | None = None,
    strength: float | None = None,
    show_progress_bar: bool = False,
    names: Sequence[object] | None = None,
) -> Vectors:
    """Encodes documents or queries in batches by tokens; vectors are those of ``model.encode`` within rounding.

    Texts are sorted by length within windows of 4096; the next window is tokenized while one is encoded.

    Args:
        model: A calibrated or a plain model.
        texts: The texts.
        task: "document" encodes as ``model.encode_document`` does, "query" as ``model.encode_query``, and None as
            ``model.encode`` without a task.
        prompt: What is put before every text; None for the model's own prompt for the task.
        batch_size: The most texts of a forward pass; None for no limit.
        tokens_per_batch: The most tokens of a forward pass, padding included; None is 4096 on a CPU and 16384
            elsewhere. A batch that runs out of memory is halved and tried again, and later batches are as small.
        normalize: Whether vectors are scaled to unit length, so that the dot product is the cosine; None does so if
            the model's similarity is the cosine.
        strength: Overrides the strength of a calibrated model's settings; it has no effect on queries.
        show_progress_bar: Whether to show a bar with texts per second.
        names: What errors call the texts, such as their docnos; None for their indices.

    Returns:
        float32 vectors of shape (n, D), in the order of the texts.

    Raises:
        TypeError: A text is not a string, or a setting has the wrong type.
        ValueError: A text is missing or has a lone surrogate, a setting is out of range, or a vector has NaN or
            infinite values.
        MemoryError: A text does not fit into memory by itself.
    """
    encoder = TextEncoder(
        model,
        task=task,
        prompt=prompt,
        batch_size=batch_size,
        tokens_per_batch=tokens_per_batch,
        normalize=normalize,
        strength=strength,
    )
    names = range(len(texts)) if names is None else names
    unit = "query" if task == "query" else "doc"
    with tqdm(total=len(texts), desc="Encoding", unit=unit, smoothing=0, disable=not show_progress_bar) as bar:
        if len(texts) <= WINDOW:  # no other thread is needed
            return encoder.encode(encoder.prepare(texts, names), progress=bar.update)
        check_texts(texts, names)  # all of them before any is encoded
        windows = cut_windows(zip(names, texts, strict=True), WINDOW)
        return np.concatenate([vectors for _, vectors in encode_windows(encoder, windows, progress=bar.update)])
