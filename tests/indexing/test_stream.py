"""Streams of documents: windows, reading ahead, several processes, the bar."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from fair_calibration import FairConfig, FairSentenceTransformer, calibrate
from fair_indexing import stream
from fair_indexing.pool import PoolEncoder
from fair_indexing.stream import encode_stream
from fair_indexing.text_encoder import TextEncoder
from tests.core.tiny_models import documents

TEXTS = documents([50, 3, 12, 90, 64, 21, 1, 41, 200, 41])
RECORDS = [(f"d{i}", text) for i, text in enumerate(TEXTS)]
CONFIG = FairConfig(basket_size=8, strength=0.8)
TOLERANCE = 2e-6  # as in test_encoding


@pytest.fixture
def fair(tiny_model: Callable[..., SentenceTransformer]) -> FairSentenceTransformer:
    return calibrate(tiny_model(), CONFIG)


@pytest.mark.parametrize("window", [1, 3, 5, 10, 100])
def test_windows_in_order(fair: FairSentenceTransformer, window: int) -> None:
    windows = list(encode_stream(fair, iter(RECORDS), window=window, show_progress_bar=False))
    assert [docno for part in windows for docno in part.docnos] == [docno for docno, _ in RECORDS]
    assert {len(part.docnos) for part in windows[:-1]} <= {window}
    counts = fair.counts
    vectors = np.concatenate([part.vectors for part in windows])
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, fair.encode_document(TEXTS, normalize_embeddings=True), atol=TOLERANCE)
    assert fair.counts == counts.plus(counts)


def test_settings_are_handed_on(fair: FairSentenceTransformer) -> None:
    sizes: list[int] = []
    fair.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0]["input_ids"])))
    (part,) = encode_stream(
        fair, RECORDS, strength=0.3, normalize=False, batch_size=4, tokens_per_batch=10_000, show_progress_bar=False
    )
    assert sizes == [4, 4, 2]
    np.testing.assert_allclose(part.vectors, fair.encode_document(TEXTS, strength=0.3), atol=1e-5)


def test_no_documents(fair: FairSentenceTransformer) -> None:
    assert list(encode_stream(fair, [], show_progress_bar=False)) == []


def test_windows_of_very_long_documents_are_shorter(
    fair: FairSentenceTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_WINDOW_CHARACTERS", 300)
    parts = [part.docnos for part in encode_stream(fair, RECORDS, show_progress_bar=False)]
    assert len(parts) > 2
    assert [docno for docnos in parts for docno in docnos] == [docno for docno, _ in RECORDS]
    for docnos in parts:
        lengths = [len(TEXTS[int(docno[1:])]) for docno in docnos]
        assert sum(lengths[:-1]) < 300


def test_one_window_is_read_ahead_and_tokenized_by_another_thread(
    fair: FairSentenceTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    readers: set[threading.Thread] = set()
    tokenizers: list[threading.Thread] = []
    prepare = TextEncoder.prepare

    def records() -> Iterator[tuple[str, str]]:
        for docno, text in RECORDS:
            read.append(docno)
            readers.add(threading.current_thread())
            yield docno, text

    def recorded(self: TextEncoder, *args: Any) -> Any:
        tokenizers.append(threading.current_thread())
        return prepare(self, *args)

    monkeypatch.setattr(TextEncoder, "prepare", recorded)
    parts = encode_stream(fair, records(), window=2, show_progress_bar=False)
    assert read == []
    next(parts)
    assert len(read) == 4
    next(parts)
    assert len(read) == 6
    list(parts)
    assert readers == {threading.current_thread()}
    assert len(tokenizers) == len(RECORDS) / 2
    assert readers.isdisjoint(tokenizers)


def test_no_idle_thread_keeps_openmp_threads_while_a_window_is_encoded(
    fair: FairSentenceTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers: list[threading.Thread] = []
    n_encoded = 0
    prepare, encode = TextEncoder.prepare, TextEncoder.encode

    def recorded(self: TextEncoder, *args: Any) -> Any:
        tokenizers.append(threading.current_thread())
        return prepare(self, *args)

    def watched(self: TextEncoder, *args: Any, **settings: Any) -> Any:
        nonlocal n_encoded
        for thread in tokenizers:
            thread.join()  # it ends, however long the machine takes
        n_encoded += 1
        return encode(self, *args, **settings)

    monkeypatch.setattr(TextEncoder, "prepare", recorded)
    monkeypatch.setattr(TextEncoder, "encode", watched)
    list(encode_stream(fair, RECORDS, window=4, show_progress_bar=False))
    assert n_encoded == len(tokenizers) == 3


def test_a_stream_that_is_left_ends_its_thread(fair: FairSentenceTransformer) -> None:
    before = threading.active_count()
    parts = encode_stream(fair, RECORDS, window=2, show_progress_bar=False)
    next(parts)
    parts.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


# Errors


def test_errors_name_the_docno(fair: FairSentenceTransformer) -> None:
    parts = encode_stream(fair, [*RECORDS[:3], ("bad", None)], window=2, show_progress_bar=False)  # type: ignore[list-item]
    assert next(parts).docnos == ["d0", "d1"]
    with pytest.raises(ValueError, match=re.escape("texts: 1 of 2 texts are missing (document 'bad')")):
        next(parts)


def test_an_error_of_the_source_passes(fair: FairSentenceTransformer) -> None:
    def records() -> Iterator[tuple[str, str]]:
        yield from RECORDS[:3]
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        list(encode_stream(fair, records(), window=2, show_progress_bar=False))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"window": 0}, "window: expected an integer of at least 1, got 0"),
        ({"tokens_per_batch": 0}, "tokens_per_batch: expected an integer of at least 1, got 0"),
        ({"devices": "cuda:0"}, "devices: expected a list such as ['cuda:0', 'cuda:1'], got 'cuda:0'"),
        (
            {"devices": ["cpu", "cuda:99"]},
            "devices: expected devices of this machine, such as 'cpu' or 'cuda:0', got 'cuda:99' (there are",
        ),
        ({"devices": ["gpu"]}, "such as 'cpu' or 'cuda:0', got 'gpu' (Expected one of cpu"),
        ({"devices": []}, "devices: expected a list such as ['cuda:0', 'cuda:1'], got []"),
    ],
)
def test_settings_out_of_range(fair: FairSentenceTransformer, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        encode_stream(fair, RECORDS, **settings)


# The bar


@pytest.mark.parametrize(
    ("sized", "total", "shown"), [(True, None, "10/10"), (False, 10, "10/10"), (False, None, "10doc")]
)
def test_the_bar(
    fair: FairSentenceTransformer, sized: bool, total: int | None, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    list(encode_stream(fair, RECORDS if sized else iter(RECORDS), window=4, total=total))
    bar = capsys.readouterr().err
    assert shown in bar
    assert "doc/s" in bar
    list(encode_stream(fair, RECORDS, show_progress_bar=False))
    assert capsys.readouterr().err == ""


# Several processes


def test_two_processes(fair: FairSentenceTransformer) -> None:
    expected = fair.encode_document(TEXTS, strength=0.3, normalize_embeddings=True)
    counts = fair.counts
    parts = list(
        encode_stream(
            fair,
            iter(RECORDS),
            window=6,
            strength=0.3,
            tokens_per_batch=256,
            devices=["cpu", "cpu"],
            show_progress_bar=False,
        )
    )
    assert [docno for part in parts for docno in part.docnos] == [docno for docno, _ in RECORDS]
    np.testing.assert_allclose(np.concatenate([part.vectors for part in parts]), expected, atol=TOLERANCE)
    assert fair.counts == counts.plus(counts)
    assert np.array_equal(fair.encode_document(TEXTS, strength=0.3, normalize_embeddings=True), expected)


class Pool(PoolEncoder):
    """Records the batch sizes it is given, and lets those above some number of documents run out of memory."""

    def __init__(self, model: SentenceTransformer, *, fits: int, **settings: Any) -> None:
        self.sizes: list[tuple[int, int]] = []
        encode_document = model.encode_document

        def encode(texts: list[str], *, pool: object, batch_size: int, chunk_size: int, **kwargs: Any) -> Any:
            assert pool == "pool"
            assert chunk_size >= batch_size
            self.sizes.append((len(texts), batch_size))
            vectors = encode_document(texts, batch_size=batch_size, **kwargs)
            if batch_size > fits:
                raise RuntimeError("CUDA out of memory")
            return vectors

        model.start_multi_process_pool = lambda _: "pool"  # type: ignore[method-assign]
        model.stop_multi_process_pool = lambda _: None  # type: ignore[method-assign]
        super().__init__(model, ["cpu", "cpu"], **settings)
        model.encode_document = encode  # type: ignore[method-assign, assignment]


def test_documents_of_like_length_are_sent_together(fair: FairSentenceTransformer) -> None:
    texts = documents([100] * 4 + [10] * 9)
    expected = fair.encode_document(texts, normalize_embeddings=True)
    counts = fair.counts
    with Pool(fair, fits=99, tokens_per_batch=256) as pool:
        vectors = pool.encode(pool.prepare(texts))
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)
    assert pool.sizes == [(4, 2), (9, 9)]
    assert fair.counts == counts.plus(counts)


def test_memory_that_ends_in_a_process(fair: FairSentenceTransformer) -> None:
    texts = documents([100] * 4 + [10] * 9)
    expected = fair.encode_document(texts, normalize_embeddings=True)
    counts = fair.counts
    with Pool(fair, fits=1, tokens_per_batch=256) as pool:
        vectors = pool.encode(pool.prepare(texts))
        np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)
        assert fair.counts == counts.plus(counts)  # and not those that failed
        assert pool.sizes[:2] == [(4, 2), (4, 1)]
        assert pool.sizes[-1] == (9, 1)


def test_a_document_that_does_not_fit_into_a_process(fair: FairSentenceTransformer) -> None:
    text = "one of the texts 'a', 'b' (about 126 tokens) does not fit into memory by itself"
    with Pool(fair, fits=0, tokens_per_batch=256) as pool, pytest.raises(MemoryError, match=re.escape(text)):
        pool.encode(pool.prepare(documents([100, 100]), ["a", "b"]))


def test_a_plain_model(tiny_model: Callable[..., SentenceTransformer]) -> None:
    model = tiny_model()
    (part,) = encode_stream(model, RECORDS, show_progress_bar=False)
    np.testing.assert_allclose(part.vectors, model.encode_document(TEXTS, normalize_embeddings=True), atol=TOLERANCE)
