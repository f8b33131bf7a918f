"""Every family of tests/core/families.py against the reference, and the families that are refused."""

from __future__ import annotations

import copy
import re
import runpy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from fair_calibration import DocumentCounts, FairSentenceTransformer, calibrate
from tests.core.families import (
    CASES,
    CONFIG,
    FAMILIES,
    INTERFACE,
    IS_NEW,
    N_LAYERS,
    REFUSED,
    TEXTS,
    MatrixCase,
    Refused,
    load_plain,
    load_transformer,
    make_transformer,
    with_pooling,
)
from tests.core.model_oracle import oracle, relative_error
from tests.core.tiny_models import documents

# Relative to the largest value of the embeddings, behind three float32 layers with sharp attention: measured 2e-6.
TOLERANCE = 2e-5
matrix = pytest.mark.parametrize("case", CASES, ids=str)


@cache
def fair_model(case: MatrixCase) -> FairSentenceTransformer:
    return calibrate(load_plain(case), CONFIG)


def encode(model: SentenceTransformer, texts: list[str], **kwargs: Any) -> torch.Tensor:
    embeddings = model.encode(texts, convert_to_tensor=True, **kwargs)
    assert isinstance(embeddings, torch.Tensor)
    assert embeddings.isfinite().all()
    return embeddings


@matrix
def test_equals_the_reference(case: MatrixCase) -> None:
    family, fair = case.family, fair_model(case)
    before = fair.counts
    calibrated = encode(fair, TEXTS)
    assert fair.counts == before.plus(DocumentCounts(calibrated=2, too_short=1))
    expected = oracle(load_plain(case, "eager" if family.eager else None), CONFIG.resolve(case.pooling), TEXTS)
    assert relative_error(calibrated, expected.embeddings) < TOLERANCE
    plain = encode(load_plain(case), TEXTS)
    assert relative_error(plain, calibrated) > 5e-3
    assert relative_error(plain[1:2], calibrated[1:2]) < TOLERANCE  # the one that is too short

    sees_less = family.has_window or (family.causal and case.pooling == "mean")
    assert expected.hides_baskets == sees_less
    summary = fair.summary()
    assert (summary.n_layers, summary.layers) == (N_LAYERS, (1, 2))
    if IS_NEW:
        assert summary.mechanism == family.mechanism
    assert any(window is not None for window in summary.windows) == (
        family.has_window and summary.mechanism == INTERFACE
    )


@pytest.mark.parametrize(
    "case",
    [
        MatrixCase("ModernBERT", "cls", "right"),
        MatrixCase("ModernBERT", "mean", "right"),
        MatrixCase("Gemma 3", "last", "left"),
        MatrixCase("Gemma 3, bidirectional", "mean", "right"),
    ],
    ids=str,
)
def test_global_layers_alone(case: MatrixCase) -> None:
    """The tiny models of these families attend globally in the first and the last of their three layers."""
    config = replace(CONFIG, layers="all", attention="global")
    fair = calibrate(load_plain(case), config)
    assert fair.summary().layers == (0, 2)
    expected = oracle(load_plain(case, "eager"), replace(CONFIG, layers=(0, 2)).resolve(case.pooling), TEXTS)
    assert relative_error(encode(fair, TEXTS), expected.embeddings) < TOLERANCE
    every_layer = encode(calibrate(load_plain(case), replace(CONFIG, layers="all")), TEXTS)
    # The first token of the tiny ModernBERT sees 6 others in its window, less than a basket.
    sees_one_basket = case == MatrixCase("ModernBERT", "cls", "right")
    assert (relative_error(every_layer, expected.embeddings) < TOLERANCE) == sees_one_basket


def test_a_summary_says_where_nothing_changes() -> None:
    case = MatrixCase("ModernBERT", "cls", "right")
    alone = calibrate(load_plain(case), replace(CONFIG, layers=(1,)))
    assert relative_error(encode(alone, TEXTS), encode(load_plain(case), TEXTS)) < TOLERANCE
    reason = "; for the first token that is one basket, so these layers stay as they are"
    line = "  local      in 1 a token sees only those fewer than 7 positions away"
    assert str(alone.summary()).splitlines()[2] == line + reason
    texts = [*TEXTS, *documents([9])]  # the last has two halves of 5 tokens, of which the first token sees 6
    for changed in ({"basket_size": 5}, {"pooling": "mean"}, {"isolated_share": "equal"}, {"last_basket": "halves"}):
        fair = calibrate(load_plain(case), replace(CONFIG, layers=(1,), **changed))
        assert str(fair.summary()).splitlines()[2] == line
        assert relative_error(encode(fair, texts), encode(load_plain(case), texts)) > TOLERANCE
    assert "local" not in str(calibrate(load_plain(case), replace(CONFIG, attention="global")).summary())


@matrix
def test_strength_zero_and_queries_are_the_plain_model_to_the_bit(case: MatrixCase) -> None:
    plain, fair = load_plain(case), fair_model(case)
    documents = plain.encode_document(TEXTS)
    assert np.array_equal(fair.encode_document(TEXTS, strength=0), documents)
    assert np.array_equal(fair.encode_query(TEXTS), plain.encode_query(TEXTS))
    assert np.abs(fair.encode_document(TEXTS) - documents).max() > 5e-3
    assert np.array_equal(plain.encode_document(TEXTS), documents)


@pytest.mark.parametrize("case", [case for case in CASES if not case.family.reads_padding], ids=str)
def test_a_document_is_the_same_alone_and_in_any_batch(case: MatrixCase) -> None:
    fair = fair_model(case)
    alone = torch.cat([encode(fair, [text]) for text in TEXTS])
    assert relative_error(encode(fair, TEXTS), alone) < TOLERANCE
    assert relative_error(encode(fair, TEXTS[::-1], batch_size=2), alone.flip(0)) < TOLERANCE
    assert min(relative_error(alone[i], alone[j]) for i in range(3) for j in range(i)) > 0.05  # or order would not show


@pytest.mark.parametrize(
    "case",
    [
        MatrixCase("BERT", "cls", "right"),
        MatrixCase("ModernBERT", "cls", "right"),
        MatrixCase("ModernBERT", "mean", "right"),
        MatrixCase("T5 encoder", "mean", "right"),
        MatrixCase("Qwen3", "last", "left"),
        MatrixCase("Mistral", "mean", "left"),
        MatrixCase("Gemma 3, bidirectional", "mean", "left"),
        MatrixCase("Falcon, rotary", "mean", "left"),
        MatrixCase("Falcon, ALiBi", "last", "left"),
    ],
    ids=str,
)
def test_on_top_of_eager_attention(case: MatrixCase) -> None:
    plain = load_plain(case, "eager")
    fair = calibrate(plain, CONFIG)
    calibrated = encode(fair, TEXTS)
    assert relative_error(calibrated, oracle(plain, CONFIG.resolve(case.pooling), TEXTS).embeddings) < TOLERANCE
    assert np.array_equal(fair.encode(TEXTS, strength=0), plain.encode(TEXTS))
    if IS_NEW:
        assert fair.summary().mechanism == INTERFACE.replace("sdpa", "eager")


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float64", "autocast"])
@pytest.mark.parametrize(
    "case",
    [
        MatrixCase("BERT", "cls", "right"),
        MatrixCase("ModernBERT", "mean", "right"),
        MatrixCase("T5 encoder", "mean", "right"),
        MatrixCase("Qwen3", "last", "left"),
        MatrixCase("Mistral", "mean", "left"),
        MatrixCase("MPNet", "mean", "right"),
        MatrixCase("DeBERTa-v2", "cls", "right"),
        MatrixCase("BLOOM", "last", "right"),  # in float64, padding on the left makes plain BLOOM return NaN
        MatrixCase("Falcon, ALiBi", "mean", "right"),
    ],
    ids=str,
)
def test_dtypes(case: MatrixCase, kind: str) -> None:
    dtype = getattr(torch, "bfloat16" if kind == "autocast" else kind)
    exact_plain, exact = load_plain(case), fair_model(case)
    plain = exact_plain
    if kind != "autocast":
        plain = with_pooling(copy.deepcopy(load_transformer(case.name, case.side)).to(dtype), case.pooling)
    with torch.autocast("cpu", dtype=dtype, enabled=kind == "autocast"):
        fair = calibrate(plain, CONFIG)
        embeddings, plain_embeddings = encode(fair, TEXTS), encode(plain, TEXTS)
        assert torch.equal(encode(fair, TEXTS, strength=0), plain_embeddings)
        assert fair.encode(TEXTS[:1], convert_to_tensor=True).dtype == plain_embeddings.dtype
    calibrated = [0, 2]  # the other one is too short
    error = relative_error(embeddings[calibrated], encode(exact, TEXTS)[calibrated])
    lost = relative_error(plain_embeddings[calibrated], encode(exact_plain, TEXTS)[calibrated])
    if kind == "float64":
        assert error < TOLERANCE
    else:
        # Calibrating may lose hardly more than the model itself loses in this dtype: measured 0.6 to 1.4 times as much.
        assert error < 2 * lost


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("case", "pooled_row_only"),
    [
        (MatrixCase("BERT", "cls", "right"), False),
        (MatrixCase("BERT", "cls", "right"), True),
        (MatrixCase("ModernBERT", "mean", "right"), False),
        (MatrixCase("Mistral", "last", "left"), True),
        (MatrixCase("MPNet", "mean", "right"), False),
        (MatrixCase("DeBERTa-v2", "cls", "right"), True),
        (MatrixCase("BLOOM", "last", "right"), False),
        (MatrixCase("Falcon, ALiBi", "last", "left"), False),
    ],
    ids=str,
)
def test_casting_after_calibrating(case: MatrixCase, pooled_row_only: bool, dtype: torch.dtype) -> None:
    transformer = load_transformer(case.name, case.side)
    before = with_pooling(copy.deepcopy(transformer).to(dtype), case.pooling)
    after = calibrate(with_pooling(copy.deepcopy(transformer), case.pooling), CONFIG, pooled_row_only=pooled_row_only)
    after.half() if dtype == torch.float16 else after.to(dtype)
    expected = encode(calibrate(before, CONFIG, pooled_row_only=pooled_row_only), TEXTS)
    assert torch.equal(encode(after, TEXTS), expected)
    assert torch.equal(encode(after, TEXTS, strength=0), encode(before, TEXTS))


@pytest.mark.parametrize("refused", REFUSED, ids=[each.name for each in REFUSED])
def test_refused(refused: Refused) -> None:
    plain = with_pooling(make_transformer(refused.model_type, refused.settings), "mean")
    before = None if refused.name == "BigBird, block-sparse" else plain.encode(TEXTS)
    with pytest.raises(ValueError, match=refused.error):
        calibrate(plain, CONFIG)
    if before is not None:
        assert np.array_equal(plain.encode(TEXTS), before)


@pytest.mark.skipif(not IS_NEW, reason="the page says how models are reached with transformers 5.25 and later")
def test_the_page_of_models_is_that_of_the_matrix() -> None:
    generator = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "generate_models.py"))
    text = generator["PAGE"].read_text(encoding="utf-8")
    measured = re.findall(r"\d\.\de-\d\d", text)
    assert len(measured) == len(FAMILIES)
    assert max(map(float, measured)) < TOLERANCE
    (versions,) = re.findall(r"^Measured with (.*)\.$", text, re.MULTILINE)
    assert generator["page"](lambda _: "0.0e-00", versions) == re.sub(r"\d\.\de-\d\d", "0.0e-00", text)
