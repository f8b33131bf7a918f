"""Two models that share weights, and what may be done to a calibrated model after it was made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from fair_calibration import FairConfig, calibrate, uncalibrate
from tests.conftest import TinyModel
from tests.core.tiny_models import documents

CONFIG = FairConfig(basket_size=8, strength=1.0)
TEXTS = documents([50, 7, 30])


@pytest.mark.parametrize("which", ["plain", "fair"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_one_casts_both(which: str, dtype: torch.dtype, tiny_model: TinyModel) -> None:
    plain = tiny_model("qwen3", "lasttoken")  # its rotary frequencies are a buffer
    fair = calibrate(plain, CONFIG)
    (plain if which == "plain" else fair).to(dtype)
    for one, other in zip(plain.buffers(), fair.buffers(), strict=True):
        assert one is other
    assert np.array_equal(plain.encode(TEXTS), fair.encode(TEXTS, strength=0))
    assert np.array_equal(plain.encode_query(TEXTS), fair.encode_query(TEXTS))
    assert not np.array_equal(plain.encode(TEXTS), fair.encode(TEXTS))
    assert np.array_equal(uncalibrate(fair).encode(TEXTS), plain.encode(TEXTS))


def test_a_replaced_pooling_is_noticed(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    fair[1] = Pooling(fair[0].get_embedding_dimension(), pooling_mode="cls")
    assert fair.summary().config.pooling == "cls"
    expected = calibrate(tiny_model("bert", "cls"), CONFIG)
    assert np.array_equal(fair.encode(TEXTS), expected.encode(TEXTS))


def test_calibrating_again_without_settings_keeps_them(tiny_model: TinyModel) -> None:
    assert calibrate(calibrate(tiny_model("bert", "cls"), CONFIG)).fair_config == CONFIG


@pytest.mark.parametrize("prompt_name", ["query", "s2p_query"])
def test_prompts_named_for_queries_make_queries(prompt_name: str, tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "cls")
    plain.prompts = {"query": "kir ", "s2p_query": "fan ", "document": "dan "}
    fair = calibrate(plain, CONFIG)
    expected = plain.encode(TEXTS, prompt_name=prompt_name)
    assert np.array_equal(fair.encode(TEXTS, prompt_name=prompt_name), expected)
    assert np.array_equal(fair.encode(TEXTS, prompt_name), expected)
    assert fair.counts.documents == 0
    assert not np.array_equal(fair.encode(TEXTS, prompt_name="document"), plain.encode(TEXTS, prompt_name="document"))
    as_document = fair.encode(TEXTS, prompt_name=prompt_name, task="document")
    assert not np.array_equal(as_document, expected)


@pytest.mark.parametrize("task", ["Query", "passage", "retrieval.query"])
def test_unknown_tasks_are_refused(task: str, tiny_model: TinyModel) -> None:
    with pytest.raises(ValueError, match=f"task: expected 'query', 'document' or None, got '{task}'"):
        calibrate(tiny_model("bert", "cls"), CONFIG).encode(TEXTS, task=task)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_is_refused(use_reentrant: bool, tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model("bert", "mean"), CONFIG).train()
    fair[0].model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with pytest.raises(ValueError, match="gradient checkpointing"):
        fair(fair.preprocess(TEXTS))
    assert fair(fair.preprocess(TEXTS), strength=0.0)["sentence_embedding"].requires_grad


@pytest.mark.parametrize("pooling", ["cls", "lasttoken", "mean"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(pooling: str, dtype: torch.dtype, tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", pooling)
    fair = calibrate(plain, CONFIG)
    exact, exact_plain = fair.encode(TEXTS), plain.encode(TEXTS)
    with torch.autocast("cpu", dtype=dtype):
        recalibrated = calibrate(plain, CONFIG)
        cast, cast_plain = recalibrated.encode(TEXTS), plain.encode(TEXTS)
    # Not further off than autocast puts the plain model.
    assert np.abs(cast - exact).max() < 3 * np.abs(cast_plain - exact_plain).max()
    assert np.isfinite(cast).all()


def test_features_may_be_used_twice(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    fair.max_seq_length = 32
    features = fair.preprocess(TEXTS)
    fair(features)
    once = fair.counts
    fair(features)
    assert once.truncated > 0
    assert fair.counts == once.plus(once._replace(truncated=0))  # what is cut off is counted when it is tokenized


def test_a_pool_of_another_model_is_refused(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    fair = calibrate(tiny_model("bert", "mean"), CONFIG)
    received: Any = [0, torch.zeros(1, 2)]
    monkeypatch.setattr(SentenceTransformer, "_get_worker_result", lambda *_: received)
    with pytest.raises(ValueError, match="pool: it was started by another model"):
        fair._get_worker_result({})


def test_a_bad_strength_does_not_reach_the_workers(tiny_model: TinyModel) -> None:
    with pytest.raises(ValueError, match="strength: expected a number in"):
        calibrate(tiny_model("bert", "mean"), CONFIG).encode(TEXTS, strength=5, pool={"input": None})
