from __future__ import annotations

import itertools
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyterrier as pt
import pytest
import torch
from pyterrier_alpha import DataFrameBuilder
from pyterrier_dr import FlexIndex
from sentence_transformers import SentenceTransformer

from fair_calibration.identity import DifferentEncoderError
from fair_indexing.assemble import assemble_flex
from fair_indexing.builder import build
from fair_indexing.lock import FolderInUseError
from fair_indexing.pending import SourceChangedError
from pyterrier_fair import FairBiEncoder, FairDocCache, FairIndex
from pyterrier_fair.index import IndexQueryEncoder
from tests.conftest import TinyModel
from tests.indexing.faults import disk_full, fault_at, tree
from tests.pyterrier.conftest import TEXTS, MakeEncoder

DOCS = [{"docno": f"d{i}", "text": text} for i, text in enumerate(TEXTS)]


@pytest.fixture
def encoder(make_encoder: MakeEncoder) -> FairBiEncoder:
    return make_encoder()


@pytest.fixture
def index(encoder: FairBiEncoder, tmp_path: Path) -> FairIndex:
    return FairIndex(tmp_path / "index.flex", encoder, shard_size=3)


@pytest.fixture
def built(index: FairIndex) -> FairIndex:
    return index.index(DOCS)


class TestIndexing:
    def test_is_what_flex_index_has(self, encoder: FairBiEncoder, index: FairIndex, tmp_path: Path) -> None:
        assert not index.built()
        assert index.index(iter(DOCS)) is index
        assert index.built()
        assert [path.name for path in tmp_path.iterdir()] == ["index.flex"]
        (encoder.doc_encoder() >> FlexIndex(str(tmp_path / "theirs"), verbose=False)).index(DOCS)
        ours, theirs = index.flex().payload(), FlexIndex(str(tmp_path / "theirs")).payload()
        assert list(ours[0]) == list(theirs[0]) == [doc["docno"] for doc in DOCS]
        assert np.abs(ours[1] - theirs[1]).max() < 1e-6
        assert theirs[2] | {"format": "flex", "package_hint": "fair-calibration"} == ours[2]

    def test_in_a_pipeline(self, index: FairIndex, tmp_path: Path) -> None:
        pipeline = pt.apply.text(lambda row: row["text"] + " ba") >> index
        pipeline.index(iter(DOCS))
        other = FairIndex(tmp_path / "other", index.encoder).index([{**d, "text": d["text"] + " ba"} for d in DOCS])
        assert np.abs(index.flex().payload()[1] - other.flex().payload()[1]).max() < 1e-6

    @pytest.mark.parametrize("stage", ["doc_encoder", "after others", "grouped", "encoder", "cache", "frame"])
    def test_vectors_of_other_encoders_are_refused(
        self, make_encoder: MakeEncoder, index: FairIndex, tmp_path: Path, stage: str
    ) -> None:
        other = make_encoder(strength=0.1)
        same_text = pt.apply.text(lambda row: row["text"])
        pipelines: dict[str, Any] = {
            "doc_encoder": lambda: other.doc_encoder() >> index,
            "after others": lambda: same_text >> other.doc_encoder() >> index,
            "grouped": lambda: (same_text >> other.doc_encoder()) >> index,
            "encoder": lambda: other >> index,
            "cache": lambda: FairDocCache(tmp_path / "caches", other) >> index,
            "frame": lambda: index,
        }
        docs = other.doc_encoder()(pd.DataFrame(DOCS)) if stage == "frame" else DOCS
        with pytest.raises(ValueError, match=r": doc_vec: FairIndex encodes the documents itself, .* leave out what"):
            pipelines[stage]().index(docs)
        assert not Path(index.path).exists()
        assert not Path(f"{index.path}.build").exists()

    def test_frames_and_other_fields(self, make_encoder: MakeEncoder, tmp_path: Path, built: FairIndex) -> None:
        frame = pd.DataFrame(DOCS).rename(columns={"text": "body"})
        index = FairIndex(f"{tmp_path}/body/", make_encoder(text_field="body"))
        assert index.index_inputs() == [["docno", "body"]]
        index.index(frame)
        assert np.abs(index.flex().payload()[1] - built.flex().payload()[1]).max() < 1e-6
        assert not (tmp_path / "body" / ".build").exists()

    def test_records_the_encoder(self, built: FairIndex, encoder: FairBiEncoder) -> None:
        record = built.record()
        assert record.fair_config == encoder.config.to_dict()
        assert record.model == encoder.model

    def test_what_is_there_stays(self, built: FairIndex) -> None:
        before = tree(Path(built.path))
        with pytest.raises(ValueError, match=r"index.flex exists; remove it to index anew, or take another path"):
            built.index(DOCS)
        assert tree(Path(built.path)) == before
        assert not Path(f"{built.path}.build").exists()

    @pytest.mark.parametrize("left", ["nothing", "shards that are removed in part"])
    def test_a_call_that_was_killed_while_tidying_up(
        self, built: FairIndex, make_encoder: MakeEncoder, left: str
    ) -> None:
        before, work = tree(Path(built.path)), Path(f"{built.path}.build")

        def kill() -> None:
            work.mkdir()
            if left != "nothing":
                (work / "done").mkdir()
                (work / "done" / "manifest.json").write_text("{}")

        kill()
        assert built.index(iter(DOCS)) is built
        assert not work.exists()
        kill()
        with pytest.raises(SourceChangedError, match="is complete and holds other documents; remove it"):
            built.index(DOCS[::-1])
        with pytest.raises(DifferentEncoderError, match=r"fair_config.strength: 0.8 there, 0.3 now"):
            FairIndex(built.path, make_encoder(strength=0.3)).index(DOCS)
        assert tree(Path(built.path)) == before
        built.index(DOCS)
        assert tree(Path(built.path)) == before
        assert not work.exists()

    def test_a_folder_that_is_not_an_index_stays(self, index: FairIndex) -> None:
        Path(index.path).mkdir()
        (Path(index.path) / "notes.txt").write_text("mine")
        Path(f"{index.path}.build").mkdir()
        with pytest.raises(ValueError, match=r"index.flex exists; remove it to index anew"):
            index.index(DOCS)
        assert (Path(index.path) / "notes.txt").exists()

    @pytest.mark.parametrize(
        ("docs", "error", "match"),
        [
            ([], ValueError, "source: expected at least 2 documents, list has 0"),
            (
                DOCS[:1],
                ValueError,
                "expected at least 2 documents, list has 1; a FlexIndex cannot hold a single one",
            ),
            ([*DOCS, {"docno": 7, "text": ""}], TypeError, r"record 8: docno: expected str, got 7 \(int\)"),
            ([*DOCS, {"docno": "x", "text": None}], ValueError, r"record 8 \(docno 'x'\): text is missing"),
            ([*DOCS, {"docno": "x", "text": np.nan}], ValueError, r"record 8 \(docno 'x'\): text is missing"),
            ([*DOCS, DOCS[1]], ValueError, "record 8: docno 'd1' is that of list, record 1 already"),
            ([*DOCS, {"docno": "x"}], ValueError, r"record 8 \(docno 'x'\): expected 'text'"),
            (
                [*DOCS, {"docno": "x\0", "text": ""}],
                ValueError,
                r"record 8 \(docno 'x\\x00'\): docno: an index cannot hold docnos with a NUL character",
            ),
        ],
    )
    def test_bad_documents(
        self, index: FairIndex, tmp_path: Path, docs: Any, error: type[Exception], match: str
    ) -> None:
        with pytest.raises(error, match=match):
            index.index(docs)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(error, match=match.replace("list", "list_iterator")):
            index.index(iter(docs))
        assert not index.built()
        assert not Path(index.path).exists()

    def test_encoders_of_other_kinds(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match="encoder: expected a FairBiEncoder, got str"):
            FairIndex(tmp_path, "BAAI/bge-m3")  # type: ignore[arg-type]


class TestResuming:
    def interrupt(self, index: FairIndex) -> None:
        def records() -> Iterator[dict[str, str]]:
            yield from DOCS[:7]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            index.index(records())
        assert not Path(index.path).exists()
        assert not index.built()

    @pytest.mark.usefixtures("built")
    def test_ends_as_an_uninterrupted_call(self, index: FairIndex, tmp_path: Path) -> None:
        other = FairIndex(tmp_path / "other", index.encoder, shard_size=3)
        self.interrupt(other)
        before = index.encoder.counts
        other.index(iter(DOCS))
        assert sum(index.encoder.counts[:3]) - sum(before[:3]) in (2, 5)  # not the complete shards again
        for name in ("vecs.f4", "docnos.npids", "pt_meta.json"):
            assert (tmp_path / "other" / name).read_bytes() == (tmp_path / "index.flex" / name).read_bytes()

    def test_other_settings_are_refused_by_name(self, index: FairIndex, encoder: FairBiEncoder) -> None:
        self.interrupt(index)
        encoder.strength = 0.3
        with pytest.raises(DifferentEncoderError, match=r"fair_config.strength: 0.8 there, 0.3 now"):
            index.index(DOCS)
        encoder.strength = 0.8
        index.index(DOCS)

    def test_other_settings_are_taken_as_long_as_nothing_is_encoded(
        self, index: FairIndex, encoder: FairBiEncoder
    ) -> None:
        with pytest.raises(ValueError, match="text is missing"):
            index.index(iter([DOCS[0], {"docno": "d1", "text": None}]))
        assert Path(f"{index.path}.build").exists()
        encoder.strength = 0.3
        FairIndex(index.path, encoder).index(DOCS)
        assert index.record().fair_config == encoder.config.to_dict()
        assert not Path(f"{index.path}.build").exists()

    def test_other_documents_are_refused(self, index: FairIndex) -> None:
        self.interrupt(index)
        with pytest.raises(SourceChangedError, match="docnos and texts from list, record 0 to list, record 2 are not"):
            index.index(DOCS[::-1])

    def test_a_full_disk_at_every_operation_after_the_build(self, index: FairIndex, tmp_path: Path) -> None:
        with fault_at(None, disk_full) as moments:
            index.index(DOCS)
        whole = tree(Path(index.path))
        n_assembly = 15
        for moment in range(moments.count - n_assembly, moments.count):
            again = FairIndex(tmp_path / f"again{moment}", index.encoder, shard_size=3)
            try:
                with fault_at(moment, disk_full):
                    again.index(DOCS)
            except OSError:
                assert not again.built() or tree(Path(again.path)) == whole
            try:
                again.index(DOCS)
            except ValueError as error:
                if "exists; remove it" not in str(error):
                    raise
            assert tree(Path(again.path)) == whole

    def test_two_at_one_time(self, index: FairIndex) -> None:
        began, go_on = threading.Event(), threading.Event()

        def slow() -> Iterator[dict[str, str]]:
            yield from DOCS[:3]
            began.set()
            go_on.wait()
            yield from DOCS[3:]

        thread = threading.Thread(target=index.index, args=(slow(),))
        thread.start()
        try:
            assert began.wait(60)
            with pytest.raises(FolderInUseError, match="is being written by process"):
                FairIndex(index.path, index.encoder).index(DOCS)
        finally:
            go_on.set()
            thread.join()
        assert index.built()


class TestRetrieval:
    def test_is_that_of_the_flex_index(self, built: FairIndex, encoder: FairBiEncoder, topics: pd.DataFrame) -> None:
        expected = (encoder.query_encoder() >> built.flex().np_retriever(num_results=5))(topics)
        found = built.retriever(num_results=5)(topics)
        pd.testing.assert_frame_equal(found, expected)
        assert len((built.retriever(kind="torch_retriever") % 2)(topics)) == 2 * len(topics)
        with pytest.raises(ValueError, match=r"kind: expected one of .*'np_retriever'.*, got 'numpy'"):
            built.retriever(kind="numpy")

    def test_in_an_experiment(self, built: FairIndex, topics: pd.DataFrame, qrels: pd.DataFrame) -> None:
        results = pt.Experiment([built.retriever()], topics, qrels, ["ndcg_cut_10"], names=["fair"])
        assert results["ndcg_cut_10"].between(0.01, 1).all()

    def test_needs_an_index(self, index: FairIndex) -> None:
        with pytest.raises(ValueError, match=r"there is no index at .*; call index\(\) first"):
            index.retriever()
        with pytest.raises(ValueError, match=r"there is no index at .*; call index\(\) first"):
            index.flex()

    def test_query_encoders_stand_for_their_encoders(
        self, built: FairIndex, encoder: FairBiEncoder, topics: pd.DataFrame
    ) -> None:
        pd.testing.assert_frame_equal(built.retriever(encoder.query_encoder())(topics), built.retriever()(topics))
        with pytest.raises(TypeError, match="encoder: expected a FairBiEncoder, got CheckedFlexIndex"):
            built.retriever(built.flex())

    @pytest.mark.parametrize("file", ["vecs.f4", "docnos.npids", "pt_meta.json", "fair_index.json"])
    @pytest.mark.parametrize("harm", ["zeros", "half", "empty", "missing"])
    def test_damaged_files_are_named(self, built: FairIndex, file: str, harm: str) -> None:
        path = Path(built.path) / file
        data = path.read_bytes()
        harmed = {"zeros": bytes(len(data)), "half": data[: len(data) // 2], "empty": b""}
        path.unlink()
        if harm != "missing":
            path.write_bytes(harmed[harm])
        with pytest.raises(ValueError, match=file):
            built.retriever()

    def test_indexes_of_others_have_no_record(self, encoder: FairBiEncoder, tmp_path: Path) -> None:
        (encoder.doc_encoder() >> FlexIndex(str(tmp_path / "theirs"), verbose=False)).index(DOCS)
        with pytest.raises(ValueError, match=r"no fair_index.json, so nothing tells which encoder made its vectors"):
            FairIndex(tmp_path / "theirs", encoder).retriever()

    def test_other_calibrations_are_no_other_encoders(self, built: FairIndex, make_encoder: MakeEncoder) -> None:
        built.retriever(make_encoder(strength=0.1, basket_size=16, layers="all"))
        prompts = make_encoder()
        prompts.calibrated_model().prompts["document"] = "kir "
        built.retriever(prompts)

    @pytest.mark.parametrize(
        ("settings", "line"),
        [
            ({"max_seq_length": 64}, "max_seq_length: 128 there, 64 now"),
            ({"normalize": False}, "normalize: True there, False now"),
        ],
    )
    def test_other_settings_are_refused(
        self, built: FairIndex, make_encoder: MakeEncoder, settings: Any, line: str
    ) -> None:
        with pytest.raises(DifferentEncoderError, match=rf"its queries cannot be compared with them: {line}\. Use"):
            built.retriever(make_encoder(**settings))

    def test_other_models_are_refused(self, built: FairIndex, make_encoder: MakeEncoder, tiny_model: TinyModel) -> None:
        with pytest.raises(DifferentEncoderError, match="pooling_mode: 'cls' there, 'mean' now"):
            built.retriever(make_encoder("bert", "mean"))
        model: SentenceTransformer = tiny_model()
        with torch.no_grad():
            next(iter(model.parameters()))[0, 0] += 1
        with pytest.raises(DifferentEncoderError, match="weights: "):
            built.retriever(FairBiEncoder(model, strength=0.8, basket_size=8))
        model = tiny_model()
        model.prompts["query"] = "kir "
        with pytest.raises(DifferentEncoderError, match="query_prompt: 'bal ' there, 'kir ' now"):
            built.retriever(FairBiEncoder(model, strength=0.8, basket_size=8))

    def test_what_is_changed_later_is_refused_later(
        self, built: FairIndex, encoder: FairBiEncoder, topics: pd.DataFrame
    ) -> None:
        retriever = built.retriever()
        expected = retriever(topics)
        encoder.strength = 0.1
        pd.testing.assert_frame_equal(retriever(topics), expected)
        encoder.max_seq_length = 64
        with pytest.raises(DifferentEncoderError, match="max_seq_length: 128 there, 64 now"):
            retriever(topics)
        encoder.max_seq_length = None
        pd.testing.assert_frame_equal(retriever(topics), expected)
        with torch.no_grad():
            next(iter(encoder.calibrated_model().parameters()))[0, 0] += 1
        with pytest.raises(DifferentEncoderError, match="weights: "):
            retriever(topics)

    def test_what_pyterrier_sees(self, built: FairIndex, index: FairIndex, encoder: FairBiEncoder) -> None:
        part = built.query_encoder()
        assert isinstance(part, IndexQueryEncoder)
        assert pt.inspect.transformer_inputs(part) == [["qid", "query"], ["query"]]
        assert pt.inspect.transformer_outputs(part, ["qid", "query"]) == ["qid", "query", "query_vec"]
        assert part == built.query_encoder(encoder)
        assert part != encoder.query_encoder()
        assert repr(index) == f"FairIndex({str(index.path)!r}, {encoder!r})"


class TestArtifact:
    def test_loading_keeps_the_check(self, built: FairIndex, make_encoder: MakeEncoder, topics: pd.DataFrame) -> None:
        expected = built.retriever(num_results=5)(topics)
        loaded = pt.Artifact.load(str(built.path), encoder=built.encoder)
        assert type(loaded) is FairIndex
        pd.testing.assert_frame_equal(loaded.retriever(num_results=5)(topics), expected)
        with pytest.raises(DifferentEncoderError, match="max_seq_length: 128 there, 64 now"):
            pt.Artifact.load(str(built.path), encoder=make_encoder(max_seq_length=64)).retriever()

    def test_without_an_encoder(self, built: FairIndex, topics: pd.DataFrame) -> None:
        loaded = pt.Artifact.load(str(built.path))
        made_by = re.escape(f"its vectors were made by {built.record().model!r}. Pass one, as in")
        needs_one: list[Callable[[], Any]] = [
            loaded.retriever, loaded.query_encoder, loaded.check, loaded.index_inputs, lambda: loaded.index(DOCS),
        ]  # fmt: skip
        for call in needs_one:
            with pytest.raises(ValueError, match=f"encoder: .*index.flex was opened without an encoder; {made_by}"):
                call()
        pd.testing.assert_frame_equal(loaded.retriever(built.encoder)(topics), built.retriever()(topics))
        with pytest.raises(ValueError, match=r"nowhere was opened without an encoder\. Pass one"):
            FairIndex("nowhere").index(DOCS)

    def test_as_a_flex_index(self, built: FairIndex) -> None:
        """FlexIndex would skip the check, so it opens the folder through `FairIndex.flex` alone."""
        with pytest.raises(AssertionError):
            len(FlexIndex(str(built.path)))
        assert len(FairIndex(built.path).flex()) == len(DOCS)

    def test_documents_that_it_does_not_have(self, built: FairIndex, topics: pd.DataFrame) -> None:
        """pyterrier_dr would take the last document's vector for them, and the docid of another index for its own."""
        flex = built.flex()
        results = built.retriever()(topics).drop(columns="docid")
        transformers: list[pt.Transformer] = [flex.np_scorer(), flex.torch_scorer(), flex.vec_loader()]
        for transformer in transformers:
            scored = transformer(results)
            other = transformer(results.assign(docid=0))
            pd.testing.assert_frame_equal(other[scored.columns], scored)
            with pytest.raises(ValueError, match=r"docno: 1 documents are not in .*index\.flex'\), such as 'other'"):
                transformer(results.assign(docno=["other", *results["docno"].iloc[1:]]))
        by_docid = flex.vec_loader()(pd.DataFrame({"docid": [1]}))["doc_vec"].iloc[0]
        by_docno = flex.vec_loader()(pd.DataFrame({"docno": ["d1"]}))["doc_vec"].iloc[0]
        assert by_docid.tolist() == by_docno.tolist()

    def test_indexes_assembled_by_the_command(self, encoder: FairBiEncoder, tmp_path: Path) -> None:
        done = build(encoder.calibrated_model(), DOCS, tmp_path / "build", strength=encoder.config.strength)
        assert len(FlexIndex(str(assemble_flex(done.shards, tmp_path / "flex")))) == len(DOCS)
        FairIndex(tmp_path / "flex", encoder).check()

    def test_sharing(
        self, built: FairIndex, topics: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Through a hub that is a folder."""
        hub = tmp_path / "hub"
        monkeypatch.setenv("PYTERRIER_HOME", str(tmp_path / "home"))
        for name in ("create_repo", "create_branch"):
            monkeypatch.setattr(f"huggingface_hub.{name}", lambda *_, **__: None)
        monkeypatch.setattr(
            "huggingface_hub.upload_folder", lambda *, folder_path, **_: shutil.copytree(folder_path, hub)
        )
        download = pt.io.open_or_download_stream
        monkeypatch.setattr(
            "pyterrier.io.open_or_download_stream",
            lambda url, *, headers, **settings: download(str(hub / url.rsplit("/", 1)[1]), **settings),  # noqa: ARG005
        )
        with pytest.raises(ValueError, match="there is no index at"):
            FairIndex(tmp_path / "nowhere").to_hf("someone/some-index")
        built.to_hf("someone/some-index")
        assert "- pyterrier-artifact.dense_index.fair_flex" in (hub / "README.md").read_text()
        assert '"package_hint": "fair-calibration"' in (hub / "README.md").read_text()
        loaded = pt.Artifact.from_hf("someone/some-index")
        assert type(loaded) is FairIndex
        assert loaded.path != built.path
        assert tree(loaded.path) == tree(built.path)
        pd.testing.assert_frame_equal(loaded.retriever(built.encoder)(topics), built.retriever()(topics))
        built.encoder.max_seq_length = 64
        with pytest.raises(DifferentEncoderError, match="max_seq_length"):
            loaded.retriever(built.encoder)


def flat(frame: pd.DataFrame) -> list[tuple[Any, ...]]:
    return list(frame[["qid", "docno", "docid", "score", "rank"]].itertuples(index=False, name=None))


class TestNumbersOfResults:
    """For one result and for none, pyterrier_dr's retrievers return arrays in place of values."""

    @pytest.fixture
    def expected(self, built: FairIndex, topics: pd.DataFrame) -> list[tuple[Any, ...]]:
        found = (built.encoder.query_encoder() >> built.flex().np_retriever())(topics)
        return flat(found[found["rank"] == 0])

    @pytest.mark.parametrize("kind", ["np_retriever", "torch_retriever"])
    @pytest.mark.parametrize("way", ["num_results", "cutoff", "compiled"])
    def test_one(
        self, built: FairIndex, topics: pd.DataFrame, expected: list[tuple[Any, ...]], kind: str, way: str
    ) -> None:
        one = {
            "num_results": lambda: built.retriever(kind=kind, num_results=1),
            "cutoff": lambda: built.retriever(kind=kind) % 1,
            "compiled": lambda: (built.retriever(kind=kind) % 1).compile(),
        }[way]()
        found = one(topics)
        for row, wanted in zip(flat(found), expected, strict=True):
            assert row == pytest.approx(wanted)
        assert all(type(docno) is str for docno in found["docno"])
        assert found["docid"].dtype.kind == "i"
        assert found["score"].dtype.kind == "f"
        assert one.search(topics["query"][0])["docno"].tolist() == [expected[0][1]]

    @pytest.mark.parametrize("kind", ["np_retriever", "torch_retriever"])
    def test_none(self, built: FairIndex, topics: pd.DataFrame, kind: str) -> None:
        some = built.retriever(kind=kind)(topics)
        for none in (
            built.retriever(kind=kind, num_results=0),
            built.retriever(kind=kind) % 0,
            (built.retriever(kind=kind) % 0).compile(),
        ):
            found = none(topics)
            assert len(found) == 0
            assert list(found.columns) == list(some.columns)

    def test_no_queries(self, built: FairIndex, topics: pd.DataFrame) -> None:
        found = built.retriever(num_results=1)(topics[:0])
        assert len(found) == 0
        assert {"docno", "score", "rank"} <= set(found.columns)

    @pytest.mark.parametrize("sizes", itertools.permutations([0, 1, 2, 5]))
    def test_of_different_sizes_in_one_batch(
        self, built: FairIndex, topics: pd.DataFrame, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As the retrievers of Faiss do, which leave out what they did not find."""

        def retriever(index: FlexIndex) -> pt.Transformer:
            docnos = index.docnos()

            def retrieve(queries: pd.DataFrame) -> pd.DataFrame:
                builder = DataFrameBuilder(["docno", "docid", "score", "rank"])
                for qid in queries["qid"]:
                    ids = np.arange(sizes[int(qid[1:])])
                    builder.extend({"docno": docnos.fwd[ids], "docid": ids, "score": -1.0 * ids, "rank": ids})
                return builder.to_df(queries)

            return pt.apply.generic(retrieve)

        monkeypatch.setattr(FlexIndex, "partial_retriever", retriever, raising=False)
        found = built.retriever(kind="partial_retriever")(topics[:4])
        expected = [(f"q{i}", DOCS[j]["docno"], j, -float(j), j) for i, n in enumerate(sizes) for j in range(n)]
        assert flat(found) == expected
        assert list(found.columns) == list(built.retriever()(topics[:4]).columns)
        assert [found[column].dtype.kind for column in ("docid", "score", "rank")] == ["i", "f", "i"]

    def test_in_an_experiment_and_before_get_text(
        self, built: FairIndex, topics: pd.DataFrame, qrels: pd.DataFrame
    ) -> None:
        texts = pt.apply.text(lambda row: TEXTS[int(row["docno"][1:])])
        one = built.retriever(num_results=1)
        systems = [one, built.retriever() % 1, one >> texts >> built.encoder]
        results = pt.Experiment(systems, topics, qrels, ["P_1"], names=["one", "cut", "reranked"])
        assert results["P_1"].nunique() == 1

    def test_equality_and_repr(self, built: FairIndex) -> None:
        assert built.retriever(num_results=1) == built.retriever(num_results=1)
        assert built.retriever(num_results=1) != built.retriever(num_results=2)
        assert "Retriever" in repr(built.retriever())
