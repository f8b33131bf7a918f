from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import normalizers, pre_tokenizers

from fair_calibration import FairConfig, calibrate
from fair_calibration.fingerprint import changeable_settings, digest_text, fingerprint_model, fingerprint_weights


@pytest.fixture(scope="module")
def tiny_path(tiny_folder: Callable[..., Path]) -> Path:
    """Returns the folder of a tiny model with mean pooling."""
    return tiny_folder("bert", "mean")


class TestAdapters:
    def test_the_active_one_is_part_of_it(self, tiny_path: Path) -> None:
        peft = pytest.importorskip("peft")
        model = SentenceTransformer(str(tiny_path), device="cpu")
        config = peft.LoraConfig(target_modules=["query"], init_lora_weights=False)
        network = peft.inject_adapter_in_model(config, model[0].model, "a")
        peft.inject_adapter_in_model(config, network, "b")
        digests = set()
        for adapter in ("a", "b"):
            for module in network.modules():
                if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
                    module.set_adapter(adapter)
            digests.add(fingerprint_model(model))
        assert len(digests) == 2


class TestFingerprint:
    def test_copies_are_the_same_and_calibration_is_no_part(self, tiny_path: Path, tmp_path: Path) -> None:
        shutil.copytree(tiny_path, tmp_path / "copy")
        models = [SentenceTransformer(str(path), device="cpu") for path in (tiny_path, tmp_path / "copy")]
        plain = fingerprint_model(models[0])
        assert fingerprint_model(models[1]) == plain
        models[1].encode(["some text"])  # sets the tokenizer's truncation and padding
        assert fingerprint_model(models[1]) == plain
        assert fingerprint_model(calibrate(models[0], FairConfig(strength=1))) == plain

    @pytest.mark.parametrize(
        "change",
        [
            lambda model: next(model.parameters()).data[0, 0].add_(1e-6),
            lambda model: setattr(model, "prompts", {"query": "q: "}),
            lambda model: setattr(model, "max_seq_length", 7),
            lambda model: setattr(model, "truncate_dim", 7),
            lambda model: setattr(model, "similarity_fn_name", "dot"),
            lambda model: model.to(torch.bfloat16),
            lambda model: setattr(model.tokenizer, "truncation_side", "left"),
            lambda model: setattr(model.tokenizer, "padding_side", "left"),
            lambda model: setattr(model[1], "pooling_mode", "cls"),
        ],
    )
    def test_what_changes_vectors_changes_it(
        self, tiny_path: Path, change: Callable[[SentenceTransformer], object]
    ) -> None:
        model = SentenceTransformer(str(tiny_path), device="cpu")
        before = fingerprint_model(model)
        change(model)
        assert fingerprint_model(model) != before

    def test_what_is_in_the_routes_of_a_router(self, tiny_path: Path) -> None:
        def routed(pooling: Any, **kwargs: Any) -> SentenceTransformer:
            transformer = Transformer(str(tiny_path))
            queries, documents = [transformer, Pooling(32, pooling_mode="cls")], [transformer, Pooling(32, pooling)]
            router = Router({"query": queries, "document": documents}, default_route="document", **kwargs)
            return SentenceTransformer(modules=[router], device="cpu")  # type: ignore[arg-type]

        digests = {
            fingerprint_model(routed("mean")),
            fingerprint_model(routed("cls")),
            fingerprint_model(routed("mean", route_mappings={("query", None): "document"})),
        }
        assert len(digests) == 3
        assert fingerprint_model(routed("mean")) in digests
        assert fingerprint_model(calibrate(routed("mean"))) in digests


class TestWeights:
    def test_are_all_that_counts(self, tiny_path: Path) -> None:
        model = SentenceTransformer(str(tiny_path), device="cpu")
        before = fingerprint_weights(model)
        model.max_seq_length = 7
        model.prompts = {"query": "q: "}
        assert fingerprint_weights(model) == before
        assert fingerprint_weights(calibrate(model)) == before
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1e-6
        assert fingerprint_weights(model) != before


class TestChangeableSettings:
    def test_encoding_changes_none(self, tiny_path: Path) -> None:
        model = calibrate(SentenceTransformer(str(tiny_path), device="cpu"))
        before = changeable_settings(model)
        model.encode_document(["dan gos bal", "dan"])
        assert changeable_settings(model) == before

    def test_values_that_are_no_numbers_change_nothing_by_themselves(self, tiny_path: Path) -> None:
        model = SentenceTransformer(str(tiny_path), device="cpu")
        next(model.parameters()).data.fill_(torch.nan)
        assert changeable_settings(model) == changeable_settings(model)

    @pytest.mark.parametrize(
        "change",
        [
            lambda model: next(model.parameters()).detach().add_(1e-6),
            lambda model: next(model.parameters()).data.mul_(1.001),
            lambda model: next(model.parameters()).data.fill_(torch.nan),
            lambda model: list(model.parameters())[-1].data.add_(1e-6),
            lambda model: model.tokenizer.add_tokens(["foo"]),
            lambda model: model.tokenizer.add_special_tokens({"additional_special_tokens": ["gos"]}),
            lambda model: setattr(model.tokenizer.backend_tokenizer, "normalizer", normalizers.NFC()),
            lambda model: setattr(model.tokenizer.backend_tokenizer, "pre_tokenizer", pre_tokenizers.Digits()),
            lambda model: setattr(model, "max_seq_length", 7),
            lambda model: model.prompts.update(query="q: "),
            lambda model: setattr(model[1], "pooling_mode", "cls"),
            lambda model: model.to(torch.bfloat16),
        ],
    )
    def test_what_changes_vectors_changes_them(
        self, tiny_path: Path, change: Callable[[SentenceTransformer], object]
    ) -> None:
        model = SentenceTransformer(str(tiny_path), device="cpu")
        before = changeable_settings(model)
        change(model)
        assert changeable_settings(model) != before


def test_digests_are_short_and_stay_as_they_are() -> None:
    assert digest_text("a") == digest_text("a") != digest_text("b")
    assert len(digest_text("a")) == 8


class TestOtherWeights:
    """Whatever a state_dict holds is taken apart: models that can encode can be identified as well."""

    def test_quantized_weights(self, tiny_path: Path) -> None:
        def quantized() -> SentenceTransformer:
            plain = SentenceTransformer(str(tiny_path), device="cpu")
            model: SentenceTransformer = torch.ao.quantization.quantize_dynamic(plain, {torch.nn.Linear})
            return model

        one, same, other = quantized(), quantized(), quantized()
        weight, bias = other[0].model.encoder.layer[0].output.dense._packed_params._weight_bias()
        with torch.no_grad():
            bias[0] += 1
        other[0].model.encoder.layer[0].output.dense.set_weight_bias(weight, bias)
        assert fingerprint_model(one) == fingerprint_model(same)
        assert fingerprint_model(one) != fingerprint_model(other)
        assert fingerprint_model(one) != fingerprint_model(SentenceTransformer(str(tiny_path), device="cpu"))
        assert changeable_settings(one) == changeable_settings(same)
        assert changeable_settings(one) != changeable_settings(other)

    def test_weights_on_disk(self, tiny_path: Path, tmp_path: Path) -> None:
        device_map = {"embeddings": "cpu", "encoder": "disk", "pooler": "cpu"}
        kwargs = {"device_map": device_map, "offload_folder": str(tmp_path)}
        offloaded = SentenceTransformer(str(tiny_path), device="cpu", model_kwargs=kwargs)
        plain = SentenceTransformer(str(tiny_path), device="cpu")
        assert offloaded[0].model.encoder.layer[0].output.dense.weight.device.type == "meta"
        assert fingerprint_weights(offloaded) == fingerprint_weights(plain)  # the same weights, wherever they are
        assert changeable_settings(offloaded) == changeable_settings(offloaded)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.eye(3).to_sparse(),
            lambda: torch.eye(3).to_sparse_csr(),
            lambda: torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8),
            lambda: torch.quantize_per_channel(torch.eye(3), torch.ones(3), torch.zeros(3), 0, torch.qint8),
            lambda: (torch.eye(3), None, 2.5, "text"),
            lambda: {"a": [torch.eye(3)]},
        ],
    )
    def test_extra_state(self, make: Callable[[], Any], tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = SentenceTransformer(str(tiny_path), device="cpu")
        seen = []
        for state in (make(), make(), torch.zeros(3)):
            monkeypatch.setattr(Transformer, "get_extra_state", lambda _, state=state: state, raising=False)
            seen.append((fingerprint_model(model), changeable_settings(model)))
        assert seen[0] == seen[1]
        assert seen[0][0] != seen[2][0]
        assert seen[0][1] != seen[2][1]

    def test_what_cannot_be_identified(self, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = SentenceTransformer(str(tiny_path), device="cpu")
        with monkeypatch.context() as patch:
            patch.setattr(Transformer, "get_extra_state", lambda _: object(), raising=False)
            with pytest.raises(
                ValueError, match=r"model: '.*_extra_state' in its state_dict is a object, which cannot"
            ):
                fingerprint_model(model)
        model[0].model.to("meta")
        with pytest.raises(ValueError, match=r"model: the weights '.*' are on the meta device and cannot be read"):
            fingerprint_model(model)
