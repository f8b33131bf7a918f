from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fair_calibration import FairConfig, calibrate
from fair_calibration.access.discovery import Discovery, Probe, discover, set_implementation
from tests.conftest import TinyModel
from tests.core.own_attention import OwnConfig, OwnModel, load_own_model
from tests.core.tiny_models import documents, make_model

CONFIG = FairConfig(basket_size=8)


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


def run_probe(model: Any) -> Probe:
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1] * 6])
    ids = torch.tensor([[0, 9, 2, 1, 1, 1], [0, 8, 7, 6, 5, 2]])
    return Probe(mask, model(input_ids=ids, attention_mask=mask).last_hidden_state)


def test_what_is_found() -> None:
    model = make_model("bert")
    found = discover(model, "sdpa", lambda: run_probe(model))
    modules = ("BertSelfAttention",) * 4
    assert found == Discovery("transformers AttentionInterface, on top of sdpa", modules, windows=(None,) * 4)
    assert model.config._attn_implementation == "fair_sdpa"
    model = make_model("mpnet")
    found = discover(model, "eager", lambda: run_probe(model))
    assert (found.mechanism, found.modules) == ("interception of softmax", ("MPNetSelfAttention",) * 4)
    assert {tuple(shape) for shape in found.shapes} == {("softmax", 4, 4)}
    assert found.hidden_below == -32752
    assert found.windows is None  # not known
    assert model.config._attn_implementation == "eager"


def test_the_model_is_left_as_it_was() -> None:
    model = OwnModel(OwnConfig())
    model.train()
    model.norms[1].eval()
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    discover(model, "eager", lambda: run_probe(model))
    assert [module.training for module in model.modules()] == modes
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks


def test_the_interface_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers goes by the source of a model, and may take it for one that uses its interface.
    monkeypatch.setattr(OwnModel, "_can_set_attn_implementation_cached_value", True, raising=False)
    fair = calibrate(load_own_model("sdpa"), FairConfig(basket_size=8))
    assert fair.summary().mechanism == "interception of scaled_dot_product_attention"
    assert fair[0].model.config._attn_implementation == "eager"


def test_two_functions_in_one_model() -> None:
    model = OwnModel(OwnConfig("sdpa"))
    model.layers[1].config = OwnConfig("torch.softmax")
    found = discover(model, "eager", lambda: run_probe(model))
    assert found.mechanism == "interception of scaled_dot_product_attention and softmax"


def test_a_model_that_calls_attention_in_its_own_forward() -> None:
    class Bare(OwnModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            torch.zeros(2, 4, 6, 6).softmax(-1)
            return super().forward(*args, **kwargs)

    model = Bare(OwnConfig())
    text = r"Bare has 3 layers, .* and 4 calls of softmax or scaled_dot_product_attention"
    with pytest.raises(ValueError, match=text):
        discover(model, "eager", lambda: run_probe(model.forward))  # as sentence-transformers calls it


class Noisy(OwnModel):
    """Computes something else every time."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        result.last_hidden_state += torch.rand(())
        return result


def test_a_model_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Noisy(OwnConfig())
    with pytest.raises(ValueError, match="Noisy computes something else when torch's functions are intercepted"):
        discover(model, "eager", lambda: run_probe(model))
    bert: Any = make_model("bert")
    forward = bert.forward

    def noisy(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        result.last_hidden_state = result.last_hidden_state + torch.rand(())
        return result

    monkeypatch.setattr(bert, "forward", noisy)
    with pytest.raises(
        ValueError, match="BertModel computes something else when its attention is routed through our function"
    ):
        discover(bert, "sdpa", lambda: run_probe(bert))


# Models that give NaN or infinite values by themselves

NOT_FINITE = r"^{name} gives NaN or infinite values in {dtype} for a short text, before anything is calibrated"


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize(("family", "name"), [("bert", "BertModel"), ("mpnet", "MPNetModel")])
def test_a_weight_that_is_nan_is_named(family: str, name: str, pooling: str, tiny_model: TinyModel) -> None:
    for half in (False, True):
        plain = tiny_model(family, pooling)
        with torch.no_grad():
            plain[0].model.encoder.layer[-1].output.dense.bias[0] = torch.nan
        plain = plain.half() if half else plain
        text = NOT_FINITE.format(name=name, dtype="float16" if half else "float32")
        text += r" \(its parameter encoder\.layer\.3\.output\.dense\.bias holds such values\)\. The plain model is at"
        with pytest.raises(ValueError, match=text):
            calibrate(plain)


@pytest.mark.parametrize(("family", "name"), [("bert", "BertModel"), ("mpnet", "MPNetModel")])
def test_an_overflow_of_float16_is_named(family: str, name: str, tiny_model: TinyModel) -> None:
    plain = tiny_model(family, "mean")
    with torch.no_grad():
        plain[0].model.encoder.layer[-1].intermediate.dense.weight *= 2e4
    remedy = r"\. The plain model is at fault: check its weights, or load it in bfloat16 or float32: model_kwargs="
    with pytest.raises(ValueError, match=NOT_FINITE.format(name=name, dtype="float16") + remedy):
        calibrate(copy.deepcopy(plain).half(), CONFIG)
    for dtype in (torch.float32, torch.bfloat16):
        assert np.isfinite(calibrate(copy.deepcopy(plain).to(dtype), CONFIG).encode(documents([40]))).all()


def test_an_overflow_under_autocast_is_named() -> None:
    plain = load_own_model("torch.softmax")
    with torch.no_grad():
        plain[0].model.layers[1].output.weight *= 1e6
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match=r"OwnModel gives NaN .* in float16"):
        calibrate(plain, CONFIG)
    calibrate(plain, CONFIG)


def test_a_layer_whose_values_the_model_repairs_is_named() -> None:
    class Repairing(OwnModel):
        """Clears away what its second attention spoils, as some models do for float16."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            hook = self.layers[1].register_forward_hook(lambda _module, _args, output: output.nan_to_num(0.0))
            try:
                return super().forward(*args, **kwargs)
            finally:
                hook.remove()

    for attention in ("torch.softmax", "sdpa"):
        model = Repairing(OwnConfig(attention))
        with torch.no_grad():
            model.layers[1].query.bias[0] = torch.nan
        text = "OwnAttention, one of the model's attention layers, gives NaN or infinite values in float32 for a short"
        with pytest.raises(ValueError, match=text):
            discover(model, "eager", lambda model=model: run_probe(model))  # type: ignore[misc]


def test_padding_may_hold_anything() -> None:
    class Spoiling(OwnModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            result = super().forward(*args, **kwargs)
            result.last_hidden_state[kwargs["attention_mask"] == 0] = torch.inf
            return result

    model = Spoiling(OwnConfig())
    assert len(discover(model, "eager", lambda: run_probe(model)).modules) == 3


def test_a_model_that_changes_itself_is_refused() -> None:
    class Fickle(OwnModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.norms[0] = nn.Identity()
            return super().forward(*args, **kwargs)

    model = Fickle(OwnConfig())
    with pytest.raises(
        ValueError, match="Fickle replaces its own attention modules, depending on the length of its in"
    ):
        discover(model, "eager", lambda: run_probe(model))


def test_an_implementation_that_is_not_taken() -> None:
    with pytest.raises(ValueError, match="MPNetModel does not let its attention implementation be set to 'sdpa'"):
        set_implementation(make_model("mpnet"), "sdpa")


@pytest.mark.parametrize("name", ["n_layers", "n_layer", "num_layers"])
def test_other_names_of_the_number_of_layers(name: str) -> None:
    fair = calibrate(load_own_model("method", num_hidden_layers=None, **{name: 3}), FairConfig(basket_size=8))
    assert fair.summary().n_layers == 3
    assert fair.encode(documents([40])).shape == (1, 32)
