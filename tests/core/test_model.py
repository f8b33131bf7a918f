from __future__ import annotations

import copy
import json
import logging
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base import BaseModel
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import (
    CNN,
    BoW,
    Dense,
    Normalize,
    Pooling,
    StaticEmbedding,
    WordEmbeddings,
)
from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer

import fair_calibration
from fair_calibration import DocumentCounts, FairConfig, FairSentenceTransformer, calibrate, uncalibrate
from fair_calibration.transformer import FairTransformer
from tests.conftest import TinyModel
from tests.core.cases import assert_close
from tests.core.tiny_models import document, documents, make_tokenizer, reference_embeddings

CONFIG = FairConfig(basket_size=8, strength=0.8)
TEXTS = documents([50, 7, 30, 90, 50, 3])


def parameters(model: SentenceTransformer) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def differ(one: Any, other: Any) -> bool:
    return bool(np.abs(np.asarray(one) - np.asarray(other)).max() > 1e-2)


def test_importing_the_core_imports_neither_framework() -> None:
    code = (
        "import sys, fair_calibration\n"
        "names = {name.split('.')[0] for name in sys.modules}\n"
        "found = names & {'pyterrier', 'pyterrier_dr', 'pyterrier_fair', 'mteb', 'mteb_fair', 'ir_measures'}\n"
        "assert not found, found\n"
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS\n"
        "assert 'fair_sdpa' not in ALL_ATTENTION_FUNCTIONS\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names() -> None:
    assert {"FairConfig", "calibrate", "uncalibrate", "FairSentenceTransformer"} < set(fair_calibration.__all__)
    for name in fair_calibration.__all__:
        assert getattr(fair_calibration, name).__doc__


# calibrate and uncalibrate


def test_weights_are_shared_and_nothing_else(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    before = plain.encode(TEXTS)
    fair = calibrate(plain, CONFIG)
    assert isinstance(fair, FairSentenceTransformer)
    assert parameters(fair).keys() == parameters(plain).keys()
    for name, tensor in parameters(plain).items():
        assert parameters(fair)[name] is tensor
    assert differ(fair.encode(TEXTS), before)
    assert type(plain) is SentenceTransformer
    assert type(plain[0]) is not FairTransformer
    assert plain[0].model.config._attn_implementation == "sdpa"
    assert np.array_equal(plain.encode(TEXTS), before)
    assert not hasattr(plain[0], "fair_config")


def test_tied_weights_stay_tied(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    plain[0].model.encoder.layer[1].output.dense.weight = plain[0].model.encoder.layer[0].output.dense.weight
    fair = calibrate(plain, CONFIG)
    layers = fair[0].model.encoder.layer
    assert (
        layers[1].output.dense.weight
        is layers[0].output.dense.weight
        is plain[0].model.encoder.layer[0].output.dense.weight
    )


def test_training_one_trains_both(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    fair = calibrate(plain, CONFIG)
    before = fair.encode(TEXTS)
    with torch.no_grad():
        plain[0].model.encoder.layer[3].output.dense.weight.mul_(2)
    assert differ(fair.encode(TEXTS), before)


def test_uncalibrate(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "cls", truncate_dim=20)
    fair = calibrate(plain, CONFIG)
    calibrated = fair.encode(TEXTS)
    again = uncalibrate(fair)
    assert type(again) is SentenceTransformer
    assert type(again[0]) is type(plain[0])
    assert vars(again[0]).keys() == vars(plain[0]).keys()
    assert np.array_equal(again.encode(TEXTS), plain.encode(TEXTS))
    assert again.prompts == plain.prompts
    assert again.truncate_dim == 20
    for name, tensor in parameters(plain).items():
        assert parameters(again)[name] is tensor
    assert np.array_equal(fair.encode(TEXTS), calibrated)  # the calibrated one stays
    assert differ(calibrated, again.encode(TEXTS))


def test_calibrating_again_takes_the_new_settings(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "cls")
    fair = calibrate(plain, CONFIG)
    fair.encode(TEXTS)
    other = FairConfig(basket_size=16, strength=1.0, layers="all")
    again = calibrate(fair, other)
    assert again.fair_config == other
    assert fair.fair_config == CONFIG
    assert again.counts == DocumentCounts()
    assert np.array_equal(again.encode(TEXTS), calibrate(plain, other).encode(TEXTS))
    assert differ(again.encode(TEXTS), fair.encode(TEXTS))


def test_the_default_config(tiny_model: TinyModel) -> None:
    assert calibrate(tiny_model()).fair_config == FairConfig()


def test_wrong_arguments(tiny_model: TinyModel, tiny_folder: Any) -> None:
    plain = tiny_model()
    text = r"model: expected a SentenceTransformer, got str; load names and paths with FairSentenceTransformer\(name"
    with pytest.raises(TypeError, match=text):
        calibrate("BAAI/bge-m3", CONFIG)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model: expected a SentenceTransformer, got Pooling"):
        calibrate(plain[1], CONFIG)
    with pytest.raises(
        TypeError, match="config: expected a FairConfig, an EvenChunks or the name of a preset, got float"
    ):
        calibrate(plain, 0.5)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="config: expected a FairConfig, an EvenChunks or the name of a preset, got dict"
    ):
        FairSentenceTransformer(str(tiny_folder()), config={"strength": 0.5})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model: expected a FairSentenceTransformer, got SentenceTransformer"):
        uncalibrate(plain)  # type: ignore[arg-type]


# Models of another structure or kind


def test_other_first_modules_are_refused(tiny_model: TinyModel) -> None:
    text = r"model: its first module must be a sentence-transformers Transformer to be calibrated .* got .*\.{}$"
    tokenizer = WhitespaceTokenizer(["bal", "dan"])
    pooling, (subclass, _) = Pooling(2), tiny_model()
    subclass.__class__ = type("CLIPModel", (Transformer,), {})  # what it would do differently would be lost
    for modules in (
        [WordEmbeddings(tokenizer, np.eye(2)), pooling],
        [WordEmbeddings(tokenizer, np.eye(2)), CNN(2, 2, [1]), Pooling(2)],
        [BoW(["bal", "dan"])],
        [StaticEmbedding(make_tokenizer(bos=True, padding_side="right").backend_tokenizer, embedding_dim=2)],
        [subclass, Pooling(32)],
    ):
        with pytest.raises(TypeError, match=text.format(type(modules[0]).__name__)):
            calibrate(SentenceTransformer(modules=modules, device="cpu"), CONFIG)  # type: ignore[arg-type]


def test_two_transformers_in_a_row_are_refused(tiny_model: TinyModel) -> None:
    (one, pooling), (other, _) = tiny_model(), tiny_model()
    model = SentenceTransformer(modules=[one, other, pooling], device="cpu")
    with pytest.raises(TypeError, match="model: its documents pass through 2 Transformers one after the other"):
        calibrate(model, CONFIG)


KINDS: dict[type[BaseModel], str] = {
    MultiVectorEncoder: "a late-interaction model keeps one vector per token, so it has no pooled token to calibrate",
    SparseEncoder: "a sparse encoder weighs the words of a vocabulary, so it has no pooled token to calibrate",
    CrossEncoder: "a cross-encoder reads query and document together, so it encodes no documents to calibrate",
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_models_are_refused(kind: type[BaseModel], tiny_folder: Any, tmp_path: Path) -> None:
    model = kind(str(tiny_folder() / "inner"), device="cpu")
    with pytest.raises(TypeError, match=f"model: expected a SentenceTransformer, got {kind.__name__}: {KINDS[kind]}"):
        calibrate(model, CONFIG)  # type: ignore[arg-type]
    # From the folder sentence-transformers would make another model, with a pooling that was never trained.
    model.save(str(tmp_path), create_model_card=False)
    text = f"model_name_or_path: expected a SentenceTransformer, {tmp_path} is a {kind.__name__}: {KINDS[kind]}"
    with pytest.raises(TypeError, match=re.escape(text)):
        FairSentenceTransformer(str(tmp_path), device="cpu")


def test_pylate_models_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    plain = tiny_model()
    plain.__class__ = type("ColBERT", (SentenceTransformer,), {})  # PyLate's is one
    with pytest.raises(TypeError, match="model: expected a SentenceTransformer, got ColBERT: a late-interaction model"):
        calibrate(plain, CONFIG)
    # As PyLate 1.6 saves it: a transformer and a projection of each token.
    torch.manual_seed(0)
    projection = Dense(32, 16, bias=False, module_input_name="token_embeddings", module_output_name="token_embeddings")
    SentenceTransformer(modules=[tiny_model()[0], projection], device="cpu").save(str(tmp_path))
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[1]["type"] = "pylate.models.Dense.Dense"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    settings = {"model_type": "ColBERT", "similarity_fn_name": "MaxSim", "query_prefix": "[Q] ", "query_length": 32}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with pytest.raises(TypeError, match="is a ColBERT: a late-interaction model keeps one vector per token"):
        FairSentenceTransformer(str(tmp_path), device="cpu")


@pytest.mark.parametrize("name", ["HF_ColBERT", "ColPaliForRetrieval", "BertForSequenceClassification"])
def test_other_networks_without_modules_are_refused(name: str, tiny_folder: Any, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder() / "inner", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    text = rf"expected a SentenceTransformer, .*other is a {name} without a modules.json; if pooled vectors of it are"
    with pytest.raises(TypeError, match=text):
        FairSentenceTransformer(str(tmp_path / "other"), device="cpu")


def test_a_bare_network_is_pooled_as_sentence_transformers_does(tiny_folder: Any) -> None:
    bare = str(tiny_folder() / "inner")
    fair = FairSentenceTransformer(bare, config=CONFIG, device="cpu")
    assert fair[1].pooling_mode == "mean"
    assert np.array_equal(fair.encode(TEXTS), calibrate(SentenceTransformer(bare, device="cpu"), CONFIG).encode(TEXTS))


# What the model was before, it still is


def test_settings_of_the_model_are_kept(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean", truncate_dim=12, similarity_fn_name="dot", default_prompt_name="other")
    fair = calibrate(plain, CONFIG)
    assert fair.prompts == plain.prompts
    assert fair.default_prompt_name == "other"
    assert fair.truncate_dim == 12
    assert fair.similarity_fn_name == "dot"
    assert fair.device == plain.device
    assert fair.encode(TEXTS).shape == (6, 12)
    assert fair.get_embedding_dimension() == plain.get_embedding_dimension()
    one, other = fair.encode(TEXTS), fair.encode(TEXTS[::-1])
    assert np.allclose(fair.similarity(one, other), one @ other.T, atol=1e-4)
    fair.prompts["query"] = "new "
    assert plain.prompts["query"] == "bal "


def test_prompts_are_applied(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean", default_prompt_name="other")
    fair, bare = calibrate(plain, CONFIG), calibrate(tiny_model("bert", "mean", prompts={}), CONFIG)

    def with_prompt(prompt: str) -> np.ndarray:
        return bare.encode([prompt + text for text in TEXTS])

    bare.prompts = {}
    assert np.allclose(fair.encode_document(TEXTS), with_prompt("dan gos "), atol=1e-5)
    assert np.allclose(fair.encode(TEXTS), with_prompt("kir "), atol=1e-5)
    assert np.allclose(fair.encode(TEXTS, prompt_name="document"), with_prompt("dan gos "), atol=1e-5)
    assert np.allclose(fair.encode(TEXTS, prompt="bal "), with_prompt("bal "), atol=1e-5)
    assert np.array_equal(fair.encode_query(TEXTS), plain.encode_query(TEXTS))
    assert differ(fair.encode(TEXTS), fair.encode_document(TEXTS))


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_precision(precision: Any, tiny_model: TinyModel) -> None:
    from sentence_transformers.util import quantize_embeddings

    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    quantized = fair.encode(TEXTS, precision=precision)
    assert np.array_equal(quantized, quantize_embeddings(fair.encode(TEXTS), precision=precision))
    assert quantized.dtype == (np.int8 if precision in ("int8", "binary") else np.uint8)


def test_normalize_and_truncate(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    embeddings = fair.encode(TEXTS)
    normalized = fair.encode(TEXTS, normalize_embeddings=True)
    assert np.allclose(normalized, embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True), atol=1e-6)
    assert np.array_equal(fair.encode(TEXTS, truncate_dim=5), embeddings[:, :5])


def test_later_modules(tiny_model: TinyModel) -> None:
    base = tiny_model("bert", "mean")
    torch.manual_seed(0)
    dense = Dense(32, 10)
    plain = SentenceTransformer(modules=[base[0], base[1], dense, Normalize()], device="cpu")
    fair = calibrate(plain, CONFIG)
    pooled = torch.from_numpy(calibrate(base, CONFIG).encode(TEXTS))
    with torch.no_grad():
        expected = torch.nn.functional.normalize(dense({"sentence_embedding": pooled})["sentence_embedding"], dim=-1)
    assert_close(fair.encode(TEXTS, convert_to_tensor=True), expected, 1e-6)
    assert differ(fair.encode(TEXTS), plain.encode(TEXTS))
    assert fair[2].linear.weight is dense.linear.weight


def test_output_values(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    fair = calibrate(plain, CONFIG)
    tokens = fair.encode(TEXTS, output_value="token_embeddings")
    assert [len(t) for t in tokens] == [52, 9, 32, 92, 52, 5]
    embeddings = fair.encode(TEXTS, convert_to_tensor=True)
    assert_close(torch.stack([t.mean(0) for t in tokens]), embeddings, 1e-5)
    everything = fair.encode(TEXTS, output_value=None)
    assert_close(torch.stack([item["sentence_embedding"] for item in everything]), embeddings, 1e-6)
    assert everything[0].keys() == plain.encode(TEXTS, output_value=None)[0].keys()


def test_shapes_of_input_and_output(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    single = fair.encode(TEXTS[0])
    assert single.shape == (32,)
    assert np.array_equal(single, fair.encode([TEXTS[0]])[0])
    tensor = fair.encode(TEXTS, convert_to_tensor=True)
    assert isinstance(tensor, torch.Tensor)
    assert np.array_equal(tensor.numpy(), fair.encode(TEXTS))
    listed = fair.encode(TEXTS, convert_to_numpy=False)
    assert isinstance(listed, list)
    assert torch.equal(torch.stack(listed), tensor)
    assert np.array_equal(fair.encode(np.array(TEXTS)), fair.encode(TEXTS))
    counts = fair.counts
    assert len(fair.encode([])) == 0
    assert len(fair.encode_document([])) == 0
    assert fair.counts == counts
    assert np.isfinite(fair.encode(["", TEXTS[0]])).all()


def test_max_seq_length_is_independent(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    fair = calibrate(plain, CONFIG)
    expected = fair.encode(TEXTS[3])
    plain.max_seq_length = 20
    assert fair.max_seq_length == 128
    assert np.array_equal(fair.encode(TEXTS[3]), expected)
    plain.max_seq_length = 128
    fair.max_seq_length = 42
    assert plain.max_seq_length == 128
    assert fair.tokenizer.model_max_length == 42
    shortened = " ".join(TEXTS[3].split()[:40])
    assert np.allclose(fair.encode(TEXTS[3]), fair.encode(shortened), atol=1e-6)
    assert differ(fair.encode(TEXTS[3]), expected)
    assert np.allclose(uncalibrate(fair).encode(TEXTS[3]), plain.encode(shortened), atol=1e-6)


def test_module_kwargs_are_kept(tiny_model: TinyModel, tmp_path: Path) -> None:
    # A model that conditions on the task says so in its modules.json.
    path = tmp_path / "asking"
    tiny_model("bert", "mean").save(str(path))
    modules = json.loads((path / "modules.json").read_text())
    modules[0]["kwargs"] = ["task"]
    (path / "modules.json").write_text(json.dumps(modules))
    plain = SentenceTransformer(str(path), device="cpu")
    assert plain.module_kwargs["0"] == ["task"]
    for fair in (calibrate(plain, CONFIG), FairSentenceTransformer(str(path), config=CONFIG, device="cpu")):
        seen: list[Any] = []
        forward = fair[0].model.forward

        def spy(*args: Any, task: Any = None, _seen: list[Any] = seen, _forward: Any = forward, **kwargs: Any) -> Any:
            _seen.append(task)
            return _forward(*args, **kwargs)

        fair[0].model.forward = spy
        fair[0]._declared_forward_params = {*fair[0]._declared_forward_params, "task"}
        fair.encode_query(TEXTS)
        fair.encode_document(TEXTS)
        fair.encode(TEXTS)
        assert seen == ["query", "document", None]
        assert uncalibrate(fair).module_kwargs["0"] == ["task"]


# Saving and loading


@pytest.fixture(scope="module")
def saved(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "fair"
    fair = calibrate(tiny_model("bert", "mean", truncate_dim=16, default_prompt_name="other"), CONFIG)
    fair.max_seq_length = 77
    fair.save_pretrained(str(path))
    return path


@pytest.fixture(scope="module")
def original(tiny_model: TinyModel) -> FairSentenceTransformer:
    fair = calibrate(tiny_model("bert", "mean", truncate_dim=16, default_prompt_name="other"), CONFIG)
    fair.max_seq_length = 77
    return fair


def test_loading_what_was_saved(saved: Path, original: FairSentenceTransformer) -> None:
    loaded = FairSentenceTransformer(str(saved), device="cpu", truncate_dim=16)
    assert loaded.fair_config == CONFIG
    assert loaded.max_seq_length == 77
    assert loaded.prompts == original.prompts
    assert loaded.default_prompt_name == "other"
    assert np.array_equal(loaded.encode(TEXTS), original.encode(TEXTS))
    assert np.array_equal(loaded.encode_query(TEXTS), original.encode_query(TEXTS))
    assert str(loaded.summary()) == str(original.summary()).replace(
        str(original.summary()).splitlines()[-1], str(loaded.summary()).splitlines()[-1]
    )
    assert FairSentenceTransformer(saved, config=CONFIG, device="cpu").fair_config == CONFIG  # type: ignore[arg-type]


def test_loading_with_other_settings(saved: Path, original: FairSentenceTransformer) -> None:
    other = FairConfig(basket_size=16, strength=1.0, layers="all")
    loaded = FairSentenceTransformer(str(saved), config=other, device="cpu", truncate_dim=16)
    assert loaded.fair_config == other
    expected = calibrate(original, other).encode(TEXTS)
    assert np.array_equal(loaded.encode(TEXTS), expected)
    assert differ(expected, original.encode(TEXTS))


def test_loading_as_a_plain_class(saved: Path, original: FairSentenceTransformer) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        SentenceTransformer(str(saved), device="cpu")
    trusting = SentenceTransformer(str(saved), device="cpu", truncate_dim=16, trust_remote_code=True)
    assert isinstance(trusting[0], FairTransformer)
    assert np.array_equal(trusting.encode(TEXTS), original.encode(TEXTS))
    assert np.array_equal(trusting.encode_query(TEXTS), original.encode_query(TEXTS))
    assert np.array_equal(trusting.encode(TEXTS, strength=0.2), original.encode(TEXTS, strength=0.2))


def test_saved_files(saved: Path) -> None:
    modules = json.loads((saved / "modules.json").read_text())
    assert modules[0]["type"] == "fair_calibration.transformer.FairTransformer"
    settings = json.loads((saved / "sentence_bert_config.json").read_text())["fair_config"]
    assert FairConfig.from_dict(settings) == CONFIG
    assert "fair_" not in (saved / "config.json").read_text()  # any other library can load the weights


def test_loading_a_plain_model(tiny_folder: Any, tiny_model: TinyModel) -> None:
    loaded = FairSentenceTransformer(str(tiny_folder("bert", "mean")), config=CONFIG, device="cpu")
    assert np.array_equal(loaded.encode(TEXTS), calibrate(tiny_model("bert", "mean"), CONFIG).encode(TEXTS))
    assert FairSentenceTransformer(str(tiny_folder("bert", "mean")), device="cpu").fair_config == FairConfig()


def test_loading_with_eager_attention(tiny_folder: Any) -> None:
    loaded = FairSentenceTransformer(
        str(tiny_folder("bert", "mean")), config=CONFIG, device="cpu", model_kwargs={"attn_implementation": "eager"}
    )
    assert "on top of eager" in loaded.summary().mechanism


def test_saving_an_uncalibrated_model(tiny_model: TinyModel, tmp_path: Path) -> None:
    plain = tiny_model("bert", "mean")
    uncalibrate(calibrate(plain, CONFIG)).save_pretrained(str(tmp_path / "plain"))
    loaded = SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    assert np.array_equal(loaded.encode(TEXTS), plain.encode(TEXTS))


# Copies, processes, counts


def test_pickles_and_copies(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    expected = fair.encode(TEXTS)
    for other in (pickle.loads(pickle.dumps(fair)), copy.deepcopy(fair)):
        assert isinstance(other, FairSentenceTransformer)
        assert other.fair_config == CONFIG
        assert other.counts == DocumentCounts()
        assert np.array_equal(other.encode(TEXTS), expected)
        assert np.array_equal(other.encode(TEXTS, strength=0), fair.encode(TEXTS, strength=0))


def test_worker_processes(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    texts = [*TEXTS, document(200)]
    expected, expected_queries = fair.encode(texts, batch_size=2), fair.encode_query(texts)
    before = fair.counts
    assert before == DocumentCounts(calibrated=6, too_short=1, truncated=1, truncated_queries=1)
    caplog.clear()
    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    pool = fair.start_multi_process_pool(["cpu", "cpu"])
    try:
        with caplog.at_level(logging.WARNING, "fair_calibration"):
            embeddings = fair.encode(texts, pool=pool, chunk_size=2, batch_size=2)
            queries = fair.encode_query(texts, pool=pool, chunk_size=4)
            assert fair.counts == before
            halved = fair.encode(texts, pool=pool, chunk_size=3, strength=0.4)
    finally:
        fair.stop_multi_process_pool(pool)
    assert np.allclose(embeddings, expected, atol=2e-5)
    assert np.allclose(queries, expected_queries, atol=2e-5)
    assert fair.counts == before.plus(before._replace(truncated_queries=0))
    assert np.allclose(halved, fair.encode(texts, strength=0.4), atol=2e-5)
    messages = [record.message.partition(" ")[0] for record in caplog.records if "truncated" in record.message]
    assert messages == ["Documents", "Queries"]
    assert differ(embeddings, queries)


def test_counts_and_summary(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model("bert", "cls"), CONFIG)
    assert fair.counts == DocumentCounts()
    fair.encode(TEXTS)
    fair.encode(TEXTS, strength=0)
    fair.encode_query(TEXTS)
    assert fair.counts == DocumentCounts(calibrated=5, too_short=1, plain=6)
    summary = fair.summary()
    assert summary.config == CONFIG.resolve("cls")
    assert summary.counts == fair.counts
    assert str(summary).splitlines() == [
        "BertModel: strength 0.8, baskets of 8 tokens",
        "  layers     2-3 of 4 (BertSelfAttention)",
        "  rows       the first token's row (cls pooling)",
        "  isolated   the first token, keeping its own share",
        "  mechanism  transformers AttentionInterface, on top of sdpa",
        "  documents  12: 5 calibrated, 1 too short (under 8 content tokens), 6 plain; 0 truncated at 128 tokens",
    ]


# The real model


def passage(n_sentences: int) -> str:
    """Returns English text of about 17 tokens a sentence."""
    places = ["harbour", "library", "mountain", "market", "station", "garden", "theatre", "bridge"]
    return " ".join(
        f"In the year {1900 + 7 * i} the old {places[i % 8]} was closed for repairs and opened again in spring."
        for i in range(n_sentences)
    )


@pytest.mark.parametrize("pooling", ["cls", "lasttoken", "mean"])
def test_minilm_equals_the_reference(pooling: Any, minilm: SentenceTransformer) -> None:
    texts = [passage(10), passage(3), passage(7)]
    plain = uncalibrate(calibrate(minilm, FairConfig()))
    plain[1] = Pooling(384, pooling_mode=pooling)
    config = FairConfig(basket_size=64, strength=1.0)
    fair = calibrate(plain, config)
    calibrated = fair.encode(texts, convert_to_tensor=True)
    assert fair.counts == DocumentCounts(calibrated=2, too_short=1)
    resolved = config.resolve(pooling.removesuffix("token"))
    expected = reference_embeddings(uncalibrate(fair), texts, resolved)
    # Normalised embeddings: components of 0.05, measured difference 1e-7.
    assert_close(calibrated, expected, 2e-6)
    change = (calibrated - torch.from_numpy(plain.encode(texts))).abs().amax(1)
    assert change[[0, 2]].min() > 1e-3
    assert change[1] < 2e-6


def test_minilm_truncates(minilm_path: str, minilm: SentenceTransformer) -> None:
    texts = [passage(25), passage(40)]  # about 430 and 690 tokens
    as_delivered = FairSentenceTransformer(minilm_path, device="cpu")
    as_delivered.encode(texts)
    assert as_delivered.counts == DocumentCounts(calibrated=2, truncated=2)  # at 256
    fair = calibrate(minilm)
    fair.encode(texts)
    assert fair.counts == DocumentCounts(calibrated=2, truncated=1)
    assert "1 truncated at 512 tokens" in str(fair.summary())


def test_minilm_at_strength_zero(minilm: SentenceTransformer) -> None:
    texts = [passage(25), passage(3), passage(12)]
    fair = calibrate(minilm)
    assert np.array_equal(fair.encode(texts, strength=0), minilm.encode(texts))
    assert np.array_equal(fair.encode_query(texts), minilm.encode_query(texts))


def test_minilm_sees_more_of_the_end(minilm: SentenceTransformer) -> None:
    # What the package is for: a late sentence counts for more, an early one for less.
    about = "The zebra is a striped animal of the African savanna that lives in herds."
    filler = passage(24)
    query = minilm.encode_query("striped animals of the savanna")
    fair = calibrate(minilm, FairConfig(strength=1.0))
    early, late = f"{about} {filler}", f"{filler} {about}"
    plain = [float(query @ minilm.encode(text)) for text in (early, late)]
    calibrated = [float(query @ fair.encode(text)) for text in (early, late)]
    assert plain[0] > plain[1]
    assert calibrated[1] > plain[1]
    assert calibrated[0] - calibrated[1] < plain[0] - plain[1]
