from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from fair_calibration import calibrate
from fair_calibration.access.attention_call import FusedCall, SoftmaxCall
from fair_evaluation.underflow import UnderflowObserver, diagnose_underflow
from tests.conftest import TinyModel
from tests.core.access.test_interface import make_call
from tests.core.families import MatrixCase, load_plain
from tests.core.tiny_models import documents

LENGTH = 512
SLOPES = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]  # of ALiBi with four heads
# Weights up to half of the smallest subnormal number become 0, for which the exponent of 2 is:
HALF_SMALLEST = {"float32": -150, "bfloat16": -134, "float16": -25}


def alibi(length: int = LENGTH) -> Tensor:
    """Returns the bias -m d, float32 (1, H, L, L)."""
    positions = torch.arange(length)
    distance = (positions[:, None] - positions).abs()
    return (-torch.tensor(SLOPES)[:, None, None] * distance)[None]


def alibi_call(length: int = LENGTH, *, causal: bool) -> FusedCall:
    """Returns an attention call in which nothing but the distance counts."""
    call = make_call(length=length, position_bias=alibi(length), is_causal=causal)
    return replace(call, query=torch.zeros_like(call.query[:1]), key=call.key[:1], value=call.value[:1])


def by_hand(slope: float, dtype: str, *, causal: bool, length: int = LENGTH) -> tuple[float, int | None, int | None]:
    """Computes share_zero, first_zero and all_zero_from in Python's floats."""
    smallest = 2.0 ** HALF_SMALLEST[dtype]
    n_zero, n_visible, zeros, others = 0, 0, set(), set()
    for i in range(length):
        distances = [abs(i - j) for j in range(i + 1 if causal else length)]
        z = math.fsum(math.exp(-slope * d) for d in distances)
        for d in distances:
            is_zero = math.exp(-slope * d) / z <= smallest
            n_zero += is_zero
            (zeros if is_zero else others).add(d)
        n_visible += len(distances)
    all_zero_from = max(others) + 1 if max(others) < length - 1 else None
    return n_zero / n_visible, min(zeros, default=None), all_zero_from


def assert_matches(rows: pd.DataFrame, *, causal: bool, length: int = LENGTH) -> None:
    for row in rows.itertuples():
        share, first, all_from = by_hand(SLOPES[row.head], row.dtype, causal=causal, length=length)  # type: ignore[arg-type]
        assert row.share_zero == pytest.approx(share, abs=1e-12)
        assert (row.first_zero if pd.notna(row.first_zero) else None) == first
        assert (row.all_zero_from if pd.notna(row.all_zero_from) else None) == all_from


def frame(observer: UnderflowObserver) -> pd.DataFrame:
    return pd.DataFrame(observer.rows)


@pytest.mark.parametrize("causal", [False, True])
def test_alibi_by_hand(causal: bool) -> None:
    observer = UnderflowObserver(LENGTH, list(HALF_SMALLEST), None)
    observer(0, alibi_call(causal=causal))
    rows = frame(observer)
    assert len(rows) == 12
    assert_matches(rows, causal=causal)


@pytest.mark.parametrize("dtype", list(HALF_SMALLEST))
def test_the_distance_is_known_in_closed_form(dtype: str) -> None:
    # With keys on one side and many of them, Z = 1 / (1 - e^-m): zero where m d > -log(smallest Z).
    slope = SLOPES[0]
    log_z = -math.log(1 - math.exp(-slope))
    distance = math.ceil((-HALF_SMALLEST[dtype] * math.log(2) - log_z) / slope)
    assert distance == {"float32": 410, "bfloat16": 366, "float16": 64}[dtype]
    observer = UnderflowObserver(LENGTH, [dtype], None)
    observer(0, alibi_call(causal=True))
    (row,) = frame(observer).query("head == 0").itertuples()
    assert (row.first_zero, row.all_zero_from) == (distance, distance)


@pytest.mark.parametrize("causal", [False, True])
def test_logits_of_the_model_itself(causal: bool) -> None:
    # As a model hands them to its softmax, hidden keys included.
    call = alibi_call(96, causal=causal)
    hidden = torch.finfo(torch.float32).min
    logits = alibi(96)
    if causal:
        logits = logits.masked_fill(~torch.ones(96, 96, dtype=torch.bool).tril(), hidden)
    given, computed = (UnderflowObserver(96, ["float16"], None) for _ in range(2))
    given(3, SoftmaxCall("Attention", logits, lambda: logits.softmax(-1), hidden / 2))
    computed(3, call)
    assert given.rows == computed.rows
    assert_matches(frame(given), causal=causal, length=96)


def test_the_cast_is_that_of_transformers() -> None:
    # Eager attention: softmax in float32, then .to(dtype). Random logits, all within float32's range.
    call = make_call(length=64, scaling=4.0, is_causal=False)
    call = replace(call, query=call.query[:1], key=call.key[:1], value=call.value[:1])
    observer = UnderflowObserver(64, ["bfloat16", "float16"], None)
    observer(0, call)
    logits = call.query @ call.key.repeat_interleave(2, 1).transpose(-1, -2) * 4.0
    for dtype in ("bfloat16", "float16"):
        weights = logits.softmax(-1, dtype=torch.float32).to(getattr(torch, dtype))
        expected = (weights[0] == 0).double().mean((1, 2))
        found = frame(observer).query("dtype == @dtype")["share_zero"]
        np.testing.assert_allclose(found, expected, atol=1e-3)
    assert frame(observer).query("dtype == 'float16'")["share_zero"].min() > 0.05


def without_content(name: str) -> SentenceTransformer:
    """Returns a model with ALiBi in which only the distance counts."""
    model = load_plain(MatrixCase(name, "last", "left"))
    calibrated = calibrate(model)  # the same weights; the plain model is shared between tests
    for module_name, parameter in calibrated.named_parameters():
        if "query_key_value" in module_name or "Wqkv" in module_name:
            parameter.data = torch.zeros_like(parameter)  # of this model alone
    return calibrated


@pytest.mark.parametrize("name", ["BLOOM", "MPT"])
def test_models_with_alibi(name: str) -> None:
    found = diagnose_underflow(without_content(name), lengths=[40, 300], dtypes=["float16", "float32"], max_rows=None)
    assert list(found) == ["length", "layer", "head", "dtype", "share_zero", "first_zero", "all_zero_from"]
    assert len(found) == 2 * 3 * 4 * 2
    for length, rows in found[found["layer"] == 2].groupby("length"):
        assert_matches(rows, causal=True, length=int(length))  # type: ignore[call-overload]
    # The steepest head is blind to nearly everything at 300 tokens, and sees everything at 40.
    worst = found.query("head == 0 and dtype == 'float16'").groupby("length")["share_zero"].max()
    assert worst.loc[40] == 0
    assert worst.loc[300] > 0.6


def test_some_rows_stand_for_all() -> None:
    every, some = (UnderflowObserver(LENGTH, ["float16"], max_rows) for max_rows in (None, 128))
    for observer in (every, some):
        observer(0, alibi_call(causal=False))
    for a, b in zip(every.rows, some.rows, strict=True):
        assert b.share_zero == pytest.approx(a.share_zero, abs=0.03)
        assert (a.first_zero, a.all_zero_from) == (b.first_zero, b.all_zero_from)


@pytest.mark.parametrize("max_rows", [1, 5, 7, 8, 9, 100, 511, 512, None])
def test_the_first_and_the_last_row_are_looked_at(max_rows: int | None) -> None:
    from fair_evaluation.underflow import _row_blocks

    blocks = _row_blocks(LENGTH, max_rows)
    rows = [row for block in blocks for row in range(block.start, block.stop)]
    assert (min(rows), max(rows)) == (0, LENGTH - 1)
    assert len(rows) <= max(2, max_rows or LENGTH)
    assert all(block.stop - block.start <= 8 for block in blocks)
    if max_rows in (None, 512):
        assert rows == list(range(LENGTH))


def test_lengths_are_exact_and_texts_repeat(tiny_model: TinyModel) -> None:
    model = tiny_model("bert", "cls")
    model.max_seq_length = 8
    texts = documents([3, 4])
    found = diagnose_underflow(model, lengths=[7, 128], dtypes=["float16"], texts=iter(texts))
    assert found.groupby("length")["share_zero"].count().to_dict() == {7: 16, 128: 16}
    assert model.max_seq_length == 8


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lengths": [16, 200]}, ValueError, "lengths: the model has positions for 130 tokens, got 200"),
        ({"lengths": [1]}, ValueError, "lengths: the tokenizer makes no sequence of 1 tokens"),
        ({"lengths": [0]}, ValueError, "lengths: expected an integer of at least 1, got 0"),
        ({"lengths": [8.0]}, TypeError, "lengths: expected an integer of at least 1, got 8.0"),
        (
            {"lengths": [8], "dtypes": ["float64"]},
            ValueError,
            r"dtypes: expected some of \['float32', .*got \['float64'\]",
        ),
        ({"lengths": [8], "max_rows": 0}, ValueError, "max_rows: expected an integer of at least 1, got 0"),
        ({"lengths": [8], "texts": []}, ValueError, "texts: expected at least one that is not empty"),
        ({"lengths": [8], "texts": [" ", ""]}, ValueError, "texts: expected at least one that is not empty"),
        ({"lengths": [8], "texts": "one"}, TypeError, "texts: expected an iterable of strings, got one string"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str, tiny_model: TinyModel) -> None:
    with pytest.raises(error, match=message):
        diagnose_underflow(tiny_model(), **arguments)


def test_minilm(minilm: SentenceTransformer) -> None:
    found = diagnose_underflow(minilm, lengths=[256], dtypes=["bfloat16", "float16"])
    assert len(found) == 6 * 12 * 2
    by_dtype = found.groupby("dtype")["share_zero"].max()
    # Sharp heads lose most of their keys in float16, which bfloat16 has the range for.
    assert by_dtype["float16"] > 0.5
    assert by_dtype["bfloat16"] < 0.05
