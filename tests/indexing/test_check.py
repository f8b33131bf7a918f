"""Assembled indexes whose files were damaged."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fair_indexing import check
from fair_indexing.assemble import assemble_flex, assemble_npy
from fair_indexing.check import RECORD, check_index
from fair_indexing.files import DamagedFileError
from fair_indexing.shards import ShardFolder
from tests.indexing.manifests import docnos, manifest, texts, vectors

FLEX = ("vecs.f4", "docnos.npids", "pt_meta.json")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    shards = ShardFolder.create(tmp_path / "build", manifest())
    shards.write(0, docnos(4), vectors(4), texts=texts(4))
    shards.finish(4)
    return assemble_flex(shards, tmp_path / "flex")


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", FLEX)
@pytest.mark.parametrize("harm", ["zeros", "half", "empty", "missing", "another's"])
def test_damage_is_named(index: Path, name: str, harm: str, full: bool) -> None:
    check_index(index, full=full)
    file = index / name
    data = file.read_bytes()
    if harm == "missing":
        file.unlink()
    else:
        changed = {"zeros": bytes(len(data)), "half": data[: len(data) // 2], "empty": b"", "another's": data[::-1]}
        file.write_bytes(changed[harm])
    with pytest.raises(DamagedFileError, match=rf"flex/{name}: the file is .*remove the index and build it again"):
        check_index(index, full=full)


@pytest.mark.usefixtures("index")
def test_the_other_format(tmp_path: Path) -> None:
    out = assemble_npy(tmp_path / "build", tmp_path / "out")
    check_index(out, full=True)
    file = next(path for path in out.iterdir() if path.name.startswith("vectors"))
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(DamagedFileError, match=r"out/vectors\.\w+: the file is damaged, expected \d+ bytes, got"):
        check_index(out)


def test_large_files_are_sampled(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_BLOCK", 4)
    monkeypatch.setattr(check, "_BLOCKS", 3)
    shutil.rmtree(index)
    assemble_flex(index.parent / "build", index)
    data = (index / "vecs.f4").read_bytes()  # 4 vectors of 3 float32: the first, middle and last number are read
    for place, is_found in ((0, True), (8, False), (23, True), (47, True)):
        changed = bytearray(data)
        changed[place] ^= 1
        (index / "vecs.f4").write_bytes(changed)
        with pytest.raises(DamagedFileError):
            check_index(index, full=True)
        if is_found:
            with pytest.raises(DamagedFileError):
                check_index(index)
        else:
            check_index(index)


def test_other_files_in_the_folder_are_no_damage(index: Path) -> None:
    (index / "hnsw.faiss").write_text("")  # FlexIndex keeps what it derives from the vectors there
    check_index(index)


def test_a_damaged_or_missing_record(index: Path) -> None:
    (index / RECORD).write_bytes(b"{}")
    with pytest.raises(DamagedFileError, match=rf"{RECORD}: the file is damaged.*remove the index and build it again"):
        check_index(index)
    (index / RECORD).unlink()
    with pytest.raises(ValueError, match=rf"has no {RECORD}"):
        check_index(index)
