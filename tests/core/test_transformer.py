from __future__ import annotations

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from fair_calibration import DocumentCounts, EvenChunks, FairConfig, FairSentenceTransformer, calibrate, uncalibrate
from fair_calibration.transformer import FairTransformer
from tests.conftest import TinyModel
from tests.core.cases import assert_close
from tests.core.tiny_models import document, documents, reference_embeddings

CONFIG = FairConfig(basket_size=8, strength=0.8)
LENGTHS = [50, 7, 30, 90, 50, 3]
# Embeddings of size 2 to 3 behind four float32 layers with sharp attention: measured 2e-6 at most.
TOLERANCE = 2e-5
ENCODERS = [("bert", p) for p in ("cls", "lasttoken", "mean")]
ENCODERS += [("xlm_roberta", p) for p in ("cls", "lasttoken", "mean")]
ENCODERS += [("qwen3", p) for p in ("lasttoken", "mean")]
ENCODERS += [("qwen3_sliding", p) for p in ("lasttoken", "mean")]
ENCODERS += [("albert", p) for p in ("cls", "mean")]


def encode(model: SentenceTransformer, texts: list[str], **kwargs: Any) -> torch.Tensor:
    embeddings = model.encode(texts, convert_to_tensor=True, **kwargs)
    assert isinstance(embeddings, torch.Tensor)
    assert embeddings.isfinite().all()
    return embeddings


def largest_change(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


@pytest.mark.parametrize(("family", "pooling"), ENCODERS)
def test_equals_the_reference(family: str, pooling: str, tiny_model: TinyModel) -> None:
    plain, texts = tiny_model(family, pooling), documents(LENGTHS)
    fair = calibrate(plain, CONFIG)
    calibrated = encode(fair, texts)
    expected = reference_embeddings(uncalibrate(fair), texts, CONFIG.resolve(pooling.removesuffix("token")))
    assert_close(calibrated, expected, TOLERANCE)
    assert largest_change(calibrated, encode(plain, texts)) > 1e-2


@pytest.mark.parametrize(("family", "pooling"), [("bert", "cls"), ("bert", "mean"), ("qwen3", "lasttoken")])
@pytest.mark.parametrize(
    "settings",
    [
        {"strength": 1.0, "isolated_share": "equal", "layers": "all"},
        {"isolate": "bos_eos", "isolated_share": 0.1, "last_basket": "proportional", "layers": (0, -1)},
        {"isolate": "none", "min_content": 1, "layers": 1},
        {"basket_size": 16, "last_basket": "halves"},
        {"pooling": "mean"},
        {"pooling": "last", "isolate": "bos"},
    ],
)
def test_settings_equal_the_reference(
    family: str, pooling: str, settings: dict[str, Any], tiny_model: TinyModel
) -> None:
    config = FairConfig(**{"basket_size": 6, **settings})
    texts = documents(LENGTHS)
    fair = calibrate(tiny_model(family, pooling), config)
    expected = reference_embeddings(uncalibrate(fair), texts, config.resolve(pooling.removesuffix("token")))
    assert_close(encode(fair, texts), expected, TOLERANCE)
    assert largest_change(encode(fair, texts), encode(fair, texts, strength=0.0)) > 1e-3


@pytest.mark.parametrize("family", ["qwen3", "bert"])
def test_a_batch_without_padding(family: str, tiny_model: TinyModel) -> None:
    # No padding, no mask: transformers leaves causality to a flag then.
    fair = calibrate(tiny_model(family, "mean"), CONFIG)
    texts = documents([40, 40, 40])
    expected = reference_embeddings(uncalibrate(fair), texts, CONFIG.resolve("mean"))
    assert_close(encode(fair, texts), expected, TOLERANCE)


@pytest.mark.parametrize(("family", "pooling"), [("bert", "mean"), ("qwen3", "lasttoken"), ("xlm_roberta", "cls")])
def test_gradients_equal_the_reference(family: str, pooling: str, tiny_model: TinyModel) -> None:
    texts = documents([50, 3, 30])  # of which one is left as it is
    gradients = []
    for with_reference in (False, True):
        fair = calibrate(tiny_model(family, pooling), CONFIG)
        model = uncalibrate(fair) if with_reference else fair
        if with_reference:
            resolved = CONFIG.resolve(pooling.removesuffix("token"))
            embeddings = reference_embeddings(model, texts, resolved, gradients=True)
        else:
            embeddings = model.eval()(model.preprocess(texts))["sentence_embedding"]
        (embeddings * torch.linspace(-1, 1, embeddings.numel()).view_as(embeddings)).sum().backward()
        gradients.append({name: p.grad for name, p in model[0].model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert len(gradients[0]) > 20
    largest = max(gradient.abs().max() for gradient in gradients[1].values())
    for name, gradient in gradients[1].items():
        # Relative to each parameter's largest, as gradients span orders of magnitude; that of the keys' biases is 0 but
        # for rounding, because a softmax does not change with them.
        scale = torch.maximum(gradient.abs().max(), 1e-3 * largest)
        assert_close(gradients[0][name] / scale, gradient / scale, 1e-3)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(("family", "pooling"), ENCODERS)
def test_strength_zero_is_the_plain_model_to_the_bit(
    family: str, pooling: str, implementation: str, tiny_model: TinyModel
) -> None:
    plain = tiny_model(family, pooling, model_kwargs={"attn_implementation": implementation})
    texts = documents(LENGTHS)
    expected = encode(plain, texts)
    assert plain[0].model.config._attn_implementation == implementation
    fair = calibrate(plain, FairConfig(strength=0.0, basket_size=8))
    assert torch.equal(encode(fair, texts), expected)
    assert torch.equal(encode(calibrate(plain, CONFIG), texts, strength=0), expected)
    assert torch.equal(encode(plain, texts), expected)
    assert plain[0].model.config._attn_implementation == implementation
    assert largest_change(encode(fair, texts, strength=0.8), expected) > 1e-2


@pytest.mark.parametrize(("family", "pooling"), ENCODERS)
def test_queries_are_the_plain_models_to_the_bit(family: str, pooling: str, tiny_model: TinyModel) -> None:
    plain, queries = tiny_model(family, pooling), documents(LENGTHS)
    fair = calibrate(plain, CONFIG)
    assert np.array_equal(fair.encode_query(queries), plain.encode_query(queries))
    assert np.array_equal(fair.encode_query(queries, strength=1.0), plain.encode_query(queries))
    assert np.array_equal(fair.encode(queries, task="query"), plain.encode(queries, task="query"))
    assert fair.counts == DocumentCounts()
    assert not np.allclose(fair.encode_document(queries), plain.encode_document(queries), atol=1e-3)


@pytest.mark.parametrize(("family", "pooling"), ENCODERS)
def test_batch_invariance_and_order(family: str, pooling: str, tiny_model: TinyModel) -> None:
    fair, texts = calibrate(tiny_model(family, pooling), CONFIG), documents(LENGTHS)
    together = encode(fair, texts)
    alone = torch.cat([encode(fair, [text]) for text in texts])
    assert_close(together, alone, TOLERANCE)
    assert_close(encode(fair, texts, batch_size=2), alone, TOLERANCE)
    assert_close(encode(fair, texts[::-1]), alone.flip(0), TOLERANCE)
    assert min(largest_change(alone[i], alone[j]) for i in range(6) for j in range(i)) > 1e-2  # or order would not show


@pytest.mark.parametrize(("family", "pooling"), [e for e in ENCODERS if e[0] in ("xlm_roberta", "qwen3")])
def test_padding_side_invariance(family: str, pooling: str, tiny_model: TinyModel) -> None:
    # These two families count positions from the first token on, or only relative ones.
    fair, texts = calibrate(tiny_model(family, pooling), CONFIG), documents(LENGTHS)
    embeddings = []
    for side in ("left", "right"):
        fair.tokenizer.padding_side = side
        assert fair.preprocess(texts)["attention_mask"][1, 0] == (side == "right")
        embeddings.append(encode(fair, texts))
    assert_close(*embeddings, TOLERANCE)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_short_documents_are_left_as_they_are(pooling: str, tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", pooling)
    fair = calibrate(plain, FairConfig(basket_size=20, strength=1.0))
    texts = documents([40, 5, 60, 9])
    change = (encode(fair, texts) - encode(plain, texts)).abs().amax(1)
    assert (change > 1e-2).tolist() == [True, False, True, False]
    assert (change[[1, 3]] < TOLERANCE).all()
    assert fair.counts == DocumentCounts(calibrated=2, too_short=2)
    # Where nothing is calibrated nothing is computed differently.
    assert torch.equal(encode(fair, texts[1::2]), encode(plain, texts[1::2]))


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_eager_models(pooling: str, tiny_model: TinyModel) -> None:
    texts = documents(LENGTHS)
    fair = calibrate(tiny_model("bert", pooling, model_kwargs={"attn_implementation": "eager"}), CONFIG)
    assert "on top of eager" in str(fair.summary())
    assert_close(encode(fair, texts), encode(calibrate(tiny_model("bert", pooling), CONFIG), texts), TOLERANCE)
    causal = calibrate(tiny_model("qwen3", "mean", model_kwargs={"attn_implementation": "eager"}), CONFIG)
    texts = documents([40, 40])
    assert_close(encode(causal, texts), encode(calibrate(tiny_model("qwen3", "mean"), CONFIG), texts), TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("family", "pooling"), [("bert", "cls"), ("bert", "mean"), ("qwen3", "lasttoken")])
def test_low_precision_models(family: str, pooling: str, dtype: torch.dtype, tiny_model: TinyModel) -> None:
    texts = documents(LENGTHS)
    plain = tiny_model(family, pooling, model_kwargs={"dtype": dtype})
    full = tiny_model(family, pooling)
    assert plain[0].model.dtype == dtype
    fair = calibrate(plain, CONFIG)
    embeddings = encode(fair, texts)
    assert embeddings.dtype == dtype
    # Calibrating may lose no more than the model itself loses in this dtype (measured: about as much).
    lost = largest_change(encode(plain, texts).float(), encode(full, texts))
    assert largest_change(embeddings.float(), encode(calibrate(full, CONFIG), texts)) < 2.5 * lost
    assert torch.equal(encode(fair, texts, strength=0), encode(plain, texts))


@pytest.mark.parametrize(("family", "pooling"), [("bert", "cls"), ("bert", "mean"), ("qwen3", "lasttoken")])
def test_a_prompt_that_pooling_excludes(family: str, pooling: str, tiny_model: TinyModel) -> None:
    plain, texts = tiny_model(family, pooling), documents([50, 7, 30, 90])
    plain.set_pooling_include_prompt(False)
    prompt = "dan gos kir "
    fair = calibrate(plain, CONFIG)
    calibrated = encode(fair, texts, prompt=prompt)
    expected = reference_embeddings(
        uncalibrate(fair), texts, CONFIG.resolve(pooling.removesuffix("token")), prompt=prompt
    )
    assert_close(calibrated, expected, TOLERANCE)
    assert largest_change(calibrated, encode(plain, texts, prompt=prompt)) > 1e-2
    assert torch.equal(encode(fair, texts, prompt=prompt, strength=0), encode(plain, texts, prompt=prompt))


@pytest.mark.parametrize(("family", "pooling"), [("bert", "cls"), ("bert", "mean"), ("qwen3", "lasttoken")])
def test_pooling_may_be_told_later_to_exclude_the_prompt(family: str, pooling: str, tiny_model: TinyModel) -> None:
    plain, texts, prompt = tiny_model(family, pooling), documents([50, 7, 30, 90]), "dan gos kir "
    plain.set_pooling_include_prompt(False)
    calibrated = encode(calibrate(plain, CONFIG), texts, prompt=prompt)
    plain.set_pooling_include_prompt(True)
    told_later = calibrate(plain, CONFIG)
    assert largest_change(calibrated, encode(told_later, texts, prompt=prompt)) > 1e-3
    told_later.set_pooling_include_prompt(False)
    assert_close(encode(told_later, texts, prompt=prompt), calibrated, 1e-7)


def test_a_prompt_that_pooling_includes_is_content(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    text = document(30)
    assert_close(encode(fair, [text], prompt="dan gos "), encode(fair, [f"dan gos {text}"]), 1e-7)


def test_strength_of_one_call(tiny_model: TinyModel) -> None:
    plain, texts = tiny_model("bert", "mean"), documents(LENGTHS)
    fair = calibrate(plain, FairConfig(basket_size=8, strength=0.3))
    assert torch.equal(encode(calibrate(plain, CONFIG), texts), encode(fair, texts, strength=0.8))
    by_default = encode(fair, texts)
    assert torch.equal(by_default, encode(fair, texts, strength=0.3))
    assert torch.equal(by_default, encode(fair, texts, strength=None))
    assert np.array_equal(
        fair.encode_document(texts, strength=np.float32(1)), fair.encode(texts, strength=1, prompt_name="document")
    )
    changes = [largest_change(encode(fair, texts, strength=s), encode(plain, texts)) for s in (0, 0.25, 0.5, 1.0)]
    assert changes == sorted(changes)
    assert changes[0] == 0


@pytest.mark.parametrize(
    ("strength", "error", "text"),
    [
        (1.5, ValueError, r"strength: expected a number in \[0, 1\], got 1.5"),
        (float("nan"), ValueError, "strength: .* got nan"),
        ("0.5", TypeError, r"strength: .* got '0.5' \(str\)"),
        (True, TypeError, r"strength: .* got True \(bool\)"),
    ],
)
def test_bad_strengths(strength: Any, error: type[Exception], text: str, tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model(), CONFIG)
    for method in (fair.encode, fair.encode_document, fair.encode_query):
        with pytest.raises(error, match=text):
            method(documents([20]), strength=strength)
    assert fair.counts.documents == 0


def test_unknown_arguments_are_refused_as_before(tiny_model: TinyModel) -> None:
    with pytest.raises(ValueError, match="additional keyword arguments that this model does not use"):
        calibrate(tiny_model(), CONFIG).encode("bal", strenght=0.5)
    with pytest.raises(ValueError, match="additional keyword arguments that this model does not use"):
        tiny_model().encode("bal", strength=0.5)


# Models that cannot be calibrated


@pytest.mark.parametrize("implementation", ["eager"])
def test_softcapped_attention_is_refused(implementation: str, tiny_model: TinyModel) -> None:
    plain, texts = (
        tiny_model("gemma2", "mean", model_kwargs={"attn_implementation": implementation}),
        documents([9, 40]),
    )
    expected = encode(plain, texts)
    with pytest.raises(
        ValueError, match=r"Gemma2Attention passes \['softcap'\] to its attention, which calibration does"
    ):
        calibrate(plain, CONFIG)
    assert torch.equal(encode(plain, texts), expected)


@pytest.mark.parametrize("pooling", ["weightedmean", "max", ("cls", "mean")])
def test_other_poolings_are_refused(pooling: Any, tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "cls")
    plain[1] = Pooling(32, pooling_mode=pooling)
    with pytest.raises(
        ValueError, match=re.escape(f"but its pooling is {pooling!r}; choose the rows to calibrate with")
    ):
        calibrate(plain, CONFIG)
    texts = documents(LENGTHS)
    explicit = calibrate(plain, FairConfig(basket_size=8, strength=0.8, pooling="mean"))
    assert largest_change(encode(explicit, texts), encode(plain, texts)) > 1e-2


def test_mean_sqrt_len_is_mean(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "cls")
    plain[1] = Pooling(32, pooling_mode="mean_sqrt_len_tokens")
    texts = documents([40])
    length = 42**0.5
    expected = encode(calibrate(tiny_model("bert", "mean"), CONFIG), texts) * length
    assert_close(encode(calibrate(plain, CONFIG), texts), expected, 1e-4)


def test_a_missing_pooling_is_refused(tiny_model: TinyModel) -> None:
    bare = SentenceTransformer(modules=[tiny_model()[0]], device="cpu")
    with pytest.raises(
        ValueError, match=r"pooling: 'auto' needs a model with one Pooling module of .* has 0 Pooling mod"
    ):
        calibrate(bare, CONFIG)


def test_another_first_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"first module must be a sentence-transformers Transformer .* got .*Pooling$"):
        calibrate(SentenceTransformer(modules=[Pooling(8)], device="cpu"), CONFIG)


def test_other_backends_are_refused(tiny_model: TinyModel) -> None:
    plain = tiny_model()
    plain[0].backend = "onnx"
    with pytest.raises(
        ValueError, match="backend: calibration needs the torch backend, the model was loaded with 'onnx'"
    ):
        calibrate(plain, CONFIG)


@pytest.mark.parametrize("name", ["flex_attention", "paged|flash_attention_2"])
def test_other_implementations_are_refused(name: str, tiny_model: TinyModel) -> None:
    plain = tiny_model()
    plain[0].model.config._attn_implementation_internal = name
    text = rf"attn_implementation: calibration works on top of .* and flash attention, .* with '{re.escape(name)}';"
    with pytest.raises(ValueError, match=text):
        calibrate(plain, CONFIG)


@pytest.mark.parametrize("settings", [{"layers": 5}, {"layers": (4,)}])
def test_layers_that_the_model_lacks_are_refused(settings: dict[str, Any], tiny_model: TinyModel) -> None:
    with pytest.raises(ValueError, match=r"layers: .*4 attention layers"):
        calibrate(tiny_model(), FairConfig(**settings))


def test_a_share_that_does_not_fit_is_refused(tiny_model: TinyModel) -> None:
    config = FairConfig(isolated_share=0.6)
    calibrate(tiny_model("bert", "cls"), config)
    with pytest.raises(ValueError, match="two isolated tokens"):
        calibrate(tiny_model("qwen3", "lasttoken"), config)


# A model that is changed after calibration


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_changed_implementation_is_noticed(implementation: str, tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model(), CONFIG)
    fair[0].model.set_attn_implementation(implementation)
    with pytest.raises(
        ValueError, match=r"BertModel made 0 attention calls instead of the 4 recorded\. Was its attn_impl"
    ):
        fair.encode(documents([40]))
    assert fair.counts.documents == 0


def test_a_removed_layer_is_noticed(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model(), CONFIG)
    del fair[0].model.encoder.layer[3]
    with pytest.raises(ValueError, match="made 3 attention calls instead of the 4 recorded"):
        fair.encode(documents([40]))


def test_a_module_without_a_model(tiny_folder: Any) -> None:
    module = FairTransformer(str(tiny_folder("bert", "cls") / "inner"), fair_config={"strength": 0.2})
    assert module.fair_config == FairConfig(strength=0.2)
    features = module.preprocess(documents([40]))
    with pytest.raises(ValueError, match="not part of a model yet: use calibrate"):
        module(features)
    with pytest.raises(ValueError, match="not part of a model yet"):
        module.summary()
    with pytest.raises(ValueError, match="unknown FairConfig settings"):
        FairTransformer(str(tiny_folder("bert", "cls") / "inner"), fair_config={"x": 0.2})


def test_features_without_a_mask_are_refused(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model(), CONFIG)
    with pytest.raises(
        ValueError, match=r"features: documents need text with an attention_mask, or .*, got \['input_i"
    ):
        fair[0]({"input_ids": torch.tensor([[0, 9, 9, 2]])})


def test_calibrating_leaves_training_mode_alone(tiny_model: TinyModel) -> None:
    plain = tiny_model()
    plain.train()
    assert calibrate(plain, CONFIG)[0].model.training
    plain.eval()
    assert not calibrate(plain, CONFIG)[0].model.training


# Counting


def test_counts(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    fair = calibrate(tiny_model(), FairConfig(basket_size=16))
    with caplog.at_level(logging.WARNING, "fair_calibration"):
        fair.encode(documents([3, 14, 15, 40]), batch_size=2)
        # For cls pooling the EOS is content: 15 + 1 tokens are a basket.
        assert fair.counts == DocumentCounts(calibrated=2, too_short=2)
        fair.encode(documents([60]), strength=0)
        fair.encode_query(documents([100]))
        assert fair.counts.plain == 1
        assert not caplog.records
        fair.encode(documents([126, 127, 300]))
        fair.encode(documents([200]), strength=0)
    assert fair.counts == DocumentCounts(calibrated=5, too_short=2, plain=2, truncated=3)
    assert fair.counts.documents == 9
    (record,) = caplog.records
    assert record.name == "fair_calibration"
    assert "Documents are truncated at max_seq_length=128 tokens, and what is cut off cannot be found" in record.message


def test_counts_of_truncation_at_a_lower_limit(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    fair = calibrate(tiny_model(), CONFIG)
    fair.max_seq_length = 20
    with caplog.at_level(logging.WARNING, "fair_calibration"):
        fair.encode_document(documents([16, 17, 5]))  # the document prompt has two words
        fair.encode_document(documents([18, 19]))
    assert fair.counts.truncated == 3
    assert [record.message.split(" tokens")[0] for record in caplog.records] == [
        "Documents are truncated at max_seq_length=20"
    ]


@pytest.mark.parametrize("settings", [CONFIG, EvenChunks(chunk_size=8, unit_size=8)])
def test_truncated_queries_are_counted(
    tiny_model: TinyModel, settings: FairConfig | EvenChunks, caplog: pytest.LogCaptureFixture
) -> None:
    fair = calibrate(tiny_model("bert", "mean"), settings)
    fair.max_seq_length = 20
    with caplog.at_level(logging.WARNING, "fair_calibration"):
        fair.encode_query(documents([5, 17]))
        assert fair.counts == DocumentCounts()
        assert not caplog.records
        fair.encode_query(documents([5, 30, 40]))
        fair.encode(documents([30]), prompt_name="query")
    assert fair.counts == DocumentCounts(truncated_queries=3)
    assert [record.message for record in caplog.records] == [
        "Queries are truncated at max_seq_length=20 tokens, and what is cut off is not searched for. Raise "
        "max_seq_length if the model allows it; model.counts.truncated_queries is their number. This warning is shown "
        "once."
    ]
    assert str(fair.summary()).endswith("\n  queries    3 truncated")


# Several models, several threads


def test_two_models_interleaved(tiny_model: TinyModel) -> None:
    plain, texts = tiny_model("bert", "mean"), documents(LENGTHS)
    one = calibrate(plain, CONFIG)
    other = calibrate(plain, FairConfig(basket_size=16, strength=1.0, layers="all", isolate="bos"))
    expected = [encode(model, texts) for model in (one, other, plain)]
    assert largest_change(expected[0], expected[1]) > 1e-2
    for _ in range(2):
        for model, embeddings in zip((one, other, plain), expected, strict=True):
            for text, embedding in zip(texts, embeddings, strict=True):
                assert_close(encode(model, [text])[0], embedding, TOLERANCE)
            assert torch.equal(encode(model, texts), embeddings)


def test_eight_threads_on_two_models(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    models: list[SentenceTransformer] = [
        calibrate(plain, CONFIG),
        calibrate(plain, FairConfig(basket_size=5, layers="all")),
    ]
    work = [(models[i % 2], documents(LENGTHS, seed=i), i % 3) for i in range(24)]

    def run(item: tuple[FairSentenceTransformer, list[str], int]) -> np.ndarray:
        model, texts, kind = item
        if kind == 0:
            return model.encode(texts)
        return model.encode_query(texts) if kind == 1 else model.encode(texts, strength=1.0)

    expected = [run(item) for item in work]  # type: ignore[arg-type]
    before = [model.counts.documents for model in models]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, work))  # type: ignore[arg-type]
    for result, single in zip(results, expected, strict=True):
        assert np.array_equal(result, single)
    assert [model.counts.documents for model in models] == [2 * n for n in before]  # type: ignore[attr-defined]
