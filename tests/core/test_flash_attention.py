"""Models with flash attention, padded and unpadded, whose calibrated vectors are those of sdpa."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from transformers import AttentionInterface, modeling_flash_attention_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_kernels_available

from fair_calibration import DocumentCounts, EvenChunks, FairConfig, calibrate, uncalibrate
from fair_calibration.access import interface
from fair_calibration.passages import check_chunk_size
from fair_evaluation.documents import count_tokens
from fair_evaluation.observation import load_batch
from fair_indexing.encode import encode_texts
from tests.conftest import TinyModel
from tests.core.families import CASES, load_plain
from tests.core.flash import HUB_NAME, pretend_flash_attention
from tests.core.tiny_models import documents

CONFIG = FairConfig(basket_size=8, strength=0.7, layers=2)
TEXTS = documents([40, 5, 27, 13])
TOLERANCE = 2e-5  # as in test_families


@pytest.fixture(autouse=True)
def flash() -> Iterator[None]:
    with pretend_flash_attention():
        yield


def with_flash(model: SentenceTransformer, name: str = "flash_attention_2", *, unpad: bool) -> SentenceTransformer:
    """Sets flash attention on a model, as loading it with ``attn_implementation`` does."""
    transformer: Any = model[0]
    transformer.model.set_attn_implementation(name)
    transformer.unpad_inputs = None if unpad else False
    assert transformer.can_flatten_inputs == unpad
    return model


def encode(model: SentenceTransformer, **kwargs: Any) -> np.ndarray:
    vectors: np.ndarray = model.encode_document(TEXTS, **kwargs)
    assert np.isfinite(vectors).all()
    return vectors


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(actual - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("unpad", [True, False])
@pytest.mark.parametrize(
    ("family", "pooling"),
    [("bert", "cls"), ("bert", "mean"), ("xlm_roberta", "cls"), ("qwen3", "lasttoken"), ("qwen3_sliding", "mean")],
)
def test_equals_sdpa(tiny_model: TinyModel, family: str, pooling: str, unpad: bool) -> None:
    plain = tiny_model(family, pooling)
    expected, expected_plain = encode(calibrate(plain, CONFIG)), encode(plain)
    with_flash(plain, unpad=unpad)
    fair = calibrate(plain, CONFIG)
    assert fair.summary().mechanism == "transformers AttentionInterface, on top of flash_attention_2"
    calibrated = encode(fair)
    assert_close(calibrated, expected)
    assert np.abs(calibrated - expected_plain).max() > 5e-3 * np.abs(expected_plain).max()
    assert fair.counts.documents == 4
    # At strength 0, for queries and without the calibration the model computes what it computes by itself.
    plain_flash = encode(plain)
    assert_close(plain_flash, expected_plain)
    assert np.array_equal(encode(fair, strength=0), plain_flash)
    assert np.array_equal(fair.encode_query(TEXTS), plain.encode_query(TEXTS))
    assert np.array_equal(encode(uncalibrate(fair)), plain_flash)


@pytest.mark.parametrize("attention", ["any", "global"])
def test_windows_of_both_sides(attention: Literal["any", "global"]) -> None:
    case = next(case for case in CASES if case.family.model_type == "modernbert" and case.pooling == "mean")
    assert case.family.has_window
    config = replace(CONFIG, attention=attention)  # the second of the three layers has windows
    sdpa = calibrate(load_plain(case), config)
    flash = calibrate(with_flash(deepcopy(load_plain(case)), unpad=True), config)
    assert_close(encode(flash), encode(sdpa))
    assert flash.summary().windows == sdpa.summary().windows
    assert flash.summary().layers == sdpa.summary().layers == {"any": (1, 2), "global": (0, 2)}[attention]


@pytest.mark.parametrize(("pooling", "unpad"), [("lasttoken", True), ("mean", False)])
def test_with_the_kernel(tiny_model: TinyModel, pooling: str, unpad: bool) -> None:
    pytest.importorskip("triton", reason="the package triton, which exists for Linux, is not installed")
    plain, config, texts = tiny_model("qwen3_sliding", pooling), replace(CONFIG, layers=1), documents([22, 10])
    expected = calibrate(plain, config).encode_document(texts)
    fair = calibrate(with_flash(plain, unpad=unpad), config, kernel="triton")
    assert_close(fair.encode_document(texts), expected)
    assert fair.summary().windows == (20,)
    assert all(word in str(fair.summary()) for word in ("  local      ", "  kernel     "))


def test_prompts_that_pooling_leaves_out(tiny_model: TinyModel) -> None:
    for pooling in ("cls", "mean"):
        plain = tiny_model("bert", pooling)
        plain[1].include_prompt = False  # type: ignore[union-attr]
        expected = encode(calibrate(plain, CONFIG), prompt="dan gos ")
        assert_close(encode(calibrate(with_flash(plain, unpad=True), CONFIG), prompt="dan gos "), expected)


def test_kernels_of_the_hub(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    expected = encode(calibrate(plain, CONFIG))
    fair = calibrate(with_flash(plain, HUB_NAME, unpad=True), CONFIG)
    assert_close(encode(fair), expected)
    # In a worker process nothing is registered yet.
    pickled = pickle.dumps(fair)
    interface._flash_functions.clear()
    AttentionInterface._global_mapping.pop(HUB_NAME)
    modeling_flash_attention_utils._loaded_implementation = None
    assert HUB_NAME not in ALL_ATTENTION_FUNCTIONS
    assert_close(encode(pickle.loads(pickled)), expected)


@pytest.mark.skipif(not is_kernels_available(), reason="needs the package kernels, as transformers 5.25 installs it")
def test_a_package_that_is_missing_is_replaced_by_a_kernel_of_the_hub(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "cls")
    expected = encode(calibrate(plain, CONFIG))
    with pretend_flash_attention(is_installed=False):
        fair = calibrate(with_flash(plain, unpad=True), CONFIG)
        assert fair.summary().mechanism == f"transformers AttentionInterface, on top of {HUB_NAME}"
        assert_close(encode(fair), expected)


def test_truncation_is_counted(tiny_model: TinyModel) -> None:
    fair = calibrate(with_flash(tiny_model("bert", "cls"), unpad=True), CONFIG, max_seq_length=24)
    encode(fair)
    assert fair.counts == DocumentCounts(calibrated=4, truncated=2)
    fair.encode_query(TEXTS)
    assert fair.counts.truncated_queries == 2


def test_tokens_are_counted_and_indexed(tiny_model: TinyModel) -> None:
    padded = calibrate(tiny_model("bert", "cls"), CONFIG)
    fair = calibrate(with_flash(tiny_model("bert", "cls"), unpad=True), CONFIG)
    assert count_tokens(fair, TEXTS, prompt="") == count_tokens(padded, TEXTS, prompt="")
    check_chunk_size(fair, 50)
    with pytest.raises(ValueError, match=r"chunk_size: expected at most 124, .* got 500"):
        check_chunk_size(fair, 500)
    vectors = encode_texts(fair, TEXTS, normalize=False, tokens_per_batch=64)
    assert_close(vectors, encode(padded))


def test_gradients(tiny_model: TinyModel) -> None:
    gradients = []
    for flash in (False, True):
        plain = tiny_model("bert", "cls")
        fair = calibrate(with_flash(plain, unpad=True) if flash else plain, CONFIG).train()
        for module in fair.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        features = fair.preprocess(TEXTS)
        fair(dict(features))["sentence_embedding"][:, :5].sum().backward()
        transformer = fair[0]
        assert isinstance(transformer, Transformer)
        gradients.append(next(transformer.model.parameters()).grad)
    first, second = gradients
    assert first is not None
    assert second is not None
    assert (first - second).abs().max() < 1e-4 * first.abs().max()


def test_what_is_refused(tiny_model: TinyModel) -> None:
    fair = calibrate(with_flash(tiny_model("bert", "cls"), unpad=True), CONFIG)
    with pytest.raises(
        ValueError, match=r"pooled_row_only: flash attention runs over batches without padding, .*unpad"
    ):
        calibrate(fair, pooled_row_only=True)
    with pytest.raises(ValueError, match=r"EvenChunks: with flash attention .* without padding, .*unpad_inputs"):
        calibrate(fair, EvenChunks(chunk_size=16))
    assert calibrate(with_flash(tiny_model("bert", "cls"), unpad=False), EvenChunks(chunk_size=16)).encode(TEXTS).any()
    with pytest.raises(ValueError, match=r"model: with flash attention it encodes .* not diagnosed; set model\[0\]"):
        load_batch(fair, TEXTS, prompt="")
    short = calibrate(with_flash(tiny_model("bert", "cls"), unpad=False), CONFIG, pooled_row_only=True)
    assert_close(encode(short), encode(fair))
