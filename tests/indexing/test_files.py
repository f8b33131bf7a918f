from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fair_indexing.files import (
    DamagedFileError,
    digest_strings,
    new_folder,
    read_record,
    remove_temporary,
    seal,
    synced_file,
    write_record,
)
from tests.indexing.faults import disk_full, fault_at

RECORD = {"number": 3, "name": "é", "nested": {"list": [1, None, "x"]}}


class TestRecord:
    def test_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        write_record(tmp_path / "a.json", {"old": 1})
        write_record(tmp_path / "a.json", RECORD)
        assert read_record(tmp_path / "a.json") == RECORD
        assert [path.name for path in tmp_path.iterdir()] == ["a.json"]

    def test_every_flipped_bit_and_every_torn_end_is_noticed(self, tmp_path: Path) -> None:
        path, data = tmp_path / "a.json", seal(RECORD)
        for i in range(len(data)):
            for bit in range(8):
                changed = bytearray(data)
                changed[i] ^= 1 << bit
                path.write_bytes(changed)
                with suppress(DamagedFileError):
                    assert read_record(path) == RECORD  # white space changed to another
        for i in range(len(data) - 1):  # the last one is the end of the line
            path.write_bytes(data[:i])
            with pytest.raises(DamagedFileError):
                read_record(path)

    @pytest.mark.parametrize("content", [b"", b"[]", b"3", b'{"number": 3}', b"\xff\xfe"])
    def test_other_files_are_no_records(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(DamagedFileError):
            read_record(tmp_path / "a.json")

    def test_a_missing_one_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            read_record(tmp_path / "a.json")

    def test_a_full_disk_leaves_what_was_there(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        write_record(path, {"old": 1})
        with fault_at(None, disk_full) as moments:
            write_record(path, {"old": 1})
        assert moments.count == 4  # write, fsync, replace, fsync of the folder
        for moment in range(3):
            with pytest.raises(OSError, match="No space left"), fault_at(moment, disk_full):
                write_record(path, RECORD)
            assert read_record(path) == {"old": 1}
            assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


class TestNewFolder:
    def test_appears_when_it_is_whole(self, tmp_path: Path) -> None:
        with new_folder(tmp_path / "new") as part:
            with synced_file(part / "a") as file:
                file.write(b"x")
            assert not (tmp_path / "new").exists()
        assert (tmp_path / "new" / "a").read_bytes() == b"x"
        assert [path.name for path in tmp_path.iterdir()] == ["new"]

    def test_an_error_leaves_nothing(self, tmp_path: Path) -> None:
        def write() -> None:
            with new_folder(tmp_path / "new") as part:
                (part / "a").write_bytes(b"x")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write()
        assert list(tmp_path.iterdir()) == []

    def test_the_first_one_stays(self, tmp_path: Path) -> None:
        def write() -> None:
            with new_folder(tmp_path / "new") as part:
                (part / "a").write_bytes(b"mine")
                (tmp_path / "new").mkdir()
                (tmp_path / "new" / "a").write_bytes(b"another's")

        with pytest.raises(OSError, match=r"not empty|exists"):
            write()
        assert (tmp_path / "new" / "a").read_bytes() == b"another's"
        assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".a.flex~host-1-ab.tmp").mkdir()
    (tmp_path / ".a.flex~host-1-ab.tmp" / "x").write_bytes(b"")
    (tmp_path / ".a~host-1-ab.tmp").write_bytes(b"")
    (tmp_path / "c.tmp").write_bytes(b"")
    remove_temporary(tmp_path, lambda name: name == "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.flex~host-1-ab.tmp", "c.tmp"]
    remove_temporary(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["c.tmp"]


STRINGS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), max_size=4)


@given(STRINGS, STRINGS)
def test_digests_are_equal_where_the_strings_are(left: list[str], right: list[str]) -> None:
    assert (digest_strings(left) == digest_strings(right)) == (left == right)


def test_digests_tell_where_a_string_ends() -> None:
    assert digest_strings(["ab", "c"]) != digest_strings(["a", "bc"])
    assert digest_strings(["", "a"]) != digest_strings(["a", ""])
