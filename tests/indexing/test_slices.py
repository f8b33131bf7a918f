from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fair_indexing.records import open_source
from fair_indexing.slices import FileSlices, open_slices

DOCS = [{"id": f"d{i}", "text": "é\u2028" * i, "other": i} for i in range(13)]  # U+2028 ends no line
FIELDS = {"docno_field": "id", "text_field": "text"}


def write(path: Path, docs: list[dict[str, Any]], *, rows_per_group: int = 3) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(docs, schema=pa.Table.from_pylist(DOCS).schema), path, rows_per_group)
        return
    data = "".join(json.dumps(doc, ensure_ascii=False) + "\n" for doc in docs).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def all_shards(source: Any, size: int) -> list[tuple[list[str], list[str]]]:
    slices = open_slices(source, **FIELDS)
    return [slices.read(place) for place in slices.cut(size)]


def expected(source: Any, size: int) -> list[tuple[list[str], list[str]]]:
    return [(window.docnos, window.texts) for window in open_source(source, **FIELDS).windows(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 12, 13, 14])
@pytest.mark.parametrize("name", ["docs.jsonl", "docs.jsonl.gz", "docs.parquet"])
def test_a_file(tmp_path: Path, name: str, size: int) -> None:
    write(tmp_path / name, DOCS)
    read = all_shards(tmp_path / name, size)
    assert read == expected(tmp_path / name, size)
    assert [len(docnos) for docnos, _ in read] == [size] * (13 // size) + [13 % size] * (13 % size > 0)


@pytest.mark.parametrize("size", [1, 4, 5, 8, 13])
def test_shards_that_span_files(tmp_path: Path, size: int) -> None:
    write(tmp_path / "a.jsonl", DOCS[:2])
    write(tmp_path / "b.parquet", DOCS[2:9])
    write(tmp_path / "c.parquet", [])
    write(tmp_path / "d.jsonl.gz", DOCS[9:10])
    write(tmp_path / "e.jsonl", [])
    write(tmp_path / "f.ndjson", DOCS[10:])
    (tmp_path / "_SUCCESS").write_text("no documents")
    assert all_shards(tmp_path, size) == expected(tmp_path, size)


def test_a_last_line_without_an_end(tmp_path: Path) -> None:
    write(tmp_path / "docs.jsonl", DOCS[:3])
    (tmp_path / "docs.jsonl").write_bytes((tmp_path / "docs.jsonl").read_bytes()[:-1])
    assert [docnos for docnos, _ in all_shards(tmp_path / "docs.jsonl", 2)] == [["d0", "d1"], ["d2"]]


def test_only_the_row_groups_of_a_slice_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "docs.parquet", DOCS)  # groups of 3, 3, 3, 3 and 1
    read: list[list[int]] = []
    real = pq.ParquetFile.read_row_groups

    def noted(self: Any, groups: list[int], **kwargs: Any) -> Any:
        read.append(groups)
        return real(self, groups, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", noted)
    assert [docnos for docnos, _ in all_shards(tmp_path / "docs.parquet", 5)] == [
        [f"d{i}" for i in range(start, min(13, start + 5))] for start in (0, 5, 10)
    ]
    assert read == [[0, 1], [1, 2, 3], [3, 4]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_blank_lines_at_the_end_are_no_documents(tmp_path: Path, size: int) -> None:
    for name, docs in {"a.JSONL": DOCS[:3], "b.jsonl": DOCS[3:5]}.items():
        write(tmp_path / name, docs)
        with (tmp_path / name).open("ab") as file:
            file.write(b"\n" * 3)
    assert all_shards(tmp_path, size) == expected(tmp_path, size)


def test_folders_are_those_that_are_read_whole(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", DOCS)
    (tmp_path / "b.txt").write_text("")
    with pytest.raises(ValueError, match=r"also holds 'b.txt', which would be left out"):
        open_slices(tmp_path, **FIELDS)


@pytest.mark.parametrize("size", [1, 5, 13])
def test_a_data_set(size: int) -> None:
    dataset = datasets.Dataset.from_list(DOCS)
    assert all_shards(dataset, size) == expected(dataset, size)
    shuffled = dataset.shuffle(seed=1)  # has an order of its own
    assert all_shards(shuffled, size) == expected(shuffled, size)


def test_paths_do_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "docs.jsonl", DOCS)
    monkeypatch.chdir(tmp_path)
    assert FileSlices("docs.jsonl", ("id", "text")).files == [tmp_path / "docs.jsonl"]


@pytest.mark.parametrize(
    "source", [DOCS, iter(DOCS), pd.DataFrame(DOCS), datasets.Dataset.from_list(DOCS).to_iterable_dataset()]
)
def test_other_sources_are_refused(source: Any) -> None:
    with pytest.raises(TypeError, match=r"workers read from .* got .*; write it to Parquet or JSON lines first"):
        open_slices(source, **FIELDS)
