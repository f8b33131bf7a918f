from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fair_calibration.access.attention_call import FusedCall, SoftmaxCall
from fair_calibration.access.recorder import AttentionRecorder
from tests.core.access.test_interface import Attention, make_call

SDPA = ALL_ATTENTION_FUNCTIONS["sdpa"]

MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0, 0]])
PADDING = MASK.bool()[:, None, None]


class OtherAttention(Attention):
    pass


def changed(call: FusedCall, dtype: torch.dtype | None = None, *, base: Any = SDPA) -> FusedCall:
    """Returns a call with its tensors in another dtype, computed by another attention function."""
    call = replace(call, **{name: getattr(call, name).to(dtype) for name in ("query", "key", "value")})
    assert isinstance(call.run_plain, partial)
    module, _, _, _, mask = call.run_plain.args
    run_plain = partial(base, module, call.query, call.key, call.value, mask, **call.run_plain.keywords)
    return replace(call, run_plain=run_plain)


def test_records_in_order() -> None:
    recorder = AttentionRecorder(MASK)
    call = make_call(mask=PADDING)
    output, _ = recorder.attend(call)
    assert torch.equal(output, call.run_plain()[0])
    recorder.attend(make_call(mask=PADDING, module=OtherAttention()))
    assert recorder.modules == ["Attention", "OtherAttention"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True},
        {"mask": PADDING},
        {"mask": PADDING & torch.ones(9, 9, dtype=torch.bool).tril()},
        {"scaling": 1.5},
        {"mask": PADDING, "position_bias": torch.linspace(-3, 3, 81).view(1, 1, 9, 9)},
    ],
)
def test_real_attention_passes(dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype != torch.bool else value

    call = make_call(**{name: cast(value) for name, value in arguments.items()})
    AttentionRecorder(MASK).attend(changed(call, dtype))


def scaled(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return SDPA(*args, **kwargs)[0] * 1.01, None


def broken(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return SDPA(*args, **kwargs)[0] * torch.nan, None


def with_a_sink(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return SDPA(module, query, torch.cat([key[:, :, 1:], key[:, :, :1]], 2), *args, **kwargs)[0], None


@pytest.mark.parametrize("base", [scaled, with_a_sink])
def test_another_computation_is_refused(base: Any) -> None:
    with pytest.raises(
        ValueError, match=r"Attention does not compute softmax\(scale \* query key \+ bias\) value .* off"
    ):
        AttentionRecorder(MASK).attend(changed(make_call(mask=PADDING), base=base))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_that_are_not_finite_are_not_blamed_on_the_architecture(dtype: torch.dtype) -> None:
    call = changed(make_call(mask=PADDING), dtype, base=broken)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(
        ValueError, match=rf"^Attention, one of .* layers, gives NaN or infinite values in {name} for a"
    ):
        AttentionRecorder(MASK).attend(call)
    softmax = softmax_call(~PADDING)
    logits = softmax.logits.clone()
    logits[1, 0, 2, 3] = torch.inf
    with pytest.raises(ValueError, match="Attention, one of the model's attention layers, gives NaN or infinite val"):
        AttentionRecorder(MASK, intercepting=True).weigh(replace(softmax, softmax=lambda: logits.softmax(-1)))


def test_a_hidden_mask_is_refused() -> None:
    # As if the model had masked in a way that we are not told of.
    def windowed(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, _: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return SDPA(module, q, k, v, torch.ones(9, 9, dtype=torch.bool).tril()[None, None], **kwargs)

    with pytest.raises(ValueError, match="does not compute"):
        AttentionRecorder(MASK).attend(changed(make_call(mask=PADDING), base=windowed))


def test_padding_may_hold_anything() -> None:
    def spoilt(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        output = SDPA(*args, **kwargs)[0].clone()
        output[1, 5:] = torch.nan
        return output, None

    AttentionRecorder(MASK).attend(changed(make_call(mask=PADDING), base=spoilt))


def test_other_lengths_are_refused() -> None:
    with pytest.raises(
        ValueError, match="Attention attends from 9 to 12 positions of a batch of 9 tokens: only self-att"
    ):
        AttentionRecorder(MASK).attend(make_call(n_keys=12))


# Calls that were intercepted, of which it is not known what they are

LOWEST = torch.finfo(torch.float32).min
FUTURE = torch.ones(9, 9, dtype=torch.bool).triu(1)
WINDOW = torch.ones(9, 9, dtype=torch.bool).tril(-6)


def softmax_call(hidden: Tensor, value: float = -1e4) -> SoftmaxCall:
    logits = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0)) + torch.where(hidden, value, 0.0)
    return SoftmaxCall("Attention", logits, lambda: logits.softmax(-1), -torch.inf)


def recorder_of(*calls: SoftmaxCall, mask: Tensor = MASK) -> AttentionRecorder:
    recorder = AttentionRecorder(mask, intercepting=True)
    for call in calls:
        weights = recorder.weigh(call)
        assert torch.equal(weights.nan_to_num(9), call.logits.softmax(-1).nan_to_num(9))  # rows of padding
    return recorder


@pytest.mark.parametrize("value", [-1e4, -65504.0, -1e9, LOWEST, -torch.inf])
@pytest.mark.parametrize("hidden", [~PADDING, ~PADDING | FUTURE, ~PADDING | FUTURE | WINDOW])
def test_softmaxes_that_hide_padding(hidden: Tensor, value: float) -> None:
    recorder = recorder_of(softmax_call(hidden, value), softmax_call(hidden, value))
    assert recorder.modules == ["Attention"] * 2
    assert not recorder.doubts
    assert recorder.hidden_below == pytest.approx(-9e3 if value == -1e4 else -32752, rel=1e-3)


def test_the_highest_mask_counts() -> None:
    # As in OpenAI GPT: another one for the future than for padding.
    future = softmax_call(FUTURE)
    both = replace(future, logits=future.logits.masked_fill(~PADDING, LOWEST))
    both = replace(both, softmax=lambda: both.logits.softmax(-1))
    recorder = recorder_of(both)
    assert not recorder.doubts
    assert recorder.hidden_below == pytest.approx(-9e3, rel=1e-3)


@pytest.mark.parametrize(
    "hidden",
    [
        torch.zeros(9, 9, dtype=torch.bool),
        FUTURE,  # hides the padding from the tokens, but it may be another sequence's
        ~PADDING.flip(0),
        ~PADDING | torch.eye(9, dtype=torch.bool),
        (~PADDING).expand(2, 3, 9, 9) & (torch.arange(3) > 0)[:, None, None],  # not from one head
        (~PADDING).expand(2, 3, 9, 9) & (torch.arange(9) != 3)[:, None],  # not from one row
    ],
)
def test_softmaxes_that_do_not(hidden: Tensor) -> None:
    (doubt,) = recorder_of(softmax_call(hidden)).doubts
    assert doubt.startswith("the logits of what looks like attention in Attention do not hide the batch's padding")


def test_left_padding() -> None:
    mask = MASK.flip(1)
    padding = mask.bool()[:, None, None]
    assert not recorder_of(softmax_call(~padding), softmax_call(~padding | FUTURE), mask=mask).doubts
    assert recorder_of(softmax_call(FUTURE), mask=mask).doubts
    # Rows of padding see no token under causality, and some models let them see everything instead.
    lenient = (~padding | FUTURE) & padding.mT
    assert not recorder_of(softmax_call(lenient), mask=mask).doubts


def test_a_mask_too_weak() -> None:
    assert recorder_of(softmax_call(~PADDING, -100.0)).doubts


def test_fused_calls_that_were_intercepted() -> None:
    def doubts(**arguments: Any) -> list[str]:
        recorder = AttentionRecorder(MASK, intercepting=True)
        recorder.attend(make_call(**arguments))
        return recorder.doubts

    assert not doubts(mask=PADDING.expand(-1, 1, 9, -1))
    assert not doubts(mask=torch.where(PADDING, 0.0, -1e9).expand(-1, 1, 9, -1))  # padding is known anyway
    assert "do not hide the batch's padding" in doubts()[0]
    (doubt,) = doubts(mask=torch.where(PADDING & ~FUTURE, 0.0, -1e9))
    assert doubt.startswith("Attention masks keys with about -1e+09 instead of -inf, the dtype's minimum or False")
    assert not doubts(mask=torch.where(PADDING & ~FUTURE, 0.0, -torch.inf))
