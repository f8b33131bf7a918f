from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mteb
import numpy as np
import pytest
import torch
from datasets import Dataset
from mteb.models import CompressionWrapper, EncoderProtocol, SearchProtocol
from mteb.models.model_implementations import MODEL_REGISTRY
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper
from mteb.types import OutputDType, PromptType
from sentence_transformers import SentenceTransformer
from torch.utils.data import DataLoader

import mteb_fair
from fair_calibration import PRESETS, EvenChunks, FairConfig, FairSentenceTransformer, calibrate
from fair_calibration.model_source import ModelNotFoundError
from fair_indexing.encode import encode_texts
from mteb_fair import FairEncoder, PositionDemoRetrieval
from tests.core.families import load_refused
from tests.core.tiny_models import documents

SHARP = {"basket_size": 16, "strength": 1.0}
TEXTS = documents([3, 40, 100, 64, 17])
TASK = PositionDemoRetrieval.metadata


def encode(encoder: Any, kind: str | None, texts: list[str] = TEXTS, task: Any = TASK, **kwargs: Any) -> np.ndarray:
    inputs = DataLoader(Dataset.from_dict({"text": texts}), batch_size=2)
    prompt_type = None if kind is None else PromptType(kind)
    settings = {"task_metadata": task, "hf_split": "test", "hf_subset": "default", "prompt_type": prompt_type}
    return np.asarray(encoder.encode(inputs, show_progress_bar=False, **settings, **kwargs))


@pytest.fixture
def base(tiny_path: Path) -> SentenceTransformer:
    model = SentenceTransformer(str(tiny_path), device="cpu")
    model.prompts = {"query": "ba du ", "document": "ko ", "STS": "mi "}
    return model


class TestVectors:
    def test_protocol(self, tiny_path: Path) -> None:
        encoder = FairEncoder(tiny_path)
        assert isinstance(encoder, EncoderProtocol)
        assert not isinstance(encoder, SearchProtocol)

    def test_queries_are_those_of_the_base_to_the_bit(self, base: SentenceTransformer) -> None:
        vectors = encode(FairEncoder(base, **SHARP), "query")
        assert np.array_equal(vectors, encode_texts(base, TEXTS, task="query", normalize=False))
        np.testing.assert_allclose(vectors, encode(SentenceTransformerEncoderWrapper(base), "query"), atol=1e-6)

    @pytest.mark.parametrize("kind", ["query", "document", None])
    def test_strength_0_is_the_base_to_the_bit(self, base: SentenceTransformer, kind: str | None) -> None:
        plain = encode(SentenceTransformerEncoderWrapper(base), kind)
        vectors = encode(FairEncoder(base, strength=0), kind)
        assert np.array_equal(vectors, encode_texts(base, TEXTS, task=kind, normalize=False))  # type: ignore[arg-type]
        np.testing.assert_allclose(vectors, plain, atol=1e-6)

    def test_documents_are_calibrated(self, base: SentenceTransformer) -> None:
        config = FairConfig(**SHARP)
        vectors = encode(FairEncoder(base, config=config), "document")
        np.testing.assert_allclose(vectors, calibrate(base, config).encode_document(TEXTS), atol=1e-6)
        plain = encode(SentenceTransformerEncoderWrapper(base), "document")
        changed = ~np.isclose(vectors, plain, atol=1e-6).all(axis=1)
        assert changed.tolist() == [False, True, True, True, True]  # three words are less than a basket

    def test_texts_that_are_neither(self, base: SentenceTransformer, caplog: pytest.LogCaptureFixture) -> None:
        sts = TASK.model_copy(update={"name": "Some STS", "type": "STS"})
        plain = encode(SentenceTransformerEncoderWrapper(base), None, task=sts)
        with caplog.at_level(logging.WARNING, "mteb_fair"):
            encoder = FairEncoder(base, **SHARP)
            calibrated = encode(encoder, None, task=sts)
            encode(encoder, None, task=sts)
            untyped = encode(FairEncoder(base, **SHARP, calibrate_untyped=False), None, task=sts)
            np.testing.assert_allclose(untyped, plain, atol=1e-6)
        assert not np.allclose(calibrated, plain, atol=1e-6)
        said = [record.getMessage() for record in caplog.records if record.name == "mteb_fair"]
        assert said == [
            "Some STS (STS) has no queries and documents: all its texts are encoded as documents, with calibration "
            "(calibrate_untyped=True).",
            "Some STS (STS) has no queries and documents: all its texts are encoded plainly, without calibration "
            "(calibrate_untyped=False).",
        ]

    def test_the_given_model_stays_as_it_is(self, base: SentenceTransformer) -> None:
        encoder = FairEncoder(base, **SHARP, max_seq_length=20, model_prompts={"query": "la "}, embed_dim=8)
        assert encode(encoder, "document").shape == (len(TEXTS), 8)
        assert (base.max_seq_length, base.truncate_dim, base.prompts["query"]) == (128, None, "ba du ")

    def test_bad_vectors_are_named(self, base: SentenceTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
        encoder = FairEncoder(base)
        forward = FairSentenceTransformer.forward

        def broken(self: FairSentenceTransformer, *args: Any, **kwargs: Any) -> dict[str, Any]:
            output = forward(self, *args, **kwargs)
            output["sentence_embedding"][0, 0] = np.nan  # of the longest text, the first of its batch
            return output

        monkeypatch.setattr(FairSentenceTransformer, "forward", broken)
        with pytest.raises(ValueError, match=r"Retrieval, default: .* NaN or infinite values \(document '2'.*float32"):
            encode(encoder, "document")
        with pytest.raises(ValueError, match=r"NaN or infinite values \(query '2'"):
            encode(encoder, "query")

    @pytest.mark.parametrize("precision", ["int8", "uint8", "binary"])
    def test_precisions_that_cannot_be_scored(self, base: SentenceTransformer, precision: str, tmp_path: Path) -> None:
        encoder = FairEncoder(base)
        with pytest.raises(ValueError, match=rf"precision='{precision}' .* evaluate mteb.models.CompressionWrapper"):
            mteb.evaluate(
                encoder,
                PositionDemoRetrieval(),
                cache=mteb.ResultCache(tmp_path),
                encode_kwargs={"precision": precision},  # type: ignore[typeddict-unknown-key]
                show_progress_bar=False,
            )
        assert encoder.counts.documents == 0

    def test_compressed_results_stay_apart(self, base: SentenceTransformer, tmp_path: Path) -> None:
        """The remedy that the message names: scored, and kept apart from results that are not compressed."""
        cache, task = mteb.ResultCache(tmp_path), PositionDemoRetrieval()
        scores, names = [], []
        for output in (None, OutputDType.INT8, OutputDType.BINARY):
            encoder = FairEncoder(base)
            model = encoder if output is None else CompressionWrapper(encoder, output)
            result = mteb.evaluate(model, task, cache=cache, show_progress_bar=False)
            scores.append(result.task_results[0].get_score())
            names.append(encoder.mteb_model_meta.name)
        assert names[1:] == [f"{names[0]},output_dtypes=int8", f"{names[0]},output_dtypes=binary"]
        assert len(set(scores)) == 3

    def test_encode_options(self, base: SentenceTransformer) -> None:
        encoder = FairEncoder(base)
        vectors = encode(encoder, "document")
        np.testing.assert_allclose(encode(encoder, "document", batch_size=1), vectors, atol=3e-6)
        np.testing.assert_allclose(encode(encoder, "document", tokens_per_batch=64), vectors, atol=3e-6)
        assert np.array_equal(encode(encoder, "document", precision="float32"), vectors)
        assert encode(encoder, "document", texts=[]).shape == (0, 32)
        with pytest.raises(ValueError, match="batch_size: expected an integer of at least 1, got 0"):
            encode(encoder, "document", batch_size=0)
        with pytest.raises(TypeError, match=r"encode_kwargs: \['batchsize'\] are not supported, only \['batch_size'"):
            encode(encoder, "document", batchsize=3)

    def test_a_default_prompt_for_queries(self, base: SentenceTransformer) -> None:
        base.default_prompt_name = "query"
        sts = TASK.model_copy(update={"name": "Some other STS", "type": "STS"})
        base.prompts = {"query": "ba du ", "document": "ko "}
        expected = calibrate(base, FairConfig(**SHARP)).encode(TEXTS)
        np.testing.assert_allclose(encode(FairEncoder(base, **SHARP), None, task=sts), expected, atol=2e-6)
        np.testing.assert_allclose(expected, base.encode(TEXTS), atol=2e-6)

    @pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "manhattan"])
    def test_similarity_is_the_models(self, base: SentenceTransformer, similarity: str) -> None:
        base.similarity_fn_name = similarity  # type: ignore[assignment]
        encoder = FairEncoder(base)
        vectors = torch.tensor(encode(encoder, "query"))
        assert torch.equal(torch.as_tensor(encoder.similarity(vectors, vectors)), base.similarity(vectors, vectors))
        pairs = base.similarity_pairwise(vectors, vectors.flip(0))
        assert torch.equal(torch.as_tensor(encoder.similarity_pairwise(vectors, vectors.flip(0))), pairs)


class TestIdentity:
    def test_repr(self, tiny_path: Path) -> None:
        encoder = FairEncoder(tiny_path, strength=0.3, device="cpu")
        name = f"mteb_fair/local__{tiny_path.name}@strength=0.3"
        assert repr(encoder) == f"FairEncoder('{name}', max_seq_length=128, device='cpu')"

    @pytest.mark.parametrize("folders", [("run0/final", "run1/final"), ("a/checkpoint-500", "b/checkpoint-500")])
    def test_folders_of_one_last_name(self, tiny_path: Path, tmp_path: Path, folders: tuple[str, str]) -> None:
        names = []
        for folder in folders:
            shutil.copytree(tiny_path, tmp_path / folder)
            names.append(FairEncoder(tmp_path / folder).mteb_model_meta.name)
        assert names == [f"mteb_fair/local__{folder.replace('/', '-')}@strength=0.5" for folder in folders]

    @pytest.mark.parametrize("base_name", [None, "me/twice"])
    def test_two_models_of_one_name_are_an_error(self, base: SentenceTransformer, base_name: str | None) -> None:
        FairEncoder(base, base_name=base_name)
        FairEncoder(base, base_name=base_name, strength=0)
        with torch.no_grad():
            next(base.parameters()).mul_(2)
        with pytest.raises(ValueError, match=r"base_name: '.*' was the name of another model before .* give one"):
            FairEncoder(base, base_name=base_name, strength=0.25)
        FairEncoder(base, base_name="me/second")

    def test_quantized_weights(self, base: SentenceTransformer) -> None:
        int8 = torch.ao.quantization.quantize_dynamic(base, {torch.nn.Linear})
        metas = [FairEncoder(m, base_name=n).mteb_model_meta for m, n in ((base, "a/f"), (int8, "a/i"), (int8, "a/i"))]
        assert metas[0].revision != metas[1].revision
        assert metas[1].revision == metas[2].revision

    def test_metadata(self, tiny_path: Path) -> None:
        meta = FairEncoder(tiny_path, strength=0.3, calibrate_untyped=False).mteb_model_meta
        assert meta.name == f"mteb_fair/local__{tiny_path.name}@strength=0.3,calibrate_untyped=False"
        assert meta.adapted_from == f"local/{tiny_path.name}"
        assert meta.experiment_kwargs is not None
        assert meta.experiment_kwargs["strength"] == 0.3
        assert meta.experiment_kwargs["calibrate_untyped"] is False
        assert (meta.max_tokens, meta.embed_dim, meta.similarity_fn_name) == (128, 32, "cosine")
        json.dumps(meta.to_dict(), default=str)

    def test_paths_and_instances_of_the_same_weights_are_the_same(self, tiny_path: Path) -> None:
        metas = [
            FairEncoder(model).mteb_model_meta
            for model in (tiny_path, str(tiny_path), SentenceTransformer(str(tiny_path), device="cpu"))
        ]
        assert len({(meta.name, meta.revision, meta.experiment_name) for meta in metas}) == 1

    def test_default_settings_given_make_no_variant(self, tiny_path: Path) -> None:
        plain = FairEncoder(tiny_path)
        given = FairEncoder(tiny_path, strength=0.5, basket_size=128, layers=0.5)
        assert given.variant == plain.variant
        assert given.mteb_model_meta.revision == plain.mteb_model_meta.revision

    def test_other_weights_are_another_revision(self, tiny_path: Path, tmp_path: Path) -> None:
        (tmp_path / "x").mkdir()
        folder = tmp_path / "x" / tiny_path.name
        shutil.copytree(tiny_path, folder)
        changed = SentenceTransformer(str(folder), device="cpu")
        with torch.no_grad():
            next(changed.parameters())[0, 0] += 1
        changed.save_pretrained(str(folder))
        first = FairEncoder(tiny_path).mteb_model_meta
        with pytest.raises(ValueError, match=f"base_name: 'local/{tiny_path.name}' was the name of another model"):
            FairEncoder(folder)
        assert FairEncoder(folder, base_name="me/second").mteb_model_meta.revision != first.revision

    def test_a_saved_model_keeps_its_settings(self, tiny_path: Path, tmp_path: Path) -> None:
        saved = FairSentenceTransformer(str(tiny_path), config=FairConfig(**SHARP), device="cpu")
        saved.save_pretrained(str(tmp_path / "saved"))
        assert FairEncoder(tmp_path / "saved").fair_config == FairConfig(**SHARP)
        assert FairEncoder(tmp_path / "saved", strength=0.2).fair_config == FairConfig(basket_size=16, strength=0.2)
        assert FairEncoder(saved).fair_config == FairConfig(**SHARP)

    def test_mteb_cannot_overwrite_it(self, tiny_path: Path) -> None:
        encoder = FairEncoder(tiny_path, base_name="org/model")
        name = encoder.mteb_model_meta.name
        encoder.mteb_model_meta = encoder.mteb_model_meta.model_copy(
            update={"name": "a/b", "experiment_kwargs": None, "license": "mit"}
        )
        assert (encoder.mteb_model_meta.name, encoder.mteb_model_meta.license) == (name, "mit")
        assert encoder.mteb_model_meta.experiment_kwargs is not None


def test_two_strengths_are_two_results_through_both_doors(tiny_path: Path, tmp_path: Path) -> None:
    cache = mteb.ResultCache(tmp_path / "cache")
    expected, through_evaluate, through_run = [], [], []
    for strength in (0.0, 1.0):
        encoder = FairEncoder(tiny_path, basket_size=16, strength=strength)
        for results, result in (
            (expected, mteb.evaluate(encoder, PositionDemoRetrieval(), cache=None, show_progress_bar=False)),
            (through_evaluate, mteb.evaluate(encoder, PositionDemoRetrieval(), cache=cache, show_progress_bar=False)),
        ):
            results.append(result.task_results[0].scores["test"][0]["psi"])
        (run,) = mteb.MTEB([PositionDemoRetrieval()]).run(encoder, output_folder=str(tmp_path / "run"), verbosity=0)
        through_run.append(run.scores["test"][0]["psi"])
    assert expected[0] != expected[1]
    assert through_evaluate == expected
    assert through_run == expected
    # Defaults given or left out, and a second run: nothing is computed again.
    again = FairEncoder(tiny_path, basket_size=16, strength=1, layers=0.5)
    mteb.evaluate(again, PositionDemoRetrieval(), cache=cache, overwrite_strategy="only-cache")
    assert again.counts.documents == 0
    loaded = cache.load_results(load_experiments="match_name", require_model_meta=False)
    assert len({result.model_name for result in loaded.model_results}) == 2


class TestSettingsBehindTheIdentity:
    """What would put results under a name that they do not belong to."""

    @pytest.mark.parametrize(
        ("name", "value"),
        [("max_seq_length", 20), ("truncate_dim", 8), ("prompts", {"query": "x"}), ("similarity_fn_name", "dot")],
    )
    def test_changed_models(self, base: SentenceTransformer, name: str, value: Any) -> None:
        encoder = FairEncoder(base)
        setattr(encoder.model, name, value)
        with pytest.raises(ValueError, match=rf"encoder.model: \['{name}'\] were changed after 'mteb_fair/local__"):
            encode(encoder, "document")

    @pytest.mark.parametrize(
        "change",
        [
            lambda model: next(model.parameters()).detach().add_(1),
            lambda model: setattr(model[1], "pooling_mode", "cls"),
            lambda model: setattr(model.tokenizer, "truncation_side", "left"),
            lambda model: model.half(),
        ],
    )
    def test_changed_parts(self, base: SentenceTransformer, change: Callable[[Any], object]) -> None:
        encoder = FairEncoder(base)
        change(encoder.model)
        with pytest.raises(ValueError, match=r"encoder.model: .* were changed after"):
            encoder.mteb_model_meta  # noqa: B018, MTEB looks for results by it
        with pytest.raises(ValueError, match=r"encoder.model: .* were changed after"):
            encode(encoder, "document")

    def test_encoding_changes_nothing(self, base: SentenceTransformer) -> None:
        encoder = FairEncoder(base)
        for kind in ("document", "query", None):
            encode(encoder, kind)
        assert encoder.mteb_model_meta.name is not None

    def test_weights_trained_in_the_given_model(self, base: SentenceTransformer) -> None:
        encoder = FairEncoder(base)
        with torch.no_grad():
            next(base.parameters()).mul_(2)  # shared
        with pytest.raises(ValueError, match=r"\['weights'\] were changed"):
            encode(encoder, "document")

    def test_encode_arguments(self, base: SentenceTransformer) -> None:
        for argument in ({"strength": 0.3}, {"truncate_dim": 4}, {"normalize_embeddings": True}, {"prompt": "x"}):
            with pytest.raises(TypeError, match=rf"encode_kwargs: {list(argument)} are not".replace("[", r"\[")):
                encode(FairEncoder(base), "document", **argument)


def test_prompts_of_mtebs_registry_come_with_the_name(tiny_path: Path) -> None:
    encoder = FairEncoder(tiny_path, base_name="intfloat/multilingual-e5-small")
    assert encoder.model.prompts == {"query": "query: ", "document": "passage: "}
    assert encoder.mteb_model_meta.name == "mteb_fair/intfloat__multilingual-e5-small@strength=0.5"
    assert encoder.mteb_model_meta.license == "mit"


def test_prompts_given_replace_those_of_mtebs_registry(tiny_path: Path) -> None:
    prompts = {"query": "query: ", "document": "passage: "}
    name = "intfloat/multilingual-e5-small"
    given = FairEncoder(tiny_path, base_name=name, model_prompts=prompts)
    assert given.model.prompts == prompts
    own = SentenceTransformer(str(tiny_path), device="cpu").prompts
    other = FairEncoder(tiny_path, base_name=name, model_prompts=own)  # the model's own are not MTEB's
    assert other.variant != given.variant
    assert other.model.prompts == own


def test_what_mteb_loads_a_name_with(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []

    def load(path: str, **kwargs: Any) -> FairSentenceTransformer:
        calls.append((path, kwargs))
        return FairSentenceTransformer(str(tiny_path), device="cpu")

    monkeypatch.setattr("mteb_fair.loading.FairSentenceTransformer", load)
    name = "Alibaba-NLP/gte-multilingual-base"
    revision = mteb.get_model_meta(name).revision
    encoder = FairEncoder(name)
    plain = {"config": None, "device": None}
    assert calls.pop() == (name, {**plain, "revision": revision, "trust_remote_code": True})
    meta = encoder.mteb_model_meta
    assert meta.revision == revision
    FairEncoder(name, "a" * 40, trust_remote_code=False)
    assert calls.pop() == (name, {**plain, "revision": "a" * 40, "trust_remote_code": False})
    mteb.get_model(mteb_fair.register_model(name), device="cpu")
    settings = {"config": FairConfig(), "trust_remote_code": True}
    assert calls.pop() == (name, {"revision": revision, "device": "cpu", **settings})
    options = {"dtype": "float32"}
    listed = mteb.get_model_meta(name).model_copy(update={"loader_kwargs": {"model_kwargs": options, "fp_options": 1}})
    monkeypatch.setitem(MODEL_REGISTRY, name, listed)
    assert FairEncoder(name, model_kwargs=dict(options)).mteb_model_meta.revision == revision
    assert calls.pop()[1] == {**plain, "revision": revision, "model_kwargs": options}
    assert FairEncoder(name, model_kwargs={}).mteb_model_meta.revision.startswith(f"{revision}-")


def test_a_branch_that_moves_is_another_revision(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: str, **kwargs: Any) -> FairSentenceTransformer:
        revisions.append(kwargs["revision"])
        return FairSentenceTransformer(str(tiny_path), device="cpu")

    revisions: list[str] = []
    monkeypatch.setattr("mteb_fair.loading.FairSentenceTransformer", load)
    metas = []
    for commit in ("1" * 40, "2" * 40):
        monkeypatch.setattr("huggingface_hub.model_info", lambda *_, sha=commit, **__: SimpleNamespace(sha=sha))
        metas.append(FairEncoder("acme/moving", "main").mteb_model_meta)
    assert revisions == [meta.revision for meta in metas] == ["1" * 40, "2" * 40]


def test_a_hub_model_by_another_name(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> FairSentenceTransformer:
        return FairSentenceTransformer(str(tiny_path), device="cpu")

    monkeypatch.setattr("mteb_fair.loading.FairSentenceTransformer", load)
    encoder = FairEncoder("intfloat/multilingual-e5-small", base_name="me/e5")
    assert encoder.model.prompts == {"query": "query: ", "document": "passage: "}
    assert encoder.mteb_model_meta.name == "mteb_fair/me__e5@strength=0.5"
    assert encoder.mteb_model_meta.adapted_from == "intfloat/multilingual-e5-small"


def test_a_registered_folder_that_is_overwritten(tiny_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_path, folder)
    name = mteb_fair.register_model(folder)
    mteb.get_model(name, strength=0.25)  # settings are no other model
    model = SentenceTransformer(str(folder), device="cpu")
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    model.save_pretrained(str(folder))
    with pytest.raises(ValueError, match=r"base_name: 'local/.*checkpoint' was the name of another model before"):
        mteb.get_model(name)
    del MODEL_REGISTRY[name]


def test_all_kinds_of_tasks(tiny_path: Path) -> None:
    results = mteb.mock_run(FairEncoder(tiny_path, basket_size=4))
    assert results.all_passed, results.to_markdown()
    assert sum(result is not None for _, result in results.items()) > 10


class TestErrors:
    def test_unknown_names(self) -> None:
        with pytest.raises(ValueError, match=r"'BAAI/bge-m4' is not a folder, .* MTEB knows are .*'BAAI/bge-m3'"):
            FairEncoder("BAAI/bge-m4")

    def test_not_a_model(self) -> None:
        with pytest.raises(TypeError, match="model: expected a name, a path or a SentenceTransformer, got int"):
            FairEncoder(3)  # type: ignore[arg-type]

    def test_config_and_settings(self, tiny_path: Path) -> None:
        encoder = FairEncoder(tiny_path, config="full", strength=0.75)
        assert encoder.fair_config == FairConfig(strength=0.75, isolated_share="equal")
        with pytest.raises(
            TypeError, match="chunk_size: a setting of EvenChunks, but the settings here are a FairConf"
        ):
            FairEncoder(tiny_path, chunk_size=16)
        with pytest.raises(ValueError, match="config: expected the name of a preset"):
            FairEncoder(tiny_path, config="half")

    @pytest.mark.parametrize(
        ("name", "nearest"),
        [("strenght", "strength"), ("max_seq_len", "max_seq_length"), ("model_kwarg", "model_kwargs")],
    )
    def test_misspelt_arguments(self, name: str, nearest: str) -> None:
        with pytest.raises(TypeError, match=f"{name}: not an argument of FairEncoder.*; did you mean '{nearest}'?"):
            FairEncoder("BAAI/bge-m3", **{name: 1})

    @pytest.mark.parametrize("name", ["./nope", "/no/where", "../nope/final", "a/b/c", "~/models/x"])
    def test_paths_that_do_not_exist(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"there is no folder '{name}', and it cannot be the name of a model"):
            FairEncoder(name)

    def test_a_hub_model_that_cannot_be_reached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is not loaded, since sentence-transformers would try to download every file for 23 s."""
        monkeypatch.setattr(SentenceTransformer, "__init__", None)
        with pytest.raises(ModelNotFoundError, match="'BAAI/bge-m3' is not a folder, not in the local cache"):
            FairEncoder("BAAI/bge-m3")

    def test_more_tokens_than_the_model_has_positions(self, tiny_path: Path) -> None:
        with pytest.raises(ValueError, match=r"max_seq_length: the model has positions for 130 tokens, got 1024"):
            FairEncoder(tiny_path, max_seq_length=1024)

    def test_bad_settings(self, tiny_path: Path, base: SentenceTransformer) -> None:
        with pytest.raises(ValueError, match=r"strength: expected a number in \[0, 1\], got 2"):
            FairEncoder(tiny_path, strength=2)
        with pytest.raises(TypeError, match="passage_size: not an argument of FairEncoder; give FairPassageSearch"):
            FairEncoder(tiny_path, passage_size=64)
        with pytest.raises(TypeError, match="calibrate_untyped: expected True or False, got 'no'"):
            FairEncoder(tiny_path, calibrate_untyped="no")  # type: ignore[arg-type]
        for name in ("model", "a/b/c", "a/b@strength=1", "../x"):
            with pytest.raises(ValueError, match=rf"base_name: expected 'organization/name' .*, got '{name}'"):
                FairEncoder(tiny_path, base_name=name)
        for prompts in ("q", ["q"], {"query": 1}, {"query": None}):
            with pytest.raises(TypeError, match="model_prompts: expected a dict from names to texts"):
                FairEncoder(tiny_path, model_prompts=prompts)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="revision: folders have none, got 'abc'"):
            FairEncoder(tiny_path, "abc")
        with pytest.raises(ValueError, match="embed_dim: expected at most the model's 32 dimensions, got 64"):
            FairEncoder(tiny_path, embed_dim=64)
        with pytest.raises(ValueError, match=r"\['revision'\] are for loading a name or a folder"):
            FairEncoder(base, "abc")


def test_even_chunks(base: SentenceTransformer) -> None:
    with pytest.raises(ValueError, match=r"chunk_size: .*128"):
        FairEncoder(base, config=PRESETS["even_chunks"])
    assert FairEncoder(base, config="even_chunks", max_seq_length=130).model.max_seq_length == 130
    config = EvenChunks(chunk_size=16)
    encoder = FairEncoder(base, config="even_chunks", chunk_size=16)
    assert encoder.fair_config == config
    assert str(encoder.mteb_model_meta.name).endswith("@even_chunks,strength=0.8,chunk_size=16")
    expected = calibrate(base, config).encode_document(TEXTS)
    np.testing.assert_allclose(encode(encoder, "document"), expected, atol=2e-6)
    np.testing.assert_allclose(encode(encoder, "query"), base.encode_query(TEXTS), atol=2e-6)


@pytest.mark.parametrize("source", ["loaded", "folder"])
def test_a_model_that_attention_calibration_refuses_is_encoded_in_even_chunks(tmp_path: Path, source: str) -> None:
    plain, error = load_refused("DiffLlama", "mean")
    plain.save_pretrained(str(tmp_path))
    model: Any = plain if source == "loaded" else tmp_path
    with pytest.raises(ValueError, match=error):
        FairEncoder(model, device="cpu")
    encoder = FairEncoder(model, config="even_chunks", chunk_size=24, max_seq_length=40, device="cpu")
    expected = calibrate(plain, EvenChunks(chunk_size=24), max_seq_length=40).encode_document(TEXTS)
    np.testing.assert_allclose(encode(encoder, "document"), expected, atol=2e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": 99}, "device: expected devices of this machine, such as 'cpu' or 'cuda:0', got 'cuda:99'"),
        ({"device": "gpu"}, "device: expected devices of this machine"),
        ({"strength": 2}, r"strength: expected a number in \[0, 1\], got 2"),
        ({"chunk_size": 0}, "chunk_size: expected an integer of at least"),
        ({"embed_dim": 0}, "embed_dim: expected an integer of at least 1, got 0"),
        ({"base_name": "mine"}, "base_name: expected 'organization/name'"),
    ],
)
def test_arguments_are_checked_before_the_model_is_looked_for(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FairEncoder("no/where", **arguments)  # type: ignore[arg-type]
