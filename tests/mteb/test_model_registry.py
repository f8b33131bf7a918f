from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mteb
import pytest
from mteb.models.model_implementations import MODEL_REGISTRY

import mteb_fair
from fair_calibration import PRESETS, FairConfig, FairSentenceTransformer
from fair_calibration.model_source import ModelNotFoundError
from mteb_fair import Variant, register_model


@pytest.fixture(autouse=True)
def _registered() -> None:
    mteb_fair.register()


class TestModels:
    @pytest.mark.parametrize("preset", [None, *sorted(PRESETS)])
    def test_names_of_variants(self, preset: str | None) -> None:
        config = FairConfig(strength=0) if preset is None else PRESETS[preset]
        name = Variant(base_name="BAAI/bge-m3", config=config).name
        assert mteb_fair.register_model("BAAI/bge-m3", config=config) == name
        meta = mteb.get_model_meta(name)
        assert meta.adapted_from == "BAAI/bge-m3"
        assert meta.experiment_kwargs is not None
        assert meta.experiment_kwargs["strength"] == config.strength

    def test_single_settings(self) -> None:
        name = mteb_fair.register_model("BAAI/bge-m3", config="full", strength=0.75, max_seq_length=512)
        assert name == "mteb_fair/BAAI__bge-m3@strength=0.75,isolated_share=equal,max_seq_length=512"
        assert mteb_fair.register_model("BAAI/bge-m3", config="even_chunks").endswith("@even_chunks,strength=0.8")

    def test_facts_are_those_of_the_base(self) -> None:
        base = mteb.get_model_meta("BAAI/bge-m3")
        meta = mteb.get_model_meta(mteb_fair.register_model("BAAI/bge-m3", strength=0.5))
        for name in ("revision", "languages", "n_parameters", "license", "training_datasets", "similarity_fn_name"):
            assert getattr(meta, name) == getattr(base, name)
        assert base.name == "BAAI/bge-m3"  # MTEB's own stays
        assert base.experiment_kwargs is None
        assert meta.get_training_datasets() == base.get_training_datasets()

    def test_loading_by_name(self, tiny_path: Path, tmp_path: Path) -> None:
        config = FairConfig(strength=0.25, layers=(1, 2))
        name = mteb_fair.register_model(tiny_path, config=config, calibrate_untyped=False, max_seq_length=64)
        encoder = mteb.get_model(name, device="cpu")
        assert isinstance(encoder, mteb_fair.FairEncoder)
        assert encoder.fair_config == config
        assert encoder.model.max_seq_length == 64
        registered, loaded = mteb.get_model_meta(name), encoder.mteb_model_meta
        assert (registered.name, registered.revision, registered.experiment_name) == (
            loaded.name,
            loaded.revision,
            loaded.experiment_name,
        )
        # evaluated by metadata, the results are found again by the model
        cache = mteb.ResultCache(tmp_path)
        task = mteb_fair.PositionDemoRetrieval()
        mteb.evaluate(registered, task, cache=cache, show_progress_bar=False)
        mteb.evaluate(encoder, task, cache=cache, overwrite_strategy="only-cache")
        assert encoder.counts.documents == 0

    def test_prompts_by_name(self, tiny_path: Path) -> None:
        name = mteb_fair.register_model(tiny_path, model_prompts={"query": "ba "})
        assert mteb.get_model(name).model.prompts == {"query": "ba "}

    def test_a_saved_setting_does_not_leak(self, tiny_path: Path, tmp_path: Path) -> None:
        saved = FairSentenceTransformer(str(tiny_path), config=FairConfig(min_content=5), device="cpu")
        saved.save_pretrained(str(tmp_path / "saved-with-5"))
        name = mteb_fair.register_model(tmp_path / "saved-with-5", config=FairConfig(strength=0.3))
        encoder = mteb.get_model(name)
        assert encoder.fair_config == FairConfig(strength=0.3)
        assert encoder.mteb_model_meta.name == name
        own = mteb_fair.register_model(tmp_path / "saved-with-5")
        assert mteb.get_model(own).fair_config == FairConfig(min_content=5)
        assert mteb.get_model(own, basket_size=16).fair_config == FairConfig(min_content=5, basket_size=16)
        assert mteb.get_model(own, config=FairConfig(strength=1)).fair_config == FairConfig(strength=1)
        assert mteb.get_model(own, config=FairConfig(), basket_size=16).fair_config == FairConfig(basket_size=16)

    def test_other_models_of_the_name(self, tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        name = mteb_fair.register_model(tiny_path, base_name="tests/other")
        first = MODEL_REGISTRY[name]
        assert mteb_fair.register_model(tiny_path, base_name="tests/other") == name
        assert MODEL_REGISTRY[name].revision == first.revision
        monkeypatch.setitem(MODEL_REGISTRY, name, first.model_copy(update={"revision": "abc"}))
        with pytest.raises(ValueError, match=f"{name}' is registered for tests/other at the revision abc, now"):
            mteb_fair.register_model(tiny_path, base_name="tests/other")
        assert MODEL_REGISTRY[name].revision == "abc"

    def test_revisions(self, tiny_path: Path) -> None:
        first, second = "a" * 40, "b" * 40
        name = mteb_fair.register_model("someone/some-model", revision=first)
        assert mteb.get_model_meta(name, revision=first).revision == first
        with pytest.raises(ValueError, match=f"registered for someone/some-model at the revision {first}"):
            mteb_fair.register_model("someone/some-model", revision=second)
        del MODEL_REGISTRY[name]
        with pytest.raises(ValueError, match="revision: folders have none, got 'abc'"):
            mteb_fair.register_model(tiny_path, revision="abc")

    def test_settings_at_loading(self, tiny_path: Path) -> None:
        name = mteb_fair.register_model(tiny_path)
        encoder = mteb.get_model(name, strength=0.125)
        assert encoder.mteb_model_meta.name.endswith("@strength=0.125")

    def test_a_name_that_mteb_does_not_know(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.model_info", lambda *_, **__: SimpleNamespace(sha="c0ffee"))
        name = mteb_fair.register_model("someone/some-model")
        assert name == "mteb_fair/someone__some-model@strength=0.5"
        assert MODEL_REGISTRY[name].adapted_from == "someone/some-model"
        assert MODEL_REGISTRY[name].revision == "c0ffee"
        del MODEL_REGISTRY[name]

    def test_a_name_that_nobody_knows(self) -> None:
        with pytest.raises(ModelNotFoundError, match="'someone/some-model' is not a folder, not in the local cache"):
            mteb_fair.register_model("someone/some-model")

    @pytest.mark.parametrize(
        ("model", "options", "message"),
        [
            ("BAAI/bge-m3", {"strenght": 0.5}, r"strenght: not an option of register_model, .* 'strength'"),
            ("BAAI/bge-m3", {"calibrate_untyped": 1}, "calibrate_untyped: expected True or False, got 1"),
            ("BAAI/bge-m3", {"device": "cpu"}, "device: not an option of register_model"),
            ("BAAI/bge-m3", {"revision": 3}, "revision: expected str, got 3"),
            (None, {}, "base_model: expected a model name or a folder, got NoneType"),
        ],
    )
    def test_misspelt_options(self, model: Any, options: dict[str, Any], message: str) -> None:
        with pytest.raises(TypeError, match=message):
            register_model(model, **options)
