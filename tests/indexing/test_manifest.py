from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer

from fair_calibration import FairConfig, calibrate
from fair_calibration.identity import DifferentEncoderError, EncoderIdentity, resolve_normalize
from fair_indexing.manifest import Manifest, check_same, describe_environment, environment_differences
from tests.conftest import TinyModel
from tests.indexing.manifests import RECORD, manifest

CONFIG = FairConfig(strength=0.8, basket_size=8)


class TestRecordOfAModel:
    def test_says_what_vectors_depend_on(self, tiny_model: TinyModel) -> None:
        record = EncoderIdentity.of(calibrate(tiny_model(), CONFIG), name="me/tiny")
        assert (record.model, record.dtype, record.max_seq_length) == ("me/tiny", "float32", 128)
        assert record.fair_config == CONFIG.to_dict()
        assert (record.document_prompt, record.query_prompt) == ("dan gos ", "bal ")
        assert record.normalize is True  # the cosine
        assert record.modules["1"]["pooling_mode"] == "cls"
        assert len(record.weights) == 32

    def test_copies_are_equal_whatever_they_are_called(self, tiny_model: TinyModel) -> None:
        one, other = (EncoderIdentity.of(calibrate(tiny_model(), CONFIG), name=name) for name in ("a", "b"))
        assert one.document_differences(other) == []
        assert one.query_differences(other) == []

    def test_encoding_changes_nothing(self, tiny_model: TinyModel) -> None:
        model = calibrate(tiny_model(), CONFIG)
        before = EncoderIdentity.of(model)
        model.encode_document(["dan gos bal"])
        assert EncoderIdentity.of(model) == before

    def test_survives_json(self, tiny_model: TinyModel) -> None:
        record = EncoderIdentity.of(calibrate(tiny_model(), FairConfig(layers=(1, 3))))
        assert EncoderIdentity.from_dict(json.loads(json.dumps(record.to_dict()))) == record

    def test_strength_of_a_call(self, tiny_model: TinyModel) -> None:
        model = calibrate(tiny_model(), CONFIG)
        assert EncoderIdentity.of(model, strength=0.3) == EncoderIdentity.of(
            calibrate(model, replace(CONFIG, strength=0.3))
        )
        plain = tiny_model()
        assert EncoderIdentity.of(plain).fair_config is None
        with pytest.raises(ValueError, match=r"strength: a plain model has none, got 0\.3"):
            EncoderIdentity.of(plain, strength=0.3)

    def test_names_are_those_that_models_were_loaded_by(self, tiny_model: TinyModel, tiny_folder: Any) -> None:
        assert str(tiny_folder()) in EncoderIdentity.of(tiny_model()).model

    @pytest.mark.parametrize(
        ("change", "line", "changes_queries"),
        [
            (lambda m: next(m.parameters()).data[0, 0].add_(1e-3), "weights: ", True),
            (lambda m: m.to(torch.bfloat16), "dtype: 'float32' there, 'bfloat16' now", True),
            (lambda m: setattr(m, "max_seq_length", 64), "max_seq_length: 128 there, 64 now", True),
            (lambda m: setattr(m, "truncate_dim", 16), "truncate_dim: None there, 16 now", True),
            (lambda m: m.prompts.update(query="x "), "query_prompt: 'bal ' there, 'x ' now", True),
            (lambda m: m.prompts.update(document="x "), "document_prompt: 'dan gos ' there, 'x ' now", False),
            (lambda m: m.prompts.update(other="x "), None, False),
            (lambda m: setattr(m[1], "pooling_mode", "mean"), "modules.1.pooling_mode: 'cls' there, 'mean' now", True),
            (lambda m: setattr(m, "similarity_fn_name", "dot"), "similarity: 'cosine' there, 'dot' now", True),
            (lambda m: setattr(m.tokenizer, "truncation_side", "left"), "tokenizer: ", True),
        ],
    )
    def test_differences_are_named(
        self,
        tiny_model: TinyModel,
        change: Callable[[SentenceTransformer], object],
        line: str | None,
        changes_queries: bool,
    ) -> None:
        model = tiny_model()
        before = EncoderIdentity.of(model)
        change(model)
        now = EncoderIdentity.of(model)
        lines = before.document_differences(now)
        assert bool(before.query_differences(now)) == changes_queries
        if line is None:
            assert lines == []
        else:
            assert any(text.startswith(line) for text in lines)

    def test_calibration_changes_no_queries(self, tiny_model: TinyModel) -> None:
        records = [EncoderIdentity.of(calibrate(tiny_model(), config)) for config in (CONFIG, FairConfig(layers=1))]
        lines = records[0].document_differences(records[1])
        assert lines == [
            "fair_config.strength: 0.8 there, 0.5 now",
            "fair_config.basket_size: 8 there, 128 now",
            "fair_config.layers: 0.5 there, 1 now",
        ]
        assert records[0].query_differences(records[1]) == []
        assert records[0].query_differences(EncoderIdentity.of(tiny_model())) == []

    def test_settings_that_older_records_lack_have_their_defaults(self) -> None:
        values = RECORD.to_dict()
        values["fair_config"] = {"strength": 0.5, "layers": [3, 5]}
        assert EncoderIdentity.from_dict(values) == RECORD


class TestManifest:
    def test_survives_json(self) -> None:
        one = manifest(environment={"versions": {"torch": "2.13"}})
        assert Manifest.from_dict(json.loads(json.dumps(one.to_dict()))) == one

    def test_formats_of_later_versions_are_refused(self) -> None:
        with pytest.raises(ValueError, match="format: this version reads 1, got 2; update fair-calibration"):
            Manifest.from_dict({**manifest().to_dict(), "format": 2})

    def test_shard_size(self) -> None:
        with pytest.raises(ValueError, match="shard_size: expected an integer of at least 1, got 0"):
            manifest(shard_size=0)

    def test_same(self) -> None:
        check_same(manifest(), manifest(source={}, environment={"device": "cuda"}), what="x")

    def test_all_differences_are_named(self) -> None:
        config = {**FairConfig().to_dict(), "strength": 0.25}
        other = replace(RECORD, model="other", weights="4567", fair_config=config, max_seq_length=None)
        with pytest.raises(DifferentEncoderError) as error:
            check_same(manifest(), manifest(encoder=other, shard_size=8), what="the build in x")
        assert str(error.value) == (
            "the build in x was made by 'some/model' with other settings than 'other' has now: "
            "weights: '0123' there, '4567' now; max_seq_length: 512 there, None now; "
            "fair_config.strength: 0.5 there, 0.25 now; fair_config.layers: [3, 5] there, 0.5 now; "
            "shard_size: 4 there, 8 now. Use the same settings, or another folder"
        )

    def test_environments(self, tiny_model: TinyModel) -> None:
        environment = describe_environment(tiny_model(), tokens_per_batch=5)
        assert environment["device"] == "cpu"
        assert describe_environment(tiny_model(), ["cuda:1", "cpu", "cuda:0"])["device"] == "pool of 1 cpu and 2 cuda"
        assert environment["versions"]["torch"] == torch.__version__
        assert environment["threads"] == torch.get_num_threads()
        cls = calibrate(tiny_model(pooling="cls"), FairConfig(basket_size=8), pooled_row_only=True)
        assert [describe_environment(model)["pooled_row_only"] for model in (tiny_model(), cls)] == [False, True]
        later = {**environment, "tokens_per_batch": 7}
        assert environment_differences(manifest(environment=environment), manifest(environment=later)) == [
            "tokens_per_batch: 5 there, 7 now"
        ]


def test_normalize_is_for_the_cosine(tiny_model: TinyModel) -> None:
    model = tiny_model()
    assert [resolve_normalize(model, value) for value in (None, False, True)] == [True, False, True]
    model.similarity_fn_name = "dot"
    assert [resolve_normalize(model, value) for value in (None, False, True)] == [False, False, True]
