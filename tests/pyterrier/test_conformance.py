"""What PyTerrier asks of a transformer: inspection, validation and schematics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from pyterrier_dr import FlexIndex

from fair_calibration import EvenChunks, FairConfig
from pyterrier_fair import PRESETS, Dart, FairBiEncoder
from tests.pyterrier.conftest import QUERIES, TEXTS, MakeEncoder

SHARED: dict[str, FairBiEncoder] = {}  # unittest classes take no fixtures


@pytest.fixture(scope="module", autouse=True)
def shared_encoder(make_encoder: MakeEncoder) -> FairBiEncoder:
    SHARED["encoder"] = make_encoder()
    return SHARED["encoder"]


class TestEncoder(pt.testing.transformer_test_class(lambda: SHARED["encoder"])):  # type: ignore[misc]
    pass


class TestQueryEncoder(pt.testing.transformer_test_class(lambda: SHARED["encoder"].query_encoder())):  # type: ignore[misc]
    pass


class TestDocEncoder(pt.testing.transformer_test_class(lambda: SHARED["encoder"].doc_encoder())):  # type: ignore[misc]
    pass


class TestScorer(pt.testing.transformer_test_class(lambda: SHARED["encoder"].scorer())):  # type: ignore[misc]
    pass


class TestDart(pt.testing.transformer_test_class(Dart)):  # type: ignore[misc]
    pass


class TestDartWithAnIndex(pt.testing.transformer_test_class(lambda: Dart(FlexIndex("missing")))):  # type: ignore[misc]
    pass


# Inputs and outputs


def parts(encoder: FairBiEncoder) -> dict[str, pt.Transformer]:
    return {
        "encoder": encoder,
        "query_encoder": encoder.query_encoder(),
        "doc_encoder": encoder.doc_encoder(),
        "scorer": encoder.scorer(),
    }


ADDED = {"query_encoder": ["query_vec"], "doc_encoder": ["doc_vec"], "scorer": ["score", "rank"]}
INPUTS = {
    "query_encoder": [["qid", "query"], ["query"]],
    "doc_encoder": [["docno", "text"], ["text"]],
    "scorer": [["query_vec", "doc_vec"], ["query", "doc_vec"], ["query_vec", "text"], ["query", "text"]],
}


@pytest.mark.parametrize("part", INPUTS)
def test_inputs_and_outputs_of_the_parts(shared_encoder: FairBiEncoder, part: str) -> None:
    transformer = parts(shared_encoder)[part]
    assert pt.inspect.transformer_inputs(transformer) == INPUTS[part]
    for columns in INPUTS[part]:
        assert pt.inspect.transformer_outputs(transformer, columns) == columns + ADDED[part]


@pytest.mark.parametrize(
    ("columns", "part"),
    [
        (["qid", "query"], "query_encoder"),
        (["query"], "query_encoder"),
        (["docno", "text"], "doc_encoder"),
        (["text"], "doc_encoder"),
        (["qid", "docno", "query", "text"], "scorer"),
        (["query", "text"], "scorer"),
        (["query_vec", "text"], "scorer"),
        (["query", "doc_vec"], "scorer"),
        (["query_vec", "doc_vec"], "scorer"),
    ],
)
def test_the_encoder_takes_its_part_from_the_columns(
    shared_encoder: FairBiEncoder, columns: list[str], part: str
) -> None:
    assert columns in pt.inspect.transformer_inputs(shared_encoder)
    assert pt.inspect.transformer_outputs(shared_encoder, columns) == columns + ADDED[part]
    empty = pd.DataFrame(columns=columns)
    for transformer in (shared_encoder, parts(shared_encoder)[part]):
        result = transformer(empty)
        assert list(result.columns) == columns + ADDED[part]
        assert len(result) == 0
    assert list(empty.columns) == columns


@pytest.mark.parametrize("part", ["encoder", *INPUTS])
def test_frames_without_the_columns_are_refused(shared_encoder: FairBiEncoder, part: str) -> None:
    with pytest.raises(pt.validate.InputValidationError):
        parts(shared_encoder)[part](pd.DataFrame({"qid": ["q"], "title": ["bal"]}))


def test_the_text_field_is_part_of_the_inputs(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder(text_field="body")
    assert pt.inspect.transformer_inputs(encoder.doc_encoder()) == [["docno", "body"], ["body"]]
    assert ["qid", "docno", "query", "body"] in pt.inspect.transformer_inputs(encoder)
    with pytest.raises(pt.validate.InputValidationError):
        encoder.doc_encoder()(pd.DataFrame({"docno": ["d"], "text": ["bal"]}))


# Attributes

SETTINGS: dict[str, Any] = {
    "strength": 0.3,
    "basket_size": 16,
    "layers": (1, 3),
    "attention": "any",
    "pooling": "cls",
    "isolate": "bos_eos",
    "isolated_share": "equal",
    "last_basket": "proportional",
    "min_content": 20,
    "max_seq_length": 64,
    "normalize": False,
    "batch_size": 3,
    "text_field": "body",
    "verbose": True,
    "device": "cpu",
}


def attributes(transformer: pt.Transformer) -> dict[str, Any]:
    return {a.name: a.value for a in pt.inspect.transformer_attributes(transformer)}


def test_attributes_are_the_arguments_as_given(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder(**SETTINGS)
    assert attributes(encoder) == {"model": encoder.model, **SETTINGS}


def test_attributes_left_out_are_none_or_the_default(make_encoder: MakeEncoder) -> None:
    found = attributes(make_encoder())
    assert found["normalize"] is None
    assert found["max_seq_length"] is None
    assert found["min_content"] is None
    assert found["batch_size"] == 32


def test_applying_attributes_changes_those_alone(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder(**SETTINGS)
    assert pt.inspect.transformer_apply_attributes(encoder) == encoder
    changed = pt.inspect.transformer_apply_attributes(encoder, strength=0.9, batch_size=7)
    assert attributes(changed) == {"model": encoder.model, **SETTINGS, "strength": 0.9, "batch_size": 7}
    assert encoder.strength == 0.3
    expected = make_encoder(**{**SETTINGS, "strength": 0.9, "batch_size": 7}).encode_docs(TEXTS)
    assert np.array_equal(changed.encode_docs(TEXTS), expected)


def test_applying_attributes_keeps_the_automatic_normalization(tiny_model: Any) -> None:
    model = tiny_model(similarity_fn_name="dot")
    copied = pt.inspect.transformer_apply_attributes(FairBiEncoder(model))
    assert copied.normalize is None
    assert np.array_equal(copied.encode_queries(QUERIES), FairBiEncoder(model).encode_queries(QUERIES))


def test_attributes_of_the_parts(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder()
    doc_encoder = encoder.doc_encoder(batch_size=4)
    assert attributes(doc_encoder) == {
        "bi_encoder_model": encoder,
        "verbose": False,
        "batch_size": 4,
        "text_field": "text",
    }
    again = pt.inspect.transformer_apply_attributes(doc_encoder, text_field="body")
    assert again.text_field == "body"
    assert again.batch_size == 4
    for transformer in parts(encoder).values():
        assert pt.inspect.subtransformers(transformer) == {}
    for transformer in (encoder.query_encoder(), doc_encoder, encoder.scorer()):
        assert pt.inspect.transformer_apply_attributes(transformer) == transformer


# Schematics


@pytest.mark.parametrize("part", ["encoder", *INPUTS])
def test_schematics_of_the_parts(shared_encoder: FairBiEncoder, part: str) -> None:
    transformer = parts(shared_encoder)[part]
    schematic = pt.schematic.transformer_schematic(transformer)
    assert schematic["type"] == "transformer"
    assert 0 < len(schematic["label"]) <= 20
    assert schematic["label"] in pt.schematic.draw(transformer)


def test_the_schematic_shows_the_settings(make_encoder: MakeEncoder) -> None:
    schematic = pt.schematic.transformer_schematic(make_encoder(strength=0.3))
    assert schematic["settings"]["strength"] == 0.3
    assert schematic["settings"]["normalize"] is None


def test_the_schematic_of_a_pipeline(shared_encoder: FairBiEncoder, candidates: pt.Transformer) -> None:
    pipeline = candidates >> shared_encoder
    schematic = pt.schematic.transformer_schematic(pipeline, input_columns=["qid", "query"])
    assert schematic["transformers"][-1]["output_columns"][-2:] == ["score", "rank"]
    assert "FairBiEncoder" in pt.schematic.draw(pipeline)


def test_a_rank_cutoff_moves_before_the_doc_encoder(make_encoder: MakeEncoder, pairs: pd.DataFrame) -> None:
    encoder = make_encoder()
    candidates = pt.Transformer.from_df(pairs.drop(columns="query").assign(rank=pairs.groupby("qid").cumcount()))
    pipeline = ((candidates >> encoder.doc_encoder()) % 2).compile()
    result = pipeline(pairs[["qid", "query"]].drop_duplicates())
    assert len(result) == 2 * len(QUERIES)
    assert encoder.counts.documents == 2
    assert np.array_equal(np.stack(result["doc_vec"])[:2], encoder.encode_docs(TEXTS[:2]))


@pytest.mark.parametrize("changes", [{"chunk_size": 30}, {"ridge": 0.1}, {"config": "published"}])
def test_attributes_of_even_chunks(tiny_model: Any, changes: dict[str, Any]) -> None:
    model = tiny_model()
    encoder = FairBiEncoder(model, EvenChunks(chunk_size=24, unit_size=8), max_seq_length=100)
    found = attributes(encoder)
    assert found["chunk_size"] == 24
    assert "basket_size" not in found
    assert pt.schematic.transformer_schematic(encoder)["settings"]["unit_size"] == 8
    assert pt.inspect.transformer_apply_attributes(encoder) == encoder
    changed = pt.inspect.transformer_apply_attributes(encoder, **changes)
    assert changed.max_seq_length == 100
    for name, value in changes.items():
        assert getattr(changed, name) == (PRESETS[value] if name == "config" else value)
    with pytest.raises(TypeError, match="ridge: "):
        pt.inspect.transformer_apply_attributes(encoder, config=FairConfig(), ridge=0.1)


def test_settings_can_be_set_to_none_again(make_encoder: MakeEncoder) -> None:
    encoder = make_encoder(min_content=30)
    assert pt.inspect.transformer_apply_attributes(encoder, min_content=None).min_content is None


@pytest.mark.parametrize("more", [[], ["query"], ["query", "query_vec"], ["query", "url"]])
@pytest.mark.parametrize("field", ["text", "body"])
def test_results_without_texts_name_the_missing_step(
    make_encoder: MakeEncoder, pairs: pd.DataFrame, more: list[str], field: str
) -> None:
    frame = pairs.assign(url="u", query_vec=0)[["qid", "docno", "score", "rank", *more]]
    encoder = make_encoder(text_field=field)
    text = f"neither a column '{field}' .* nor 'doc_vec'; load their texts first: .*get_text\\(dataset, '{field}'\\)"
    for transformer in (encoder, encoder.scorer(), pt.Transformer.from_df(frame.drop(columns=more)) >> encoder):
        with pytest.raises(pt.validate.InputValidationError, match=text):
            transformer(frame)
    assert "query_vec" in encoder(pairs[["qid", "query"]]).columns  # queries by themselves are encoded
    assert "query_vec" in encoder.query_encoder()(pairs[["qid", "query", "docno", "score"]]).columns
