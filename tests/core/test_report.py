from __future__ import annotations

import copy
import logging
import pickle
import threading

import pytest

from fair_calibration import DocumentCounts, FairConfig, Summary
from fair_calibration.report import DocumentCounter


def test_counts() -> None:
    counts = DocumentCounts(calibrated=5, too_short=2, plain=1, truncated=3)
    assert counts.documents == 8
    assert counts.plus(DocumentCounts(1, 1, 1, 1)) == (6, 3, 2, 4, 0)
    assert DocumentCounts() == (0, 0, 0, 0, 0)


def test_counter_adds_and_starts_again() -> None:
    counter = DocumentCounter()
    counter.add(DocumentCounts(calibrated=2), max_seq_length=9)
    counter.add(DocumentCounts(too_short=1, plain=4), max_seq_length=9)
    assert counter.counts == DocumentCounts(2, 1, 4, 0)
    assert counter.take() == DocumentCounts(2, 1, 4, 0)
    assert counter.counts == counter.take() == DocumentCounts()


def test_counter_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    counter = DocumentCounter()
    with caplog.at_level(logging.WARNING, "fair_calibration"):
        counter.add(DocumentCounts(calibrated=1), max_seq_length=256)
        assert not caplog.records
        for _ in range(3):
            counter.add(DocumentCounts(calibrated=1, truncated=1), max_seq_length=256)
            counter.add(DocumentCounts(truncated_queries=1), max_seq_length=256)
        counter.take()
        counter.add(DocumentCounts(calibrated=1, truncated=1, truncated_queries=1), max_seq_length=512)
    assert [record.getMessage() for record in caplog.records] == [
        "Documents are truncated at max_seq_length=256 tokens, and what is cut off cannot be found. Raise "
        "max_seq_length if the model allows it; model.counts.truncated is their number. This warning is shown once.",
        "Queries are truncated at max_seq_length=256 tokens, and what is cut off is not searched for. Raise "
        "max_seq_length if the model allows it; model.counts.truncated_queries is their number. This warning is shown "
        "once.",
    ]


def test_muted_counter_counts(caplog: pytest.LogCaptureFixture) -> None:
    counter = DocumentCounter()
    counter.mute()
    counter.add(DocumentCounts(truncated=1, truncated_queries=2), max_seq_length=256)
    assert counter.counts == DocumentCounts(truncated=1, truncated_queries=2)
    assert not caplog.records


def test_counter_of_many_threads() -> None:
    counter = DocumentCounter()

    def add() -> None:
        for _ in range(2000):
            counter.add(DocumentCounts(1, 2, 3, 0), max_seq_length=None)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.counts == DocumentCounts(8000, 16000, 24000, 0)


def test_copies_start_from_zero() -> None:
    counter = DocumentCounter()
    counter.add(DocumentCounts(calibrated=2), max_seq_length=9)
    for other in (copy.deepcopy(counter), pickle.loads(pickle.dumps(counter))):
        assert other.counts == DocumentCounts()
        other.add(DocumentCounts(calibrated=1), max_seq_length=9)
        assert other.counts.calibrated == 1
    assert counter.counts.calibrated == 2


def make_summary(layers: tuple[int, ...] = (3, 4, 5), **settings: object) -> Summary:
    config = FairConfig(**{"pooling": "cls", "isolate": "bos", **settings})  # type: ignore[arg-type]
    return Summary(
        model="BertModel",
        config=config,
        n_layers=6,
        layers=layers,
        modules=("BertSelfAttention",) * len(layers),
        mechanism="transformers AttentionInterface, on top of sdpa",
        counts=DocumentCounts(calibrated=7, too_short=2, plain=1, truncated=4),
        max_seq_length=512,
    )


def test_summary() -> None:
    assert str(make_summary()).splitlines() == [
        "BertModel: strength 0.5, baskets of 128 tokens",
        "  layers     3-5 of 6 (BertSelfAttention)",
        "  rows       the first token's row (cls pooling)",
        "  isolated   the first token, keeping its own share",
        "  mechanism  transformers AttentionInterface, on top of sdpa",
        "  documents  10: 7 calibrated, 2 too short (under 128 content tokens), 1 plain; 4 truncated at 512 tokens",
    ]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"pooling": "last", "isolate": "bos_eos"}, "the last token's row (last-token pooling)"),
        ({"pooling": "last", "isolate": "bos_eos"}, "isolated   the first and the last token, keeping its own share"),
        ({"pooling": "mean", "isolate": "none"}, "every row (mean pooling)"),
        ({"pooling": "mean", "isolate": "none"}, "isolated   no token\n"),
        ({"isolated_share": "equal"}, "the first token, keeping a basket's share"),
        ({"isolated_share": 0.25}, "the first token, keeping the share 0.25"),
        ({"last_basket": "proportional"}, "keeping its own share; baskets weigh by size"),
        ({"basket_size": 64, "strength": 1}, "strength 1.0, baskets of 64 tokens"),
        ({"last_basket": "halves"}, "baskets of 128 tokens, or two halves\n"),
        ({"min_content": 7}, "(under 7 content tokens)"),
    ],
)
def test_summary_of_settings(settings: dict[str, object], text: str) -> None:
    assert text in str(make_summary(**settings))


@pytest.mark.parametrize(
    ("layers", "text"),
    [((5,), "5 of 6"), ((0, 1, 2, 5), "0-2, 5 of 6"), ((1, 3, 4), "1, 3-4 of 6"), ((0, 2, 4), "0, 2, 4 of 6")],
)
def test_summary_of_layers(layers: tuple[int, ...], text: str) -> None:
    assert f"  layers     {text} (" in str(make_summary(layers))
