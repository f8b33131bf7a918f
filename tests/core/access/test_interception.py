"""Models that do not use transformers' AttentionInterface: calibrated by interception, or refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from fair_calibration import FairConfig, FairSentenceTransformer, calibrate, uncalibrate
from fair_calibration.access.attention_call import FusedCall, SoftmaxCall
from fair_calibration.access.interception import CallShape, Interception
from tests.conftest import TinyModel
from tests.core.cases import assert_close
from tests.core.own_attention import load_own_model
from tests.core.patched_attention import Visible, bidirectional, causal, patched_reference
from tests.core.tiny_models import GPT_NEO_WINDOW, documents

CONFIG = FairConfig(basket_size=8, strength=0.8)
LENGTHS = [40, 7, 26, 3]
TEXTS = documents(LENGTHS)
# Embeddings of size 2 to 3 behind four float32 layers with sharp attention: measured 5e-6 at most.
TOLERANCE = 2e-5


def windowed(attention_mask: Tensor) -> Tensor:
    return causal(attention_mask).triu(1 - GPT_NEO_WINDOW)


VISIBLE: dict[str, Visible | Sequence[Visible]] = {
    "mpnet": bidirectional,
    "deberta_v2": bidirectional,
    "roformer": bidirectional,
    "bloom": causal,
    "mpt": causal,
    "own sdpa": causal,  # calls scaled_dot_product_attention, as remote code does
    "xglm": causal,  # whose softmax is over (B * H, L, L)
    "gpt_neo": [causal, windowed, causal, windowed],
    "openai_gpt": causal,  # with -10000 for the future, and float32's minimum for padding
}
CASES = [(family, pooling) for family in VISIBLE for pooling in ("cls", "lasttoken", "mean")]
CASES = [(f, p) for f, p in CASES if p != "cls" or VISIBLE[f] is bidirectional]
SOME = [("mpnet", "mean"), ("deberta_v2", "cls"), ("bloom", "lasttoken"), ("own sdpa", "mean")]


def load(tiny_model: TinyModel, family: str, pooling: str, dtype: torch.dtype = torch.float32) -> SentenceTransformer:
    if family != "own sdpa":
        return tiny_model(family, pooling, model_kwargs={"dtype": dtype})
    return load_own_model("sdpa", pooling, side="left", causal=True).to(dtype)


class Pair(NamedTuple):
    """A model and what `calibrate` made of it with `CONFIG`. Shared by tests: leave them as they are."""

    plain: SentenceTransformer
    fair: FairSentenceTransformer


@pytest.fixture(scope="module")
def pair(tiny_model: TinyModel) -> Callable[[str, str], Pair]:
    @cache
    def load_pair(family: str, pooling: str) -> Pair:
        plain = load(tiny_model, family, pooling)
        return Pair(plain, calibrate(plain, CONFIG))

    return load_pair


def encode(model: SentenceTransformer, texts: Sequence[str] = TEXTS, **kwargs: Any) -> Tensor:
    embeddings = model.encode(list(texts), convert_to_tensor=True, **kwargs)
    assert isinstance(embeddings, Tensor)
    assert embeddings.isfinite().all()
    return embeddings


def largest_change(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


@pytest.mark.parametrize(("family", "pooling"), CASES)
def test_equals_the_reference(family: str, pooling: str, pair: Callable[[str, str], Pair]) -> None:
    plain, fair = pair(family, pooling)
    side = plain.tokenizer.padding_side
    try:
        for plain.tokenizer.padding_side in ("left", "right"):
            fair.tokenizer.padding_side = plain.tokenizer.padding_side
            too_short, calibrated = fair.counts.too_short, encode(fair)
            assert fair.counts.too_short - too_short in (1, 2)
            resolved = CONFIG.resolve(pooling.removesuffix("token"))
            assert_close(calibrated, patched_reference(plain, TEXTS, resolved, visible=VISIBLE[family]), TOLERANCE)
            assert largest_change(calibrated, encode(plain)) > 1e-3
    finally:
        plain.tokenizer.padding_side = fair.tokenizer.padding_side = side


@pytest.mark.parametrize(("family", "pooling"), SOME)
@pytest.mark.parametrize(
    "settings",
    [
        {"strength": 1.0, "isolated_share": "equal", "layers": "all"},
        {"isolate": "bos_eos", "isolated_share": 0.1, "last_basket": "proportional", "layers": (0, -1)},
        {"isolate": "none", "min_content": 1, "layers": 1},
        {"basket_size": 16, "last_basket": "halves"},
        {"pooling": "mean", "isolate": "bos"},
        {"pooling": "last", "isolate": "bos"},
    ],
)
def test_settings_equal_the_reference(
    family: str, pooling: str, settings: dict[str, Any], tiny_model: TinyModel
) -> None:
    config = FairConfig(**{"basket_size": 6, **settings})
    fair = calibrate(load(tiny_model, family, pooling), config)
    calibrated = encode(fair)
    resolved = config.resolve(pooling.removesuffix("token"))
    assert_close(calibrated, patched_reference(uncalibrate(fair), TEXTS, resolved, visible=VISIBLE[family]), TOLERANCE)
    assert largest_change(calibrated, encode(fair, strength=0)) > 1e-3


@pytest.mark.parametrize(("family", "pooling"), CASES)
def test_strength_zero_and_queries_are_the_plain_model_to_the_bit(
    family: str, pooling: str, pair: Callable[[str, str], Pair]
) -> None:
    plain, fair = pair(family, pooling)
    assert torch.equal(encode(fair, strength=0), encode(plain))
    assert np.array_equal(fair.encode_query(TEXTS), plain.encode_query(TEXTS))
    assert largest_change(encode(fair), encode(plain)) > 1e-3
    assert torch.equal(encode(uncalibrate(fair)), encode(plain))


@pytest.mark.parametrize(
    ("family", "pooling"),
    [c for c in CASES if c[0] not in ("xglm", "gpt_neo", "openai_gpt")],  # whose plain positions count padding
)
def test_batch_invariance_and_order(family: str, pooling: str, pair: Callable[[str, str], Pair]) -> None:
    fair = pair(family, pooling).fair
    together = encode(fair)
    alone = torch.cat([encode(fair, [text]) for text in TEXTS])
    assert_close(together, alone, TOLERANCE)
    assert_close(encode(fair, TEXTS[::-1], batch_size=3), alone.flip(0), TOLERANCE)
    assert min(largest_change(alone[i], alone[j]) for i in range(4) for j in range(i)) > 1e-2  # or order would not show


@pytest.mark.parametrize(("family", "pooling"), [("mpnet", "mean"), ("mpnet", "cls"), ("own sdpa", "lasttoken")])
def test_padding_side_invariance(family: str, pooling: str, tiny_model: TinyModel) -> None:
    fair = calibrate(load(tiny_model, family, pooling), CONFIG)
    embeddings = []
    for side in ("left", "right"):
        fair.tokenizer.padding_side = side
        embeddings.append(encode(fair))
    assert_close(*embeddings, TOLERANCE)


@pytest.mark.parametrize(("family", "pooling"), SOME)
def test_a_batch_without_padding(family: str, pooling: str, pair: Callable[[str, str], Pair]) -> None:
    texts = documents([30, 30, 30])
    plain, fair = pair(family, pooling)
    resolved = CONFIG.resolve(pooling.removesuffix("token"))
    assert_close(encode(fair, texts), patched_reference(plain, texts, resolved, visible=VISIBLE[family]), TOLERANCE)


@pytest.mark.parametrize(("family", "pooling"), SOME)
def test_gradients_equal_the_reference(family: str, pooling: str, tiny_model: TinyModel) -> None:
    texts = documents([50, 3, 30])  # of which one is left as it is
    gradients = []
    for with_reference in (False, True):
        fair = calibrate(load(tiny_model, family, pooling), CONFIG)
        if with_reference:
            model, resolved = uncalibrate(fair), CONFIG.resolve(pooling.removesuffix("token"))
            embeddings = patched_reference(model, texts, resolved, visible=VISIBLE[family], gradients=True)
        else:
            model = fair
            embeddings = fair.eval()(fair.preprocess(texts))["sentence_embedding"]
        (embeddings * torch.linspace(-1, 1, embeddings.numel()).view_as(embeddings)).sum().backward()
        gradients.append({name: p.grad for name, p in model[0].model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert len(gradients[0]) > 20
    largest = max(gradient.abs().max() for gradient in gradients[1].values())
    for name, gradient in gradients[1].items():
        scale = torch.maximum(gradient.abs().max(), 1e-3 * largest)  # see test_transformer.py
        assert_close(gradients[0][name] / scale, gradient / scale, 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("family", "pooling"), [*SOME, ("mpt", "mean")])
def test_low_precision(family: str, pooling: str, autocast: bool, dtype: torch.dtype, tiny_model: TinyModel) -> None:
    full = load(tiny_model, family, pooling)
    plain = full if autocast else load(tiny_model, family, pooling, dtype)
    exact, exact_plain = encode(calibrate(full, CONFIG)), encode(full)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        fair = calibrate(plain, CONFIG)
        embeddings, plain_embeddings = encode(fair), encode(plain)
        assert torch.equal(encode(fair, strength=0), plain_embeddings)
    # Calibrating may lose no more than the model itself loses in this dtype (measured: about as much).
    lost = largest_change(plain_embeddings.float(), exact_plain)
    assert 0 < largest_change(embeddings.float(), exact) < 2.5 * lost
    assert largest_change(embeddings.float(), plain_embeddings.float()) > 1e-2


@pytest.mark.parametrize(("family", "pooling"), [("mpt", "mean"), ("deberta_v2", "cls")])
def test_a_cast_after_calibration(family: str, pooling: str, tiny_model: TinyModel) -> None:
    # These fill in the minimum of the dtype, which was another one when the model was calibrated.
    fair = calibrate(load(tiny_model, family, pooling), CONFIG).half()
    cast_before = calibrate(load(tiny_model, family, pooling, torch.float16), CONFIG)
    assert torch.equal(encode(fair), encode(cast_before))


def test_threads(tiny_model: TinyModel) -> None:
    plain = tiny_model("mpnet", "mean")
    models: list[FairSentenceTransformer] = [
        calibrate(plain, CONFIG),
        calibrate(plain, FairConfig(basket_size=5, layers="all")),
    ]
    work = [(models[i % 2], documents(LENGTHS, seed=i), i % 3) for i in range(24)]

    def run(item: tuple[FairSentenceTransformer, list[str], int]) -> np.ndarray:
        model, texts, kind = item
        if kind == 0:
            return model.encode(texts)
        return model.encode_query(texts) if kind == 1 else model.encode(texts, strength=1.0)

    expected = [run(item) for item in work]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, work))
    for result, single in zip(results, expected, strict=True):
        assert np.array_equal(result, single)


@pytest.mark.parametrize("family", VISIBLE)
def test_the_summary_names_the_mechanism(family: str, pair: Callable[[str, str], Pair]) -> None:
    summary = pair(family, "mean").fair.summary()
    function = "scaled_dot_product_attention" if family == "own sdpa" else "softmax"
    assert summary.mechanism == f"interception of {function}"
    assert f"  mechanism  interception of {function}\n" in str(summary)
    assert summary.n_layers == (3 if family == "own sdpa" else 4)
    assert len(set(summary.modules)) == 1
    assert "Attention" in summary.modules[0]


def test_a_changed_implementation_is_noticed() -> None:
    fair = calibrate(load_own_model("sdpa"), CONFIG)
    fair[0].model.config.attention = "torch.softmax"
    with pytest.raises(ValueError, match="OwnModel made 0 attention calls instead of the 3 recorded"):
        fair.encode(TEXTS)
    by_softmax = calibrate(fair, CONFIG)
    assert by_softmax.summary().mechanism == "interception of softmax"
    assert_close(encode(by_softmax), encode(calibrate(load_own_model("sdpa"), CONFIG)), TOLERANCE)


def test_an_error_ends_the_interception(tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model("mpnet", "mean"), CONFIG)
    del fair[0].model.encoder.layer[3].output
    with pytest.raises(AttributeError, match="output"):
        fair.encode(TEXTS)
    assert torch.overrides._len_torch_function_stack() == 0


# Attention written in other ways

REACHED = ["torch.softmax", "keywords", "functional", "method", "special", "module", "dropped"]
REACHED += ["three dimensions", "five dimensions"]
REACHED += ["sdpa", "sdpa grouped", "sdpa three dimensions", "sdpa scaled"]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("attention", REACHED)
def test_own_attention(attention: str, is_causal: bool) -> None:
    visible = causal if is_causal else bidirectional
    for pooling, side in (("mean", "right"), ("lasttoken", "left")):
        plain = load_own_model(attention, pooling, side=side, causal=is_causal)
        fair = calibrate(plain, CONFIG)
        calibrated = encode(fair)
        expected = patched_reference(plain, TEXTS, CONFIG.resolve(pooling.removesuffix("token")), visible=visible)
        assert_close(calibrated, expected, TOLERANCE)
        assert largest_change(calibrated, encode(plain)) > 1e-2
        assert torch.equal(encode(fair, strength=0), encode(plain))
        assert fair.summary().modules == ("OwnAttention",) * 2


@pytest.mark.parametrize("value", [-1e4, -65504.0, -1e9, torch.finfo(torch.float32).min, -torch.inf])
@pytest.mark.parametrize("is_causal", [False, True])
def test_values_of_masks(value: float, is_causal: bool) -> None:
    plain = load_own_model("torch.softmax", mask_value=value, causal=is_causal)
    expected = patched_reference(plain, TEXTS, CONFIG.resolve("mean"), visible=causal if is_causal else bidirectional)
    assert_close(encode(calibrate(plain, CONFIG)), expected, TOLERANCE)
    if is_causal and value not in (-torch.inf, torch.finfo(torch.float32).min):
        with pytest.raises(ValueError, match=r"OwnAttention masks keys with about -.* instead of -inf"):
            calibrate(load_own_model("sdpa additive", mask_value=value, causal=True), CONFIG)
    else:
        plain = load_own_model("sdpa additive", mask_value=value, causal=is_causal)
        assert_close(encode(calibrate(plain, CONFIG)), expected, TOLERANCE)


def test_a_router_is_no_attention() -> None:
    # Its softmax is over (B, L, experts), as many experts as there are tokens.
    texts = documents([40, 30])
    plain = load_own_model("torch.softmax", n_experts=42)
    fair = calibrate(plain, CONFIG)
    assert fair.preprocess(texts)["input_ids"].shape[1] == 42
    without = calibrate(plain, FairConfig(basket_size=8, strength=0.8, layers=(0, 1)))
    calibrated = encode(fair, texts)
    assert fair.summary().n_layers == 3
    assert_close(calibrated, torch.cat([encode(fair, [text]) for text in texts]), TOLERANCE)
    assert largest_change(calibrated, encode(without, texts)) > 1e-2


_COUNT = (
    r"OwnModel has 3 layers, .* made 0 attention calls through transformers' AttentionInterface, and {} calls of soft"
)
_PADDING = "the logits of what looks like attention in OwnAttention do not hide the batch's padding from its tokens, or"


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("attention", "text"),
    [
        ("heads first", _PADDING),
        ("keys first", _COUNT.format(0)),
        ("twice", "OwnAttention makes several calls of softmax or scaled_dot_product_attention in one forward pass"),
        ("gated", _COUNT.format(6)),
        ("out", _COUNT.format(0)),
        ("exponentials", _COUNT.format(0)),
        ("partly", _COUNT.format(2)),
        ("masked afterwards", _PADDING),
        ("unmasked", _PADDING),
        ("sdpa unmasked", _PADDING),
        ("summaries", "OwnModel attends not only over the batch's tokens but, with as many heads, over something else"),
        ("multihead attention", _COUNT.format(0)),
    ],
)
def test_refused(attention: str, text: str, is_causal: bool) -> None:
    plain = load_own_model(attention, causal=is_causal)
    before = encode(plain)
    with pytest.raises(ValueError, match=text):
        calibrate(plain, CONFIG)
    assert torch.equal(encode(plain), before)
    assert torch.overrides._len_torch_function_stack() == 0


@pytest.mark.parametrize("n_layers", [2, 4, None])
def test_another_number_of_layers_is_refused(n_layers: int | None) -> None:
    with pytest.raises(ValueError, match=f"OwnModel has {n_layers} layers, .* and 3 calls of softmax or scaled_dot"):
        calibrate(load_own_model("torch.softmax", num_hidden_layers=n_layers), CONFIG)


# The mode itself


class Handler:
    """Notes the calls and gives back something that nobody else does."""

    def __init__(self) -> None:
        self.logits: list[torch.Size] = []
        self.queries: list[tuple[torch.Size, ...]] = []

    def weigh(self, call: SoftmaxCall) -> Tensor:
        self.logits.append(call.logits.shape)
        return call.softmax() + 1

    def attend(self, call: FusedCall) -> tuple[Tensor, None]:
        self.queries.append((call.query.shape, call.key.shape, call.value.shape))
        return call.run_plain()[0] + 1, None


@pytest.mark.parametrize(
    ("shape", "dim", "heads"),
    [
        ((2, 3, 5, 5), -1, 3),
        ((2, 3, 5, 5), 3, 3),
        ((6, 5, 5), -1, 3),
        ((2, 5, 5), 2, 1),
        ((2, 2, 3, 5, 5), -1, 6),
        ((2, 3, 5, 5), 2, None),  # over the rows
        ((2, 3, 5, 6), -1, None),
        ((2, 3, 1, 5), -1, None),
        ((3, 5, 5), -1, None),  # not of two sequences
        ((1, 3, 5, 5), -1, None),
        ((10, 5), -1, None),
        ((5, 5), -1, None),
        ((5,), -1, None),
    ],
)
def test_which_softmax_is_attention(shape: tuple[int, ...], dim: int, heads: int | None) -> None:
    logits, handler = torch.randn(shape), Handler()
    with Interception(handler, (2, 5)) as mode:
        weights = logits.softmax(dim)
    expected = logits.softmax(dim)
    if heads is None:
        assert torch.equal(weights, expected)
        assert not handler.logits
        assert (mode.attention.total(), mode.others.total()) == (0, 1)
    else:
        assert torch.equal(weights, expected + 1)
        assert handler.logits == [(2, heads, 5, 5)]
        assert mode.attention == {CallShape("softmax", len(shape), heads): 1}
        assert not mode.others
        for shapes in ([], [CallShape("softmax", len(shape), heads + 1)]):
            with Interception(handler, (2, 5), shapes=shapes):
                assert torch.equal(logits.softmax(dim), expected)
        with Interception(handler, (2, 5), shapes=mode.attention.keys()):
            assert torch.equal(logits.softmax(dim), expected + 1)


@pytest.mark.parametrize(
    ("query", "key", "value", "heads"),
    [
        ((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8), (4, 4)),
        ((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8), (4, 2)),
        ((8, 5, 8), (8, 5, 8), (8, 5, 6), (4, 4)),
        ((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8), None),
        ((2, 4, 1, 8), (2, 4, 5, 8), (2, 4, 5, 8), None),
        ((2, 4, 5, 8), (1, 4, 5, 8), (1, 4, 5, 8), None),
        ((2, 2, 2, 5, 8), (2, 2, 2, 5, 8), (2, 2, 2, 5, 8), None),
    ],
)
def test_which_attention_is_of_the_batch(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], heads: tuple[int, int] | None
) -> None:
    function, handler = torch.nn.functional.scaled_dot_product_attention, Handler()
    q, k, v = torch.randn(query), torch.randn(key), torch.randn(value)
    expected = function(q, k, v, enable_gqa=heads == (4, 2))
    with Interception(handler, (2, 5)) as mode:
        output = function(q, k, v, enable_gqa=heads == (4, 2))
    assert output.shape == expected.shape
    if heads is None:
        assert torch.equal(output, expected)
        assert mode.others.total() == 1
    else:
        assert torch.equal(output, expected + 1)
        assert handler.queries == [((2, heads[0], 5, 8), (2, heads[1], 5, 8), (2, heads[1], 5, value[-1]))]


def test_an_interception_is_of_one_thread() -> None:
    logits, handler, results = torch.randn(2, 3, 5, 5), Handler(), []
    with Interception(handler, (2, 5)):
        thread = threading.Thread(target=lambda: results.append(logits.softmax(-1)))
        thread.start()
        thread.join()
    assert torch.equal(results[0], logits.softmax(-1))
    assert not handler.logits
