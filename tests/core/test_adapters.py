"""PEFT adapters: calibrated with the adapter that is active; their weights are shared, which one is active is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from packaging.version import Version
from peft.tuners.tuners_utils import BaseTunerLayer
from sentence_transformers import SentenceTransformer
from transformers.integrations.peft import MIN_PEFT_VERSION

from fair_calibration import FairConfig, FairSentenceTransformer, calibrate, uncalibrate
from tests.conftest import TinyModel
from tests.core.cases import assert_close
from tests.core.tiny_models import documents, reference_embeddings

CONFIG = FairConfig(basket_size=8, strength=0.8)
TEXTS = documents([50, 7, 30, 90])
ADAPTERS: dict[str, Any] = {
    "lora": peft.LoraConfig(r=4, lora_alpha=32, target_modules=["query", "value"], init_lora_weights=False),
    "dora": peft.LoraConfig(r=4, target_modules=["key", "value"], use_dora=True, init_lora_weights=False),
    "ia3": peft.IA3Config(target_modules=["key", "value"], feedforward_modules=[], init_ia3_weights=False),
}
needs_integration = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"add_adapter: this transformers asks for peft {MIN_PEFT_VERSION}, installed is {peft.__version__}",
)


def add(model: SentenceTransformer, kind: str, name: str = "one") -> None:
    """Adds an adapter with random weights, always the same ones, and makes it the active one."""
    torch.manual_seed(5)
    peft.inject_adapter_in_model(ADAPTERS[kind], model[0].model, name)
    activate(model, name)


def layers(model: SentenceTransformer) -> list[BaseTunerLayer]:
    found = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    assert found
    return found


def activate(model: SentenceTransformer, name: str) -> None:
    for layer in layers(model):
        layer.set_adapter(name)


def enable(model: SentenceTransformer, enabled: bool) -> None:
    for layer in layers(model):
        layer.enable_adapters(enabled)


def differ(one: Any, other: Any) -> bool:
    return bool(np.abs(np.asarray(one) - np.asarray(other)).max() > 1e-2)


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_equals_the_reference_with_the_adapter(kind: str, pooling: str, tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", pooling)
    bare = plain.encode(TEXTS)
    add(plain, kind)
    adapted = plain.encode(TEXTS)
    assert differ(adapted, bare)
    fair = calibrate(plain, CONFIG)
    calibrated = fair.encode(TEXTS, convert_to_tensor=True)
    assert differ(calibrated, adapted)
    assert_close(calibrated, reference_embeddings(uncalibrate(fair), TEXTS, CONFIG.resolve(pooling)), 2e-5)
    assert np.array_equal(fair.encode(TEXTS, strength=0), adapted)
    assert np.array_equal(fair.encode_query(TEXTS), plain.encode_query(TEXTS))
    assert np.array_equal(uncalibrate(fair).encode(TEXTS), adapted)
    assert fair.summary().n_layers == 4


def test_weights_are_shared_and_switches_are_not(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    bare, bare_calibrated = plain.encode(TEXTS), calibrate(plain, CONFIG).encode(TEXTS)
    add(plain, "lora")
    fair = calibrate(plain, CONFIG)
    adapted, calibrated = plain.encode(TEXTS), fair.encode(TEXTS)
    assert dict(plain.named_parameters()).keys() == dict(fair.named_parameters()).keys()
    for one, other in zip(plain.parameters(), fair.parameters(), strict=True):
        assert one is other

    enable(fair, False)
    assert np.array_equal(fair.encode(TEXTS), bare_calibrated)
    assert np.array_equal(plain.encode(TEXTS), adapted)
    enable(fair, True)
    enable(plain, False)
    assert np.array_equal(fair.encode(TEXTS), calibrated)
    assert np.array_equal(plain.encode(TEXTS), bare)
    enable(plain, True)

    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "lora_B" in name:
                parameter.mul_(2)  # training one trains both
    assert differ(plain.encode(TEXTS), adapted)
    assert np.array_equal(fair.encode(TEXTS, strength=0), plain.encode(TEXTS))


def test_adapters_added_after_calibration(tiny_model: TinyModel) -> None:
    adapted = tiny_model("bert", "mean")
    add(adapted, "lora")
    expected = calibrate(adapted, CONFIG).encode(TEXTS)
    plain = tiny_model("bert", "mean")
    fair = calibrate(plain, CONFIG)
    bare, bare_calibrated = plain.encode(TEXTS), fair.encode(TEXTS)
    add(fair, "lora")
    assert np.array_equal(fair.encode(TEXTS), expected)
    assert np.array_equal(plain.encode(TEXTS), bare)
    fair = calibrate(plain, CONFIG)
    add(plain, "lora")
    assert np.array_equal(fair.encode(TEXTS), bare_calibrated)  # it has its own, and was not given it
    assert np.array_equal(calibrate(plain, CONFIG).encode(TEXTS), expected)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
def test_several_adapters(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    add(plain, "lora", "one")
    fair = calibrate(plain, CONFIG)
    one = fair.encode(TEXTS)
    add(fair, "lora", "two")
    with torch.no_grad():
        for name, parameter in fair.named_parameters():
            if "lora_B.two" in name:
                parameter.mul_(2)
    assert differ(fair.encode(TEXTS), one)
    activate(fair, "one")
    assert np.array_equal(fair.encode(TEXTS), one)
    assert {name for layer in layers(plain) for name in layer._get_available_adapters()} == {"one"}


@needs_integration
def test_adapters_through_the_model(tiny_model: TinyModel) -> None:
    plain = tiny_model("bert", "mean")
    fair = calibrate(plain, CONFIG)
    bare, bare_calibrated = plain.encode(TEXTS), fair.encode(TEXTS)
    torch.manual_seed(5)
    fair.add_adapter(ADAPTERS["lora"], "one")
    calibrated = fair.encode(TEXTS)
    assert differ(calibrated, bare_calibrated)
    assert fair.active_adapters() == ["one"]
    fair.disable_adapters()
    assert np.array_equal(fair.encode(TEXTS), bare_calibrated)
    fair.enable_adapters()
    assert np.array_equal(fair.encode(TEXTS), calibrated)
    assert np.array_equal(plain.encode(TEXTS), bare)


@needs_integration
def test_saving_and_loading(tiny_model: TinyModel, tmp_path: Path) -> None:
    plain = tiny_model("bert", "mean")
    torch.manual_seed(5)
    plain.add_adapter(ADAPTERS["lora"])
    fair = calibrate(plain, CONFIG)
    fair.save_pretrained(str(tmp_path))
    assert (tmp_path / "adapter_config.json").exists()
    loaded = FairSentenceTransformer(str(tmp_path), device="cpu")
    assert loaded.fair_config == CONFIG
    assert np.array_equal(loaded.encode(TEXTS), fair.encode(TEXTS))
    assert np.array_equal(loaded.encode_query(TEXTS), plain.encode_query(TEXTS))
