from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from fair_calibration import EvenChunks, FairConfig, FairSentenceTransformer, calibrate
from fair_calibration.limits import position_limit, validate_max_seq_length
from tests.conftest import TinyModel
from tests.core.tiny_models import document

CONFIG = FairConfig(basket_size=8)


@pytest.mark.parametrize(
    ("family", "pooling"),
    [(family, "mean") for family in ("bert", "xlm_roberta", "mpnet", "albert", "roformer")]
    + [(family, "lasttoken") for family in ("openai_gpt", "gpt_neo")],
)
def test_absolute_positions_limit_the_length(family: str, pooling: str, tiny_model: TinyModel) -> None:
    plain = tiny_model(family, pooling)
    limit = position_limit(plain[0].model)
    assert limit is not None
    plain.max_seq_length = limit
    fair = calibrate(plain, CONFIG)
    assert fair.encode_document([document(3 * limit)]).shape[0] == 1  # a document as long as the limit is encoded
    with pytest.raises(
        ValueError, match=f"max_seq_length: the model has positions for {limit} tokens, got {limit + 1}"
    ):
        fair.max_seq_length = limit + 1
    with pytest.raises(ValueError, match=f"max_seq_length: the model has positions for {limit} tokens, so it needs"):
        fair.max_seq_length = None
    assert fair.max_seq_length == limit


@pytest.mark.parametrize("family", ["bloom", "qwen3"])
def test_models_without_a_table_have_no_limit(family: str, tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model(family, "lasttoken"), CONFIG)
    assert position_limit(fair[0].model) is None
    fair.max_seq_length = 100_000
    assert fair.max_seq_length == 100_000
    assert fair.encode_document([document(600)]).shape[0] == 1


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_absurd_values(value: object, error: type[Exception], tiny_model: TinyModel) -> None:
    fair = calibrate(tiny_model(), CONFIG)
    with pytest.raises(error, match="max_seq_length: expected an integer of at least 1"):
        fair.max_seq_length = value  # type: ignore[assignment]
    with pytest.raises(ValueError, match="max_seq_length: expected at most 1000000000 tokens, or None for no limit"):
        validate_max_seq_length(10**30, None)
    assert validate_max_seq_length(None, None) is None


def test_a_model_that_was_loaded_with_too_long_a_limit(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    plain = tiny_model()
    limit = position_limit(plain[0].model)
    assert limit is not None
    plain.max_seq_length = limit + 100
    with caplog.at_level(logging.WARNING, "fair_calibration"):
        fair = calibrate(plain, CONFIG)
    assert fair.max_seq_length == limit
    assert f"was loaded with max_seq_length={limit + 100}, but it has positions for {limit} tokens" in caplog.text
    assert fair.encode_document([document(3 * limit)]).shape[0] == 1


def test_a_tokenizer_without_a_limit(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    plain = tiny_model()
    plain.tokenizer.model_max_length = 10**30
    fair = calibrate(plain, CONFIG)
    assert fair.max_seq_length == position_limit(plain[0].model)
    assert not caplog.records  # there is no limit of the user's that would not hold
    free = tiny_model("qwen3", "lasttoken")
    free.tokenizer.model_max_length = 10**30
    fair = calibrate(free, CONFIG)
    fair.encode_document([document(40)])
    assert str(fair.summary()).endswith("0 truncated (no limit)")


def test_chunks_beyond_the_positions(tiny_model: TinyModel, minilm: SentenceTransformer) -> None:
    limit = position_limit(tiny_model()[0].model)
    assert limit is not None
    with pytest.raises(ValueError, match=f"chunk_size: chunks of {limit} tokens, .* use chunk_size={limit - 2}"):
        calibrate(tiny_model(), EvenChunks(chunk_size=limit))
    assert position_limit(minilm[0].model) == 512
    fair = FairSentenceTransformer(modules=list(calibrate(minilm)), device="cpu")
    with pytest.raises(
        ValueError, match="max_seq_length: the model has positions for 512 tokens, got 1024; longer doc"
    ):
        fair.max_seq_length = 1024


def test_a_length_given_at_loading(minilm_path: str, tmp_path: Path) -> None:
    plain = SentenceTransformer(minilm_path, device="cpu")
    settings = EvenChunks(chunk_size=400)
    with pytest.raises(ValueError, match=r"chunk_size: chunks of 400 tokens, .* do not fit into max_seq_length=256"):
        calibrate(plain, settings).encode_document([document(600)])
    fair = calibrate(plain, settings, max_seq_length=512)
    assert (fair.max_seq_length, plain.max_seq_length) == (512, 256)
    plain.save_pretrained(str(tmp_path / "plain"))
    fair.save_pretrained(str(tmp_path / "fair"))
    expected = fair.encode_document([document(600)])
    loaded = FairSentenceTransformer(str(tmp_path / "plain"), config=settings, max_seq_length=512, device="cpu")
    assert np.array_equal(loaded.encode_document([document(600)]), expected)
    for config in (None, FairConfig()):  # as saved, and calibrated anew
        again = FairSentenceTransformer(str(tmp_path / "fair"), config=config, max_seq_length=500, device="cpu")
        assert again.max_seq_length == 500
        assert calibrate(again).max_seq_length == 500
    for name in ("plain", "fair"):
        with pytest.raises(ValueError, match="max_seq_length: the model has positions for 512 tokens, got 513"):
            FairSentenceTransformer(str(tmp_path / name), max_seq_length=513, device="cpu")
    with pytest.raises(TypeError, match="max_seq_length: expected an integer of at least 1"):
        calibrate(plain, settings, max_seq_length="512")  # type: ignore[arg-type]
