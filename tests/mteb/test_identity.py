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

from fair_calibration import FairConfig, calibrate
from fair_calibration.fingerprint import fingerprint_model
from mteb_fair import FairEncoder
from mteb_fair.identity import Variant


def variant(**settings: object) -> Variant:
    return Variant(base_name="BAAI/bge-m3", **{"config": FairConfig(), **settings})  # type: ignore[arg-type]


class TestVariant:
    def test_name(self) -> None:
        assert variant().name == "mteb_fair/BAAI__bge-m3@strength=0.5"
        config = FairConfig(strength=1, basket_size=64, layers=(3, 5))
        assert variant(config=config).name == "mteb_fair/BAAI__bge-m3@strength=1.0,basket_size=64,layers=at3+5"
        assert variant(calibrate_untyped=False).name.endswith("@strength=0.5,calibrate_untyped=False")
        assert variant(max_seq_length=512).name.endswith("@strength=0.5,max_seq_length=512")

    def test_explicit_defaults_are_omitted_defaults(self) -> None:
        explicit = variant(config=FairConfig(strength=0.5, basket_size=128, min_content=None), calibrate_untyped=True)
        assert explicit == variant()
        assert explicit.name == variant().name
        assert explicit.experiment_kwargs == variant().experiment_kwargs

    def test_every_setting_is_told_apart(self) -> None:
        variants = [
            variant(),
            variant(config=FairConfig(strength=0.3)),
            variant(config=FairConfig(basket_size=64)),
            variant(config=FairConfig(layers=1)),
            variant(config=FairConfig(layers="all")),
            variant(config=FairConfig(layers=(1,))),
            variant(config=FairConfig(pooling="mean")),
            variant(config=FairConfig(isolate="bos")),
            variant(config=FairConfig(isolated_share="equal")),
            variant(config=FairConfig(last_basket="proportional")),
            variant(config=FairConfig(min_content=64)),
            variant(config=FairConfig(chunk_size=64)),
            variant(config=FairConfig(chunk_size=64, unit_size=16)),
            variant(config=FairConfig(chunk_size=64, ridge=0.1)),
            variant(calibrate_untyped=False),
            variant(max_seq_length=512),
            variant(embed_dim=64),
            variant(model_prompts={"query": "q: "}),
            variant(model_prompts={"query": "Q: "}),
        ]
        # `MTEB(...).run` goes by the name alone, `mteb.evaluate` by the experiment settings, too.
        assert len({v.name for v in variants}) == len(variants)
        assert len({str(v.experiment_kwargs) for v in variants}) == len(variants)

    def test_names_that_folders_can_have(self) -> None:
        config = FairConfig(strength=0.3, layers=tuple(range(10, 80)))
        name = variant(config=config).name
        assert len(name) <= 200
        assert name.startswith("mteb_fair/BAAI__bge-m3@strength=0.3,settings=")
        assert name != variant(config=FairConfig(strength=0.3, layers=tuple(range(11, 80)))).name

    @pytest.mark.parametrize(
        ("value", "error"), [(0, ValueError), (-3, ValueError), (True, TypeError), (64.0, TypeError)]
    )
    @pytest.mark.parametrize("name", ["max_seq_length", "embed_dim"])
    def test_numbers(self, name: str, value: object, error: type[Exception]) -> None:
        with pytest.raises(error, match=f"{name}: expected an integer of at least 1, got {value}"):
            variant(**{name: value})


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
        assert FairEncoder(routed("mean")).mteb_model_meta.name == f"mteb_fair/local__{tiny_path.name}@strength=0.5"
