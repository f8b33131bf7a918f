"""Builds whose parts are encoded by several processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fair_calibration import FairSentenceTransformer, calibrate
from fair_calibration.identity import DifferentEncoderError
from fair_indexing import checkpoints
from fair_indexing.builder import Build, build, finish_build
from fair_indexing.lock import FolderInUseError, locked
from fair_indexing.pending import SourceChangedError
from fair_indexing.records import open_source
from fair_indexing.shards import IncompleteBuildError, ShardFolder
from tests.conftest import TinyModel
from tests.core.tiny_models import documents
from tests.indexing.faults import tree
from tests.indexing.ray_workers import CONFIG

DOCS = [{"docno": f"d{i}", "text": text} for i, text in enumerate(documents([50, 12, 30, 90, 64, 21, 77, 41, 5]))]
SIZE = 2  # four shards of 2 documents, one of 1


def run(model: Any, folder: Path, source: Any = DOCS, **settings: Any) -> Build:
    return build(model, source, folder, **{"shard_size": SIZE, "show_progress_bar": False, **settings})


@pytest.mark.parametrize("make", [list, iter])
def test_the_parts_are_the_build(model: FairSentenceTransformer, tmp_path: Path, make: Callable[[Any], Any]) -> None:
    run(model, tmp_path / "whole", make(DOCS))
    folder = tmp_path / "b"
    assert [run(model, folder, make(DOCS), part=(i, 3)).encoded for i in (2, 0)] == [2, 4]
    assert ShardFolder(folder).starts() == [0, 4, 6]
    assert run(model, folder, make(DOCS), part=(1, 3))[1:] == (None, 3)
    with pytest.raises(IncompleteBuildError, match="the build is not complete"):
        ShardFolder(folder).completion()
    done = run(model, folder, make(DOCS))
    assert done.encoded == 0
    assert done.completion is not None
    assert tree(folder) == tree(tmp_path / "whole")
    assert run(model, folder, make(DOCS), part=(1, 2)).encoded == 0
    assert tree(folder) == tree(tmp_path / "whole")


def test_a_whole_build_encodes_what_the_parts_have_not(model: FairSentenceTransformer, tmp_path: Path) -> None:
    run(model, tmp_path / "whole")
    run(model, tmp_path / "b", part=(1, 2))
    assert run(model, tmp_path / "b").encoded == 5
    assert tree(tmp_path / "b") == tree(tmp_path / "whole")


def test_parts_at_the_same_time(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Processes that begin together in a folder that does not exist."""
    pids = []
    for i in range(4):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                torch.set_num_threads(1)
                model = FairSentenceTransformer(str(tiny_folder()), config=CONFIG, device="cpu")
                run(model, tmp_path / "b", part=(i, 4))
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    finish_build(tmp_path / "b", open_source(DOCS))
    model = FairSentenceTransformer(str(tiny_folder()), config=CONFIG, device="cpu")
    run(model, tmp_path / "whole")
    assert tree(tmp_path / "b").keys() == tree(tmp_path / "whole").keys()
    assert run(model, tmp_path / "b").encoded == 0


class Waiting:
    """A stream of documents that waits after the first one."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[dict[str, str]]:
        yield DOCS[0]
        self.began.set()
        self.go_on.wait()
        yield from DOCS[1:]


def test_who_may_write_beside_a_part(model: FairSentenceTransformer, tiny_model: TinyModel, tmp_path: Path) -> None:
    folder, source = tmp_path / "b", Waiting()
    temporary = folder / "shards" / f".{0:012d}~host-1-ab.tmp"
    own = folder / "shards" / f".{2:012d}~host-1-ab.tmp"
    with ThreadPoolExecutor() as threads:
        first = threads.submit(run, model, folder, source, part=(0, 2))
        try:
            source.began.wait()
            for part in (None, (0, 2), (1, 3)):
                with pytest.raises(FolderInUseError, match=f"being written by process {os.getpid()} on"):
                    run(model, folder, part=part)
            with pytest.raises(DifferentEncoderError, match=r"fair_config.strength: 0.8 there, 0.3 now"):
                run(model, folder, part=(1, 2), strength=0.3)  # though there is no shard yet
            temporary.mkdir(parents=True)
            own.mkdir()
            other = calibrate(tiny_model(), CONFIG)
            assert run(other, folder, part=(1, 2)).encoded == 4
            assert temporary.exists()  # it may be the other part's
            assert not own.exists()
        finally:
            source.go_on.set()
        assert first.result().encoded == 5
    run(model, folder)
    assert not temporary.exists()
    run(model, tmp_path / "whole")
    assert tree(folder / "shards") == tree(tmp_path / "whole" / "shards")


def test_a_whole_build_keeps_parts_out(model: FairSentenceTransformer, tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(FolderInUseError, match="is being written by process"):
        run(model, tmp_path, part=(0, 2))


def test_a_killed_part_resumes_behind_its_last_checkpoint(
    model: FairSentenceTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoints, "INTERVAL", 0)
    settings = {"shard_size": 5, "tokens_per_batch": 100}
    run(model, tmp_path / "whole", **settings)
    folder = tmp_path / "b"
    passes: list[int] = []

    def count(_: Any, args: tuple[dict[str, Any]]) -> None:
        if kill_at == len(passes):
            os.kill(os.getpid(), signal.SIGKILL)
        passes.append(len(args[0]["input_ids"]))

    kill_at = 2
    model.register_forward_pre_hook(count)
    if (pid := os.fork()) == 0:
        torch.set_num_threads(1)
        run(model, folder, part=(0, 2), **settings)
        os._exit(0)  # not reached
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    kill_at = -1
    n = checkpoints.count_checkpointed(folder)
    assert n >= 2
    assert run(model, folder, part=(1, 2), **settings).encoded == 4
    assert checkpoints.count_checkpointed(folder) == n  # those of the other part stay
    passes.clear()
    assert run(model, folder, part=(0, 2), **settings).encoded == 5
    assert sum(passes) == 5 - n
    assert f"resuming after process {pid} on" in caplog.text
    run(model, folder, **settings)
    assert tree(folder).keys() == tree(tmp_path / "whole").keys()


class TestChecks:
    def test_another_source(self, model: FairSentenceTransformer, tmp_path: Path) -> None:
        run(model, tmp_path / "b", part=(0, 2))
        changed = [{**DOCS[0], "text": "x"}, *DOCS[1:]]
        for make in (list, iter):
            with pytest.raises(SourceChangedError, match="the source has changed"):
                run(model, tmp_path / "b", make(changed), part=(1, 2))
        with pytest.raises(SourceChangedError, match="has 2 documents, but those from number 4 on were encoded"):
            run(model, tmp_path / "b", DOCS[:2], part=(1, 2))

    def test_other_settings(self, model: FairSentenceTransformer, tmp_path: Path) -> None:
        run(model, tmp_path / "b", part=(0, 2))
        with pytest.raises(DifferentEncoderError, match=r"fair_config.strength: 0.8 there, 0.3 now"):
            run(model, tmp_path / "b", part=(1, 2), strength=0.3)

    def test_damaged_shards_are_encoded_again_by_their_part(
        self, model: FairSentenceTransformer, tmp_path: Path
    ) -> None:
        run(model, tmp_path / "b")
        whole = tree(tmp_path / "b")
        (tmp_path / "b" / "shards" / f"{2:012d}" / "entry.json").write_bytes(b"damaged")
        assert run(model, tmp_path / "b", part=(0, 2)).encoded == 0
        assert run(model, tmp_path / "b", part=(1, 2)).encoded == 2
        with pytest.raises(IncompleteBuildError, match="not complete"):
            ShardFolder(tmp_path / "b").completion()
        run(model, tmp_path / "b")
        assert tree(tmp_path / "b") == whole

    def test_finishing_names_what_is_missing(
        self, model: FairSentenceTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        run(model, tmp_path / "b")
        whole = tree(tmp_path / "b")
        (tmp_path / "b" / "shards" / f"{2:012d}" / "vectors.npy").write_bytes(b"damaged")
        with pytest.raises(IncompleteBuildError, match=r"1 shards \(those of document 2\) missing of 5"):
            finish_build(tmp_path / "b", open_source(DOCS))
        assert "vectors.npy: the file is damaged" in caplog.text
        with pytest.raises(SourceChangedError, match="has 8 documents"):
            finish_build(tmp_path / "b", open_source(DOCS[:8]))
        run(model, tmp_path / "b", part=(1, 2))
        assert finish_build(tmp_path / "b", open_source(DOCS)).documents == len(DOCS)
        assert tree(tmp_path / "b") == whole

    def test_a_bad_record_leaves_no_folder(self, model: FairSentenceTransformer, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="text is missing"):
            run(model, tmp_path / "b", [*DOCS, {"docno": "x", "text": None}], part=(0, 2))
        assert not (tmp_path / "b").exists()

    @pytest.mark.parametrize("part", [(2, 2), (-1, 2), (0, 0), 1, (1,), (0.0, 2), "0/2"])
    def test_parts_that_do_not_exist(self, model: FairSentenceTransformer, tmp_path: Path, part: Any) -> None:
        with pytest.raises(ValueError, match=r"part: expected \(i, n\) with 0 <= i < n, such as \(0, 4\), got"):
            run(model, tmp_path / "b", part=part)

    def test_refusing_to_resume(self, model: FairSentenceTransformer, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="resume: parts share the build in the folder"):
            run(model, tmp_path / "b", part=(0, 2), resume=False)
