"""The logarithmic distance bias against models whose own bias is built logarithmic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from fair_calibration import FairConfig, FairSentenceTransformer, calibrate
from fair_calibration.log_distance import find_slopes, log_distance
from tests.core.families import load_transformer, with_pooling
from tests.core.tiny_models import documents

CONFIG = FairConfig(basket_size=8, strength=0.8)
TEXTS = documents([60, 12, 35])
SLOPES = torch.tensor([2.0 ** (-8 * (head + 1) / 4) for head in range(4)])


def load(family: str, pooling: str = "mean", side: str = "right") -> SentenceTransformer:
    return with_pooling(load_transformer(family, side), pooling)


def encode(model: FairSentenceTransformer, **kwargs: Any) -> np.ndarray:
    return np.asarray(model.encode_document(TEXTS, **kwargs))


def logarithmic(length: int) -> Tensor:
    positions = torch.arange(length).float()
    return -SLOPES[:, None, None] * (positions[:, None] - positions).abs().log1p()


def patch_own_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has BLOOM and MPT build a logarithmic bias themselves."""

    def bloom(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        n_sequences, length = attention_mask.shape
        assert num_heads == 4
        return logarithmic(length).repeat(n_sequences, 1, 1).to(dtype)

    def mpt(_: int, length: int, *__: Any, **___: Any) -> Tensor:
        return logarithmic(length)

    monkeypatch.setattr(modeling_bloom.BloomModel, "build_alibi_tensor", lambda _, *args, **kw: bloom(*args, **kw))
    monkeypatch.setattr(
        modeling_mpt.MptModel, "build_mpt_alibi_tensor", lambda _, *args, **kwargs: mpt(*args, **kwargs)
    )


@pytest.mark.parametrize("strength", [0.0, 0.8])
@pytest.mark.parametrize(("pooling", "side"), [("mean", "right"), ("last", "left")])
@pytest.mark.parametrize("family", ["BLOOM", "MPT"])
def test_as_if_built_logarithmic(
    family: str, pooling: str, side: str, strength: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = calibrate(load(family, pooling, side), CONFIG)
    linear = encode(model, strength=strength)
    with log_distance(model) as slopes:
        vectors = encode(model, strength=strength)
    assert torch.allclose(slopes, SLOPES, rtol=1e-3)
    assert np.array_equal(encode(model, strength=strength), linear)  # it is over
    patch_own_bias(monkeypatch)
    expected = encode(model, strength=strength)
    assert np.abs(vectors - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.abs(vectors - linear).max() > 1e-2 * np.abs(expected).max()


def test_fused_attention() -> None:
    model = calibrate(load("Falcon, ALiBi"), CONFIG)
    assert "scaled_dot_product_attention" in model.summary().mechanism
    with log_distance(model) as slopes:
        plain, fair = encode(model, strength=0), encode(model)
    # Falcon's slopes are ALiBi's, scaled like its logits.
    expected_slopes = modeling_falcon.build_alibi_tensor(torch.ones(1, 3), 4, torch.float32).reshape(4, 1, 3)[:, 0, 1]
    ratio = slopes / expected_slopes
    assert torch.allclose(ratio, ratio[0].expand(4), rtol=1e-2)
    assert np.abs(plain - encode(model, strength=0)).max() > 1e-2 * np.abs(plain).max()
    assert np.abs(plain - fair).max() > 1e-3 * np.abs(plain).max()


def test_queries_stay_as_they_are() -> None:
    model = calibrate(load("BLOOM"), CONFIG)
    before = model.encode_query(TEXTS)
    with log_distance(model):
        assert np.array_equal(model.encode_query(TEXTS), before)


@pytest.mark.parametrize("family", ["BERT", "Falcon, rotary", "Qwen3", "T5 encoder"])
def test_models_without_a_linear_bias(family: str) -> None:
    with pytest.raises(ValueError, match="has no distance bias that is linear"):
        find_slopes(calibrate(load(family), CONFIG))


def test_plain_models_are_refused() -> None:
    with (
        pytest.raises(TypeError, match="model: expected a FairSentenceTransformer, from calibrate"),
        log_distance(
            load("BLOOM")  # type: ignore[arg-type]
        ),
    ):
        pass


def test_far_keys_no_longer_underflow() -> None:
    distance = torch.arange(8192.0)
    linear = (-0.5 * distance).softmax(0).to(torch.bfloat16)
    logarithm = (-0.5 * distance.log1p()).softmax(0).to(torch.bfloat16)
    assert linear[-1] == 0
    assert logarithm[-1] > 1e-5
