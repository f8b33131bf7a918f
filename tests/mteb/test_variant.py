from __future__ import annotations

from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from fair_calibration import EvenChunks, FairConfig
from mteb_fair import FairEncoder
from mteb_fair.variant import Variant


def variant(**settings: object) -> Variant:
    return Variant(base_name="BAAI/bge-m3", **{"config": FairConfig(), **settings})  # type: ignore[arg-type]


class TestVariant:
    def test_name(self) -> None:
        assert variant().name == "mteb_fair/BAAI__bge-m3@strength=0.5"
        config = FairConfig(strength=1, basket_size=64, layers=(3, 5))
        assert variant(config=config).name == "mteb_fair/BAAI__bge-m3@strength=1.0,basket_size=64,layers=at3+5"
        assert variant(calibrate_untyped=False).name.endswith("@strength=0.5,calibrate_untyped=False")
        assert variant(max_seq_length=512).name.endswith("@strength=0.5,max_seq_length=512")

    def test_names_of_even_chunks(self) -> None:
        assert variant(config=EvenChunks()).name == "mteb_fair/BAAI__bge-m3@even_chunks,strength=0.8"
        config = EvenChunks(chunk_size=64, ridge=0.1)
        assert variant(config=config).name == "mteb_fair/BAAI__bge-m3@even_chunks,strength=0.8,chunk_size=64,ridge=0.1"

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
            variant(config=FairConfig(attention="global")),
            variant(config=FairConfig(pooling="mean")),
            variant(config=FairConfig(isolate="bos")),
            variant(config=FairConfig(isolated_share="equal")),
            variant(config=FairConfig(last_basket="proportional")),
            variant(config=FairConfig(min_content=64)),
            variant(config=EvenChunks()),
            variant(config=EvenChunks(strength=0.5)),
            variant(config=EvenChunks(chunk_size=64)),
            variant(config=EvenChunks(chunk_size=64, unit_size=16)),
            variant(config=EvenChunks(chunk_size=64, ridge=0.1)),
            variant(calibrate_untyped=False),
            variant(max_seq_length=512),
            variant(embed_dim=64),
            variant(passage_size=64),
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
    @pytest.mark.parametrize("name", ["max_seq_length", "embed_dim", "passage_size"])
    def test_numbers(self, name: str, value: object, error: type[Exception]) -> None:
        with pytest.raises(error, match=f"{name}: expected an integer of at least 1, got {value}"):
            variant(**{name: value})


def test_the_name_of_a_model_with_a_router(tiny_path: Path) -> None:
    transformer = Transformer(str(tiny_path))
    routes = {"query": [transformer, Pooling(32, "cls")], "document": [transformer, Pooling(32, "mean")]}
    model = SentenceTransformer(modules=[Router(routes, default_route="document")], device="cpu")  # type: ignore[arg-type]
    assert FairEncoder(model).mteb_model_meta.name == f"mteb_fair/local__{tiny_path.name}@strength=0.5"
