from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError, replace
from math import log2, sqrt
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from fair_calibration import EvenChunks, FairConfig, FairSentenceTransformer, calibrate
from fair_evaluation.position_collections import build_collections, load_passages
from fair_evaluation.tuning import Tuning, TuningCounts, tune
from tests.conftest import TinyModel
from tests.core.tiny_models import WORDS, documents

Array = NDArray[np.float64]
N_TEXTS = 8
LOST = 1 / log2(1 + N_TEXTS)  # nDCG of a text that all others come before

# A stand-in for an encoder. Segment s of text t says nothing but word number t * P + s. A document's vector has, for
# each word, the weight of its position, and a 1 that marks the text. A query's similarity to its own text is so that
# weight, and to every other text 0.5: the text comes first where the weight is greater, and else last.


def marked_texts(n_positions: int, n_words: int = 16) -> list[str]:
    return [
        " ".join(WORDS[t * n_positions + s] for s in range(n_positions) for _ in range(n_words)) for t in range(N_TEXTS)
    ]


Weights = Callable[[int, float], Sequence[float]]


@pytest.fixture
def stand_in(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SentenceTransformer]:
    """Returns a function that gives a model whose documents are encoded by weights (text, strength) -> by position."""

    def prepare(weights: Weights | Mapping[float, Sequence[float]], n_positions: int) -> SentenceTransformer:
        size = N_TEXTS * n_positions
        weigh = weights if callable(weights) else lambda _, strength: weights[strength]

        def encode_document(_: object, texts: list[str], *, strength: float, **__: Any) -> Array:
            vectors = np.zeros((len(texts), size + N_TEXTS))
            for vector, text in zip(vectors, texts, strict=True):
                words = [WORDS.index(word) for word in dict.fromkeys(text.split())]
                vector[words] = weigh(words[0] // n_positions, strength)
                vector[size + words[0] // n_positions] = 1
            return vectors

        def encode_query(_: object, texts: list[str], **__: Any) -> Array:
            vectors = np.zeros((len(texts), size + N_TEXTS))
            vectors[:, size:] = 0.5
            for vector, text in zip(vectors, texts, strict=True):
                word = WORDS.index(text.split()[0])
                vector[word], vector[size + word // n_positions] = 1, 0
            return vectors

        monkeypatch.setattr(FairSentenceTransformer, "encode_document", encode_document)
        monkeypatch.setattr(FairSentenceTransformer, "encode_query", encode_query)
        model = tiny_model("bert", "mean")
        model.similarity_fn_name = "dot"  # type: ignore[assignment]
        return calibrate(model, FairConfig(basket_size=16, last_basket="proportional"))

    return prepare


def run(model: SentenceTransformer, texts: Sequence[str], **settings: Any) -> Tuning:
    return tune(model, texts, **{"show_progress_bar": False, **settings})


def test_the_best_strength_by_hand(stand_in: Callable[..., SentenceTransformer]) -> None:
    model = stand_in({0: [1, 1, 1, 0], 0.5: [1, 1, 1, 1], 1: [1, 1, 0, 0]}, 4)
    found = run(model, marked_texts(4), strengths=[1, 0.5])
    assert found.config == FairConfig(strength=0.5, basket_size=16, last_basket="proportional")
    curve = found.curve
    assert list(curve["strength"]) == [0, 1, 0.5]
    assert list(curve["chosen"]) == [False, False, True]
    # Harmonic means of (1, 1, 1, LOST), (1, 1, LOST, LOST) and (1, 1, 1, 1).
    scores = [4 / (3 + log2(9)), 4 / (2 + 2 * log2(9)), 1]
    assert list(curve["score"]) == pytest.approx(scores)
    assert list(curve["behind"]) == pytest.approx([1 - score for score in scores])
    assert list(curve["mean"]) == pytest.approx([(3 + LOST) / 4, (2 + 2 * LOST) / 4, 1])
    assert list(curve["psi"]) == pytest.approx([1 - LOST, 1 - LOST, 0])
    assert curve.filter(like="at_").to_numpy() == pytest.approx(
        np.array([[1, 1, 1, LOST], [1, 1, LOST, LOST], [1, 1, 1, 1]])
    )
    # (1, 1, 1, 0, mark) against (1, 1, 0, 0, mark) and (1, 1, 1, 1, mark).
    assert list(curve["cosine"]) == pytest.approx([1, 3 / (2 * sqrt(3)), 4 / (2 * sqrt(5))])
    assert list(curve["error"]) == pytest.approx([0, 0, 0], abs=1e-7)  # all texts are alike
    assert found.counts == TuningCounts(texts=8, examined=8, too_short=0, used=8, truncated=0, queries=32)
    with pytest.raises(FrozenInstanceError):
        found.seed = 1  # type: ignore[attr-defined]


def test_ties_are_settled_in_favour_of_the_settings_in_use_and_then_of_the_plain_model(
    stand_in: Callable[..., SentenceTransformer],
) -> None:
    # Found at both strengths alike, but only the cosine with (1, .4) says which is closer.
    tied = stand_in({0: [1, 0.4], 0.6: [1, 0.6], 1: [1, 1]}, 2)
    assert run(tied, marked_texts(2, 32), strengths=[1, 0.6], n_positions=2).config.strength == 0.6
    flat = stand_in({0: [1, 0.6], 0.5: [1, 0.8], 0.6: [1, 0.8], 1: [1, 1]}, 2)
    found = run(flat, marked_texts(2, 32), n_positions=2, strengths=[1, 0.5])
    assert found.config.strength == 0.5  # the settings in use
    assert list(found.curve["score"]) == [1, 1, 1]
    assert run(flat, marked_texts(2, 32), n_positions=2, strengths=[0.6, 1]).config.strength == 0
    nothing = stand_in({0: [0, 0], 1: [0, 0]}, 2)
    assert run(nothing, marked_texts(2, 32), n_positions=2, strengths=[1]).config.strength == 0


@pytest.mark.parametrize(("gained", "lost", "chosen"), [({0, 1}, set(), 1), ({0, 1}, {2}, 0), ({0, 1, 2, 3}, {4}, 1)])
def test_the_standard_error(
    gained: set[int], lost: set[int], chosen: float, stand_in: Callable[..., SentenceTransformer]
) -> None:
    def weights(text: int, strength: float) -> list[float]:
        return [1, text in gained] if strength else [1, text in lost]

    found = run(stand_in(weights, 2), marked_texts(2, 32), n_positions=2, strengths=[1])
    assert found.config.strength == chosen
    plain, fair = (np.array([1 if t in texts else LOST for t in range(N_TEXTS)]) for texts in (lost, gained))

    def difference(texts: list[int]) -> float:
        a, b = plain[texts].mean(), fair[texts].mean()
        return float(2 / (1 + 1 / b) - 2 / (1 + 1 / a))

    rest = np.array([difference([t for t in range(N_TEXTS) if t != left_out]) for left_out in range(N_TEXTS)])
    error = sqrt((N_TEXTS - 1) / N_TEXTS * ((rest - rest.mean()) ** 2).sum())
    assert list(found.curve["error"]) == pytest.approx([error, 0], abs=1e-7)
    assert list(found.curve["behind"]) == pytest.approx([difference(list(range(N_TEXTS))), 0])
    assert (found.curve["behind"][0] > error) == bool(chosen)


def test_against_encoding_one_by_one(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    config = FairConfig(basket_size=8, isolate="bos")
    texts = documents([112] * 8)  # words are tokens: two segments of 56, each of two pieces of 28
    found = run(calibrate(plain, config), texts, strengths=[0.3, 1], n_positions=2)
    words = [np.array(text.split()).reshape(4, 28) for text in texts]
    queries = [[plain.encode_query(" ".join(piece)).astype(np.float64) for piece in of_text] for of_text in words]
    for row in found.curve.to_dict("records"):
        model = calibrate(plain, replace(config, strength=row["strength"]))
        ndcg, cosines = np.zeros(2), []
        for order in ([0, 1, 2, 3], [2, 3, 0, 1]):
            joined = [" ".join(of_text[order].ravel()) for of_text in words]
            vectors = np.stack([model.encode_document(text).astype(np.float64) for text in joined])
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            for t, vector in enumerate(vectors):
                of_plain = plain.encode_document(joined[t]).astype(np.float64)
                cosines.append(vector @ of_plain / np.linalg.norm(of_plain))
                for place, piece in enumerate(order):
                    similarities = vectors @ queries[t][piece]
                    n_before = (similarities > similarities[t]).sum()
                    ndcg[place // 2] += 1 / log2(2 + n_before) / (8 * 2 * 2)
        assert [row["at_0"], row["at_1"]] == pytest.approx(ndcg, abs=1e-6)
        assert row["score"] == pytest.approx(2 / (1 / ndcg).sum(), abs=1e-6)
        assert row["cosine"] == pytest.approx(np.mean(cosines), abs=1e-6)
    assert list(found.curve["strength"]) == [0, 0.3, 1]


def test_what_is_encoded(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def count(name: str) -> None:
        encode = getattr(FairSentenceTransformer, name)

        def counting(self: object, texts: list[str], **settings: Any) -> Array:
            calls.append((name, len(texts)))
            return encode(self, texts, **settings)  # type: ignore[no-any-return]

        monkeypatch.setattr(FairSentenceTransformer, name, counting)

    count("encode_query")
    count("encode_document")
    plain = tiny_model("qwen3", "lasttoken")
    model = calibrate(plain, FairConfig(strength=0.3, basket_size=8))
    found = run(model, documents([64] * 8), strengths=[0, 0.5, 1], basket_sizes=[8, 16], n_positions=2)
    assert len(found.curve) == 1 + 2 * 2
    assert [n for name, n in calls if name == "encode_query"] == [found.counts.queries]
    assert sum(n for name, n in calls if name == "encode_document") == 5 * 8 * 2
    assert model.fair_config == FairConfig(strength=0.3, basket_size=8)
    assert model.counts.documents == 0
    assert not found.curve.isna().any(axis=None)
    assert found.curve["basket_size"].tolist() == [8, 8, 8, 16, 16]
    assert isinstance(found.config, FairConfig)


def test_texts_left_out_or_cut_are_counted(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("bert", "mean")  # at most 128 tokens, four of them special or of the prompt
    lengths: list[int] = []
    encode = FairSentenceTransformer.encode_document

    def encode_document(self: FairSentenceTransformer, texts: list[str], **settings: Any) -> Array:
        lengths.extend(len(text.split()) for text in texts)
        return encode(self, texts, **settings)  # type: ignore[no-any-return]

    monkeypatch.setattr(FairSentenceTransformer, "encode_document", encode_document)
    settings: dict[str, Any] = {"strengths": [1], "basket_sizes": [40], "n_positions": 2}
    texts = [*documents([40, 60, 80, 100, 120, 122, 123, 300]), *documents([39, 0]), documents([40])[0]]
    found = run(model, texts, **settings)
    counts = TuningCounts(texts=10, examined=10, too_short=2, used=8, truncated=2, queries=found.counts.queries)
    assert found.counts == counts
    assert max(lengths) == 122  # 128 less 4, and less 2 for what may be added
    assert "8 of 10 texts" in str(found)
    assert "10 examined, 2 too short. 2 of the texts used are longer than the model reads and were cut" in str(found)
    assert run(model, documents([60] * 20), max_texts=9, **settings).counts[:4] == (20, 9, 0, 9)
    with pytest.raises(
        ValueError, match=r"at least 8 different ones of at least 41 tokens within what the model reads \(122 t"
    ):
        run(model, texts, **{**settings, "basket_sizes": [10, 41]})
    with pytest.raises(
        ValueError, match=r"at least 8 different ones of at least 48 tokens .* got 6, and 9 that are too short"
    ):
        run(model, documents([47] * 9 + [48] * 6), **{**settings, "basket_sizes": [8], "n_positions": 3})


def test_a_model_without_a_limit(tiny_model: TinyModel) -> None:
    model = tiny_model("bert", "mean")
    model.max_seq_length = 10**30  # as of tokenizers without one
    found = run(model, documents([100] * 8), strengths=[1], basket_sizes=[16], n_positions=2)
    assert found.counts.truncated == 0


def test_seeds(tiny_model: TinyModel) -> None:
    def curve(seed: int) -> pd.DataFrame:
        texts = documents([64] * 12)
        settings: dict[str, Any] = {"strengths": [1], "basket_sizes": [8], "n_positions": 2, "max_texts": 8}
        return run(tiny_model("bert", "mean"), texts, seed=seed, **settings).curve

    pd.testing.assert_frame_equal(curve(0), curve(0))
    assert not curve(0).equals(curve(1))


def test_the_text(stand_in: Callable[..., SentenceTransformer]) -> None:
    text = str(run(stand_in({0: [1, 0], 0.5: [1, 1]}, 2), marked_texts(2, 32), strengths=[0.5], n_positions=2))
    assert text.startswith("Chosen: strength 0.5, basket_size 16. The settings in use are kept")
    assert "8 of 8 texts, 16 pieces of them as queries; 8 examined, 0 too short. 0 of the texts" in text
    assert text.splitlines()[-1].split()[2:] == ["1.000", "1.000", "0.000", "0.000", "0.000", "0.816"]


def test_the_bar(tiny_model: TinyModel, capfd: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"strengths": [1], "basket_sizes": [8], "n_positions": 2}
    model, texts = tiny_model("bert", "mean"), documents([64] * 8)
    capfd.readouterr()
    run(model, texts, **settings)
    assert capfd.readouterr() == ("", "")
    tune(model, texts, **settings)
    assert "32/32" in capfd.readouterr().err


@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_broken_vectors(value: float, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode_document(_: object, texts: list[str], **__: Any) -> Array:
        vectors = np.ones((len(texts), 32))
        vectors[1] = value
        return vectors

    monkeypatch.setattr(FairSentenceTransformer, "encode_document", encode_document)
    with pytest.raises(ValueError, match="model: 1 of 8 vectors are zero or not finite, the first of"):
        run(tiny_model("bert", "mean"), documents([64] * 8), basket_sizes=[8], n_positions=2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n_positions": 1}, ValueError, "n_positions: expected at least 2, got 1"),
        ({"n_positions": 2.0}, TypeError, "n_positions: expected an integer"),
        ({"max_texts": 7}, ValueError, "max_texts: expected at least 8, got 7"),
        ({"batch_size": 0}, ValueError, "batch_size: expected an integer of at least 1, got 0"),
        ({"strengths": 0.5}, TypeError, "strengths: expected a list of values to try, got 0.5"),
        ({"basket_sizes": "8"}, TypeError, "basket_sizes: expected a list of values to try, got '8'"),
        ({"strengths": [0.5, 2]}, ValueError, r"strength: expected a number in \[0, 1\], got 2"),
        ({"strengths": [0]}, ValueError, "strengths: expected one above 0"),
        ({"basket_sizes": []}, ValueError, "strengths: expected one above 0, and at least one of basket_sizes"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str, tiny_model: TinyModel) -> None:
    with pytest.raises(error, match=message):
        run(tiny_model("bert", "mean"), documents([64] * 8), **{"basket_sizes": [8], "n_positions": 2, **arguments})


def test_a_model_in_even_chunks(tiny_model: TinyModel) -> None:
    with pytest.raises(TypeError, match="model: it encodes documents in even chunks"):
        tune(calibrate(tiny_model(), EvenChunks(chunk_size=32, unit_size=16)), documents([60] * 9))


def test_one_string(tiny_model: TinyModel) -> None:
    with pytest.raises(TypeError, match="texts: expected an iterable of strings, got one string"):
        run(tiny_model("bert", "mean"), "one")


def test_minilm(minilm: SentenceTransformer) -> None:
    texts = [d["text"] for d in build_collections(load_passages())[0].documents]
    found = run(calibrate(minilm, FairConfig(isolate="bos")), texts, strengths=[1], n_positions=2, max_texts=8)
    plain, fair = found.curve.to_dict("records")
    # The end is found less often by the plain model, and calibration mends it.
    assert plain["at_1"] < plain["at_0"] - 0.02
    assert fair["at_1"] > plain["at_1"] + 0.02
    assert found.config == FairConfig(strength=1, isolate="bos")
