"""What is read off a mask is cached for the layers that share it, and read again for layers with another mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.access.attention_call import SoftmaxCall
from fair_calibration.method import all_rows, pooled_row
from fair_calibration.method.calibrated_pass import CalibratedPass
from tests.core.cases import MASKS, Case, assert_close, make_case, masked_variants


def layers_of(variants: list[dict[str, Case]], masks: list[str]) -> list[Case]:
    """Returns one case per layer: layer i has queries, keys and values of its own, and the i-th of the masks."""
    shared = variants[0]
    return [
        replace(variants[i][name], mask=shared[name].mask, position_bias=shared[name].position_bias)
        for i, name in enumerate(masks)
    ]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists how often a mask is read."""
    read: list[str] = []

    def counted(name: str, function: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            read.append(name)
            return function(*args)

        return wrapper

    monkeypatch.setattr(pooled_row, "_read_row", counted("row", pooled_row._read_row))
    monkeypatch.setattr(all_rows, "find_visible_baskets", counted("baskets", all_rows.find_visible_baskets))
    return read


def run(layers: list[Case]) -> None:
    """Runs the layers in one pass and compares each with the reference."""
    first = layers[0]
    this = CalibratedPass(frozenset(range(len(layers))), first.baskets, first.config)
    for layer in layers:
        seen = layer.full_bias_and_visible()[1] & layer.attention_mask.bool()[:, None, None]
        rows = layer.rows() & seen.any(-1).all(1)  # the output of a row that sees no key has no meaning
        expected = layer.to(torch.float64).reference().output.transpose(1, 2)
        assert_close(this.attend(layer.call())[0][rows], expected[rows], 2e-5)


def variants_of(pooling: str, n: int, lengths: tuple[int, ...] = (13, 5, 9)) -> list[dict[str, Case]]:
    cases = [make_case(lengths, pooling=pooling, seed=seed) for seed in range(n)]
    return [{name: case.to(torch.float32) for name, case in masked_variants(case).items()} for case in cases]


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
@pytest.mark.parametrize("mask", MASKS)
@torch.no_grad()
def test_layers_with_one_mask(pooling: str, mask: str) -> None:
    run(layers_of(variants_of(pooling, 3), [mask] * 3))


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
@torch.no_grad()
def test_layers_with_masks_of_their_own(pooling: str) -> None:
    run(layers_of(variants_of(pooling, len(MASKS)), MASKS))
    windows = ["bool", "window", "bool", "window", "causal bool", "bool", "window", "none", "causal flag", "none"]
    run(layers_of(variants_of(pooling, len(windows)), windows))


@pytest.mark.parametrize(("pooling", "once"), [("cls", ["row"]), ("mean", ["baskets"])])
def test_a_mask_is_read_once(pooling: str, once: list[str], reads: list[str]) -> None:
    lengths = (13, 13, 13)  # of equal length, so that they are worked on together
    variants = variants_of(pooling, 4, lengths)
    with torch.no_grad():
        run(layers_of(variants, ["causal bool"] * 4))
        assert reads == once
        run(layers_of(variants, ["causal bool", "window"] * 2))
        assert reads == once * 3
        reads.clear()
        views = [replace(case, mask=case.mask[:]) for case in layers_of(variants, ["causal bool"] * 4)]  # type: ignore[index]
        run(views)  # as in models that take each layer's mask out of a larger one
        assert reads == once
        reads.clear()
        run([replace(case, mask=case.mask.clone()) for case in views])  # type: ignore[union-attr]
        assert reads == once * 4
    reads.clear()
    run(layers_of(variants, ["causal bool"] * 4))  # with gradients, each layer needs a graph of its own
    assert reads == once * 4


@torch.no_grad()
def test_additive_biases_are_not_kept_after_their_layer() -> None:
    (variants,) = variants_of("mean", 1)
    for name in ("position bias", "additive minimum", "bool"):
        case = variants[name]
        this = CalibratedPass(frozenset({0}), case.baskets, case.config)
        this.attend(case.call())
        assert len(this._biases) == (name == "bool")


def test_has_same_masks() -> None:
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    bias = AttentionBias(mask, None, causal=False)
    assert bias.has_same_masks(AttentionBias(mask[:], None, causal=False))
    for other in (
        AttentionBias(None, None, causal=False),
        AttentionBias(mask, mask, causal=False),
        AttentionBias(mask, None, causal=True),
        AttentionBias(mask.clone(), None, causal=False),
        AttentionBias(mask.transpose(2, 3), None, causal=False),
        AttentionBias(mask[:, :, :1], None, causal=False),
        AttentionBias(mask.view(torch.int8), None, causal=False),
    ):
        assert not bias.has_same_masks(other)
        assert not other.has_same_masks(bias)


def test_a_layer_on_another_device_is_refused() -> None:
    """As happens to models whose layers are spread over several GPUs by ``device_map``."""
    case = make_case((13, 5), pooling="cls").to(torch.float32)
    call, problem = case.call(), "Attention runs on meta, but the batch is on cpu: a model that is spread over several"
    fused = replace(call, query=call.query.to("meta"), key=call.key.to("meta"), value=call.value.to("meta"))
    with pytest.raises(ValueError, match=problem):
        CalibratedPass(frozenset({0}), case.baskets, case.config).attend(fused)
    logits = torch.zeros(2, 1, 13, 13, device="meta")
    softmax = SoftmaxCall("Attention", logits, lambda: logits.softmax(-1), hidden_below=-1e30)
    with pytest.raises(ValueError, match=problem):
        CalibratedPass(frozenset({0}), case.baskets, case.config).weigh(softmax)
