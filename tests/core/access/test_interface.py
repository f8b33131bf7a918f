from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fair_calibration import FairConfig
from fair_calibration.access.attention_call import FusedCall, SoftmaxCall
from fair_calibration.access.interface import (
    handle_attention,
    implementation_name,
    register_implementations,
)
from fair_calibration.method.baskets import build_baskets
from fair_calibration.method.calibrated_pass import CalibratedPass
from fair_calibration.method.reference import calibrated_attention
from tests.conftest import TinyModel
from tests.core.cases import assert_close
from tests.core.tiny_models import documents


class Attention(nn.Module):
    """Stands in for a model's attention module."""

    is_causal = False
    num_key_value_groups = 2
    training = False


class CausalAttention(Attention):
    """Stands in for causal attention with an eager function."""

    __module__ = "transformers.models.bert.modeling_bert"
    is_causal = True


def make_call(
    *,
    length: int = 9,
    n_keys: int | None = None,
    mask: Tensor | None = None,
    base: str = "sdpa",
    module: nn.Module | None = None,
    **arguments: Any,
) -> FusedCall:
    generator = torch.Generator().manual_seed(0)
    n_keys = length if n_keys is None else n_keys
    query = torch.randn(2, 4, length, 8, generator=generator)
    key, value = (torch.randn(2, 2, n_keys, 8, generator=generator) for _ in range(2))
    register_implementations()
    calls: list[FusedCall] = []

    class Catch:
        def attend(self, call: FusedCall) -> tuple[Tensor, None]:
            calls.append(call)
            return call.value, None

        def weigh(self, call: SoftmaxCall) -> Tensor:
            raise NotImplementedError

    with handle_attention(Catch()):
        ALL_ATTENTION_FUNCTIONS[f"fair_{base}"](module or Attention(), query, key, value, mask, **arguments)
    return calls[0]


def make_pass(pooling: str = "mean", layers: tuple[int, ...] = (0,), length: int = 9) -> CalibratedPass:
    config = FairConfig(basket_size=3, strength=0.8).resolve(pooling)
    baskets = build_baskets(torch.ones(2, length, dtype=torch.int64), config)
    return CalibratedPass(frozenset(layers), baskets, config)


def test_registering_twice_changes_nothing() -> None:
    register_implementations()
    before = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ("fair_sdpa", "fair_eager", "sdpa")}
    register_implementations()
    assert {name: ALL_ATTENTION_FUNCTIONS[name] for name in before} == before
    assert implementation_name("sdpa") == "fair_sdpa"
    assert ALL_MASK_ATTENTION_FUNCTIONS["fair_sdpa"] is ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    assert ALL_MASK_ATTENTION_FUNCTIONS["fair_eager"] is ALL_MASK_ATTENTION_FUNCTIONS["eager"]


def test_outside_of_a_pass_attention_is_plain() -> None:
    register_implementations()
    call = make_call()
    routed = AttentionInterface()["fair_sdpa"](Attention(), call.query, call.key, call.value, None)
    assert torch.equal(routed[0], call.run_plain()[0])


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_pass_calibrates_its_layers(pooling: str, causal: bool) -> None:
    this, call = make_pass(pooling, layers=(1,)), make_call(is_causal=causal, scaling=0.3)
    plain = call.run_plain()[0]
    assert torch.equal(this.attend(call)[0], plain)
    calibrated, weights = this.attend(call)
    assert weights is None
    assert torch.equal(this.attend(call)[0], plain)
    assert this.n_calls == 3
    visible = torch.ones(9, 9, dtype=torch.bool)
    expected = calibrated_attention(
        call.query,
        call.key,
        call.value,
        this.baskets,
        visible=visible.tril() if causal else visible,
        scale=0.3,
        config=this.config,
    ).output.transpose(1, 2)
    assert_close(calibrated, expected, 5e-6)
    if (pooling, causal) != ("cls", True):  # a causal first row sees nothing but itself
        assert not torch.allclose(calibrated, plain, atol=1e-2)


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
@pytest.mark.parametrize("shape", [(2, 4, 9, 9), (8, 9, 9), (2, 2, 2, 9, 9)])
def test_a_pass_calibrates_softmaxes(pooling: str, shape: tuple[int, ...]) -> None:
    this, call = make_pass(pooling, layers=(1,)), make_call()
    logits = call.query @ call.key.repeat_interleave(2, dim=1).mT * call.scale
    own = logits.view(shape)
    softmax = SoftmaxCall("Attention", logits, lambda: own.softmax(-1), -3e4)
    plain = own.softmax(-1)
    assert torch.equal(this.weigh(softmax), plain)
    calibrated = this.weigh(softmax)
    assert torch.equal(this.weigh(softmax), plain)
    assert this.n_calls == 3
    assert calibrated.shape == shape
    visible = torch.ones(9, 9, dtype=torch.bool)
    arguments = call.query, call.key, call.value, this.baskets
    expected = calibrated_attention(*arguments, visible=visible, config=this.config)
    assert_close(calibrated.view(logits.shape), expected.weights, 1e-6)
    assert not torch.allclose(calibrated, plain, atol=1e-2)


def test_scale() -> None:
    assert make_call().scale == 8**-0.5
    assert make_call(scaling=None).scale == 8**-0.5
    assert make_call(scaling=1.0).scale == 1.0


def test_when_a_call_is_causal() -> None:
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    assert make_call(is_causal=True).bias.causal
    assert not make_call(is_causal=False).bias.causal
    assert not make_call(is_causal=None).bias.causal  # the module's
    assert not make_call(is_causal=True, mask=mask).bias.causal  # the mask says it all
    assert not make_call(is_causal=True, length=1, n_keys=9).bias.causal  # as sdpa has it
    assert not make_call(is_causal=True, base="eager", module=CausalAttention()).bias.causal
    assert make_call(module=CausalAttention()).bias.causal


def test_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="Attention attends from 9 to 12 positions, but the batch has 9 tokens"):
        make_pass().attend(make_call(n_keys=12))
    with pytest.raises(ValueError, match="Attention attends from 8 to 8 positions, but the batch has 9 tokens"):
        make_pass().attend(make_call(length=8))


@pytest.mark.parametrize("name", ["softcap", "s_aux", "cu_seq_lens_q"])
def test_arguments_that_change_attention_are_refused(name: str) -> None:
    register_implementations()
    call = make_call()
    function = AttentionInterface()["fair_sdpa"]
    arguments = (Attention(), call.query, call.key, call.value, None)
    with (
        handle_attention(make_pass()),
        pytest.raises(ValueError, match=rf"Attention passes \['{name}'\] to its attention, which calibration does not"),
    ):
        function(*arguments, **{name: torch.ones(1)})
    with handle_attention(make_pass()):
        function(*arguments, **{name: None})


def test_eager_attention_without_a_function_is_refused() -> None:
    register_implementations()
    call = make_call()
    with pytest.raises(ValueError, match="Attention has no eager attention function; load the model with attn_impl"):
        AttentionInterface()["fair_eager"](Attention(), call.query, call.key, call.value, None)


def test_a_handler_is_of_one_thread() -> None:
    register_implementations()
    call = make_call()
    results: list[Tensor] = []

    def run() -> None:
        results.append(AttentionInterface()["fair_sdpa"](Attention(), call.query, call.key, call.value, None)[0])

    with handle_attention(make_pass()):
        run()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        with handle_attention(None):
            run()
    run()
    plain = call.run_plain()[0]
    assert not torch.allclose(results[0], plain, atol=1e-2)
    assert all(torch.equal(result, plain) for result in results[1:])


def test_a_handler_is_left_after_an_error(tiny_model: TinyModel) -> None:
    model: SentenceTransformer = tiny_model("bert", "mean")
    texts = documents([20])
    expected = model.encode(texts)
    register_implementations()
    model[0].model.set_attn_implementation("fair_sdpa")
    with pytest.raises(ValueError, match="positions, but the batch has"), handle_attention(make_pass()):
        model.encode(texts)
    assert (model.encode(texts) == expected).all()
