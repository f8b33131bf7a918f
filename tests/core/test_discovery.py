from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fair_calibration import FairConfig, calibrate
from fair_calibration.attention import AttentionCall
from fair_calibration.discovery import AttentionRecorder
from tests.conftest import TinyModel
from tests.core.test_attention import SDPA, Attention, make_call

MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0, 0]])
PADDING = MASK.bool()[:, None, None]


class OtherAttention(Attention):
    pass


def test_records_in_order() -> None:
    recorder = AttentionRecorder(MASK)
    call = make_call(mask=PADDING)
    output, _ = recorder.attend(call)
    assert torch.equal(output, call.run_plain()[0])
    recorder.attend(replace(call, module=OtherAttention()))
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
    call = replace(call, query=cast(call.query), key=cast(call.key), value=cast(call.value))
    AttentionRecorder(MASK).attend(call)


def scaled(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return SDPA(*args, **kwargs)[0] * 1.01, None


def broken(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return SDPA(*args, **kwargs)[0] * torch.nan, None


def with_a_sink(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return SDPA(module, query, torch.cat([key[:, :, 1:], key[:, :, :1]], 2), *args, **kwargs)[0], None


@pytest.mark.parametrize("base", [scaled, broken, with_a_sink])
def test_another_computation_is_refused(base: Any) -> None:
    with pytest.raises(
        ValueError, match=r"Attention does not compute softmax\(scale \* query key \+ bias\) value .* off"
    ):
        AttentionRecorder(MASK).attend(replace(make_call(mask=PADDING), base=base))


def test_a_hidden_mask_is_refused() -> None:
    # As if the model had masked in a way that we are not told of.
    def windowed(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, _: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return SDPA(module, q, k, v, torch.ones(9, 9, dtype=torch.bool).tril()[None, None], **kwargs)

    with pytest.raises(ValueError, match="does not compute"):
        AttentionRecorder(MASK).attend(replace(make_call(mask=PADDING), base=windowed))


def test_padding_may_hold_anything() -> None:
    def spoilt(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        output = SDPA(*args, **kwargs)[0].clone()
        output[1, 5:] = torch.nan
        return output, None

    AttentionRecorder(MASK).attend(replace(make_call(mask=PADDING), base=spoilt))


def test_other_lengths_are_refused() -> None:
    with pytest.raises(
        ValueError, match="Attention attends from 9 to 12 positions of a batch of 9 tokens: only self-att"
    ):
        AttentionRecorder(MASK).attend(make_call(n_keys=12))


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("bert", "BertSelfAttention"),
        ("xlm_roberta", "XLMRobertaSelfAttention"),
        ("qwen3", "Qwen3Attention"),
        ("albert", "AlbertAttention"),
    ],
)
def test_families(family: str, module: str, tiny_model: TinyModel) -> None:
    summary = calibrate(tiny_model(family, "mean"), FairConfig(layers=3)).summary()
    assert summary.n_layers == 4
    assert summary.layers == (1, 2, 3)
    assert summary.modules == (module,) * 3


def test_the_call_knows_its_implementation() -> None:
    assert make_call().base_name == "sdpa"
    assert isinstance(make_call(), AttentionCall)
