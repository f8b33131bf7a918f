"""Models with a Router, which sends queries and documents different ways: the documents' transformer is calibrated."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, StaticEmbedding
from torch import nn

from fair_calibration import DocumentCounts, FairConfig, FairSentenceTransformer, calibrate, uncalibrate
from fair_calibration.transformer import FairTransformer
from tests.conftest import TinyModel
from tests.core.cases import assert_close
from tests.core.tiny_models import document, documents, make_tokenizer, reference_embeddings

CONFIG = FairConfig(basket_size=8, strength=0.8)
TEXTS = documents([50, 7, 30, 90, 3])
PROMPTS = {"query": "bal ", "document": "dan gos "}
Load = Callable[..., Transformer]


@pytest.fixture
def load(tiny_folder: Any) -> Load:
    """Returns a function that loads a fresh Transformer of a family."""
    return lambda family="bert": Transformer(str(tiny_folder(family, "mean") / "inner"))


def pool(mode: Any = "mean") -> Pooling:
    return Pooling(32, pooling_mode=mode)


def static() -> StaticEmbedding:
    torch.manual_seed(3)
    return StaticEmbedding(make_tokenizer(bos=True, padding_side="right").backend_tokenizer, embedding_dim=32)


def model_of(*modules: nn.Module, **kwargs: Any) -> SentenceTransformer:
    return SentenceTransformer(modules=list(modules), device="cpu", **kwargs)  # type: ignore[arg-type]


def asymmetric(query: Sequence[Any], document: Sequence[Any], *later: nn.Module, **kwargs: Any) -> SentenceTransformer:
    return model_of(Router.for_query_document(list(query), list(document)), *later, prompts=PROMPTS, **kwargs)


def two_transformers(load: Load) -> SentenceTransformer:
    return asymmetric([load("xlm_roberta"), pool("cls")], [load(), pool()])


def shared_transformer(load: Load) -> SentenceTransformer:
    shared = load()
    return asymmetric([shared, pool("cls")], [shared, pool()])


def shared_before_pooling(load: Load) -> SentenceTransformer:
    shared = load()
    return asymmetric([shared], [shared], pool(), Normalize())


def shared_network(load: Load) -> SentenceTransformer:
    one, other = load(), load()
    one.model = other.model
    return asymmetric([one, pool()], [other, pool()])


def static_queries(load: Load) -> SentenceTransformer:
    return asymmetric([static()], [load(), pool()], Normalize())


def by_modality(load: Load) -> SentenceTransformer:
    return model_of(Router({"text": [load(), pool()], "image": [static()]}), prompts=PROMPTS)


def behind_the_pooling(load: Load) -> SentenceTransformer:
    torch.manual_seed(4)
    query, document = Dense(32, 10), Dense(32, 10)
    return model_of(load(), pool(), Router.for_query_document([query], [document]), prompts=PROMPTS)


STRUCTURES = [
    two_transformers,
    shared_transformer,
    shared_before_pooling,
    shared_network,
    static_queries,
    by_modality,
    behind_the_pooling,
]


def documents_only(model: SentenceTransformer) -> SentenceTransformer:
    """Returns the modules that documents pass as a model of its own, with modules of its own."""
    modules: list[Any] = []
    for module in uncalibrate(calibrate(model, CONFIG)):
        modules += (
            module.sub_modules[module._resolve_route("document", "text")] if isinstance(module, Router) else [module]
        )
    return model_of(*modules, prompts=PROMPTS)


def differ(one: Any, other: Any) -> bool:
    return bool(np.abs(np.asarray(one) - np.asarray(other)).max() > 1e-2)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_documents_are_calibrated_and_queries_are_not(structure: Callable[[Load], Any], load: Load) -> None:
    plain = structure(load)
    queries, vectors, untasked = plain.encode_query(TEXTS), plain.encode_document(TEXTS), plain.encode(TEXTS)
    alone = calibrate(documents_only(plain), CONFIG)
    fair = calibrate(plain, CONFIG)

    calibrated = fair.encode_document(TEXTS)
    assert np.array_equal(calibrated, alone.encode_document(TEXTS))
    assert differ(calibrated, vectors)
    assert fair.counts == DocumentCounts(calibrated=4, too_short=1)
    calibrated = fair.encode(TEXTS)
    assert np.array_equal(calibrated, alone.encode(TEXTS))
    assert differ(calibrated, untasked)
    assert fair.counts == alone.counts == DocumentCounts(calibrated=8, too_short=2)
    assert str(fair.summary()) == str(alone.summary())

    assert np.array_equal(fair.encode_query(TEXTS), queries)
    assert np.array_equal(fair.encode(TEXTS, task="query", prompt_name="query"), queries)
    assert fair.counts.documents == 10
    assert np.array_equal(fair.encode_document(TEXTS, strength=0), vectors)
    assert np.array_equal(fair.encode_document(TEXTS, strength=0.3), alone.encode_document(TEXTS, strength=0.3))

    for model in (plain, uncalibrate(fair)):
        assert type(model) is SentenceTransformer
        assert not any(isinstance(module, FairTransformer) for module in model.modules())
        assert np.array_equal(model.encode_query(TEXTS), queries)
        assert np.array_equal(model.encode_document(TEXTS), vectors)
    for one, other in zip(plain.parameters(), fair.parameters(), strict=True):
        assert one is other
    assert sum(isinstance(module, FairTransformer) for module in fair.modules()) == 1


@pytest.mark.parametrize("structure", [shared_before_pooling, static_queries, by_modality, behind_the_pooling])
def test_saving_and_loading(structure: Callable[[Load], Any], load: Load, tmp_path: Path) -> None:
    plain = structure(load)
    plain.save_pretrained(str(tmp_path / "plain"))
    fair = calibrate(plain, CONFIG)
    fair.save_pretrained(str(tmp_path / "fair"))
    loaded = FairSentenceTransformer(str(tmp_path / "fair"), device="cpu")
    assert loaded.fair_config == CONFIG
    calibrated_later = FairSentenceTransformer(str(tmp_path / "plain"), config=CONFIG, device="cpu")
    trusting = SentenceTransformer(str(tmp_path / "fair"), device="cpu", trust_remote_code=True)
    for model in (loaded, calibrated_later, trusting):
        assert np.array_equal(model.encode_document(TEXTS), fair.encode_document(TEXTS))
        assert np.array_equal(model.encode_query(TEXTS), fair.encode_query(TEXTS))
        assert sum(isinstance(module, FairTransformer) for module in model.modules()) == 1
    other = FairConfig(basket_size=16)
    changed = FairSentenceTransformer(str(tmp_path / "fair"), config=other, device="cpu")
    assert changed.fair_config == other
    assert np.array_equal(changed.encode_document(TEXTS), calibrate(plain, other).encode_document(TEXTS))
    uncalibrate(loaded).save_pretrained(str(tmp_path / "again"))
    again = SentenceTransformer(str(tmp_path / "again"), device="cpu")
    assert np.array_equal(again.encode_document(TEXTS), plain.encode_document(TEXTS))


def test_equals_the_reference(load: Load) -> None:
    fair = calibrate(two_transformers(load), CONFIG)
    texts = [PROMPTS["document"] + text for text in TEXTS]
    expected = reference_embeddings(documents_only(fair), texts, CONFIG.resolve("mean"))
    assert_close(fair.encode_document(TEXTS, convert_to_tensor=True), expected, 2e-5)


def test_worker_processes(load: Load) -> None:
    fair = calibrate(static_queries(load), CONFIG)
    texts = [*TEXTS, document(200)]
    expected, queries = fair.encode_document(texts), fair.encode_query(texts)
    counts = fair.counts
    assert counts == DocumentCounts(calibrated=5, too_short=1, truncated=1)
    pool = fair.start_multi_process_pool(["cpu"])
    try:
        assert np.allclose(fair.encode_document(texts, pool=pool, chunk_size=3), expected, atol=2e-5)
        assert np.allclose(fair.encode_query(texts, pool=pool, chunk_size=3), queries, atol=2e-5)
    finally:
        fair.stop_multi_process_pool(pool)
    assert fair.counts == counts.plus(counts)


# Which rows: by the pooling that documents pass


def test_the_pooling_of_the_route_for_documents(load: Load) -> None:
    shared = load()
    fair = calibrate(asymmetric([shared, pool("max")], [shared, pool("cls")]), CONFIG)
    assert fair.summary().config.pooling == "cls"
    fair[0].sub_modules["document"][1] = pool("mean")
    assert fair.summary().config.pooling == "mean"
    with pytest.raises(ValueError, match=r"pooling: 'auto' needs .* but its pooling is 'max'"):
        calibrate(asymmetric([shared, pool("cls")], [shared, pool("max")]), CONFIG)
    with pytest.raises(ValueError, match=r"pooling: 'auto' needs .* but it has 2 Pooling modules"):
        calibrate(asymmetric([shared, pool()], [shared, pool()], pool()), CONFIG)


def test_prompts_that_pooling_leaves_out(load: Load, tiny_model: TinyModel) -> None:
    left_out = Pooling(32, pooling_mode="mean", include_prompt=False)
    fair = calibrate(asymmetric([static()], [load(), left_out]), CONFIG)
    expected = tiny_model("bert", "mean", prompts=PROMPTS)
    expected[1].include_prompt = False
    assert np.array_equal(fair.encode_document(TEXTS), calibrate(expected, CONFIG).encode_document(TEXTS))


def test_max_seq_length_is_that_of_documents(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    fair = calibrate(static_queries(load), CONFIG)  # static embeddings take any length, and none can be set
    assert fair.max_seq_length == 128
    fair.max_seq_length = 20
    queries = fair.encode_query(TEXTS)
    fair.encode_document(TEXTS)
    assert fair.counts.truncated == 3
    assert "Documents are truncated at max_seq_length=20 tokens" in caplog.text
    assert np.array_equal(queries, static_queries(load).encode_query(TEXTS))


# Which texts are queries: where there are routes, they decide


def test_texts_without_a_task_are_what_the_default_route_is_for(load: Load) -> None:
    shared = load()
    for query in (shared, load()):
        plain = model_of(Router({"query": [query, pool()], "document": [shared, pool()]}))
        assert plain[0].default_route == "query"  # the first, where none is named
        fair = calibrate(plain, CONFIG)
        assert np.array_equal(fair.encode(TEXTS), plain.encode(TEXTS))
        assert fair.counts.documents == 0
        assert differ(fair.encode_document(TEXTS), plain.encode_document(TEXTS))


def test_a_prompt_named_for_queries_leaves_the_route_alone(load: Load) -> None:
    plain = two_transformers(load)
    fair = calibrate(plain, CONFIG)
    as_document = fair.encode(TEXTS, prompt="bal ")
    assert np.array_equal(fair.encode(TEXTS, prompt_name="query"), as_document)
    assert np.array_equal(fair.encode(TEXTS, prompt_name="query", strength=0), plain.encode(TEXTS, prompt_name="query"))
    # With one route for both, the name decides as in a model without routes.
    plain = by_modality(load)
    fair = calibrate(plain, CONFIG)
    assert np.array_equal(fair.encode(TEXTS, prompt_name="query"), plain.encode(TEXTS, prompt_name="query"))
    assert fair.counts.documents == 0
    # And where queries have no route at all, a task would have none either.
    plain = model_of(Router({"passage": [load(), pool()]}), prompts=PROMPTS)
    assert differ(calibrate(plain, CONFIG).encode(TEXTS, prompt_name="query"), plain.encode(TEXTS, prompt_name="query"))


def test_tasks_of_the_router(load: Load) -> None:
    query, passage = load(), load()
    mappings: Any = {("query", None): "question", ("document", "text"): "answer"}
    plain = model_of(Router({"question": [query, pool()], "answer": [passage, pool()]}, route_mappings=mappings))
    fair = calibrate(plain, CONFIG)
    assert type(fair[0].sub_modules["question"][0]) is Transformer
    calibrated = fair.encode_document(TEXTS)
    assert differ(calibrated, plain.encode_document(TEXTS))
    assert np.array_equal(fair.encode(TEXTS, task="answer"), calibrated)
    assert np.array_equal(fair.encode([{"answer": text} for text in TEXTS]), calibrated)
    for texts, task in ((TEXTS, "query"), (TEXTS, "question"), ([{"question": text} for text in TEXTS], None)):
        assert np.array_equal(fair.encode(texts, task=task), plain.encode(texts, task=task))
    with pytest.raises(ValueError, match="No route found for task type 'passage'"):
        fair.encode(TEXTS, task="passage")
    with pytest.raises(ValueError, match="task: expected 'query', 'document' or None, got 'Query'"):
        calibrate(by_modality(load), CONFIG).encode(TEXTS, task="Query")


def test_a_shared_transformer_takes_the_route_of_queries_for_queries(load: Load) -> None:
    shared = load()
    mappings: Any = {("query", None): "question", ("document", None): "answer"}
    plain = model_of(Router({"question": [shared, pool()], "answer": [shared, pool()]}, route_mappings=mappings))
    fair = calibrate(plain, CONFIG)
    assert np.array_equal(fair.encode(TEXTS, task="question"), plain.encode(TEXTS))
    assert differ(fair.encode(TEXTS, task="answer"), plain.encode(TEXTS))


def test_documents_without_a_route_of_their_name_take_the_default_one(load: Load) -> None:
    router = Router({"query": [load(), pool()], "passage": [load(), pool()]}, default_route="passage")
    fair = calibrate(model_of(router), CONFIG)
    assert isinstance(fair[0].sub_modules["passage"][0], FairTransformer)
    assert np.array_equal(fair.encode(TEXTS, task="passage"), fair.encode(TEXTS))
    assert fair.counts.calibrated == 8


def test_a_route_that_is_not_calibrated_takes_no_documents(load: Load) -> None:
    routes = {"query": [load(), pool()], "document": [load(), pool()], "other": [load(), pool()]}
    fair = calibrate(model_of(Router(routes, default_route="other")), CONFIG)
    text = "inputs of task {} and modality 'text' to its route 'other', which is not calibrated: encode documents with"
    with pytest.raises(ValueError, match=text.format(None)):
        fair.encode(TEXTS)
    with pytest.raises(ValueError, match=text.format("'other'")):
        fair.encode(TEXTS, task="other")
    assert fair.counts.documents == 0
    fair.encode_document(TEXTS)
    assert fair.counts.documents == 5


def test_images_are_refused_as_documents(load: Load) -> None:
    fair = calibrate(by_modality(load), CONFIG)
    features = {"input_ids": torch.tensor([7, 8, 9]), "offsets": torch.tensor([0]), "modality": "image"}
    with pytest.raises(
        ValueError, match="task None and modality 'image' to its route 'image', which is not calibrated"
    ):
        fair(dict(features))
    assert fair(dict(features), task="query")["sentence_embedding"].shape == (1, 32)


# Routers that cannot be calibrated


def test_a_route_for_documents_without_a_transformer_is_refused(load: Load) -> None:
    text = (
        "model: the first module that its Router has for documents must be a sentence-transformers Transformer to be "
        "calibrated (other modules have no attention, or run it in their own way: use the model as it is), got "
        "sentence_transformers.sentence_transformer.modules.static_embedding.StaticEmbedding"
    )
    with pytest.raises(TypeError, match=re.escape(text)):
        calibrate(asymmetric([load(), pool()], [static()]), CONFIG)


def test_a_refused_folder(load: Load, tmp_path: Path) -> None:
    asymmetric([load(), pool()], [static()]).save_pretrained(str(tmp_path))
    with pytest.raises(TypeError, match=r"first module that its Router has for documents .* got .*StaticEmbedding$"):
        FairSentenceTransformer(str(tmp_path), device="cpu")


def test_a_router_without_a_route_for_documents_is_refused(load: Load) -> None:
    text = re.escape(
        "the Router has no route for documents among ['query', 'doc']: name one 'document', or map it with "
        "route_mappings={('document', None): ...}"
    )
    router = Router({"query": [load(), pool()], "doc": [load(), pool()]})
    with pytest.raises(TypeError, match=text):
        calibrate(model_of(router), CONFIG)
    router.default_route = None
    with pytest.raises(TypeError, match=text):
        calibrate(model_of(router), CONFIG)
    router.route_mappings = {("document", None): "doc"}
    assert differ(calibrate(model_of(router), CONFIG).encode_document(TEXTS), model_of(router).encode_document(TEXTS))
