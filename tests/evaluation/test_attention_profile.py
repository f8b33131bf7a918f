from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from fair_calibration import EvenChunks, FairConfig, FairSentenceTransformer, calibrate
from fair_calibration.access.attention_call import FusedCall, SoftmaxCall
from fair_calibration.method.baskets import Baskets, build_baskets
from fair_calibration.method.calibrated_pass import CalibratedPass
from fair_evaluation.attention_profile import COLUMNS, attention_profile, count_baskets
from fair_evaluation.attention_shares import ShareObserver
from fair_evaluation.observation import Batch
from fair_evaluation.position_collections import build_collections, load_passages
from tests.conftest import TinyModel
from tests.core.access.test_interface import make_call
from tests.core.families import MatrixCase, load_plain
from tests.core.tiny_models import documents

TEXTS = documents([44, 40, 38])  # three baskets of 16 each, whatever is isolated
SHARES = ["share_plain", "share_calibrated"]
CASES = {
    "bert": "cls",
    "xlm_roberta": "mean",
    "qwen3": "lasttoken",
    "qwen3_sliding": "mean",
    "MPNet": "cls",
    "DeBERTa-v2": "mean",
    "BLOOM": "last",
    "MPT": "mean",
}


def load(name: str, tiny_model: TinyModel) -> SentenceTransformer:
    """Loads a tiny model that goes through the AttentionInterface, or one that is intercepted."""
    pooling = CASES[name]
    if name[0].islower():
        return tiny_model(name, pooling)
    return load_plain(MatrixCase(name, pooling, "left" if name in ("BLOOM", "MPT") else "right"))


class Used:
    """Records how the attention that a calibrated forward pass really used falls on baskets and isolated tokens.

    The pass's own code runs a second time with values that say which segment a key is of, so that its output is the
    masses; where the model multiplies the weights with the values itself, these are summed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.masses: list[Tensor] = []
        attend, weigh = CalibratedPass.attend, CalibratedPass.weigh

        def spy_attend(this: CalibratedPass, call: FusedCall) -> Any:
            segments = one_hot(this.baskets)[:, None].expand(-1, call.value.shape[1], -1, -1).to(call.value.dtype)
            function: Any = call.run_plain  # of (module, query, key, value, mask)
            module, query, key, _, mask = function.args
            plain = partial(function.func, module, query, key, segments, mask, **function.keywords)
            self.add(this, attend(copy.copy(this), replace(call, value=segments, run_plain=plain))[0])
            return attend(this, call)

        def spy_weigh(this: CalibratedPass, call: SoftmaxCall) -> Tensor:
            weights = weigh(this, call)
            by_head = weights.view(call.logits.shape) @ one_hot(this.baskets)[:, None]
            self.add(this, by_head.transpose(1, 2))
            return weights

        monkeypatch.setattr(CalibratedPass, "attend", spy_attend)
        monkeypatch.setattr(CalibratedPass, "weigh", spy_weigh)

    def add(self, this: CalibratedPass, masses: Tensor) -> None:
        """Takes down the mean over rows of masses (B, L, H, N + I), as (B, H, N + I)."""
        if this.config.pooling == "mean":
            valid = this.baskets.segment_of_key < one_hot(this.baskets).shape[-1]
            self.masses.append((masses * valid[:, :, None, None]).sum(1) / valid.sum(1)[:, None, None])
        else:
            self.masses.append(masses[torch.arange(len(masses)), this.baskets.pooled])


def one_hot(baskets: Baskets) -> Tensor:
    """Returns (B, K, N + I): which segment each key is of."""
    n_segments = baskets.n_baskets + baskets.isolated.shape[1]
    return torch.nn.functional.one_hot(baskets.segment_of_key, n_segments + 1)[..., :-1].float()


def segment_order(config: FairConfig) -> list[int]:
    """Returns where bos, the three baskets and eos stand among baskets and isolated tokens."""
    return {"none": [0, 1, 2], "bos": [3, 0, 1, 2], "bos_eos": [3, 0, 1, 2, 4]}[config.isolate]


@pytest.mark.parametrize("strength", [1.0, 0.4])
@pytest.mark.parametrize("name", list(CASES))
def test_the_calibrated_share_is_what_the_model_really_uses(
    name: str, strength: float, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = calibrate(load(name, tiny_model), FairConfig(basket_size=16, strength=strength, layers=2))
    profile = attention_profile(model, TEXTS, per_head=True, prompt="")
    used = Used(monkeypatch)
    model.encode(TEXTS, show_progress_bar=False)
    config = model.summary().config
    masses = torch.stack(used.masses)[..., segment_order(config)]  # (layers, B, H, segments)
    assert len(masses) == model.summary().n_layers
    expected = masses.double().mean(1).flatten().numpy()
    np.testing.assert_allclose(profile["share_calibrated"], expected, atol=2e-6)
    # Layers below the first calibrated one are plain, the others differ.
    first = model.summary().layers[0]
    below = profile[profile["layer"] < first]
    np.testing.assert_array_equal(below["share_plain"], below["share_calibrated"])
    at = profile[profile["layer"] == first]
    assert (at["share_plain"] - at["share_calibrated"]).abs().max() > 0.01


@pytest.mark.parametrize("name", list(CASES))
def test_shares(name: str, tiny_model: TinyModel) -> None:
    model = load(name, tiny_model)
    profile = attention_profile(model, TEXTS, config=FairConfig(basket_size=16, strength=1, layers=2))
    assert list(profile) == ["layer", *COLUMNS]
    assert (profile[SHARES] >= 0).all(axis=None)
    np.testing.assert_allclose(profile.groupby("layer")[SHARES].sum(), 1, atol=1e-6)
    n_layers = profile["layer"].nunique()
    baskets = profile[(profile["layer"] >= n_layers - 2) & (profile["segment"] == "basket")]
    spread = baskets.groupby("layer")["share_calibrated"].agg(np.ptp)
    if CASES[name] == "mean" and name in ("qwen3_sliding", "MPT"):
        assert (spread > 0.01).all()  # early rows do not see the later baskets
    else:
        np.testing.assert_allclose(spread, 0, atol=1e-6)
    plain = attention_profile(model, TEXTS, config=FairConfig(basket_size=16, layers=2, strength=0))
    np.testing.assert_array_equal(plain["share_plain"], plain["share_calibrated"])
    np.testing.assert_array_equal(plain["share_plain"], profile["share_plain"])


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_the_plain_share_is_that_of_eager_attention(pooling: str, tiny_model: TinyModel) -> None:
    model = tiny_model("bert", pooling)
    profile = attention_profile(model, TEXTS, config=FairConfig(basket_size=16, isolate="bos_eos"), prompt="")
    model[0].model.set_attn_implementation("eager")
    features = model.preprocess(TEXTS)
    with torch.no_grad():
        output = model[0].model(
            features["input_ids"], attention_mask=features["attention_mask"], output_attentions=True
        )
    rows = []
    for layer, attention in enumerate(output.attentions):
        for weights, mask in zip(attention.double(), features["attention_mask"], strict=True):
            n = int(mask.sum())
            row = weights[:, 0, :n].mean(0) if pooling == "cls" else weights[:, :n, :n].mean((0, 1))
            shares = [row[0], row[1:17].sum(), row[17:33].sum(), row[33 : n - 1].sum(), row[n - 1]]
            rows += [(layer, i, float(share)) for i, share in enumerate(shares)]
    expected = pd.DataFrame(rows, columns=["layer", "segment", "share"]).groupby(["layer", "segment"])["share"].mean()
    np.testing.assert_allclose(profile["share_plain"], expected, atol=1e-6)


def test_documents_are_grouped_by_their_baskets(tiny_model: TinyModel) -> None:
    # Content tokens, the prompt's two included, and EOS among them: 8, 23, 33, 34, and too few.
    texts = documents([5, 20, 30, 31, 2])
    config = FairConfig(basket_size=16, min_content=8)
    profile = attention_profile(tiny_model(), texts, config=config, batch_size=2)
    (*_, last) = (frame for _, frame in profile.groupby("layer"))
    columns = ["n_baskets", "calibrated", "segment", "basket", "first_token", "last_token", "tokens", "documents"]
    assert last[columns].astype(object).where(last[columns].notna(), None).to_numpy().tolist() == [
        [1, False, "bos", None, None, None, 1.0, 1],
        [1, False, "basket", 0, 0, 4, 5.0, 1],
        [1, True, "bos", None, None, None, 1.0, 1],
        [1, True, "basket", 0, 0, 7, 8.0, 1],
        [2, True, "bos", None, None, None, 1.0, 1],
        [2, True, "basket", 0, 0, 15, 16.0, 1],
        [2, True, "basket", 1, 16, 22, 7.0, 1],
        [3, True, "bos", None, None, None, 1.0, 2],
        [3, True, "basket", 0, 0, 15, 16.0, 2],
        [3, True, "basket", 1, 16, 31, 16.0, 2],
        [3, True, "basket", 2, 32, 33, 1.5, 2],
    ]
    np.testing.assert_allclose(profile.groupby(["layer", "n_baskets", "calibrated"])[SHARES].sum(), 1, atol=1e-6)
    short = profile[~profile["calibrated"]]
    np.testing.assert_allclose(short["share_plain"], short["share_calibrated"], atol=1e-7)


def test_halves_start_in_the_middle_of_the_longest_document(tiny_model: TinyModel) -> None:
    texts = documents([20, 24, 31])  # content tokens: 23, 27, 34
    profile = attention_profile(tiny_model(), texts, config=FairConfig(basket_size=16, last_basket="halves"))
    baskets = profile[(profile["layer"] == 0) & (profile["segment"] == "basket")]
    columns = ["n_baskets", "basket", "first_token", "last_token", "tokens"]
    assert baskets[columns].to_numpy().tolist() == [
        [2, 0, 0, 13, 13.0],
        [2, 1, 14, 26, 12.0],
        [3, 0, 0, 15, 16.0],
        [3, 1, 16, 31, 16.0],
        [3, 2, 32, 33, 2.0],
    ]


@pytest.mark.parametrize("name", ["bert", "qwen3", "MPNet", "DeBERTa-v2"])
def test_batches_and_padding_change_nothing(name: str, tiny_model: TinyModel) -> None:
    texts = documents([44, 9, 40, 22])
    config = FairConfig(basket_size=16, strength=0.7)
    together = attention_profile(load(name, tiny_model), texts, config=config, batch_size=4)
    alone = attention_profile(load(name, tiny_model), iter(texts), config=config, batch_size=1)
    pd.testing.assert_frame_equal(together, alone, atol=1e-5, rtol=0)


def test_heads(tiny_model: TinyModel) -> None:
    config = FairConfig(basket_size=16)
    mean = attention_profile(tiny_model(), TEXTS, config=config)
    heads = attention_profile(tiny_model(), TEXTS, config=config, per_head=True)
    assert list(heads) == ["layer", "head", *COLUMNS]
    assert heads["head"].tolist() == [head for _ in range(4) for head in range(4) for _ in range(4)]
    by = ["layer", "segment", "basket"]
    averaged = heads.groupby(by, sort=False, dropna=False)[SHARES].mean()
    np.testing.assert_allclose(averaged, mean[SHARES], atol=1e-12)
    assert heads.groupby(by, dropna=False)["share_plain"].std().max() > 0.01


def test_a_prompt_that_is_not_pooled_is_a_segment(tiny_model: TinyModel) -> None:
    model = tiny_model("bert", "mean")
    model[1].include_prompt = False
    profile = attention_profile(model, TEXTS, config=FairConfig(basket_size=16, isolate="bos_eos", strength=1))
    layer = profile[profile["layer"] == 3]
    assert layer["segment"].tolist() == ["bos", "basket", "basket", "basket", "eos", "prompt"]
    # "dan gos" and BOS are the prompt, as sentence-transformers counts it; BOS is isolated anyway.
    assert layer["tokens"].tolist()[4:] == [1.0, 2.0]
    assert layer["share_plain"].iloc[-1] > 0
    np.testing.assert_allclose(layer[SHARES].sum(), 1, atol=1e-6)
    assert np.ptp(layer["share_calibrated"].iloc[1:4]) < 1e-6


def test_weights_that_underflow_count() -> None:
    bias = torch.zeros(1, 1, 9, 9)
    bias[..., 1:4] = -300.0  # the weights of basket 0 are 0 in float32
    call = make_call(position_bias=bias)
    config = FairConfig(basket_size=3, strength=1).resolve("cls")
    baskets = build_baskets(torch.ones(2, 9, dtype=torch.int64), config)
    batch = Batch({}, baskets, config, frozenset([0]), 0)
    observer = ShareObserver(batch, 1.0)
    observer(0, call)
    assert observer.shares[0].shape == (2, 4, 4)
    np.testing.assert_allclose(observer.shares[0][..., 0], observer.shares[0][..., 1], rtol=1e-6)
    plain = ShareObserver(batch, 0.0)
    plain(0, call)
    assert (plain.shares[0][..., 0] == 0).all()


def test_blocks_of_rows(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def profile() -> pd.DataFrame:
        return attention_profile(tiny_model("bert", "mean"), TEXTS, config=FairConfig(basket_size=16))

    at_once = profile()
    monkeypatch.setattr("fair_evaluation.attention_shares._BLOCK_LOGITS", 1500)  # 7 rows
    pd.testing.assert_frame_equal(profile(), at_once, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, tiny_model: TinyModel) -> None:
    config = FairConfig(basket_size=16, strength=1, layers=2)
    half = attention_profile(tiny_model().to(dtype), TEXTS, config=config)
    single = attention_profile(tiny_model(), TEXTS, config=config)
    # The logits are a little different; what is made of them is as exact.
    np.testing.assert_allclose(half[SHARES], single[SHARES], atol=0.05)
    np.testing.assert_allclose(half.groupby("layer")[SHARES].sum(), 1, atol=1e-6)
    baskets = half[(half["layer"] >= 2) & (half["segment"] == "basket")]
    np.testing.assert_allclose(baskets.groupby("layer")["share_calibrated"].agg(np.ptp), 0, atol=1e-6)


def test_the_model_stays_as_it_is(tiny_model: TinyModel) -> None:
    model = calibrate(tiny_model(), FairConfig(basket_size=16))
    model.train()
    before = model.counts, model.fair_config, model.max_seq_length, model.training
    attention_profile(model, TEXTS, config=FairConfig(basket_size=8, strength=0.3))
    assert (model.counts, model.fair_config, model.max_seq_length, model.training) == before
    assert isinstance(model, FairSentenceTransformer)


def test_truncation_is_said(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    attention_profile(tiny_model(), documents([30, 200, 300]), config=FairConfig(basket_size=16))
    assert caplog.messages == [
        "2 of 3 documents are truncated at max_seq_length=128 tokens; the profile describes what the model reads."
    ]


@pytest.mark.parametrize(
    ("texts", "arguments", "error", "message"),
    [
        ([], {}, ValueError, "texts: expected at least one document, got none"),
        ("text", {}, TypeError, "texts: expected an iterable of strings, got one string"),
        (["text"], {"batch_size": 0}, ValueError, "batch_size: expected an integer of at least 1, got 0"),
        (["text"], {"config": FairConfig(layers=9)}, ValueError, "layers: the model has 4 attention layers"),
    ],
)
def test_errors(
    texts: Sequence[str], arguments: dict[str, Any], error: type[Exception], message: str, tiny_model: TinyModel
) -> None:
    with pytest.raises(error, match=message):
        attention_profile(tiny_model(), texts, **arguments)


def test_minilm(minilm: SentenceTransformer) -> None:
    texts = [d["text"] for d in build_collections(load_passages())[0].documents[:4]]
    config = FairConfig(strength=1, pooling="cls")
    profile = attention_profile(minilm, texts, config=config)
    table = profile.pivot(index="layer", columns=["segment", "basket"], values="share_calibrated")
    assert table.shape == (6, 5)
    baskets = table["basket"].to_numpy()
    assert np.ptp(baskets[:3], axis=1).min() > 0.02
    np.testing.assert_allclose(np.ptp(baskets[3:], axis=1), 0, atol=1e-6)
    # Plainly, the last layer reads more of the beginning than of the end.
    last = profile[(profile["layer"] == 5) & (profile["segment"] == "basket")]
    assert last["share_plain"].iloc[0] > 2 * last["share_plain"].iloc[-1]


def test_even_chunks_have_no_calibrated_attention(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model(), EvenChunks(chunk_size=32, unit_size=16))
    with pytest.raises(TypeError, match="config: EvenChunks leaves the model's attention as it is"):
        attention_profile(fair, ["a text"])
    assert not attention_profile(fair, documents([40]), config=FairConfig(basket_size=16)).empty


def test_numbers_of_baskets_without_encoding(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = documents([10, 31, 31, 60])
    fair = calibrate(tiny_model(), FairConfig(basket_size=16))
    profile = attention_profile(fair, texts)
    expected = profile[(profile["layer"] == 0) & (profile["basket"] == 0)].groupby("n_baskets")["documents"].sum()
    fail = "the model encoded documents"
    monkeypatch.setattr(type(fair.fair), "run_handled", lambda *_: pytest.fail(fail))
    assert count_baskets(fair, texts) == expected.to_dict()
