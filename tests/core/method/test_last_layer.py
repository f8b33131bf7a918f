from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module
from torch import nn
from torch.overrides import TorchFunctionMode

from fair_calibration import FairConfig, FairSentenceTransformer, calibrate, uncalibrate
from tests.conftest import TinyModel
from tests.core.families import CASES, CONFIG, N_LAYERS, TEXTS, MatrixCase, load_plain
from tests.core.model_oracle import relative_error
from tests.core.tiny_models import documents

# Matrix products of other shapes round differently, after one float32 layer: measured 6e-7.
TOLERANCE = 3e-6
NO_LINEAR = {"XLNet", "Falcon, ALiBi", "Falcon, rotary", "GPT-2"}
"""Families whose last layer has no `torch.nn.functional.linear` over (B, L, size): they are refused."""
POOLED = [case for case in CASES if case.pooling != "mean"]
LONG = [TEXTS[0], TEXTS[2]]
"""The texts that are long enough to be calibrated."""


@cache
def models(case: MatrixCase) -> tuple[SentenceTransformer, FairSentenceTransformer, FairSentenceTransformer]:
    """Returns the plain model, the calibrated one, and the one with the pooled row only."""
    plain = load_plain(case)
    return plain, calibrate(plain, CONFIG), calibrate(plain, CONFIG, pooled_row_only=True)


def encode(model: SentenceTransformer, texts: list[str], **kwargs: Any) -> torch.Tensor:
    embeddings = model.encode(texts, convert_to_tensor=True, **kwargs)
    assert isinstance(embeddings, torch.Tensor)
    assert embeddings.isfinite().all()
    return embeddings


@pytest.mark.parametrize("case", [case for case in POOLED if case.name not in NO_LINEAR], ids=str)
def test_equals_the_whole_layer(case: MatrixCase) -> None:
    plain, fair, cut = models(case)
    for texts in (LONG, TEXTS):  # the last ones with a text that stays as it is
        expected = encode(fair, texts)
        assert relative_error(encode(cut, texts), expected) < TOLERANCE
        assert relative_error(encode(plain, texts), expected) > 5e-3


@pytest.mark.parametrize("case", [MatrixCase("BERT", "cls", "right"), MatrixCase("Qwen3", "last", "left")], ids=str)
def test_strength_zero_and_queries_are_the_plain_model_to_the_bit(case: MatrixCase) -> None:
    plain, _, cut = models(case)
    assert np.array_equal(cut.encode(TEXTS, strength=0), plain.encode(TEXTS))
    assert np.array_equal(cut.encode_query(TEXTS), plain.encode_query(TEXTS))


@pytest.mark.parametrize("case", [case for case in POOLED if case.name in NO_LINEAR], ids=str)
def test_families_without_linear_layers_are_refused(case: MatrixCase) -> None:
    with pytest.raises(ValueError, match=r"Model has no linear layer over \(batch, length, size\) after its last att"):
        calibrate(load_plain(case), CONFIG, pooled_row_only=True)


@pytest.mark.parametrize("case", [MatrixCase("BERT", "cls", "right"), MatrixCase("Qwen3", "last", "left")], ids=str)
@pytest.mark.parametrize("implementation", ["eager", "bfloat16", "autocast"])
def test_implementations_and_dtypes(case: MatrixCase, implementation: str) -> None:
    plain = load_plain(case, "eager" if implementation == "eager" else None)
    if implementation == "bfloat16":
        plain = copy.deepcopy(plain).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=implementation == "autocast"):
        fair, cut = calibrate(plain, CONFIG), calibrate(plain, CONFIG, pooled_row_only=True)
        expected, got = encode(fair, LONG), encode(cut, LONG)
    assert got.dtype == expected.dtype
    # Half precision: one rounding of 2^-9 per linear layer, in another order.
    assert relative_error(got, expected) < (TOLERANCE if implementation == "eager" else 2e-2)


class Recorder(TorchFunctionMode):
    """Notes the rows of each sequence in every linear layer, and the number of fused attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.n_attentions = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            self.rows.append(args[0].shape[1])
        self.n_attentions += func is nn.functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def test_what_is_left_out() -> None:
    _, fair, cut = models(MatrixCase("BERT", "cls", "right"))
    length, last = cut.preprocess(LONG)["input_ids"].shape[1], 3 * [1]
    for model, rows, n_attentions in ((fair, 3 * [length], N_LAYERS), (cut, last, N_LAYERS - 1)):
        features = model.preprocess(LONG)
        with Recorder() as recorder, torch.inference_mode():
            model[0](features)
        layers = [length] * (6 * N_LAYERS - 3)  # query, key, value, output and two of the MLP; the pooler's has 2 axes
        assert recorder.rows[: 6 * N_LAYERS] == layers + rows
        assert recorder.n_attentions == n_attentions
    with Recorder() as recorder:
        encode(cut, TEXTS)  # one is too short: it has the plain attention
    assert recorder.n_attentions == N_LAYERS


@pytest.mark.parametrize(
    "case", [MatrixCase("XLM-RoBERTa", "cls", "right"), MatrixCase("Llama", "last", "right")], ids=str
)
def test_other_rows_are_not_to_be_read(case: MatrixCase) -> None:
    plain, fair, cut = models(case)
    with torch.inference_mode():
        features, states = fair.preprocess(TEXTS), cut[0](cut.preprocess(TEXTS))["token_embeddings"]
        whole = fair[0](features)["token_embeddings"]
    rows = (features["attention_mask"].sum(1) - 1).tolist() if case.pooling == "last" else [0] * len(TEXTS)
    for got, expected, row in zip(states, whole, rows, strict=True):
        assert relative_error(got[row], expected[row]) < TOLERANCE
        assert got.isfinite().all(1).nonzero().flatten().tolist() == [row]
    for kind in ("token_embeddings", None):
        with pytest.raises(ValueError, match=f"output_value: with pooled_row_only there is only .* got {kind!r}"):
            cut.encode(TEXTS, output_value=kind)
        with pytest.raises(ValueError, match="output_value: with pooled_row_only"):
            cut.encode(TEXTS, None, None, 32, False, kind)
    for got, expected in zip(
        *(m.encode_query(TEXTS, output_value="token_embeddings") for m in (cut, plain)), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("pooling", "settings", "error"),
    [
        ("mean", {}, "mean pooling reads every row of the last layer"),
        ("cls", {"pooling": "mean"}, "mean pooling reads every row of the last layer"),
        ("mean", {"pooling": "cls"}, r"expected a model that pools by 'cls', got 'mean'"),
        ("lasttoken", {"pooling": "cls"}, r"expected a model that pools by 'cls', got 'lasttoken'"),
        ("max", {"pooling": "cls"}, r"expected a model that pools by 'cls', got 'max'"),
        (
            "cls",
            {"layers": (0, 2)},
            r"layer 3, the last one, is not among the calibrated ones \(layers=\(0, 2\), attention='any'\)",
        ),
    ],
)
def test_what_cannot_be_left_out(pooling: str, settings: dict[str, Any], error: str, tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "cls")
    plain[1].pooling_mode = pooling
    with pytest.raises(ValueError, match=f"pooled_row_only: {error}"):
        calibrate(plain, FairConfig(basket_size=8, **settings), pooled_row_only=True)


class Mixing(nn.Module):
    """Adds the mean of all tokens to every token."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor, *args: Any) -> torch.Tensor:
        output: torch.Tensor = self.inner(states, *args)
        return output + output.mean(1, keepdim=True)


class Reshaping(Mixing):
    """Takes for granted that there are as many rows as the residual has."""

    def forward(self, states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self.inner.dense(states).view(residual.shape)


class Cutting(Mixing):
    """Returns what comes out of the linear layer alone."""

    def forward(self, states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return self.inner.dense(states)


@pytest.mark.parametrize(
    ("wrapper", "error"),
    [
        (Mixing, "BertModel mixes tokens after its last attention"),
        (Reshaping, "BertModel does not run with one row per sequence after its last attention .*shape"),
        (Cutting, r"BertModel returns states of shape \(2, 1, 32\) instead of \(2, \d+, 32\)"),
    ],
)
def test_models_that_do_not_lend_themselves_to_it(
    wrapper: Callable[[nn.Module], nn.Module], error: str, tiny_model: TinyModel
) -> None:
    plain = tiny_model("bert", "cls")
    last = plain[0].model.encoder.layer[-1]
    last.output = wrapper(last.output)
    plain[0].model.train()
    with pytest.raises(ValueError, match=error):
        calibrate(plain, CONFIG, pooled_row_only=True)
    assert all(module.training for module in plain[0].model.modules())
    calibrate(plain, CONFIG).encode(LONG)


def test_later_changes_are_noticed(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "cls")
    cut = calibrate(plain, CONFIG, pooled_row_only=True)
    cut[1].pooling_mode = "mean"
    with pytest.raises(ValueError, match="pooled_row_only: mean pooling reads every row"):
        cut.encode(LONG)
    cut[1].pooling_mode = "cls"
    cut[0].model.config.output_hidden_states = True
    with pytest.raises(ValueError, match="output_hidden_states: with pooled_row_only"):
        cut.encode(LONG)
    cut[0].model.config.output_hidden_states = False
    cut.encode(LONG)
    dense = cut[0].model.encoder.layer[-1].intermediate
    dense.dense = nn.Sequential(nn.Linear(32, 32), dense.dense)
    cut.encode(LONG)  # the rows are cut before it
    cut[0].model.encoder.layer[-1].intermediate = nn.Sequential(nn.LayerNorm(32), nn.Identity(), dense)
    attention = cut[0].model.encoder.layer[-1].attention.output
    attention.dense = Doubled(attention.dense)
    with pytest.raises(ValueError, match=r"BertModel ran 3 linear layers .* instead of the 2 recorded"):
        cut.encode(LONG)


class Doubled(nn.Module):
    """An adapter beside a linear layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.adapter = inner, nn.Linear(32, 32)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(states) + self.adapter(states)
        return output


def test_adapters_are_cut_alike(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "cls")
    output = plain[0].model.encoder.layer[-1].attention.output
    output.dense = Doubled(output.dense)
    expected = encode(calibrate(plain, CONFIG), LONG)
    assert relative_error(encode(calibrate(plain, CONFIG, pooled_row_only=True), LONG), expected) < TOLERANCE


def test_as_many_sequences_as_tokens(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "cls")
    fair, cut = calibrate(plain, CONFIG), calibrate(plain, CONFIG, pooled_row_only=True)
    texts = documents([14] * 16)
    assert cut.preprocess(texts)["input_ids"].shape == (16, 16)
    assert torch.equal(encode(cut, texts), encode(fair, texts))  # whole
    assert relative_error(encode(cut, texts[:15]), encode(fair, texts[:15])) < TOLERANCE


def test_gradients(tiny_model: TinyModel) -> None:
    plain = tiny_model("qwen3", "lasttoken")
    gradients = []
    for pooled_row_only in (False, True):
        fair = calibrate(copy.deepcopy(plain), CONFIG, pooled_row_only=pooled_row_only)
        fair(fair.preprocess(LONG))["sentence_embedding"][:, 0].sum().backward()
        gradients.append([p.grad for p in fair[0].model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 20
    for whole, part in zip(*gradients, strict=True):
        assert relative_error(part, whole) < 1e-5  # sums over tokens, in another order


def test_the_option_stays_with_the_model(tiny_model: TinyModel, tmp_path: Path) -> None:
    plain = tiny_model("bert", "cls")
    plain.save(str(tmp_path / "plain"))
    cut = FairSentenceTransformer(str(tmp_path / "plain"), config=CONFIG, pooled_row_only=True)
    assert cut.summary().pooled_row_only
    assert "; the last layer is computed for no other" in str(cut.summary())
    for copied in (copy.deepcopy(cut), pickle.loads(pickle.dumps(cut))):
        assert copied.summary().pooled_row_only
        assert torch.equal(encode(copied, LONG), encode(cut, LONG))
    cut.save(str(tmp_path / "fair"))
    saved = FairSentenceTransformer(str(tmp_path / "fair"))
    assert saved.fair_config == CONFIG
    assert not saved.summary().pooled_row_only
    assert FairSentenceTransformer(str(tmp_path / "fair"), pooled_row_only=True).summary().pooled_row_only
    assert calibrate(cut, FairConfig(basket_size=4)).summary().pooled_row_only
    assert not calibrate(cut, pooled_row_only=False).summary().pooled_row_only
    with pytest.raises(ValueError, match=r"pooled_row_only: mean pooling reads every row .* set it to False"):
        calibrate(cut, FairConfig(pooling="mean"))
    back = uncalibrate(cut)
    assert np.array_equal(back.encode(LONG), plain.encode(LONG))
    assert not hasattr(back[0], "state")


def test_threads_do_not_meet(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "cls")
    fair, cut = calibrate(plain, CONFIG), calibrate(plain, CONFIG, pooled_row_only=True)
    turns = [plain, fair, cut] * 6
    expected = {id(model): model.encode(LONG) for model in turns}
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda model: model.encode(LONG), turns))
    for model, embeddings in zip(turns, got, strict=True):
        assert np.array_equal(embeddings, expected[id(model)])


class Mixing(Module):
    """Adds the mean over all tokens to every token."""

    config_keys: list[str] = []

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        states = features["token_embeddings"]
        return {**features, "token_embeddings": states + states.mean(1, keepdim=True)}

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(output_path)


def test_a_module_between_transformer_and_pooling_is_refused(tiny_model: TinyModel) -> None:
    """Such a module reads the rows that are not computed."""
    transformer, pooling = tiny_model("bert", "cls")
    model = SentenceTransformer(modules=[transformer, Mixing(), pooling], device="cpu")  # type: ignore[list-item]
    text = r"pooled_row_only: expected one Pooling module, directly after the transformer, got \['Mixing', 'Pooling'\]"
    with pytest.raises(ValueError, match=text):
        calibrate(model, CONFIG, pooled_row_only=True)
    fair = calibrate(tiny_model("bert", "cls"), CONFIG, pooled_row_only=True)
    fair.insert(1, Mixing())
    with pytest.raises(ValueError, match=text):
        fair.encode_document(documents([60, 50]))
