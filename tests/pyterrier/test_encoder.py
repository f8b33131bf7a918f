"""`FairBiEncoder` itself: where its model comes from, its settings, and the vectors it computes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pyterrier_dr import SimFn
from sentence_transformers import SentenceTransformer

import pyterrier_fair
from fair_calibration import DocumentCounts, EvenChunks, FairConfig, FairSentenceTransformer, calibrate
from fair_calibration.model_source import ModelNotFoundError
from pyterrier_fair import PRESETS, FairBiEncoder
from tests.conftest import TinyModel
from tests.core.families import load_refused
from tests.core.tiny_models import document, documents
from tests.pyterrier.conftest import QUERIES, TEXTS, MakeEncoder

CONFIG = FairConfig(basket_size=8, strength=0.8)
FAMILIES = [("bert", "cls"), ("xlm_roberta", "mean"), ("qwen3", "lasttoken")]


def differ(one: Any, other: Any) -> bool:
    return bool(np.abs(np.asarray(one) - np.asarray(other)).max() > 1e-3)


def test_public_names() -> None:
    for name in pyterrier_fair.__all__:
        assert getattr(pyterrier_fair, name).__doc__


# Where the model comes from


def test_a_name_a_path_and_a_loaded_model_give_the_same_vectors(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("bert", "mean")
    loaded = SentenceTransformer(str(folder), device="cpu")
    encoders = [FairBiEncoder(m, basket_size=8, strength=0.8) for m in (str(folder), folder, loaded)]
    expected = calibrate(loaded, CONFIG).encode_document(TEXTS, normalize_embeddings=True)
    for encoder in encoders:
        assert np.array_equal(encoder.encode_docs(TEXTS), expected)
        assert encoder.config == CONFIG
    assert [e.model for e in encoders] == [str(folder), folder, loaded]
    assert [e.model_name for e in encoders[:2]] == [str(folder)] * 2
    assert encoders[0] == encoders[1]


def test_a_loaded_model_stays_plain(tiny_model: TinyModel) -> None:
    model = tiny_model("bert", "cls")
    before = model.encode(TEXTS)
    encoder = FairBiEncoder(model, basket_size=8, strength=1.0, max_seq_length=40)
    fair = encoder.encode_docs(TEXTS)
    assert type(model) is SentenceTransformer
    assert model.max_seq_length == 128
    assert np.array_equal(model.encode(TEXTS), before)
    assert differ(fair, model.encode(TEXTS, normalize_embeddings=True))
    own = {id(p) for p in encoder.calibrated_model().parameters()}
    assert own == {id(p) for p in model.parameters()}  # one copy of the weights


def test_a_calibrated_model_keeps_its_settings(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model(), CONFIG)
    assert FairBiEncoder(fair).config == CONFIG
    encoder = FairBiEncoder(fair, strength=0.2, layers=1)
    assert encoder.config == FairConfig(basket_size=8, strength=0.2, layers=1)
    encoder.encode_docs(TEXTS)
    assert fair.fair_config == CONFIG
    assert fair.counts == DocumentCounts()


@pytest.fixture
def saved(tiny_model: TinyModel, tmp_path: Path) -> tuple[Path, FairConfig]:
    """Returns the folder of a saved calibrated model, and its settings."""
    config = FairConfig(basket_size=8, strength=0.8, layers=(1, 3), isolate="none", min_content=10)
    calibrate(tiny_model(), config).save(str(tmp_path / "saved"))
    return tmp_path / "saved", config


def test_a_saved_calibrated_model_keeps_its_settings(saved: tuple[Path, FairConfig], tiny_model: TinyModel) -> None:
    folder, config = saved
    encoder = FairBiEncoder(folder)
    assert encoder.config == config
    assert (encoder.strength, encoder.layers, encoder.min_content) == (0.8, (1, 3), 10)
    expected = calibrate(tiny_model(), config).encode_document(TEXTS, normalize_embeddings=True)
    assert np.array_equal(encoder.encode_docs(TEXTS), expected)


def test_explicit_settings_override_the_saved_ones(saved: tuple[Path, FairConfig], make_encoder: MakeEncoder) -> None:
    folder, _ = saved
    given = {"strength": 0.3, "basket_size": 16, "layers": 2, "isolate": "bos", "min_content": 5}
    encoder = FairBiEncoder(folder, **given)  # type: ignore[arg-type]
    assert encoder.config == FairConfig(**given)  # type: ignore[arg-type]
    assert np.array_equal(encoder.encode_docs(TEXTS), make_encoder(**given).encode_docs(TEXTS))
    assert FairBiEncoder(folder, strength=0.0).strength == 0.0


def test_a_config_overrides_all_of_the_saved_settings(saved: tuple[Path, FairConfig]) -> None:
    folder, _ = saved
    config = FairConfig(basket_size=16)
    assert FairBiEncoder(folder, config).config == config


@pytest.mark.parametrize("wrong", [3, None, ["a"], b"path", torch.nn.Linear(2, 2)])
def test_wrong_models(wrong: Any) -> None:
    text = f"model: expected a model name, a path or a SentenceTransformer, got {type(wrong).__name__}"
    with pytest.raises(TypeError, match=text):
        FairBiEncoder(wrong)


def test_settings_are_keywords(tiny_model: TinyModel) -> None:
    with pytest.raises(TypeError, match="config: expected a FairConfig, an EvenChunks or the name of a pre"):
        FairBiEncoder(tiny_model(), 0.5)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"stregth: not a setting of .*; did you mean 'strength'"):
        FairBiEncoder(tiny_model(), stregth=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets(tiny_model: TinyModel, name: str) -> None:
    model = tiny_model()
    config = PRESETS[name]
    if isinstance(config, EvenChunks):  # the tiny model's inputs are short
        config = replace(config, chunk_size=98)
    encoder = FairBiEncoder(model, config, batch_size=3, text_field="body", max_seq_length=100)
    assert encoder.config == config
    assert (encoder.batch_size, encoder.text_field, encoder.max_seq_length) == (3, "body", 100)
    assert encoder == FairBiEncoder(model, config, batch_size=3, text_field="body", max_seq_length=100)


def test_the_default_is_the_published_one(tiny_model: TinyModel) -> None:
    assert FairBiEncoder(tiny_model()).config == PRESETS["published"] == FairConfig()


def test_from_config_uses_every_setting(tiny_model: TinyModel) -> None:
    config = FairConfig(
        strength=0.7,
        basket_size=6,
        layers=(0, 2),
        attention="global",
        pooling="mean",
        isolate="bos_eos",
        isolated_share=0.1,
        last_basket="proportional",
        min_content=9,
    )
    model = tiny_model()
    encoder = FairBiEncoder(model, config)
    expected = calibrate(model, config).encode_document(TEXTS, normalize_embeddings=True)
    assert encoder.config == config
    assert np.array_equal(encoder.encode_docs(TEXTS), expected)


# Vectors


@pytest.mark.parametrize(("family", "pooling"), FAMILIES)
def test_vectors_are_the_models(make_encoder: MakeEncoder, tiny_model: TinyModel, family: str, pooling: str) -> None:
    encoder = make_encoder(family, pooling)
    plain = tiny_model(family, pooling)
    queries, docs = encoder.encode_queries(QUERIES), encoder.encode_docs(TEXTS)
    assert queries.dtype == docs.dtype == np.float32
    assert queries.shape == (len(QUERIES), 32)
    assert docs.shape == (len(TEXTS), 32)
    assert np.array_equal(queries, plain.encode_query(QUERIES, normalize_embeddings=True))
    assert np.array_equal(docs, calibrate(plain, CONFIG).encode_document(TEXTS, normalize_embeddings=True))
    assert differ(docs, plain.encode_document(TEXTS, normalize_embeddings=True))


@pytest.mark.parametrize(("family", "pooling"), FAMILIES)
def test_strength_0_is_the_plain_model_to_the_bit(
    make_encoder: MakeEncoder, tiny_model: TinyModel, family: str, pooling: str
) -> None:
    encoder = make_encoder(family, pooling, strength=0)
    plain = tiny_model(family, pooling)
    assert np.array_equal(encoder.encode_docs(TEXTS), plain.encode_document(TEXTS, normalize_embeddings=True))


def test_long_queries_are_never_calibrated(make_encoder: MakeEncoder, tiny_model: TinyModel) -> None:
    encoder = make_encoder(strength=1)
    plain = tiny_model().encode_query(TEXTS, normalize_embeddings=True)
    assert np.array_equal(encoder.encode_queries(TEXTS), plain)
    assert encoder.counts == DocumentCounts()


def test_the_models_own_prompts_are_used(make_encoder: MakeEncoder, tiny_model: TinyModel) -> None:
    plain = tiny_model()
    assert plain.prompts["query"] == "bal "
    assert plain.prompts["document"] == "dan gos "
    encoder = make_encoder()
    queries = plain.encode(QUERIES, prompt="bal ", normalize_embeddings=True)
    docs = calibrate(plain, CONFIG).encode(TEXTS, prompt="dan gos ", normalize_embeddings=True)
    assert np.array_equal(encoder.encode_queries(QUERIES), queries)
    assert np.array_equal(encoder.encode_docs(TEXTS), docs)
    assert differ(queries, plain.encode(QUERIES, prompt="", normalize_embeddings=True))
    assert differ(docs, calibrate(plain, CONFIG).encode(TEXTS, prompt="", normalize_embeddings=True))


def test_a_prompt_for_passages(tiny_model: TinyModel) -> None:
    model = tiny_model()
    model.prompts = {"query": "", "passage": "kir fan "}
    docs = calibrate(model, CONFIG).encode(TEXTS, prompt="kir fan ", normalize_embeddings=True)
    assert np.array_equal(FairBiEncoder(model, basket_size=8, strength=0.8).encode_docs(TEXTS), docs)


@pytest.mark.parametrize(
    ("similarity", "normalize", "unit"),
    [
        ("cosine", None, True),
        ("dot", None, False),
        ("cosine", False, False),
        ("dot", True, True),
        ("cosine", True, True),
        ("dot", False, False),
    ],
)
def test_normalization(tiny_model: TinyModel, similarity: str, normalize: bool | None, unit: bool) -> None:
    model = tiny_model(similarity_fn_name=similarity)
    encoder = FairBiEncoder(model, basket_size=8, strength=0.8, normalize=normalize)
    assert encoder.sim_fn == SimFn.dot
    for vectors in (encoder.encode_queries(QUERIES), encoder.encode_docs(TEXTS)):
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5) == unit
    expected = calibrate(model, CONFIG).encode_document(TEXTS, normalize_embeddings=unit)
    assert np.array_equal(encoder.encode_docs(TEXTS), expected)
    encoder.normalize = not unit
    assert np.allclose(np.linalg.norm(encoder.encode_docs(TEXTS), axis=1), 1, atol=1e-5) != unit


@pytest.mark.parametrize("similarity", ["euclidean", "manhattan"])
def test_a_similarity_that_pyterrier_does_not_retrieve_by(tiny_model: TinyModel, similarity: str) -> None:
    encoder = FairBiEncoder(tiny_model(similarity_fn_name=similarity))
    text = f"similarity: PyTerrier retrieves by dot product or cosine, the model uses '{similarity}'"
    with pytest.raises(ValueError, match=text):
        encoder.scorer()
    with pytest.raises(ValueError, match=text):
        _ = encoder.sim_fn


def test_max_seq_length(make_encoder: MakeEncoder, tiny_model: TinyModel) -> None:
    plain = tiny_model()
    plain.max_seq_length = 16
    short = plain.encode_document(TEXTS, normalize_embeddings=True)
    long = make_encoder(strength=0).encode_docs(TEXTS)
    encoder = make_encoder(strength=0, max_seq_length=16)
    assert encoder.max_seq_length == 16
    assert np.array_equal(encoder.encode_docs(TEXTS), short)
    assert differ(short, long)
    encoder.max_seq_length = None
    assert np.array_equal(encoder.encode_docs(TEXTS), long)
    encoder.max_seq_length = 16
    assert np.array_equal(encoder.encode_docs(TEXTS), short)
    assert np.array_equal(encoder.encode_queries(TEXTS), plain.encode_query(TEXTS, normalize_embeddings=True))


def test_later_modules_and_truncated_dimensions(tiny_model: TinyModel) -> None:
    model = tiny_model(truncate_dim=20)
    encoder = FairBiEncoder(model, basket_size=8, strength=0.8)
    expected = calibrate(model, CONFIG).encode_document(TEXTS, normalize_embeddings=True)
    assert encoder.encode_docs(TEXTS).shape == (len(TEXTS), 20)
    assert np.array_equal(encoder.encode_docs(TEXTS), expected)
    assert encoder.encode_queries([]).shape == (0, 20)


def test_batch_size_and_order_do_not_matter(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder("xlm_roberta", "mean")
    expected = encoder.encode_docs(TEXTS)
    np.testing.assert_allclose(encoder.encode_docs(TEXTS, batch_size=1), expected, atol=2e-6)
    np.testing.assert_allclose(encoder.encode_docs(TEXTS[::-1], batch_size=3), expected[::-1], atol=2e-6)


def test_any_iterable_of_texts(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder()
    expected = encoder.encode_docs(TEXTS)
    for texts in (tuple(TEXTS), np.array(TEXTS), np.array(TEXTS, dtype=object), (t for t in TEXTS)):
        assert np.array_equal(encoder.encode_docs(texts), expected)
    assert np.array_equal(encoder.encode_queries(iter(QUERIES)), encoder.encode_queries(QUERIES))


def test_no_texts_and_empty_texts(make_encoder: MakeEncoder, tiny_model: TinyModel) -> None:
    encoder = make_encoder()
    plain = tiny_model()
    for vectors in (encoder.encode_docs([]), encoder.encode_queries([])):
        assert vectors.shape == (0, 32)
        assert vectors.dtype == np.float32
    docs = encoder.encode_docs([TEXTS[0], "", " "])
    assert np.isfinite(docs).all()
    np.testing.assert_allclose(docs[1:], plain.encode_document(["", " "], normalize_embeddings=True), atol=1e-6)
    assert np.array_equal(encoder.encode_queries([""]), plain.encode_query([""], normalize_embeddings=True))


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_missing_texts(make_encoder: MakeEncoder, missing: Any) -> None:
    encoder = make_encoder()
    with pytest.raises(ValueError, match=r"texts: 1 of 2 texts are missing \(number 1\)"):
        encoder.encode_docs(["bal", missing])
    with pytest.raises(ValueError, match=r"texts: 1 of 1 texts are missing \(number 0\)"):
        encoder.encode_queries([missing])


@pytest.mark.parametrize("wrong", [3, b"bal", {"text": "bal"}])
def test_texts_that_are_no_strings(make_encoder: MakeEncoder, wrong: Any) -> None:
    with pytest.raises(TypeError, match=type(wrong).__name__):
        make_encoder().encode_docs([wrong, wrong])


# Gradients


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize(("family", "pooling"), FAMILIES)
def test_query_tensors_keep_gradients(tiny_model: TinyModel, family: str, pooling: str, similarity: str) -> None:
    model = tiny_model(family, pooling, similarity_fn_name=similarity)
    encoder = FairBiEncoder(model, basket_size=8, strength=0.8)
    vectors = encoder.encode_queries_torch(QUERIES, batch_size=4)
    assert vectors.requires_grad
    np.testing.assert_allclose(vectors.detach().numpy(), encoder.encode_queries(QUERIES), rtol=1e-5, atol=2e-6)
    vectors[:, 0].sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert any(g.abs().max() > 0 for g in gradients)
    assert encoder.encode_queries_torch([]).shape == (0, 32)
    assert encoder.counts == DocumentCounts()


def test_query_tensors_have_the_truncated_dimensions(tiny_model: TinyModel) -> None:
    encoder = FairBiEncoder(tiny_model(truncate_dim=20))
    vectors = encoder.encode_queries_torch(QUERIES).detach().numpy()
    assert vectors.shape == (len(QUERIES), 20)
    np.testing.assert_allclose(vectors, encoder.encode_queries(QUERIES), rtol=1e-5, atol=2e-6)


# Settings are live


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strength", 0.2),
        ("basket_size", 20),
        ("layers", 1),
        ("layers", [0, 2]),
        ("layers", "all"),
        ("pooling", "mean"),
        ("isolate", "none"),
        ("isolated_share", "equal"),
        ("last_basket", "proportional"),
        ("min_content", 60),
        ("max_seq_length", 20),
        ("normalize", False),
    ],
)
def test_a_setting_that_is_changed_is_used(make_encoder: MakeEncoder, name: str, value: Any) -> None:
    encoder = make_encoder()
    doc_encoder, scorer = encoder.doc_encoder(), encoder.scorer()
    before = encoder.encode_docs(TEXTS)
    encoder.set_parameter(name, value)
    assert encoder.get_parameter(name) == (tuple(value) if isinstance(value, list) else value)
    expected = make_encoder(**{name: value})
    assert np.array_equal(encoder.encode_docs(TEXTS), expected.encode_docs(TEXTS))
    assert np.array_equal(doc_encoder.encode(TEXTS), expected.encode_docs(TEXTS))
    assert differ(encoder.encode_docs(TEXTS), before)
    assert encoder == expected
    assert doc_encoder == expected.doc_encoder()
    assert scorer == expected.scorer()
    assert repr(encoder) == repr(expected)
    encoder.set_parameter(name, getattr(make_encoder(), name))
    assert np.array_equal(encoder.encode_docs(TEXTS), before)


def test_a_changed_model_is_used_or_refused(make_encoder: MakeEncoder) -> None:
    """Never may the encoder take another model's name and go on with the old one, as in a grid search over models."""
    encoder, other = make_encoder("bert", "cls"), make_encoder("xlm_roberta", "mean")
    try:
        encoder.model = other.model
    except AttributeError:
        return
    assert np.array_equal(encoder.encode_queries(QUERIES), other.encode_queries(QUERIES))
    assert np.array_equal(encoder.encode_docs(TEXTS), other.encode_docs(TEXTS))


def test_a_changed_device_is_used_or_refused(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder()
    try:
        encoder.device = "no_such_device"
    except AttributeError:
        return
    with pytest.raises((RuntimeError, ValueError), match="no_such_device"):
        encoder.encode_queries(QUERIES)


def test_two_encoders_of_one_model_do_not_disturb_each_other(tiny_model: TinyModel) -> None:
    model = tiny_model("bert", "mean")
    one = FairBiEncoder(model, basket_size=8, strength=0.3)
    two = FairBiEncoder(model, basket_size=16, strength=1.0, layers="all", max_seq_length=40)
    first, second = one.encode_docs(TEXTS), two.encode_docs(TEXTS)
    assert differ(first, second)
    two.layers = 2
    assert differ(two.encode_docs(TEXTS), second)
    assert np.array_equal(one.encode_docs(TEXTS), first)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("strength", 2, ValueError),
        ("strength", -0.1, ValueError),
        ("strength", float("nan"), ValueError),
        ("strength", "0.5", TypeError),
        ("strength", None, TypeError),
        ("basket_size", 0, ValueError),
        ("basket_size", 1.5, TypeError),
        ("layers", 9, ValueError),
        ("layers", (7,), ValueError),
        ("attention", "local", ValueError),
        ("pooling", "max", ValueError),
        ("isolate", "eos", ValueError),
        ("isolated_share", 1.5, ValueError),
        ("last_basket", "merged", ValueError),
        ("min_content", 0, ValueError),
        ("max_seq_length", 0, ValueError),
        ("max_seq_length", -1, ValueError),
        ("batch_size", 0, ValueError),
        ("batch_size", -1, ValueError),
    ],
)
def test_a_setting_out_of_range(make_encoder: MakeEncoder, name: str, value: Any, error: type[Exception]) -> None:
    encoder = make_encoder()
    before, good = encoder.encode_docs(TEXTS), getattr(encoder, name)

    def use() -> None:
        setattr(encoder, name, value)  # a setting of the config is checked at once
        encoder.encode_docs(TEXTS)

    with pytest.raises(error, match=name):
        use()
    setattr(encoder, name, good)
    assert np.array_equal(encoder.encode_docs(TEXTS), before)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strength", 1.5),
        ("basket_size", -1),
        ("layers", 5),
        ("isolated_share", "own"),
        ("max_seq_length", 0),
        ("max_seq_length", -1),
        ("batch_size", 0),
    ],
)
def test_a_setting_out_of_range_when_built(make_encoder: MakeEncoder, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        make_encoder(**{name: value})


# Equality, hash, repr


def test_equal_settings_are_equal(make_encoder: MakeEncoder) -> None:
    one, other = make_encoder(), make_encoder()
    assert one is not other
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == repr(other)
    assert make_encoder(strength=1) == make_encoder(strength=1.0) == make_encoder(strength=np.float32(1))
    assert one != "encoder"
    assert one != one.doc_encoder()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strength", 0.5),
        ("basket_size", 9),
        ("layers", 1),
        ("attention", "global"),
        ("pooling", "cls"),
        ("isolate", "none"),
        ("isolated_share", "equal"),
        ("last_basket", "proportional"),
        ("min_content", 3),
        ("max_seq_length", 64),
        ("normalize", False),
    ],
)
def test_unequal_settings_are_unequal_and_seen(make_encoder: MakeEncoder, name: str, value: Any) -> None:
    one, other = make_encoder(), make_encoder(**{name: value})
    assert one != other
    assert repr(one) != repr(other)
    assert f"{name}={value!r}" in repr(other)
    assert hash(one) == hash(one)


@pytest.mark.parametrize(("name", "value"), [("batch_size", 5), ("text_field", "body"), ("verbose", True)])
def test_other_settings_are_part_of_equality(make_encoder: MakeEncoder, name: str, value: Any) -> None:
    assert make_encoder() != make_encoder(**{name: value})


def test_the_hash_stays_while_settings_change(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder()
    table = {encoder: 1}
    for strength in (0.0, 0.5, 1.0):
        encoder.strength = strength
        encoder.basket_size = 9
        assert table[encoder] == 1


def test_other_models_are_unequal(make_encoder: MakeEncoder, tiny_model: TinyModel) -> None:
    assert make_encoder("bert", "cls") != make_encoder("bert", "mean")
    assert FairBiEncoder(tiny_model()) != FairBiEncoder(tiny_model())  # loaded twice: who knows what was changed
    model = tiny_model()
    assert FairBiEncoder(model) == FairBiEncoder(model)
    assert FairBiEncoder(model, strength=0.1) != FairBiEncoder(model)
    assert "SentenceTransformer" in repr(FairBiEncoder(model))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_seq_length", 16),
        ("prompts", {"query": "fan ", "document": "kir "}),
        ("truncate_dim", 20),
        ("similarity_fn_name", "dot"),
    ],
)
def test_a_loaded_model_changed_in_between_is_another_model(tiny_model: TinyModel, name: str, value: Any) -> None:
    """Equal encoders are run once by `pt.Experiment(plan="tree")`: they must give the same vectors."""
    model = tiny_model()
    one = FairBiEncoder(model, basket_size=8)
    setattr(model, name, value)
    other = FairBiEncoder(model, basket_size=8)
    texts = documents([60, 60])
    assert one.encode_docs(texts).shape != other.encode_docs(texts).shape or differ(
        one.encode_docs(texts), other.encode_docs(texts)
    )
    assert one != other
    assert one.doc_encoder() != other.doc_encoder()
    assert one.scorer() != other.scorer()


def test_copies(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder()
    for other in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        assert other == encoder
        assert np.array_equal(other.encode_docs(TEXTS), encoder.encode_docs(TEXTS))
        other.strength = 0.1
        assert encoder.strength == 0.8


# Counts and summary


def test_counts(make_encoder: MakeEncoder, caplog: pytest.LogCaptureFixture) -> None:
    encoder = make_encoder(basket_size=16)
    assert encoder.counts == DocumentCounts()
    encoder.encode_docs(documents([50, 3, 30]))
    encoder.encode_queries(QUERIES)
    assert encoder.counts == DocumentCounts(calibrated=2, too_short=1)
    encoder.strength = 0
    encoder.encode_docs(documents([50, 3]))
    assert encoder.counts == DocumentCounts(calibrated=2, too_short=1, plain=2)
    assert not caplog.records
    encoder.strength, encoder.max_seq_length = 0.5, 20
    encoder.encode_docs(documents([50, 60, 3]))
    assert encoder.counts == DocumentCounts(calibrated=4, too_short=2, plain=2, truncated=2)
    assert "Documents are truncated at max_seq_length=20" in caplog.text
    encoder.encode_queries([document(5), document(30)])
    assert encoder.counts.truncated_queries == 1
    assert "Queries are truncated at max_seq_length=20" in caplog.text
    encoder.basket_size = 8
    encoder.encode_docs([document(9)])
    assert encoder.counts == DocumentCounts(calibrated=1)


def test_the_summary_is_of_the_settings_as_they_stand(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder("bert", "mean")
    summary = encoder.summary()
    assert (summary.layers, summary.n_layers, summary.config.pooling) == ((2, 3), 4, "mean")
    assert summary.config.strength == 0.8
    encoder.encode_docs(documents([50, 3]))
    encoder.strength = 0.3
    assert encoder.summary().config.strength == 0.3
    assert encoder.summary().counts == encoder.counts == DocumentCounts(calibrated=1, too_short=1)
    encoder.layers, encoder.max_seq_length = 1, 64
    summary = encoder.summary()
    assert summary.layers == (3,)
    assert summary.max_seq_length == 64
    text = str(summary)
    assert "strength 0.3, baskets of 8 tokens" in text
    assert "every row (mean pooling)" in text


def test_the_calibrated_model_is_the_one_in_use(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder(normalize=False)
    model = encoder.calibrated_model()
    assert isinstance(model, FairSentenceTransformer)
    assert model is encoder.calibrated_model()
    assert np.array_equal(model.encode_document(TEXTS, strength=0.8), encoder.encode_docs(TEXTS))


# Progress bars


def test_no_bars_by_default(make_encoder: MakeEncoder, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = make_encoder()
    capsys.readouterr()
    encoder.encode_docs(TEXTS)
    encoder.encode_queries(QUERIES)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_bars_when_verbose(make_encoder: MakeEncoder, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = make_encoder()
    encoder.verbose = True
    capsys.readouterr()
    encoder.encode_docs(TEXTS)
    assert "100%" in capsys.readouterr().err
    encoder.encode_queries(QUERIES)
    assert "100%" in capsys.readouterr().err
    encoder.encode_docs(TEXTS, verbose=False)
    assert capsys.readouterr().err == ""
    encoder.verbose = False
    encoder.encode_queries(QUERIES, verbose=True)
    assert "100%" in capsys.readouterr().err


def test_a_saved_folder_loaded_by_sentence_transformers_keeps_its_settings(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = FairConfig(basket_size=8, strength=0.9, layers=1)
    calibrate(tiny_model(), config).save(str(tmp_path))
    encoder = FairBiEncoder(SentenceTransformer(str(tmp_path), trust_remote_code=True))
    assert encoder.config == config


def test_a_lone_surrogate_is_named(make_encoder: MakeEncoder) -> None:
    docs = pd.DataFrame({"docno": ["a", "b"], "text": pd.Series(["bal", "\ud800"], dtype=object)})
    with pytest.raises(ValueError, match=r"lone surrogate.*\(docno 'b'\)"):
        make_encoder().doc_encoder()(docs)


def test_two_columns_of_one_name(make_encoder: MakeEncoder) -> None:
    docs = pd.DataFrame([["a", "bal", "gos"]], columns=["docno", "text", "text"])
    with pytest.raises(ValueError, match="text: expected one column of this name, got 2"):
        make_encoder().doc_encoder()(docs)


@pytest.mark.parametrize(("name", "value"), [("batch_size", "8"), ("batch_size", 2.7), ("max_seq_length", "64")])
def test_sizes_must_be_integers(name: str, value: Any, make_encoder: MakeEncoder) -> None:
    with pytest.raises(TypeError, match=f"{name}: expected an integer of at least 1"):
        make_encoder(**{name: value})


def test_a_model_without_the_rest_of_its_last_layer(tiny_model: TinyModel) -> None:
    """`calibrate(..., pooled_row_only=True)` stays with the encoder, also when settings are changed."""
    plain = tiny_model("bert", "cls")
    encoder = FairBiEncoder(calibrate(plain, CONFIG, pooled_row_only=True))
    for layers in (2, 1):
        encoder.layers = layers
        vectors = encoder.encode_docs(TEXTS)
        assert encoder.summary().pooled_row_only
        whole = FairBiEncoder(plain, encoder.config).encode_docs(TEXTS)
        np.testing.assert_allclose(vectors, whole, atol=1e-6)


def test_chunks_that_do_not_fit_are_said_at_once(tiny_model: TinyModel) -> None:
    with pytest.raises(
        ValueError, match=r"chunk_size: chunks of 128 tokens, .* max_seq_length=128; use chunk_size=126"
    ):
        FairBiEncoder(tiny_model(), PRESETS["even_chunks"])
    FairBiEncoder(tiny_model(), "even_chunks", chunk_size=126)


def test_chunks_that_fit_the_given_length_alone(tiny_model: TinyModel) -> None:
    model = tiny_model()
    model.max_seq_length = 40
    with pytest.raises(ValueError, match="chunk_size: chunks of 60 tokens"):
        FairBiEncoder(model, EvenChunks(chunk_size=60))
    encoder = FairBiEncoder(model, EvenChunks(chunk_size=60), max_seq_length=100)
    model.max_seq_length = 100
    expected = calibrate(model, EvenChunks(chunk_size=60)).encode_document(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(encoder.encode_docs(TEXTS), expected, atol=1e-6)


# Names


@pytest.mark.parametrize(
    ("name", "nearest"), [("strenght", "strength"), ("chunksize", "chunk_size"), ("batchsize", "batch_size")]
)
def test_unknown_settings_name_the_nearest_before_the_model_is_loaded(name: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: not a setting of .*; did you mean '{nearest}'"):
        FairBiEncoder("no/such-model", **{name: 1})


@pytest.mark.parametrize("name", ["./nope", "/nope", "~/nope", "a/b/c", "nope/", "", Path("nope")])
def test_missing_folders_are_not_taken_for_names(name: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.model_info", None)  # not called
    with pytest.raises(ValueError, match=r"model: there is no folder .*, and it cannot be the name of a model"):
        FairBiEncoder(name)


def test_unknown_names_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def model_info(name: str, **_: Any) -> None:
        asked.append(name)
        raise OSError("no route\nto the hub")

    monkeypatch.setattr("huggingface_hub.model_info", model_info)
    monkeypatch.setattr(SentenceTransformer, "__init__", None)  # not called
    for name, names in (("BAAI/bge-m33", ["BAAI/bge-m33"]), ("bge", ["sentence-transformers/bge", "bge"])):
        asked.clear()
        with pytest.raises(
            ModelNotFoundError, match=r"is not a folder, not in the local cache, .* \(no route\); check"
        ):
            FairBiEncoder(name)
        assert asked == names


@pytest.mark.parametrize("source", ["loaded", "folder"])
def test_a_model_that_attention_calibration_refuses_is_encoded_in_even_chunks(tmp_path: Path, source: str) -> None:
    plain, error = load_refused("DiffLlama", "mean")
    plain.save_pretrained(str(tmp_path))
    model: Any = plain if source == "loaded" else tmp_path
    length = plain.max_seq_length
    with pytest.raises(ValueError, match=error):
        FairBiEncoder(model, device="cpu")
    config = EvenChunks(chunk_size=24)
    encoder = FairBiEncoder(model, "even_chunks", chunk_size=24, max_seq_length=40, device="cpu")
    expected = calibrate(plain, config, max_seq_length=40).encode_document(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(encoder.encode_docs(TEXTS), expected, atol=1e-6)
    encoder.max_seq_length = None
    assert encoder.calibrated_model().max_seq_length == length


def test_config_is_a_setting(tiny_model: TinyModel) -> None:
    encoder = FairBiEncoder(tiny_model())
    encoder.config = "full"  # type: ignore[assignment]
    assert encoder.config == PRESETS["full"]
    assert encoder.isolated_share == "equal"
    encoder.config = EvenChunks(chunk_size=24)
    assert encoder.chunk_size == 24
    assert differ(encoder.encode_docs(TEXTS), FairBiEncoder(tiny_model(), "full").encode_docs(TEXTS))
    with pytest.raises(AttributeError, match="basket_size"):
        _ = encoder.basket_size
    with pytest.raises(ValueError, match="config: expected the name of a preset"):
        encoder.config = "fully"  # type: ignore[assignment]


def test_repr_and_str(make_encoder: MakeEncoder, tiny_model: TinyModel) -> None:
    encoder = make_encoder(layers=1, normalize=False)
    assert repr(encoder) == (
        f"FairBiEncoder({encoder.model!r}, strength=0.8, basket_size=8, layers=1, normalize=False)"
    )
    assert str(encoder) == f"FairBiEncoder({encoder.model!r})"
    chunks = FairBiEncoder(tiny_model(), EvenChunks(chunk_size=24))
    assert repr(chunks).endswith(", 'even_chunks', strength=0.8, chunk_size=24)")


def test_copies_have_identities_of_their_own(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder()
    before = encoder.identity()
    assert encoder.identity() is before
    for copied in (copy.copy(encoder), copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        assert copied.identity() == before
        copied.strength = 0.1
        assert copied.identity().document_differences(before) == ["fair_config.strength: 0.1 there, 0.8 now"]
        assert encoder.identity() == before
