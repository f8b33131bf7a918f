from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from fair_calibration import FairConfig, calibrate
from fair_evaluation.cutting import rotated_orders
from fair_evaluation.position_collections import build_collections, load_passages
from fair_evaluation.reflection import Reflection, ReflectionCounts, segment_reflection
from tests.conftest import TinyModel
from tests.core.tiny_models import WORDS, documents

Array = NDArray[np.float64]


def similarities(reflection: Reflection, by: str) -> list[float]:
    frame = reflection.frame
    return list(frame.loc[frame["by"] == by, "similarity"])


def marked_documents(n_documents: int, n_segments: int, n_words: int = 16) -> list[str]:
    """Returns documents whose segment s says nothing but word number s."""
    return [" ".join(WORDS[s] for s in range(n_segments) for _ in range(n_words)) for _ in range(n_documents)]


def encode_by(position_weights: Sequence[float], content_weights: Sequence[float]) -> Callable[..., Array]:
    """Stands in for an encoder: a dimension per segment, weighted by where the segment stands and by what it says."""

    def encode_document(texts: list[str], **_: Any) -> Array:
        vectors = np.zeros((len(texts), len(content_weights)))
        for vector, text in zip(vectors, texts, strict=True):
            for position, word in enumerate(dict.fromkeys(text.split())):
                segment = WORDS.index(word)
                vector[segment] = position_weights[position] * content_weights[segment]
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return encode_document


def test_a_position_effect_by_hand(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(model, "encode_document", encode_by([2, 2, 1], [1, 1, 1]))
    found = segment_reflection(model, marked_documents(4, 3), n_segments=3, show_progress_bar=False)
    # (2, 2, 1) / 3 at the positions; each segment stands once at each, so content has their mean.
    assert similarities(found, "as_written") == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert similarities(found, "position") == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert similarities(found, "content") == pytest.approx([5 / 9] * 3)
    # Least squares over (0, 2/3), (1/2, 2/3), (1, 1/3).
    assert found.summary.slope == pytest.approx(-1 / 3)
    assert found.summary.max_min == pytest.approx(1 / 3)
    assert found.summary.spread == pytest.approx(np.sqrt(2) / 9)
    # All documents are alike.
    assert (found.summary.slope_low, found.summary.slope_high) == pytest.approx((-1 / 3, -1 / 3))
    np.testing.assert_allclose(found.frame["low"], found.frame["similarity"])
    np.testing.assert_allclose(found.frame["high"], found.frame["similarity"])
    assert found.counts == ReflectionCounts(documents=4, measured=4, too_short=0, truncated=0)


def test_a_content_effect_is_no_position_effect(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(model, "encode_document", encode_by([1, 1, 1], [2, 2, 1]))
    found = segment_reflection(model, marked_documents(4, 3), n_segments=3, show_progress_bar=False)
    # As written, it looks like one of position.
    assert similarities(found, "as_written") == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert similarities(found, "content") == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert similarities(found, "position") == pytest.approx([5 / 9] * 3)
    assert found.summary == pytest.approx((0,) * 5, abs=1e-12)


@pytest.mark.parametrize("strength", [None, 0.9])
def test_against_encoding_one_by_one(strength: float | None, tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    model = calibrate(plain, FairConfig(basket_size=8, strength=0.3))
    texts = documents([48, 40, 80])  # words are tokens: segments of 12, 10 and 20, long enough to be calibrated
    settings: dict[str, Any] = {} if strength is None else {"strength": strength}
    found = segment_reflection(
        model,
        texts,
        n_segments=4,
        min_tokens=10,
        seed=5,
        batch_size=2,
        show_progress_bar=False,
        **settings,
    )
    by_position, by_content = np.zeros((3, 4)), np.zeros((3, 4))
    for d, text in enumerate(texts):
        words = np.array(text.split()).reshape(4, -1)
        orders = rotated_orders(4)
        for order in orders:
            document = model.encode_document(" ".join(words[order].ravel()), **settings).astype(np.float64)
            for position, segment in enumerate(order):
                alone = plain.encode_document(" ".join(words[segment])).astype(np.float64)
                cosine = document @ alone / np.linalg.norm(document) / np.linalg.norm(alone)
                by_position[d, position] += cosine / len(orders)
                by_content[d, segment] += cosine / len(orders)
    np.testing.assert_allclose(similarities(found, "position"), by_position.mean(0), atol=1e-6)
    np.testing.assert_allclose(similarities(found, "content"), by_content.mean(0), atol=1e-6)
    assert found.summary.slope == pytest.approx(np.polyfit([0, 1 / 3, 2 / 3, 1], by_position.mean(0), 1)[0], abs=1e-6)
    assert found.summary.max_min == pytest.approx(np.ptp(by_position.mean(0)), abs=1e-6)
    assert found.summary.spread == pytest.approx(by_position.mean(0).std(), abs=1e-6)


def test_plain_and_calibrated_share_their_segments(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    texts = documents([60, 70])
    settings: dict[str, Any] = {"min_tokens": 4, "show_progress_bar": False}
    as_plain = segment_reflection(plain, texts, **settings)
    at_zero = segment_reflection(calibrate(plain, FairConfig(basket_size=8)), texts, strength=0, **settings)
    pd.testing.assert_frame_equal(as_plain.frame, at_zero.frame, atol=1e-9)


def test_the_frame(tiny_model: TinyModel) -> None:
    frame = segment_reflection(tiny_model(), documents([80] * 6), show_progress_bar=False).frame
    assert list(frame) == ["by", "position", "similarity", "low", "high", "documents"]
    assert frame["by"].tolist() == ["as_written"] * 4 + ["position"] * 4 + ["content"] * 4
    assert frame["position"].tolist() == [0, 1, 2, 3] * 3
    assert (frame["low"] < frame["similarity"]).all()
    assert (frame["similarity"] < frame["high"]).all()
    assert (frame["documents"] == 6).all()


def test_intervals_are_of_means_over_documents(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    rng = np.random.default_rng(1)
    cosines = rng.uniform(0.2, 0.8, size=60)

    def encode_document(texts: list[str], **_: Any) -> Array:
        if len(texts[0].split()) == 16:  # segments
            return np.tile([1.0, 0.0], (len(texts), 1))
        values = np.repeat(cosines[: len(texts) // 2], 2)
        return np.stack([values, np.sqrt(1 - values**2)], axis=1)

    monkeypatch.setattr(model, "encode_document", encode_document)
    texts, settings = documents([32] * 60), {"n_segments": 2, "batch_size": 60, "show_progress_bar": False}
    found = segment_reflection(model, texts, **settings)  # type: ignore[arg-type]
    error = 1.96 * cosines.std(ddof=1) / np.sqrt(60)
    row = found.frame.iloc[0]
    assert row["similarity"] == pytest.approx(cosines.mean())
    assert row["similarity"] - row["low"] == pytest.approx(error, rel=0.1)
    assert row["high"] - row["similarity"] == pytest.approx(error, rel=0.1)
    narrow = segment_reflection(model, texts, confidence=0.5, **settings)  # type: ignore[arg-type]
    assert narrow.frame.iloc[0]["low"] > row["low"]


def test_seeds(tiny_model: TinyModel) -> None:
    def run(seed: int) -> Reflection:
        return segment_reflection(tiny_model(), documents([80] * 9), seed=seed, show_progress_bar=False)

    assert run(0).frame.equals(run(0).frame)
    assert run(0).summary == run(0).summary
    assert run(0).summary.slope_low != run(1).summary.slope_low
    assert similarities(run(0), "position") == similarities(run(1), "position")


def test_documents_left_out_are_counted(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    model.max_seq_length = 104
    # 100 words with the prompt's two and two special tokens are just read whole.
    texts = documents([64, 63, 100, 101, 500, 0])
    counts = ReflectionCounts(documents=6, measured=2, too_short=2, truncated=2)
    found = segment_reflection(model, iter(texts), show_progress_bar=False)
    assert found.counts == counts
    assert (found.frame["documents"] == 2).all()
    assert caplog.messages == [
        "Segment reflection leaves documents out: 2 of 6 documents measured, 2 too short, 2 truncated"
    ]
    with pytest.raises(
        ValueError,
        match="at least two documents are needed that can be cut and are read whole, got 1 of 2 documents measured",
    ):
        segment_reflection(model, texts[1:3], show_progress_bar=False)


def test_the_bar(tiny_model: TinyModel, capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny_model()
    capfd.readouterr()
    segment_reflection(model, documents([64, 70]), show_progress_bar=False)
    assert capfd.readouterr() == ("", "")
    segment_reflection(model, documents([64, 70]))
    assert "reflection: 2doc" in capfd.readouterr().err


def test_broken_vectors(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()

    def encode_document(texts: list[str], **_: Any) -> Array:
        vectors = np.ones((len(texts), 2))
        vectors[1] = np.nan
        return vectors

    monkeypatch.setattr(model, "encode_document", encode_document)
    with pytest.raises(ValueError, match="model: 1 of 8 vectors are zero or not finite, the first of"):
        segment_reflection(model, documents([64, 70]), show_progress_bar=False)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n_segments": 1}, ValueError, "n_segments: expected at least 2, got 1"),
        ({"n_segments": 2.0}, TypeError, "n_segments: expected an integer"),
        ({"min_tokens": 0}, ValueError, "min_tokens: expected an integer of at least 1, got 0"),
        ({"batch_size": 0}, ValueError, "batch_size: expected an integer of at least 1, got 0"),
        ({"strength": 0.5}, ValueError, "strength: the model is plain; calibrate it first"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str, tiny_model: TinyModel) -> None:
    with pytest.raises(error, match=message):
        segment_reflection(tiny_model(), documents([64, 70]), show_progress_bar=False, **arguments)


def test_minilm(minilm: SentenceTransformer) -> None:
    texts = [d["text"] for d in build_collections(load_passages())[0].documents[:2]]
    plain, fair = (
        segment_reflection(model, texts, n_segments=3, show_progress_bar=False)
        for model in (minilm, calibrate(minilm, FairConfig(strength=1)))
    )
    # The plain vector reflects the beginning better than the end, whatever stands there; calibration levels it.
    assert plain.summary.slope_high < -0.1
    assert abs(fair.summary.slope) < 0.5 * abs(plain.summary.slope)
    assert fair.summary.max_min < 0.6 * plain.summary.max_min
