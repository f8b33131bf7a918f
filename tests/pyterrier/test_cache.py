from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
from pyterrier_caching import IndexerCache, KeyValueCache, ScorerCache
from pyterrier_dr import FlexIndex

from fair_calibration.identity import DifferentEncoderError
from pyterrier_fair import FairBiEncoder, FairDocCache, cache_path
from tests.pyterrier.conftest import MakeEncoder

VECTORS = 1e-6
SHARED: dict[str, pt.Transformer] = {}  # unittest classes take no fixtures


@pytest.fixture(scope="module", autouse=True)
def shared_cache(make_encoder: MakeEncoder, tmp_path_factory: pytest.TempPathFactory) -> None:
    SHARED["cache"] = FairDocCache(tmp_path_factory.mktemp("caches"), make_encoder())


class TestConformance(pt.testing.transformer_test_class(lambda: SHARED["cache"])):  # type: ignore[misc]
    pass


@pytest.fixture
def encoder(make_encoder: MakeEncoder) -> FairBiEncoder:
    return make_encoder()


def vectors(frame: pd.DataFrame) -> np.ndarray:
    return np.stack(frame["doc_vec"].tolist())


def n_encoded(encoder: FairBiEncoder) -> int:
    return sum(encoder.counts[:3])


def test_a_cache_by_itself_mixes_settings_up(encoder: FairBiEncoder, docs: pd.DataFrame, tmp_path: Path) -> None:
    """What this is all for: the day this fails, pyterrier-caching has the transformer in its keys."""
    path = str(tmp_path / "cache")
    strong = KeyValueCache(path, encoder.doc_encoder(), key="text", value="doc_vec")(docs)
    encoder.strength = 0
    plain = KeyValueCache(path, encoder.doc_encoder(), key="text", value="doc_vec")(docs)
    assert np.array_equal(vectors(plain), vectors(strong))
    assert np.abs(vectors(plain) - encoder.encode_docs(docs["text"])).max() > 0.01


class TestPath:
    def test_is_one_for_equal_encoders(self, make_encoder: MakeEncoder, tmp_path: Path) -> None:
        path = cache_path(tmp_path / "caches", make_encoder())
        assert path.is_dir()
        assert path.parent == tmp_path / "caches"
        assert cache_path(tmp_path / "caches", make_encoder()) == path
        assert cache_path(tmp_path / "caches", make_encoder(batch_size=7, verbose=True)) == path

    def test_is_another_for_all_that_changes_vectors(self, make_encoder: MakeEncoder, tmp_path: Path) -> None:
        encoders = [
            make_encoder(),
            make_encoder(strength=0.3),
            make_encoder(basket_size=16),
            make_encoder(layers=1),
            make_encoder(max_seq_length=64),
            make_encoder(normalize=False),
            make_encoder("bert", "mean"),
        ]
        assert len({cache_path(tmp_path, encoder) for encoder in encoders}) == len(encoders)
        changed = encoders[0]
        changed.calibrated_model().prompts["document"] = "kir "
        assert cache_path(tmp_path, changed) not in {cache_path(tmp_path, encoder) for encoder in encoders[1:]}
        assert len(list(tmp_path.iterdir())) == len(encoders) + 1

    def test_the_folder_of_another_encoder_is_refused(self, make_encoder: MakeEncoder, tmp_path: Path) -> None:
        mine, other = cache_path(tmp_path, make_encoder()), cache_path(tmp_path, make_encoder(strength=0.3))
        shutil.rmtree(mine)
        other.rename(mine)
        with pytest.raises(
            DifferentEncoderError, match=r"fair_config.strength: 0.3 there, 0.8 now\. Remove it, or take"
        ):
            cache_path(tmp_path, make_encoder())

    def test_a_folder_without_a_record_is_refused(self, encoder: FairBiEncoder, tmp_path: Path) -> None:
        (cache_path(tmp_path, encoder) / "fair_encoder.json").unlink()
        with pytest.raises(ValueError, match=r"has no fair_encoder.json, so its encoder is not known"):
            cache_path(tmp_path, encoder)

    def test_scores(
        self, make_encoder: MakeEncoder, pairs: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for strength in (0.8, 0.0):
            encoder = make_encoder(strength=strength)
            expected = encoder.scorer()(pairs)
            for _ in range(2):
                with ScorerCache(str(cache_path(tmp_path, encoder) / "tiny-scores"), encoder.scorer()) as cache:
                    found = cache(pairs)
                merged = found.merge(expected, on=["qid", "docno"])
                assert np.abs(merged["score_x"] - merged["score_y"]).max() < VECTORS
                monkeypatch.setattr(FairBiEncoder, "encode_docs", None)  # the second time nothing is encoded
            monkeypatch.undo()

    def test_encoded_collections(self, make_encoder: MakeEncoder, docs: pd.DataFrame, tmp_path: Path) -> None:
        for strength in (0.8, 0.0):
            encoder = make_encoder(strength=strength)
            cache = IndexerCache(str(cache_path(tmp_path, encoder) / "tiny-vectors"))
            (encoder.doc_encoder() >> cache).index(docs.to_dict("records"))
            stored = np.stack([record["doc_vec"] for record in cache])
            assert np.abs(stored - encoder.encode_docs(docs["text"])).max() < VECTORS


class TestDocCache:
    def test_encodes_nothing_twice(self, encoder: FairBiEncoder, docs: pd.DataFrame, tmp_path: Path) -> None:
        expected = encoder.encode_docs(docs["text"])
        before = n_encoded(encoder)
        first = FairDocCache(tmp_path / "caches", encoder)(docs)
        assert n_encoded(encoder) == before + len(docs)
        again = FairDocCache(tmp_path / "caches", encoder)(docs.iloc[::-1].reset_index(drop=True))
        assert n_encoded(encoder) == before + len(docs)
        assert np.abs(vectors(first) - expected).max() < VECTORS
        assert np.array_equal(vectors(again)[::-1], vectors(first))
        assert list(first.columns) == ["docno", "text", "doc_vec"]

    def test_the_same_text_in_several_documents(
        self, encoder: FairBiEncoder, docs: pd.DataFrame, tmp_path: Path
    ) -> None:
        twice = pd.concat([docs, docs.assign(docno="x")], ignore_index=True)
        twice.index = pd.RangeIndex(5, 5 + len(twice))
        found = FairDocCache(tmp_path, encoder)(twice)
        assert np.array_equal(vectors(found)[: len(docs)], vectors(found)[len(docs) :])
        assert found["docno"].tolist() == twice["docno"].tolist()

    def test_follows_changed_settings(self, encoder: FairBiEncoder, docs: pd.DataFrame, tmp_path: Path) -> None:
        cache = FairDocCache(tmp_path, encoder)
        for strength in (0.8, 0.0, 0.3, 0.8):
            encoder.strength = strength
            assert np.abs(vectors(cache(docs)) - encoder.encode_docs(docs["text"])).max() < VECTORS
        encoder.max_seq_length = 32
        assert np.abs(vectors(cache(docs)) - encoder.encode_docs(docs["text"])).max() < VECTORS
        assert len(list(tmp_path.iterdir())) == 4

    def test_in_a_grid_search(
        self,
        encoder: FairBiEncoder,
        candidates: pt.Transformer,
        topics: pd.DataFrame,
        qrels: pd.DataFrame,
        tmp_path: Path,
    ) -> None:
        lines = []
        for part in (FairDocCache(tmp_path, encoder), encoder.doc_encoder()):
            pipeline = candidates >> part >> encoder.scorer()
            grid = {encoder: {"strength": [0.0, 0.4, 0.8]}}
            scan = pt.GridScan(pipeline, grid, topics, qrels, ["ndcg_cut_3"], verbose=False)
            lines.append(scan["ndcg_cut_3"].tolist())
        assert lines[0] == pytest.approx(lines[1])

    def test_before_an_index(self, encoder: FairBiEncoder, docs: pd.DataFrame, tmp_path: Path) -> None:
        records = docs.to_dict("records")
        (FairDocCache(tmp_path / "caches", encoder) >> FlexIndex(str(tmp_path / "a"), verbose=False)).index(records)
        stored = FlexIndex(str(tmp_path / "a")).payload()[1]
        assert np.abs(stored - encoder.encode_docs(docs["text"])).max() < VECTORS

    def test_other_fields(self, make_encoder: MakeEncoder, docs: pd.DataFrame, tmp_path: Path) -> None:
        encoder = make_encoder(text_field="body")
        frame = docs.rename(columns={"text": "body"})
        found = FairDocCache(tmp_path, encoder)(frame)
        assert np.abs(vectors(found) - encoder.encode_docs(docs["text"])).max() < VECTORS
        again = FairDocCache(tmp_path, encoder, text_field="text")(docs)
        assert np.array_equal(vectors(again), vectors(found))

    def test_bad_texts(self, encoder: FairBiEncoder, docs: pd.DataFrame, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"text: 1 of 8 texts are missing \(docno 'd2'\)"):
            FairDocCache(tmp_path, encoder)(docs.assign(text=[*docs["text"][:2], None, *docs["text"][3:]]))

    @pytest.mark.parametrize("column", ["text", "docno"])
    def test_columns_of_one_name(self, encoder: FairBiEncoder, docs: pd.DataFrame, tmp_path: Path, column: str) -> None:
        with pytest.raises(ValueError, match=f"{column}: expected one column of this name, got 2; rename the others"):
            FairDocCache(tmp_path, encoder)(pd.concat([docs, docs[[column]]], axis=1))

    def test_follows_weights_changed_in_place(self, encoder: FairBiEncoder, docs: pd.DataFrame, tmp_path: Path) -> None:
        cache = FairDocCache(tmp_path, encoder)
        before = vectors(cache(docs))
        for parameter in encoder.calibrated_model().parameters():
            parameter.data.mul_(1.5)  # which PyTorch does not count as a change
        found = vectors(cache(docs))
        assert np.abs(found - before).max() > 0.01
        assert np.abs(found - encoder.encode_docs(docs["text"])).max() < VECTORS

    def test_what_pyterrier_sees(self, encoder: FairBiEncoder, make_encoder: MakeEncoder, tmp_path: Path) -> None:
        cache = FairDocCache(tmp_path / "caches", encoder)
        assert pt.inspect.transformer_inputs(cache) == [["text"]]
        assert pt.inspect.transformer_outputs(cache, ["docno", "text"]) == ["docno", "text", "doc_vec"]
        assert not (tmp_path / "caches").exists()
        assert cache == FairDocCache(tmp_path / "caches", make_encoder())
        assert hash(cache) == hash(FairDocCache(tmp_path / "caches", make_encoder()))
        assert cache != FairDocCache(tmp_path / "caches", make_encoder(strength=0.3))
        assert repr(cache) == f"FairDocCache({str(tmp_path / 'caches')!r}, {encoder!r})"
        with pytest.raises(TypeError, match="encoder: expected a FairBiEncoder, got str"):
            FairDocCache(tmp_path, "BAAI/bge-m3")  # type: ignore[arg-type]
