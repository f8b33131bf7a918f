from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from npids import Lookup
from pyterrier_dr import FlexIndex

from fair_indexing.assemble import RECORD, assemble_flex, assemble_npy, read_manifest
from fair_indexing.files import DamagedFileError
from fair_indexing.shards import IncompleteBuildError, ShardFolder
from tests.indexing.faults import disk_full, fault_at, tree
from tests.indexing.manifests import docnos, manifest, texts, vectors

N = 10
VECTORS = np.concatenate([vectors(min(4, N - start), start) for start in range(0, N, 4)])


@pytest.fixture
def incomplete(tmp_path: Path) -> ShardFolder:
    shards = ShardFolder.create(tmp_path / "build", manifest())
    for start in range(0, N, 4):
        n = min(4, N - start)
        shards.write(start, docnos(n, start), vectors(n, start), texts=texts(n, start))
    return shards


@pytest.fixture
def complete(incomplete: ShardFolder) -> ShardFolder:
    incomplete.finish(N)
    return incomplete


def test_flex_is_what_flex_index_writes(complete: ShardFolder, tmp_path: Path) -> None:
    assert assemble_flex(complete.folder, tmp_path / "ours") == tmp_path / "ours"
    records = [{"docno": docno, "doc_vec": vector} for docno, vector in zip(docnos(N), VECTORS, strict=True)]
    FlexIndex(str(tmp_path / "theirs"), verbose=False).index(records)
    ours, theirs = tree(tmp_path / "ours"), tree(tmp_path / "theirs")
    ours.pop(RECORD)
    assert ours == theirs


def test_flex_is_opened_by_flex_index(complete: ShardFolder, tmp_path: Path) -> None:
    assemble_flex(complete, tmp_path / "flex")
    index = FlexIndex(str(tmp_path / "flex"))
    found, stored, meta = index.payload()
    assert list(found) == docnos(N)
    assert np.array_equal(stored, VECTORS)
    assert meta["doc_count"] == len(index) == N


def test_npy(complete: ShardFolder, tmp_path: Path) -> None:
    assemble_npy(complete, tmp_path / "npy")
    assert np.array_equal(np.load(tmp_path / "npy" / "vectors.npy", mmap_mode="r"), VECTORS)
    assert [json.loads(line) for line in (tmp_path / "npy" / "docnos.jsonl").open()] == docnos(N)


@pytest.mark.parametrize("assemble", [assemble_flex, assemble_npy])
class TestAll:
    def test_the_encoder_is_recorded(
        self, complete: ShardFolder, tmp_path: Path, assemble: Callable[..., Path]
    ) -> None:
        assemble(complete, tmp_path / "out")
        assert read_manifest(tmp_path / "out") == manifest()

    def test_incomplete_builds_are_refused(
        self, incomplete: ShardFolder, tmp_path: Path, assemble: Callable[..., Path]
    ) -> None:
        with pytest.raises(IncompleteBuildError, match="the build is not complete, 3 of 3 shards exist"):
            assemble(incomplete, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["build"]

    def test_damaged_builds_are_refused(
        self, complete: ShardFolder, tmp_path: Path, assemble: Callable[..., Path]
    ) -> None:
        path = complete.folder / "shards" / "000000000004" / "vectors.npy"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(DamagedFileError, match=r"000000000004/vectors.npy: the file is damaged"):
            assemble(complete, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["build"]

    def test_what_is_there_stays(self, complete: ShardFolder, tmp_path: Path, assemble: Callable[..., Path]) -> None:
        (tmp_path / "out").mkdir()
        with pytest.raises(ValueError, match=r"out: expected a new folder, .* exists"):
            assemble(complete, tmp_path / "out")

    def test_a_full_disk_at_every_operation(
        self, complete: ShardFolder, tmp_path: Path, assemble: Callable[..., Path]
    ) -> None:
        with fault_at(None, disk_full) as moments:
            assemble(complete, tmp_path / "whole")
        whole = tree(tmp_path / "whole")
        for moment in range(moments.count - 1):  # the last one is the sync of the folder after the rename
            out = tmp_path / f"out{moment}"
            with pytest.raises(OSError, match="No space left"), fault_at(moment, disk_full):
                assemble(complete, out)
            assert not out.exists()
            assert list(tmp_path.glob(".*")) == []
        assemble(complete, tmp_path / "again")
        assert tree(tmp_path / "again") == whole


def test_a_single_document_is_none_for_flex(tmp_path: Path) -> None:
    shards = ShardFolder.create(tmp_path / "build", manifest())
    shards.write(0, ["d0"], vectors(1), texts=["x"])
    shards.finish(1)
    with pytest.raises(ValueError, match=r"expected at least 2 documents, .* has 1; a FlexIndex cannot hold a single"):
        assemble_flex(shards, tmp_path / "flex")
    with pytest.raises(ZeroDivisionError):  # when this is mended, so is the limit
        Lookup.build(["d0"], tmp_path / "docnos.npids")
    assert np.array_equal(np.load(assemble_npy(shards, tmp_path / "npy") / "vectors.npy"), vectors(1))


def test_other_indexes_have_no_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no fair_index.json, so nothing tells which encoder made its vectors"):
        read_manifest(tmp_path)
