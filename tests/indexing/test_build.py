from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fair_calibration import FairConfig, FairSentenceTransformer, calibrate
from fair_calibration.identity import DifferentEncoderError
from fair_indexing import builder, checkpoints, stream
from fair_indexing.assemble import assemble_npy
from fair_indexing.builder import Build, build
from fair_indexing.duplicates import DuplicateDocnoError
from fair_indexing.lock import FolderInUseError
from fair_indexing.pending import SourceChangedError
from fair_indexing.shards import IncompleteBuildError, ShardFolder
from fair_indexing.text_encoder import TextEncoder
from tests.conftest import TinyModel
from tests.core.tiny_models import documents
from tests.indexing.faults import disk_full, fault_at, tree
from tests.indexing.ray_workers import CONFIG

LENGTHS = [50, 12, 30, 90, 64, 21, 77, 41, 5, 33, 60]
DOCS = [{"docno": f"d{i}", "text": text} for i, text in enumerate(documents(LENGTHS))]
SIZE = 4  # shards of 4, 4 and 3 documents


def run(model: Any, folder: Path, source: Any = DOCS, **settings: Any) -> Build:
    return build(model, source, folder, **{"shard_size": SIZE, "show_progress_bar": False, **settings})


def stored(folder: Path) -> np.ndarray:
    return np.concatenate([shard.vectors for shard in ShardFolder(folder).read_all()])


def interrupted(model: Any, folder: Path, *, after: int) -> None:
    """Builds until so many documents were read."""

    def records() -> Iterator[dict[str, str]]:
        yield from DOCS[:after]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, folder, records())


class TestVectors:
    @pytest.mark.parametrize(("family", "pooling"), [("bert", "cls"), ("bert", "mean"), ("qwen3", "lasttoken")])
    def test_are_those_of_encode_document(
        self, tiny_model: TinyModel, tmp_path: Path, family: str, pooling: str
    ) -> None:
        model = calibrate(tiny_model(family, pooling), CONFIG)
        done = run(model, tmp_path / "b")
        expected = model.encode_document([doc["text"] for doc in DOCS], normalize_embeddings=True)
        assert np.abs(stored(tmp_path / "b") - expected).max() < 1e-6
        assert done.completion.documents == done.encoded == 11
        assert [d for names in done.shards.all_docnos() for d in names] == [doc["docno"] for doc in DOCS]

    def test_settings(self, model: FairSentenceTransformer, tmp_path: Path) -> None:
        run(model, tmp_path / "b", strength=0.25, normalize=False, tokens_per_batch=200)
        expected = model.encode_document([doc["text"] for doc in DOCS], strength=0.25)
        assert np.abs(stored(tmp_path / "b") - expected).max() < 1e-5
        record = ShardFolder(tmp_path / "b").manifest
        assert record.encoder.fair_config == replace(CONFIG, strength=0.25).to_dict()
        assert record.environment["tokens_per_batch"] == 200

    def test_a_plain_model(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        plain = tiny_model()
        run(plain, tmp_path / "b")
        expected = plain.encode_document([doc["text"] for doc in DOCS], normalize_embeddings=True)
        assert np.abs(stored(tmp_path / "b") - expected).max() < 1e-6

    def test_all_kinds_of_sources_give_the_same_bytes(self, model: FairSentenceTransformer, tmp_path: Path) -> None:
        path = tmp_path / "docs.jsonl"
        path.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
        shards = []
        for name, source in {"list": DOCS, "iterator": iter(DOCS), "file": path}.items():
            run(model, tmp_path / name, source)
            shards.append(tree(tmp_path / name / "shards"))
        assert shards[0] == shards[1] == shards[2]

    def test_long_texts_are_cut_into_parts_within_their_shard(
        self, model: FairSentenceTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run(model, tmp_path / "whole")
        monkeypatch.setattr(stream, "_WINDOW_CHARACTERS", 300)
        run(model, tmp_path / "parts")
        assert np.abs(stored(tmp_path / "parts") - stored(tmp_path / "whole")).max() < 1e-6
        interrupted(model, tmp_path / "resumed", after=9)
        run(model, tmp_path / "resumed")
        assert tree(tmp_path / "resumed" / "shards") == tree(tmp_path / "parts" / "shards")

    def test_one_document(self, model: FairSentenceTransformer, tmp_path: Path) -> None:
        assert run(model, tmp_path / "b", DOCS[:1]).completion.documents == 1

    def test_several_devices_are_the_pools(
        self,
        model: FairSentenceTransformer,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        class Pool(TextEncoder):
            def __init__(self, model: Any, devices: list[str], **settings: Any) -> None:
                super().__init__(model, **settings)
                self.devices = devices

            def __enter__(self) -> Pool:
                return self

            def __exit__(self, *_: object) -> None:
                ended.append(self.devices)

        ended: list[list[str]] = []
        monkeypatch.setattr(builder, "PoolEncoder", Pool)
        interrupted(model, tmp_path / "b", after=10)
        assert ShardFolder(tmp_path / "b").manifest.environment["device"] == "cpu"
        run(model, tmp_path / "b", devices=["cpu", "cpu"])
        assert "last bits may differ: device: 'cpu' there, 'pool of 2 cpu' now" in caplog.text
        run(model, tmp_path / "c", devices=["cpu", "cpu"])
        assert ended == [["cpu", "cpu"]] * 2
        assert ShardFolder(tmp_path / "c").manifest.environment["device"] == "pool of 2 cpu"
        assert ShardFolder(tmp_path / "b").completion().documents == 11


class TestResume:
    def test_ends_as_an_uninterrupted_run(self, model: FairSentenceTransformer, tmp_path: Path) -> None:
        run(model, tmp_path / "whole")
        interrupted(model, tmp_path / "b", after=10)
        there = ShardFolder(tmp_path / "b").starts()
        assert 0 in there
        assert 8 not in there
        done = run(model, tmp_path / "b")
        assert done.encoded == 11 - 4 * len(there)
        assert tree(tmp_path / "b" / "shards") == tree(tmp_path / "whole" / "shards")
        assert done.completion == ShardFolder(tmp_path / "whole").completion()

    def test_a_complete_build_stays(self, model: FairSentenceTransformer, tmp_path: Path) -> None:
        run(model, tmp_path / "b")
        before = tree(tmp_path / "b")
        done = run(model, tmp_path / "b", iter(DOCS))
        assert done.encoded == 0
        assert tree(tmp_path / "b") == before

    @pytest.mark.parametrize("name", ["vectors.npy", "docnos.json", "entry.json"])
    def test_damaged_shards_are_encoded_anew(
        self, model: FairSentenceTransformer, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        run(model, tmp_path / "b")
        before = tree(tmp_path / "b")
        path = tmp_path / "b" / "shards" / "000000000004" / name
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        assert run(model, tmp_path / "b").encoded == 4
        assert tree(tmp_path / "b") == before
        assert f"000000000004/{name}: the file is damaged" in caplog.text
        assert "its documents are encoded again" in caplog.text

    def test_can_be_refused(self, model: FairSentenceTransformer, tmp_path: Path) -> None:
        run(model, tmp_path / "b", resume=False)
        with pytest.raises(ValueError, match="holds a build; remove it, use another folder, or resume"):
            run(model, tmp_path / "b", resume=False)

    def test_other_settings_are_named(
        self, model: FairSentenceTransformer, tiny_model: TinyModel, tmp_path: Path
    ) -> None:
        interrupted(model, tmp_path / "b", after=10)
        before = tree(tmp_path / "b")
        other = calibrate(tiny_model(), FairConfig(strength=0.8, basket_size=16))
        other.max_seq_length = 64
        with torch.no_grad():
            next(iter(other.parameters()))[0, 0] += 1
        for changed, settings, lines in [
            (model, {"strength": 0.5}, ["fair_config.strength: 0.8 there, 0.5 now"]),
            (model, {"shard_size": 8}, ["shard_size: 4 there, 8 now"]),
            (model, {"normalize": False}, ["normalize: True there, False now"]),
            (other, {}, ["weights: ", "max_seq_length: 128 there, 64 now", "fair_config.basket_size: 8 there, 16 now"]),
            (tiny_model(), {}, ["fair_config: nothing there, None now"]),
        ]:
            with pytest.raises(DifferentEncoderError) as error:
                run(changed, tmp_path / "b", **settings)  # type: ignore[arg-type]
            for line in lines:
                assert line in str(error.value)
        assert tree(tmp_path / "b") == before

    def test_another_environment_is_said(
        self, model: FairSentenceTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        interrupted(model, tmp_path / "b", after=10)
        run(model, tmp_path / "b", tokens_per_batch=100)  # as after running out of memory
        assert "last bits may differ: tokens_per_batch: " in caplog.text

    def test_without_a_shard_other_settings_are_taken(
        self, model: FairSentenceTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with pytest.raises(ValueError, match="text is missing"):
            run(model, tmp_path / "b", iter([{"docno": "d0", "text": None}]))
        assert ShardFolder(tmp_path / "b").starts() == []
        with pytest.raises(ValueError, match="holds a build; remove it"):
            run(model, tmp_path / "b", resume=False)
        run(model, tmp_path / "b", strength=0.25, shard_size=5, tokens_per_batch=99)
        run(model, tmp_path / "whole", strength=0.25, shard_size=5, tokens_per_batch=99)
        assert tree(tmp_path / "b") == tree(tmp_path / "whole")
        assert "last bits" not in caplog.text


class TestChangedSources:
    CHANGES = {
        "docnos": [*DOCS[:5], {**DOCS[5], "docno": "x"}, *DOCS[6:]],
        "texts": [*DOCS[:5], {**DOCS[5], "text": "x"}, *DOCS[6:]],
        "docnos and texts": [*DOCS[:5], DOCS[6], DOCS[5], *DOCS[7:]],
    }

    @pytest.mark.parametrize("changed", CHANGES)
    @pytest.mark.parametrize("make", [list, iter])
    def test_are_refused(self, model: FairSentenceTransformer, tmp_path: Path, changed: str, make: Any) -> None:
        run(model, tmp_path / "b")
        with pytest.raises(
            SourceChangedError, match=rf"the source has changed|: {changed} from .* 4 to .* 7 are not"
        ) as e:
            run(model, tmp_path / "b", make(self.CHANGES[changed]))
        assert str(e.value).startswith(f"source: {changed} from {make(DOCS).__class__.__name__}, record 4 to ")

    def test_shorter_ones(self, model: FairSentenceTransformer, tmp_path: Path) -> None:
        run(model, tmp_path / "b")
        with pytest.raises(SourceChangedError, match="list has 8 documents, but those from number 8 on were encoded"):
            run(model, tmp_path / "b", DOCS[:8])
        with pytest.raises(SourceChangedError, match=r"the 2 documents \(there were 3\) from list, record 8 to"):
            run(model, tmp_path / "b", DOCS[:10])

    def test_longer_ones(self, model: FairSentenceTransformer, tmp_path: Path) -> None:
        run(model, tmp_path / "b")
        more = [*DOCS, {"docno": "d11", "text": "x"}]
        with pytest.raises(SourceChangedError, match=r"the 4 documents \(there were 3\) from list, record 8 to"):
            run(model, tmp_path / "b", more)

    @pytest.mark.parametrize("make", [list, iter])
    def test_longer_ones_of_whole_shards_are_gone_on_with(
        self, model: FairSentenceTransformer, tmp_path: Path, make: Any
    ) -> None:
        run(model, tmp_path / "b", DOCS[:8])
        assert ShardFolder(tmp_path / "b").manifest.source["documents"] == 8
        assert run(model, tmp_path / "b", make(DOCS)).encoded == 3
        run(model, tmp_path / "whole")
        assert tree(tmp_path / "b") == tree(tmp_path / "whole")

    def test_a_longer_one_that_ends_before_its_first_shard_is_not_complete(
        self, model: FairSentenceTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run(model, tmp_path / "b", DOCS[:8])
        monkeypatch.setattr(ShardFolder, "write", lambda *_, **__: disk_full())
        with pytest.raises(OSError, match="No space left"):
            run(model, tmp_path / "b")
        assert ShardFolder(tmp_path / "b").manifest.source["documents"] == 11
        with pytest.raises(IncompleteBuildError, match="2 of 3 shards exist"):
            ShardFolder(tmp_path / "b").completion()

    def test_a_longer_one_that_ends_early_is_not_complete(self, model: FairSentenceTransformer, tmp_path: Path) -> None:
        more = [*DOCS, *({**doc, "docno": f"more {doc['docno']}"} for doc in DOCS)]

        def records() -> Iterator[dict[str, str]]:
            yield from more[:20]
            raise KeyboardInterrupt

        run(model, tmp_path / "b", DOCS[:8])
        with pytest.raises(KeyboardInterrupt):
            run(model, tmp_path / "b", records())
        assert max(ShardFolder(tmp_path / "b").starts()) >= 8
        assert ShardFolder(tmp_path / "b").manifest.source["documents"] is None
        with pytest.raises(IncompleteBuildError, match="the build is not complete"):
            assemble_npy(tmp_path / "b", tmp_path / "npy")
        assert not (tmp_path / "npy").exists()
        assert run(model, tmp_path / "b", more).completion.documents == 22
        assert ShardFolder(tmp_path / "b").manifest.source["documents"] == 22


class TestBadSources:
    @pytest.mark.parametrize("source", [[], iter([])])
    def test_no_documents(self, model: FairSentenceTransformer, tmp_path: Path, source: Any) -> None:
        with pytest.raises(ValueError, match=r"source: expected at least 1 document, list.* has 0"):
            run(model, tmp_path / "b", source)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("bad", "error"),
        [({"docno": 7, "text": ""}, TypeError), ({"docno": "x", "text": None}, ValueError), (DOCS[0], ValueError)],
    )
    def test_records_are_checked_before_anything_is_encoded(
        self, model: FairSentenceTransformer, tmp_path: Path, bad: Any, error: type[Exception]
    ) -> None:
        with pytest.raises(error, match="list, record 11"):
            run(model, tmp_path / "b", [*DOCS, bad])
        assert list(tmp_path.iterdir()) == []
        assert model.counts.calibrated == 0

    def test_what_was_encoded_before_a_bad_record_of_a_stream_stays(
        self, model: FairSentenceTransformer, tmp_path: Path
    ) -> None:
        with pytest.raises(DuplicateDocnoError, match="record 11: docno 'd0' is that of list_iterator, record 0"):
            run(model, tmp_path / "b", iter([*DOCS, DOCS[0]]))
        assert ShardFolder(tmp_path / "b").starts()[:1] == [0]
        run(model, tmp_path / "b", iter(DOCS))

    def test_other_folders(self, model: FairSentenceTransformer, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("")
        with pytest.raises(ValueError, match=r"expected an empty or a new one, .* holds \['thesis.tex'\]"):
            run(model, tmp_path)


class TestFaults:
    def test_an_error_that_is_kept_keeps_no_thread(
        self, model: FairSentenceTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = set(threading.enumerate())
        failed = threading.Event()

        def fail(*_: Any, **__: Any) -> None:
            failed.set()
            disk_full()

        monkeypatch.setattr(ShardFolder, "write", fail)
        prepare = TextEncoder.prepare
        prepared: list[int] = []

        def slow(self: TextEncoder, texts: Any, names: Any) -> Any:
            prepared.append(len(texts))
            if len(prepared) == 3:  # the error comes meanwhile
                failed.wait()
            return prepare(self, texts, names)

        monkeypatch.setattr(TextEncoder, "prepare", slow)
        with pytest.raises(OSError, match="No space left") as kept:
            run(model, tmp_path / "b")
        assert kept.value.__traceback__ is not None
        assert len(prepared) == 3
        assert set(threading.enumerate()) <= before

    def test_a_full_disk_at_every_operation(
        self,
        model: FairSentenceTransformer,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        caplog.set_level(logging.CRITICAL)
        monkeypatch.setattr(checkpoints, "INTERVAL", float("inf"))  # else a slow machine would write some
        with fault_at(None, disk_full) as moments:
            run(model, tmp_path / "whole")
        whole = tree(tmp_path / "whole")
        assert moments.count == 4 + 3 * 9 + 4
        for moment in range(moments.count):
            folder = tmp_path / f"b{moment}"
            with pytest.raises(OSError, match="No space left"), fault_at(moment, disk_full):
                run(model, folder)
            if ShardFolder.exists(folder):
                shards = ShardFolder(folder)
                assert shards.verify()[1] == []  # what is there is whole
                if (folder / "complete.json").exists():
                    assert moment == moments.count - 1  # the sync of the folder after the rename
            run(model, folder)
            assert tree(folder) == whole

    def test_two_at_one_time(self, model: FairSentenceTransformer, tmp_path: Path) -> None:
        began, go_on = threading.Event(), threading.Event()

        def slow() -> Iterator[dict[str, str]]:
            yield DOCS[0]
            began.set()
            go_on.wait()
            yield from DOCS[1:]

        thread = threading.Thread(target=run, args=(model, tmp_path / "b", slow()))
        thread.start()
        try:
            began.wait()
            with pytest.raises(FolderInUseError, match="is being written by process"):
                run(model, tmp_path / "b")
        finally:
            go_on.set()
            thread.join()
        assert run(model, tmp_path / "b").encoded == 0

    def test_vectors_that_are_not_finite(self, model: FairSentenceTransformer, tmp_path: Path) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        with pytest.raises(ValueError, match="finite"):
            run(model, tmp_path / "b")
        assert ShardFolder(tmp_path / "b").starts() == []


def test_memory_is_bounded_by_the_shard(
    model: FairSentenceTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents are read no further ahead of those written than the shards at work: tokenized, encoded, written."""
    n_read, ahead = 0, []

    def records() -> Iterator[dict[str, str]]:
        nonlocal n_read
        for i in range(40):
            n_read += 1
            yield {"docno": str(i), "text": "ba da ga"}

    real = ShardFolder.write

    def write(self: ShardFolder, start: int, *args: Any, **kwargs: Any) -> Any:
        ahead.append(n_read - start)
        return real(self, start, *args, **kwargs)

    monkeypatch.setattr(ShardFolder, "write", write)
    run(model, tmp_path / "b", records(), shard_size=2)
    assert len(ahead) == 20
    assert max(ahead) <= 4 * 2
