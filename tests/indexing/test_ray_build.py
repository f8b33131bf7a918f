from __future__ import annotations

import ast
import errno
import json
import logging
import pickle
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import fair_indexing
from fair_calibration import FairSentenceTransformer
from fair_calibration.commands import main
from fair_calibration.identity import DifferentEncoderError
from fair_indexing import ray_build
from fair_indexing.builder import Build, build, finish_build
from fair_indexing.duplicates import DuplicateDocnoError
from fair_indexing.pending import SourceChangedError
from fair_indexing.ray_build import Worker, WorkerDiedError, _warn_of_too_little, build_on_ray
from fair_indexing.records import open_source
from fair_indexing.shards import IncompleteBuildError, ShardFolder
from tests.core.tiny_models import documents
from tests.indexing.faults import tree
from tests.indexing.ray_workers import CONFIG, load, load_with_fault

LENGTHS = [50, 12, 30, 90, 64, 21, 77, 41, 5, 33, 60]
DOCS = [{"docno": f"d{i}", "text": text} for i, text in enumerate(documents(LENGTHS))]
SIZE = 2  # five shards of 2 documents, one of 1
Loader = Callable[[], FairSentenceTransformer]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else a token is written to the home folder
        patch.setenv("RAY_worker_niceness", "0")  # else they wait for all other tests
        patch.setenv("OMP_NUM_THREADS", "1")
        ray.init(
            address="local", num_cpus=2, object_store_memory=200 * 2**20, include_dashboard=False, log_to_driver=False
        )
        yield ray
        ray.shutdown()


@pytest.fixture
def path(tiny_folder: Callable[..., Path]) -> str:
    return str(tiny_folder("bert", "mean"))


@pytest.fixture
def model(path: str) -> FairSentenceTransformer:
    return load(path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Returns a folder of a file of JSON lines and one of Parquet; a shard begins in one and ends in the other."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS[:5]))
    pq.write_table(pa.Table.from_pylist(DOCS[5:]), folder / "b.parquet", row_group_size=4)
    return folder


@pytest.fixture
def alone(model: FairSentenceTransformer, source: Path, tmp_path: Path) -> dict[str, bytes]:
    """Returns the files of a build without Ray."""
    build(model, source, tmp_path / "alone", shard_size=SIZE, show_progress_bar=False)
    return tree(tmp_path / "alone")


def run(load_model: Any, source: Any, folder: Path, **settings: Any) -> Build:
    return build_on_ray(load_model, source, folder, **{"shard_size": SIZE, "show_progress_bar": False, **settings})


@pytest.mark.usefixtures("cluster")
class TestOnRay:
    """Runs Ray; what follows does not, as every worker process takes seconds to start."""

    def test_a_worker_that_dies(self, path: str, source: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
        load_model = partial(load_with_fault, path, "kill", 4, tmp_path / "killed")
        done = run(load_model, source, tmp_path / "b", workers=2)
        assert (tmp_path / "killed").exists()
        assert tree(tmp_path / "b") == alone
        assert done.completion.documents == done.encoded == len(DOCS)
        assert run(load_model, source, tmp_path / "b").encoded == 0

    def test_a_part_whose_workers_die_again_and_again(
        self, path: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ray_build, "_ATTEMPTS", 2)
        with pytest.raises(WorkerDiedError, match="2 workers died while they encoded part 0 of 4; most often memory"):
            run(partial(load_with_fault, path, "kill", 0, tmp_path), source, tmp_path / "b", workers=1)
        assert build(load(path), source, tmp_path / "b", shard_size=SIZE).encoded == 4  # the folder is free

    def test_going_on_with_what_one_machine_began_and_the_other_way_round(
        self, path: str, model: FairSentenceTransformer, tmp_path: Path
    ) -> None:
        datasets.Dataset.from_list(DOCS).save_to_disk(str(tmp_path / "docs"))
        dataset = datasets.load_from_disk(str(tmp_path / "docs"))
        folder = tmp_path / "b"
        build(model, dataset, folder, shard_size=SIZE, show_progress_bar=False)
        alone = tree(folder)
        (folder / "complete.json").unlink()
        shards = folder / "shards"
        for start in (2, 4, 8):
            shutil.rmtree(shards / f"{start:012d}")
        (shards / f"{10:012d}" / "vectors.npy").write_bytes(b"damaged")
        kept = {start: (shards / f"{start:012d}").stat().st_ino for start in (0, 6)}

        with pytest.raises(OSError, match="No space left") as caught:
            run(partial(load_with_fault, path, "disk full", 8, tmp_path / "full"), dataset, folder, workers=1)
        assert caught.value.errno == errno.ENOSPC
        notes = " ".join(caught.value.__notes__)
        assert re.search(r"000000000008 .* In the worker on .*, in part 0 of 4", notes)
        assert 8 not in ShardFolder(folder).starts()
        assert {start: (shards / f"{start:012d}").stat().st_ino for start in kept} == kept
        with pytest.raises(IncompleteBuildError, match="not complete"):
            ShardFolder(folder).completion()

        done = build(model, dataset, folder, shard_size=SIZE, show_progress_bar=False)
        assert tree(folder) == alone
        assert done.encoded >= 2

    def test_what_cannot_be_indexed_is_refused_before_it_is_encoded(
        self, path: str, source: Path, tmp_path: Path
    ) -> None:
        with (source / "a.jsonl").open("a") as file:
            file.write(json.dumps(DOCS[7]) + "\n")
        with pytest.raises(DuplicateDocnoError, match=r"b.parquet, row 2: docno 'd7' is that of .*a.jsonl, line 6"):
            run(partial(load, path), source, tmp_path / "b")
        assert not (tmp_path / "b").exists()

    def test_other_settings_are_refused(self, path: str, source: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
        with pytest.raises(DifferentEncoderError, match=r"fair_config.strength: 0.8 there, 0.3 now"):
            run(partial(load, path), source, tmp_path / "alone", strength=0.3)
        assert tree(tmp_path / "alone") == alone


class TestWorker:
    def worker(self, load_model: Loader, source: Path, folder: Path) -> Worker:
        return Worker(
            load_model=load_model,
            source=source,
            folder=folder,
            fields={},
            as_checked={"name": str(source), "documents": len(DOCS), "rereadable": False},
            settings={"shard_size": SIZE},
        )

    def test_writes_what_a_build_writes(self, path: str, source: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
        loads = []

        def counted() -> FairSentenceTransformer:
            loads.append(1)
            return load(path)

        worker = self.worker(counted, source, tmp_path / "b")
        assert [worker.encode((i, 4)) for i in range(4)] == [4, 3, 2, 2]
        assert len(loads) == 1
        with pytest.raises(IncompleteBuildError):
            ShardFolder(tmp_path / "b").completion()
        finish_build(tmp_path / "b", open_source(source))
        assert tree(tmp_path / "b") == alone

    def test_refuses_other_weights_and_names_the_machine(self, path: str, source: Path, tmp_path: Path) -> None:
        self.worker(partial(load, path), source, tmp_path / "b").encode((0, 2))

        def other() -> FairSentenceTransformer:
            model = load(path)
            with torch.no_grad():
                next(iter(model.parameters()))[0, 0] += 1
            return model

        with pytest.raises(DifferentEncoderError, match="weights: ") as caught:
            self.worker(other, source, tmp_path / "b").encode((1, 2))
        assert caught.value.__notes__ == [f"In the worker on {socket.gethostname()}, in part 1 of 2."]
        assert ShardFolder(tmp_path / "b").starts() == [0, 4, 8]

    def test_refuses_a_source_that_has_changed(self, path: str, source: Path, tmp_path: Path) -> None:
        self.worker(partial(load, path), source, tmp_path / "b").encode((0, 2))
        file = source / "a.jsonl"
        file.write_text(file.read_text().replace(DOCS[0]["text"], DOCS[0]["text"][::-1]))
        with pytest.raises(SourceChangedError, match="the source has changed"):
            self.worker(partial(load, path), source, tmp_path / "b").encode((1, 2))


class TestArguments:
    def test_a_loaded_model(self, model: FairSentenceTransformer, source: Path, tmp_path: Path) -> None:
        for value in (model, "BAAI/bge-m3"):
            with pytest.raises(TypeError, match=r"load_model: expected a function .*functools.partial"):
                run(value, source, tmp_path / "b")

    def test_workers(self, path: str, source: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="workers: expected an integer of at least 1, got 0"):
            run(partial(load, path), source, tmp_path / "b", workers=0)

    def test_sources(self, path: str, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match="expected one that can be read twice, got list_iterator; write it to a"):
            run(partial(load, path), iter(DOCS), tmp_path / "b")
        with pytest.raises(FileNotFoundError, match="no such file"):
            run(partial(load, path), tmp_path / "docs.jsonl", tmp_path / "b")

    def test_a_cluster_that_is_too_small(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, logger="fair_indexing"):
            _warn_of_too_little({"CPU": 2.0}, {"num_cpus": 2, "num_gpus": 0.5})
        assert [record.getMessage() for record in caplog.records] == [
            "num_gpus: a worker needs 0.5, the cluster has 0: unless it grows, Ray waits forever"
        ]


class TestCommand:
    def test_build(self, path: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[Any, dict[str, Any]]] = []

        def fake(load_model: Any, *places: str, **settings: Any) -> Any:
            calls.append((load_model, {"places": places, **settings}))
            model = pickle.loads(pickle.dumps(load_model))()  # as a worker gets it
            return build(model, *places, shard_size=4, show_progress_bar=False)

        monkeypatch.setattr("fair_indexing.ray_build.build_on_ray", fake)
        command = ["build", path, str(source), str(tmp_path / "b"), "--config", CONFIG.to_json()]
        options = ["--max-seq-length", "40", "--shard-size", "4", "--quiet", "--no-resume"]
        assert main([*command, *options, "--ray", "3", "--gpus-per-worker", "0.5"]) == 0
        (_, settings), *_ = calls
        assert settings == {
            "places": (str(source), str(tmp_path / "b")),
            "workers": 3,
            "num_cpus": 1,
            "num_gpus": 0.5,
            "shard_size": 4,
            "resume": False,
            "docno_field": "docno",
            "text_field": "text",
            "model_name": path,
            "tokens_per_batch": None,
            "show_progress_bar": False,
        }
        encoder = ShardFolder(tmp_path / "b").manifest.encoder
        assert encoder.fair_config == CONFIG.to_dict()
        assert encoder.max_seq_length == 40

    def test_errors(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["build", "model", "docs.jsonl", "b", "--ray", "2", "--devices", "cuda:0", "cuda:1"]) == 2
        assert "--devices: with --ray every worker has one device" in capsys.readouterr().err


class TestRayItself:
    def test_is_imported_by_no_module(self) -> None:
        for file in Path(fair_indexing.__file__).parent.glob("*.py"):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                    assert not any(name.split(".")[0] == "ray" for name in names), file

    def test_missing(self, path: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(ImportError, match=r"pip install 'fair-calibration\[ray\]'"):
            run(partial(load, path), source, tmp_path / "b")
