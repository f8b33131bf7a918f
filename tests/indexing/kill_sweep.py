"""Kills builds with SIGKILL at every file operation, resumes them, and compares the results. Run by test_kill.py.

Arguments: the folder of a tiny model and an empty folder. Prints one line of JSON.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fair_calibration import FairConfig, FairSentenceTransformer
from fair_indexing import checkpoints
from fair_indexing.builder import Build, build
from fair_indexing.lock import FolderInUseError
from fair_indexing.shards import IncompleteBuildError, ShardFolder
from tests.core.tiny_models import documents
from tests.indexing.faults import fault_at, kill, tree

DOCS = [{"docno": f"d{i}", "text": text} for i, text in enumerate(documents([50, 12, 30, 90, 64]))]
SIZE = 3  # shards of 3 and 2 documents


def run_killed(run: Callable[[], object], moment: int) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            with fault_at(moment, kill):
                run()
        finally:
            os._exit(0)  # not reached
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), status
    assert os.WTERMSIG(status) == signal.SIGKILL, status


def sweep_build(model_folder: str, root: Path) -> dict[str, int]:
    model = FairSentenceTransformer(model_folder, config=FairConfig(strength=0.8, basket_size=8), device="cpu")

    def run(folder: Path) -> object:
        return build(model, DOCS, folder, shard_size=SIZE, show_progress_bar=False)

    with fault_at(None, kill) as moments:
        run(root / "whole")
    whole, n_kept = tree(root / "whole"), 0
    folder = root / "killed"
    for moment in range(moments.count):
        run_killed(lambda: run(folder), moment)
        if ShardFolder.exists(folder):
            shards = ShardFolder(folder)
            entries, damaged = shards.verify()
            assert damaged == [], (moment, damaged)
            n_kept += len(entries)
            try:
                shards.completion()
                assert tree(folder) == whole, moment
            except IncompleteBuildError:
                pass
        run(folder)
        assert tree(folder) == whole, moment
        shutil.rmtree(folder)
    return {"moments": moments.count, "kept": n_kept}


def sweep_index(model_folder: str, root: Path) -> dict[str, int]:
    from pyterrier_fair import FairBiEncoder, FairIndex

    encoder = FairBiEncoder(model_folder, strength=0.8, basket_size=8, device="cpu")

    def run(path: Path) -> object:
        return FairIndex(path, encoder, shard_size=SIZE).index(DOCS)

    with fault_at(None, kill) as moments:
        run(root / "whole")
    whole, n_whole = tree(root / "whole"), 0
    path, work = root / "killed", root / "killed.build"
    # Those of the build itself are swept above: the last one of it, and those of the assembly and the tidying up.
    for moment in range(moments.count - 25, moments.count):
        run_killed(lambda: run(path), moment)
        if path.exists():
            n_whole += 1
            assert tree(path) == whole, moment
        if path.exists() and not work.exists():
            continue  # killed in the last step of tidying up
        try:
            run(path)
        except ValueError as error:
            if "exists; remove it to index anew" not in str(error) or not path.exists():
                raise
        assert tree(path) == whole, moment
        assert [p.name for p in root.glob("*killed*")] == ["killed"], moment
        shutil.rmtree(path)
    return {"moments": moments.count, "whole": n_whole}


def kill_while_encoding(model_folder: str, root: Path) -> dict[str, int]:
    """Kills a build from outside that waits for its source, while another one wants the folder."""
    model = FairSentenceTransformer(model_folder, config=FairConfig(strength=0.8, basket_size=8), device="cpu")
    read, write = os.pipe()

    docs = [*DOCS, *({**doc, "docno": f"more-{doc['docno']}"} for doc in DOCS)]

    def blocked() -> Iterator[dict[str, str]]:
        yield from docs[: 2 * SIZE + 1]
        while not (root / "killed" / "shards" / "000000000000").exists():
            time.sleep(0.01)  # it is being written by another thread
        os.write(write, b"x")
        signal.pause()

    def run(source: object, folder: str = "killed") -> Build:
        return build(model, source, root / folder, shard_size=SIZE, show_progress_bar=False)

    pid = os.fork()
    if pid == 0:
        try:
            run(blocked())
        finally:
            os._exit(0)  # not reached
    assert os.read(read, 1) == b"x"
    try:
        run(docs)
    except FolderInUseError as error:
        named = f"process {pid} on" in str(error)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    encoded = run(docs).encoded
    run(docs, "uninterrupted")
    assert tree(root / "killed" / "shards") == tree(root / "uninterrupted" / "shards")
    return {"named": named, "encoded": encoded}


def main(model_folder: str, root: Path) -> None:
    results = {}
    for run in (sweep_build, kill_while_encoding, sweep_index):
        results[run.__name__] = run(model_folder, root)
        if run is not sweep_build:
            shutil.rmtree(root)
            root.mkdir()
    print(json.dumps(results))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    checkpoints.INTERVAL = float("inf")  # else a slow machine would write some
    main(sys.argv[1], Path(sys.argv[2]))
