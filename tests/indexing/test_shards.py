from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fair_indexing.duplicates import DuplicateDocnoError
from fair_indexing.files import DamagedFileError
from fair_indexing.shards import IncompleteBuildError, ShardFolder
from tests.indexing.faults import disk_full, fault_at, tree
from tests.indexing.manifests import docnos, manifest, texts, vectors

N = 10  # shards of 4, 4 and 2 documents


def write(shards: ShardFolder, start: int, count: int | None = None) -> Any:
    n = min(4, N - start) if count is None else count
    return shards.write(start, docnos(n, start), vectors(n, start), texts=texts(n, start))


@pytest.fixture
def shards(tmp_path: Path) -> ShardFolder:
    return ShardFolder.create(tmp_path / "build", manifest())


@pytest.fixture
def complete(shards: ShardFolder) -> ShardFolder:
    for start in (8, 0, 4):  # in any order
        write(shards, start)
    shards.finish(N)
    return shards


class TestFolder:
    def test_is_opened_again(self, shards: ShardFolder) -> None:
        assert ShardFolder.exists(shards.folder)
        assert ShardFolder(shards.folder).manifest == manifest()

    def test_other_folders_are_refused(self, tmp_path: Path) -> None:
        assert not ShardFolder.exists(tmp_path)
        with pytest.raises(ValueError, match=r"holds no build \(no manifest.json\)"):
            ShardFolder(tmp_path)
        (tmp_path / "thesis.tex").write_text("")
        with pytest.raises(ValueError, match=r"expected an empty or a new one, .* holds \['thesis.tex'\]"):
            ShardFolder.create(tmp_path, manifest())

    def test_a_manifest_may_be_replaced_while_there_are_no_shards(self, shards: ShardFolder) -> None:
        shards.replace_manifest(manifest(shard_size=2))
        assert shards.shard_size == ShardFolder(shards.folder).shard_size == 2
        shards.write(0, docnos(2), vectors(2), texts=texts(2))
        with pytest.raises(ValueError, match=r"holds 1 shards \(those of document 0\) of the present one"):
            shards.replace_manifest(manifest())

    def test_the_number_of_documents_is_that_of_the_source(self, shards: ShardFolder) -> None:
        shards.note_documents(None)
        assert ShardFolder(shards.folder).manifest.source == {"name": "list", "documents": None}
        write(shards, 0)
        shards.finish(4)
        assert ShardFolder(shards.folder).manifest.source == {"name": "list", "documents": 4}

    def test_a_damaged_manifest(self, shards: ShardFolder) -> None:
        path = shards.folder / "manifest.json"
        path.write_text(path.read_text().replace("0.5", "0.6"))
        with pytest.raises(DamagedFileError, match=r"manifest.json: the file is damaged"):
            ShardFolder(shards.folder)


class TestShard:
    def test_is_read_as_it_was_written(self, shards: ShardFolder) -> None:
        write(shards, 4)
        shard, entry = shards.read(4), shards.entry(4)
        assert (entry.start, entry.count, entry.dimension) == (4, 4, 3)
        assert shard.entry == entry
        assert shard.docnos == docnos(4, 4)
        assert np.array_equal(shard.vectors, vectors(4, 4))
        assert shard.vectors.dtype == np.float32
        assert shards.starts() == [4]

    def test_docnos_of_all_kinds(self, shards: ShardFolder) -> None:
        odd = ["a\nb", "é\0", '"', " "]
        shards.write(0, odd, vectors(4), texts=texts(4))
        assert shards.read(0).docnos == odd

    def test_vectors_that_are_views(self, shards: ShardFolder) -> None:
        shards.write(0, docnos(3), vectors(3)[:, ::-1], texts=texts(3))
        assert np.array_equal(shards.read(0).vectors, vectors(3)[:, ::-1])

    def test_the_same_one_twice_stays(self, shards: ShardFolder) -> None:
        write(shards, 0)
        shards.write(0, docnos(4), vectors(4) + 1e-7, texts=texts(4))  # a retry on other hardware
        assert np.array_equal(shards.read(0).vectors, vectors(4))
        assert sorted(path.name for path in (shards.folder / "shards").iterdir()) == ["000000000000"]

    def test_another_one_in_its_place_is_refused(self, shards: ShardFolder) -> None:
        write(shards, 0)
        with pytest.raises(ValueError, match="000000000000 holds other documents"):
            shards.write(0, docnos(4), vectors(4), texts=["other"] * 4)

    @pytest.mark.parametrize("name", ["vectors.npy", "docnos.json", "entry.json"])
    def test_damage_is_noticed(self, shards: ShardFolder, name: str) -> None:
        write(shards, 0)
        path = shards.folder / "shards" / "000000000000" / name
        data = path.read_bytes()
        for i in range(0, len(data) - 1, 3):  # the entry's last byte is the end of the line
            changed = bytearray(data)
            changed[i] ^= 1 << i % 8
            path.write_bytes(changed)
            try:
                assert shards.read(0).docnos == docnos(4)
            except DamagedFileError:
                continue
            assert name == "entry.json"  # white space changed to another
            assert not data[i : i + 1].strip()
        for end in (0, 1, len(data) // 2, len(data) - 2):
            path.write_bytes(data[:end])
            with pytest.raises(DamagedFileError, match=name):
                shards.read(0)
        path.unlink()
        with pytest.raises(DamagedFileError, match=name):
            shards.read(0)
        assert shards.verify()[0] == {}

    def test_one_that_was_moved_is_noticed(self, shards: ShardFolder) -> None:
        write(shards, 0)
        (shards.folder / "shards" / "000000000000").rename(shards.folder / "shards" / "000000000004")
        with pytest.raises(DamagedFileError, match="the folder holds another shard, which starts at 0"):
            shards.read(4)

    def test_a_missing_one(self, shards: ShardFolder) -> None:
        with pytest.raises(IncompleteBuildError, match=r"1 shards \(those of document 4\) missing"):
            shards.read(4)

    @pytest.mark.parametrize(
        ("arguments", "error", "match"),
        [
            ({"start": 2}, ValueError, "start: expected a multiple of the shard size 4, got 2"),
            ({"vectors": vectors(4).astype(np.float64)}, TypeError, "vectors: expected a float32 array, got float64"),
            ({"vectors": [[1.0]]}, TypeError, "expected a float32 array, got <class 'list'>"),
            ({"vectors": vectors(3)}, ValueError, r"got shape \(3, 3\), 4 docnos and 4 texts"),
            ({"vectors": vectors(4)[0]}, ValueError, r"got shape \(3,\)"),
            ({"texts": []}, ValueError, "4 docnos and 0 texts"),
            (
                {"docnos": [], "vectors": vectors(0), "texts": []},
                ValueError,
                "docnos: expected 1 to 4 for a shard, got 0",
            ),
            ({"docnos": docnos(5), "vectors": vectors(5), "texts": texts(5)}, ValueError, "1 to 4 for a shard, got 5"),
        ],
    )
    def test_what_does_not_fit(
        self, shards: ShardFolder, arguments: dict[str, Any], error: type[Exception], match: str
    ) -> None:
        good = {"start": 0, "docnos": docnos(4), "vectors": vectors(4), "texts": texts(4)}
        with pytest.raises(error, match=match):
            shards.write(**{**good, **arguments})
        assert shards.starts() == []

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_values_that_are_not_finite(self, shards: ShardFolder, value: float) -> None:
        bad = vectors(4)
        bad[2, 1] = value
        with pytest.raises(ValueError, match=r"1 of 4 documents have NaN or infinite values \(docno 'd2'\)"):
            shards.write(0, docnos(4), bad, texts=texts(4))
        assert shards.starts() == []

    def test_a_full_disk_at_every_operation(self, shards: ShardFolder) -> None:
        before = tree(shards.folder)
        with fault_at(None, disk_full) as moments:
            write(shards, 8)
        assert moments.count == 9  # write and fsync of three files, fsync, rename, fsync
        for moment in range(9):
            with pytest.raises(OSError, match="No space left") as error, fault_at(moment, disk_full):
                write(shards, 0)
            assert "could not be written; run the build again to resume it" in error.value.__notes__[0]
            assert shards.starts() == ([8] if moment < 8 else [0, 8])  # the last one is a sync after the rename
        shutil.rmtree(shards.folder / "shards" / "000000000000")
        shutil.rmtree(shards.folder / "shards" / "000000000008")
        assert tree(shards.folder) == before


class TestCompletion:
    def test_of_a_build(self, complete: ShardFolder) -> None:
        completion = ShardFolder(complete.folder).completion()
        assert (completion.documents, completion.dimension, completion.shards) == (10, 3, 3)
        read = list(complete.read_all())
        assert [docno for shard in read for docno in shard.docnos] == docnos(10)
        assert [docno for names in complete.all_docnos() for docno in names] == docnos(10)

    def test_of_one_that_has_not_ended(self, shards: ShardFolder) -> None:
        write(shards, 4)
        with pytest.raises(IncompleteBuildError, match="not complete, 1 of 3 shards exist; run it again"):
            shards.completion()
        with pytest.raises(IncompleteBuildError):
            next(shards.read_all())

    def test_missing_shards_are_named(self, shards: ShardFolder) -> None:
        write(shards, 4)
        with pytest.raises(IncompleteBuildError, match=r"2 shards \(those of document 0, 8\) missing of 3"):
            shards.finish(N)

    def test_shards_beyond_the_source(self, shards: ShardFolder) -> None:
        for start in (0, 4, 8):
            write(shards, start)
        with pytest.raises(IncompleteBuildError, match=r"has 8 documents, 1 shards \(those of document 8\) beyond"):
            shards.finish(8)
        with pytest.raises(IncompleteBuildError, match=r"1 shards \(those of document 8\) have another size"):
            shards.finish(11)

    def test_no_documents(self, shards: ShardFolder) -> None:
        with pytest.raises(ValueError, match="documents: expected at least one, got 0"):
            shards.finish(0)

    def test_duplicates_across_shards(self, shards: ShardFolder) -> None:
        write(shards, 0)
        shards.write(4, ["d7", "d2"], vectors(2), texts=texts(2))
        with pytest.raises(DuplicateDocnoError, match=r"document 5: docno 'd2' is that of .*document 2 already"):
            shards.finish(6)

    def test_dimensions(self, shards: ShardFolder) -> None:
        write(shards, 0)
        shards.write(4, docnos(1, 4), vectors(1)[:, :2], texts=texts(1))
        with pytest.raises(ValueError, match=r"expected vectors of one dimension, got \[2, 3\]"):
            shards.finish(5)

    def test_is_gone_before_a_new_shard_is_there(self, complete: ShardFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        write(complete, 0)  # it is there already
        assert complete.completion().documents == N
        synced: list[tuple[Path, bool]] = []
        real = os.fsync

        def fsync(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            synced.append((path, (complete.folder / "complete.json").exists()))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        complete.write(12, docnos(1, 12), vectors(1), texts=texts(1))
        assert synced[0] == (complete.folder, False)
        with pytest.raises(IncompleteBuildError, match="not complete, 4 shards exist"):
            complete.completion()

    def test_is_of_the_shards_that_are_there(self, complete: ShardFolder) -> None:
        """An older version left the marker where it went on with a longer source."""
        path = complete.folder / "complete.json"
        data = path.read_bytes()
        complete.write(12, docnos(1, 12), vectors(1), texts=texts(1))
        path.write_bytes(data)
        with pytest.raises(
            IncompleteBuildError,
            match=r"not complete, 1 shards \(those of document 12\) beyond the 10 documents that it ended with; run it",
        ):
            next(complete.read_all())
        shutil.rmtree(complete.folder / "shards" / "000000000012")
        assert complete.completion().documents == N
        shutil.rmtree(complete.folder / "shards" / "000000000004")
        with pytest.raises(IncompleteBuildError, match=r"1 shards \(those of document 4\) missing; run it again"):
            complete.completion()

    def test_is_gone_with_a_damaged_shard(self, complete: ShardFolder) -> None:
        (complete.folder / "shards" / "000000000004" / "docnos.json").write_text("[]")
        with pytest.raises(DamagedFileError, match=r"docnos.json: the file is damaged"):
            list(complete.read_all())
        whole, damaged = complete.repair()
        assert sorted(whole) == [0, 8] == complete.starts()
        assert len(damaged) == 1
        with pytest.raises(IncompleteBuildError):
            complete.completion()

    def test_is_gone_when_it_is_damaged_itself(self, complete: ShardFolder) -> None:
        path = complete.folder / "complete.json"
        path.write_text(path.read_text().replace("10", "11"))
        with pytest.raises(DamagedFileError, match=r"complete.json"):
            complete.completion()
        whole, damaged = complete.repair()
        assert len(whole) == 3
        assert len(damaged) == 1
        assert complete.finish(N).documents == N

    def test_repair_removes_what_killed_writers_left(self, complete: ShardFolder) -> None:
        before = tree(complete.folder)
        (complete.folder / "shards" / ".000000000012~host-1-ab.tmp").mkdir()
        (complete.folder / ".complete.json~host-1-ab.tmp").write_text("")
        complete.repair()
        assert tree(complete.folder) == before


def test_entries_are_small(shards: ShardFolder) -> None:
    write(shards, 0)
    entry = json.loads((shards.folder / "shards" / "000000000000" / "entry.json").read_text())
    assert sorted(entry) == sorted(["start", "count", "dimension", "docnos", "texts", "files", "checksum"])
