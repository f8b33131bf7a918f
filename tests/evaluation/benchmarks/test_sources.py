from __future__ import annotations

import math
import os
from pathlib import Path

import pandas as pd
import pytest

from fair_evaluation.benchmarks.sources import (
    check_id,
    check_numbers,
    data_files,
    fingerprint,
    hub_folder,
    local_folder,
    read_rows,
)


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MTEB_FAIR_DATA", raising=False)


def test_the_environment_names_a_folder_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "PosIR").mkdir()
    assert local_folder("PosIR") is None
    monkeypatch.setenv("MTEB_FAIR_DATA", str(tmp_path))
    assert local_folder("PosIR") == tmp_path / "PosIR"
    assert local_folder("FineWeb-PosQ") is None


def test_missing_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTEB_FAIR_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"MTEB_FAIR_DATA: there is no folder '.*nowhere'"):
        local_folder("PosIR")


def test_the_hub_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"some/name: the dataset is not in the cache .* give a local copy"):
        hub_folder("some/name", "main", ["*.parquet"])


class TestRows:
    def test_parquet_and_json_lines_are_the_same(self, tmp_path: Path) -> None:
        frame = pd.DataFrame({"_id": ["007", "1"], "text": ["a", "2020-01-01"], "more": [1, 2]})
        frame.to_parquet(tmp_path / "a.parquet")
        frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
        expected = [{"_id": "007", "text": "a"}, {"_id": "1", "text": "2020-01-01"}]
        assert read_rows(tmp_path / "a.parquet", ["_id", "text"]) == expected
        for name in ("a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz"):
            frame.to_json(tmp_path / name, orient="records", lines=True)
            assert read_rows(tmp_path / name, ["_id", "text"]) == expected
            assert tmp_path / name in data_files(tmp_path)

    def test_missing_column(self, tmp_path: Path) -> None:
        pd.DataFrame({"id": [1]}).to_parquet(tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=r"expected the columns \['_id'\], \['_id'\] are not in \['id'\]"):
            read_rows(tmp_path / "a.parquet", ["_id"])

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="there is no such file"):
            read_rows(tmp_path / "a.parquet", ["_id"])


@pytest.mark.parametrize("name", ["b.jsonl.zst", "b.csv", "part/b.csv.gz"])
def test_data_in_other_formats_are_not_passed_over(tmp_path: Path, name: str) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / ".cache").mkdir()
    for other in ("a.jsonl", "README.md", ".gitattributes", ".cache/c.json", ".cache/c.jsonl", "dataset_info.json"):
        (tmp_path / other).write_text("{}\n")
    assert data_files(tmp_path) == [tmp_path / "a.jsonl"]
    (tmp_path / name).write_text("{}\n")
    with pytest.raises(ValueError, match=f"{name}: expected files that end in .parquet, .jsonl, .*; convert it"):
        data_files(tmp_path)


class TestFingerprint:
    def test_knows_contents_and_names_and_nothing_else(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            (tmp_path / name / "part").mkdir(parents=True)
            (tmp_path / name / "part" / "a.jsonl").write_text('{"a": 1}\n')
            (tmp_path / name / "README.md").write_text(name)
        assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two")
        changed = tmp_path / "two" / "part" / "a.jsonl"
        changed.write_text('{"a": 2}\n')
        os.utime(changed, ns=(1, 1))
        assert fingerprint(tmp_path / "one") != fingerprint(tmp_path / "two")
        assert [path.name for path in data_files(tmp_path / "one")] == ["a.jsonl"]

    def test_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"expected files that end in .parquet, .* in or below"):
            fingerprint(tmp_path)


class TestBadValues:
    @pytest.mark.parametrize("value", [None, math.nan, 0.5, "", True, ["d"]])
    def test_ids(self, value: object) -> None:
        with pytest.raises(ValueError, match="here: expected a string or an integer as id, got"):
            check_id(value, "here")

    def test_good_ids(self) -> None:
        assert [check_id(value, "here") for value in ("007", 7)] == ["007", "7"]

    @pytest.mark.parametrize("value", [None, "12", 5, ["1", "2"], [[1, 2]]])
    def test_numbers(self, value: object) -> None:
        with pytest.raises(ValueError, match="here: expected two numbers, got"):
            check_numbers(value, "two numbers", "here")

    def test_damaged_files(self, tmp_path: Path) -> None:
        for name in ("a.parquet", "a.jsonl"):
            (tmp_path / name).write_text('{"id": ')
            with pytest.raises(
                ValueError, match=rf"{name}: expected a (parquet file|file of JSON lines), could not read it"
            ):
                read_rows(tmp_path / name, ["id"])
