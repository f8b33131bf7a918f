"""What an interruption within a shard keeps."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fair_calibration import FairSentenceTransformer
from fair_indexing import checkpoints, stream
from fair_indexing.builder import build
from fair_indexing.checkpoints import Checkpoint, count_checkpointed
from fair_indexing.shards import ShardFolder
from tests.core.tiny_models import documents
from tests.indexing.faults import tree

DOCS = [{"docno": f"d{i}", "text": text} for i, text in enumerate(documents([50, 12, 30, 90, 64, 21, 77, 41, 5, 33]))]
SETTINGS: dict[str, Any] = {"tokens_per_batch": 100, "show_progress_bar": False}  # a batch is one to five documents


class Passes:
    """Counts the documents of forward passes, and raises an error or sends a signal at one of them."""

    def __init__(self, model: FairSentenceTransformer) -> None:
        self.documents: list[int] = []
        self.stop_at: int | None = None
        self.stop: Any = KeyboardInterrupt
        model.register_forward_pre_hook(self._record)

    def _record(self, _module: torch.nn.Module, args: tuple[dict[str, torch.Tensor]]) -> None:
        if len(self.documents) == self.stop_at:
            if isinstance(self.stop, signal.Signals):
                os.kill(os.getpid(), self.stop)
            raise self.stop
        self.documents.append(len(args[0]["input_ids"]))


@pytest.mark.parametrize("cut", [None, 150])  # the shard in one part, and in several parts of so many characters
def test_an_interrupted_shard_resumes_behind_its_last_batch(
    model: FairSentenceTransformer, tmp_path: Path, cut: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cut is not None:
        monkeypatch.setattr(stream, "_WINDOW_CHARACTERS", cut)
    build(model, DOCS, tmp_path / "whole", **SETTINGS)
    passes = Passes(model)
    passes.stop_at = 3
    with pytest.raises(KeyboardInterrupt) as interrupt:
        build(model, DOCS, tmp_path / "b", **SETTINGS)
    n = sum(passes.documents)
    assert interrupt.value.__notes__ == [f"{n} of 10 documents are kept in {tmp_path / 'b'}; the same command resumes"]
    assert ShardFolder(tmp_path / "b").starts() == []
    passes.stop_at = None
    build(model, DOCS, tmp_path / "b", **SETTINGS)
    assert sum(passes.documents) == len(DOCS)
    assert tree(tmp_path / "b") == tree(tmp_path / "whole")


def test_a_killed_shard_resumes_behind_the_last_checkpoint(
    model: FairSentenceTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "INTERVAL", 0)
    build(model, DOCS, tmp_path / "whole", **SETTINGS)
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        passes = Passes(model)
        passes.stop_at, passes.stop = 3, signal.SIGKILL
        build(model, DOCS, tmp_path / "b", **SETTINGS)
        os._exit(0)  # not reached
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    n = count_checkpointed(tmp_path / "b")
    assert n >= 3
    passes = Passes(model)
    build(model, DOCS, tmp_path / "b", **SETTINGS)
    assert sum(passes.documents) == len(DOCS) - n
    assert tree(tmp_path / "b").keys() == tree(tmp_path / "whole").keys()


@pytest.mark.parametrize("change", ["texts", "settings", "damage"])
def test_checkpoints_of_other_vectors_are_not_used(model: FairSentenceTransformer, tmp_path: Path, change: str) -> None:
    passes = Passes(model)
    passes.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        build(model, DOCS, tmp_path / "b", **SETTINGS)
    passes.documents, passes.stop_at = [], None
    docs, settings = DOCS, dict(SETTINGS)
    if change == "texts":
        docs = [{**doc, "text": doc["text"][::-1]} for doc in DOCS]
    elif change == "settings":
        settings["strength"] = 0.3
    else:
        for path in (tmp_path / "b" / "unfinished").rglob("*.npy"):
            path.write_bytes(path.read_bytes()[:-1])
    build(model, docs, tmp_path / "b", **settings)
    assert sum(passes.documents) == len(DOCS)
    build(model, docs, tmp_path / "whole", **settings)
    assert tree(tmp_path / "b") == tree(tmp_path / "whole")


def test_checkpoints_are_written_by_time_and_without_values_that_are_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a", "b", "c"]
    checkpoint = Checkpoint(tmp_path, 4, texts)
    checkpoint.add([2], torch.ones(1, 2))
    assert Checkpoint(tmp_path, 4, texts).get([2]) is None  # it is too early
    monkeypatch.setattr(checkpoints, "INTERVAL", 0)
    checkpoint.add([1, 0], torch.full((2, 2), torch.nan))
    again = Checkpoint(tmp_path, 4, texts)
    assert np.array_equal(again.get([2]), np.ones((1, 2)))  # type: ignore[arg-type]
    assert again.get([1, 0]) is None
    assert Checkpoint(tmp_path, 0, texts).get([2]) is None
    record = next(tmp_path.rglob("batches.json"))
    assert json.loads(record.read_text())["batches"] == [[2]]


def test_resuming_reads_the_shard_size_from_the_folder(model: FairSentenceTransformer, tmp_path: Path) -> None:
    build(model, DOCS, tmp_path / "b", shard_size=4, **SETTINGS)
    assert build(model, DOCS, tmp_path / "b", **SETTINGS).encoded == 0
