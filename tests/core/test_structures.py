"""What stands before and behind the transformer: poolings, heads, prompts; whole models against the oracle."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Dropout,
    LayerNorm,
    Normalize,
    Pooling,
    WeightedLayerPooling,
)
from torch import nn

from fair_calibration import DocumentCounts, FairConfig, calibrate
from tests.core.families import CONFIG, TEXTS, MatrixCase, load_plain, load_transformer
from tests.core.model_oracle import oracle, relative_error
from tests.core.test_families import TOLERANCE, encode, fair_model
from tests.core.tiny_models import document


def model_of(*modules: nn.Module, **kwargs: Any) -> SentenceTransformer:
    return SentenceTransformer(modules=list(modules), device="cpu", **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("pooling", ["weightedmean", "max", "mean_sqrt_len_tokens", "lasttoken", ("cls", "mean")])
@pytest.mark.parametrize("rows", ["cls", "last", "mean"])
def test_rows_chosen_for_any_pooling(pooling: Any, rows: Any) -> None:
    # What "auto" says of these poolings: test_transformer.py.
    pool = Pooling(32, pooling_mode=pooling)
    plain = model_of(load_transformer("RoBERTa", "right"), pool)
    config = FairConfig(basket_size=8, layers=2, pooling=rows)
    fair = calibrate(plain, config)
    eager = model_of(load_transformer("RoBERTa", "right", "eager"), pool)
    calibrated = encode(fair, TEXTS)
    assert relative_error(calibrated, oracle(eager, config.resolve(rows), TEXTS).embeddings) < TOLERANCE
    assert relative_error(calibrated, encode(plain, TEXTS)) > 1e-3
    assert fair.summary().config.pooling == rows
    assert np.array_equal(fair.encode(TEXTS, strength=0), plain.encode(TEXTS))


def test_two_poolings_are_refused() -> None:
    plain = model_of(load_transformer("RoBERTa", "right"), Pooling(32), Pooling(32))
    with pytest.raises(ValueError, match="but it has 2 Pooling modules; choose the rows to calibrate"):
        calibrate(plain, CONFIG)


@pytest.mark.parametrize("truncate_dim", [None, 12])
def test_heads_and_matryoshka(truncate_dim: int | None) -> None:
    torch.manual_seed(1)
    head = [Dense(32, 24), Dropout(0.1), LayerNorm(24), Normalize()]
    plain = model_of(load_transformer("GTE", "right"), Pooling(32, "cls"), *head, truncate_dim=truncate_dim)
    eager = model_of(load_transformer("GTE", "right", "eager"), Pooling(32, "cls"), *head)
    fair = calibrate(plain, CONFIG)
    calibrated = encode(fair, TEXTS)
    assert calibrated.shape == (3, truncate_dim or 24)
    expected = oracle(eager, CONFIG.resolve("cls"), TEXTS).embeddings[:, :truncate_dim]
    assert relative_error(calibrated, expected) < TOLERANCE
    assert relative_error(calibrated, encode(plain, TEXTS)) > 1e-2
    assert np.array_equal(fair.encode(TEXTS, strength=0), plain.encode(TEXTS))
    unit = fair.encode(TEXTS, normalize_embeddings=True)
    assert np.allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)


def test_a_weighted_mean_of_layers() -> None:
    models = []
    for implementation in (None, "eager"):
        transformer = copy.deepcopy(load_transformer("BERT", "right", implementation))
        transformer.model.config.output_hidden_states = True
        layers = WeightedLayerPooling(32, num_hidden_layers=3, layer_start=1)
        models.append(model_of(transformer, layers, Pooling(32, "mean")))
    plain, eager = models
    calibrated = encode(calibrate(plain, CONFIG), TEXTS)
    assert relative_error(calibrated, oracle(eager, CONFIG.resolve("mean"), TEXTS).embeddings) < TOLERANCE
    assert relative_error(calibrated, encode(plain, TEXTS)) > 1e-2


@pytest.mark.parametrize("task", ["retrieval_query", "retrieval_passage", "text_matching"])
def test_jina_v3_with_its_task_adapters(task: str) -> None:
    models = []
    for implementation in (None, "eager"):
        transformer = copy.deepcopy(load_transformer("Jina v3", "right", implementation))
        torch.manual_seed(2)
        for name in ("retrieval_query", "retrieval_passage", "text_matching"):
            lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            peft.inject_adapter_in_model(lora, transformer.model, name)
        for layer in transformer.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.set_adapter(task)
        models.append(model_of(transformer, Pooling(32, "mean")))
    plain, eager = models
    fair = calibrate(plain, CONFIG)
    calibrated = encode(fair, TEXTS)
    assert relative_error(calibrated, oracle(eager, CONFIG.resolve("mean"), TEXTS).embeddings) < TOLERANCE
    assert relative_error(calibrated, encode(fair_model(MatrixCase("Jina v3", "mean", "right")), TEXTS)) > 0.1
    assert np.array_equal(fair.encode(TEXTS, strength=0), plain.encode(TEXTS))
    assert np.array_equal(fair.encode_query(TEXTS), plain.encode_query(TEXTS))


@pytest.mark.parametrize(
    ("case", "n_words"),
    [
        # The words that are as much content as a basket, with an EOS unless it is isolated; the prompt has the BOS.
        # cls pooling takes, and isolates, the first token behind the prompt; last-token pooling isolates the EOS.
        (MatrixCase("ModernBERT", "mean", "right"), 7),
        (MatrixCase("MPNet", "cls", "right"), 8),
        (MatrixCase("T5 encoder", "mean", "right"), 7),
        (MatrixCase("Qwen3", "last", "left"), 8),
        (MatrixCase("Llama", "mean", "left"), 7),
        (MatrixCase("BLOOM", "mean", "right"), 7),
    ],
    ids=str,
)
def test_a_prompt_that_pooling_excludes_is_no_content(case: MatrixCase, n_words: int) -> None:
    prompt = "bal dan gos kir "
    pooling = Pooling(32, pooling_mode=load_plain(case)[1].pooling_mode, include_prompt=False)
    plain, eager = (
        model_of(load_transformer(case.name, case.side, implementation), pooling) for implementation in (None, "eager")
    )
    fair = calibrate(plain, CONFIG)
    calibrated = encode(fair, TEXTS, prompt=prompt)
    expected = oracle(eager, CONFIG.resolve(case.pooling), TEXTS, prompt=prompt)
    assert relative_error(calibrated, expected.embeddings) < TOLERANCE
    assert relative_error(calibrated, encode(plain, TEXTS, prompt=prompt)) > 2e-3
    before = fair.counts
    encode(fair, [document(n_words), document(n_words - 1)], prompt=prompt)
    assert fair.counts == before.plus(DocumentCounts(calibrated=1, too_short=1))
