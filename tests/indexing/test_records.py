from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tqdm import tqdm

from fair_indexing.duplicates import DuplicateDocnoError
from fair_indexing.records import Source, open_source

DOCS = [{"docno": f"d{i}", "text": f"text {i}", "more": None} for i in range(5)]
PAIRS = [(f"d{i}", f"text {i}") for i in range(5)]


def count_documents(source: Source) -> int:
    """Reads and checks all documents."""
    return sum(len(window.docnos) for window in source.windows(1024))


def pairs(source: Source, size: int = 2) -> list[tuple[str, str]]:
    return [pair for window in source.windows(size) for pair in zip(window.docnos, window.texts, strict=True)]


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_parquet(path: Path, records: list[Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(records), path)
    return path


def write_gzip(path: Path, records: list[Any]) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))
    return path


WRITERS: dict[str, Callable[[Path, list[Any]], Path]] = {
    "docs.jsonl": write_lines,
    "docs.ndjson": write_lines,
    "docs.jsonl.gz": write_gzip,
    "docs.parquet": write_parquet,
}


class TestKinds:
    @pytest.mark.parametrize("name", WRITERS)
    def test_files(self, tmp_path: Path, name: str) -> None:
        path = WRITERS[name](tmp_path / name, DOCS)
        source = open_source(path)
        assert source.rereadable
        assert source.documents == (5 if name.endswith("parquet") else None)
        assert source.name == str(path)
        assert pairs(source) == pairs(source) == PAIRS
        assert count_documents(open_source(str(path))) == 5

    def test_a_folder(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "b.parquet", DOCS[2:3])
        write_lines(tmp_path / "a.jsonl", DOCS[:2])
        write_lines(tmp_path / "c.jsonl", DOCS[3:])
        (tmp_path / "_SUCCESS").write_text("")
        (tmp_path / ".a.jsonl.crc").write_text("")
        source = open_source(tmp_path)
        assert pairs(source) == PAIRS
        assert [source.locate(i).removeprefix(f"{tmp_path}/") for i in range(5)] == [
            "a.jsonl, line 1", "a.jsonl, line 2", "b.parquet, row 0", "c.jsonl, line 1", "c.jsonl, line 2",
        ]  # fmt: skip
        assert source.documents is None

    def test_a_dataset(self) -> None:
        datasets = pytest.importorskip("datasets")
        source = open_source(datasets.Dataset.from_list(DOCS))
        assert (source.documents, source.rereadable) == (5, True)
        assert pairs(source) == pairs(source) == PAIRS
        with pytest.raises(ValueError, match=r"Dataset, record 0: expected '_id', the record has \['docno', 'more', "):
            pairs(open_source(datasets.Dataset.from_list(DOCS), docno_field="_id"))
        streamed = open_source(datasets.Dataset.from_list(DOCS).to_iterable_dataset())
        assert (streamed.documents, streamed.rereadable) == (None, False)
        assert pairs(streamed) == PAIRS

    def test_a_frame(self) -> None:
        source = open_source(pd.DataFrame(DOCS))
        assert (source.documents, source.rereadable) == (5, True)
        assert pairs(source) == PAIRS
        with pytest.raises(ValueError, match=r"DataFrame, record 0 .*: expected 'body'"):
            pairs(open_source(pd.DataFrame(DOCS), text_field="body"))

    def test_iterables(self) -> None:
        assert pairs(open_source(DOCS)) == PAIRS
        assert open_source(DOCS).rereadable
        once = open_source(iter(DOCS))
        assert (once.documents, once.rereadable) == (None, False)
        assert pairs(once) == PAIRS
        bar = open_source(tqdm(iter(DOCS), total=5, disable=True))  # has a length, and can be read once
        assert (bar.documents, bar.rereadable) == (5, False)
        assert pairs(bar) == PAIRS

    def test_fields(self) -> None:
        source = open_source([{"_id": "a", "body": "b"}], docno_field="_id", text_field="body")
        assert pairs(source) == [("a", "b")]

    def test_a_source_is_itself(self) -> None:
        source = open_source(DOCS)
        assert open_source(source) is source

    @pytest.mark.parametrize("source", [3, None, {"docno": "a", "text": "b"}])
    def test_others(self, source: Any) -> None:
        with pytest.raises(TypeError, match="source: expected a file, a folder or an iterable of dicts"):
            open_source(source)

    def test_paths(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="source: no such file"):
            open_source(tmp_path / "docs.jsonl")
        with pytest.raises(ValueError, match="holds no files named"):
            open_source(tmp_path)
        (tmp_path / "docs.tsv").write_text("")
        with pytest.raises(ValueError, match=r"expected a file named .*, got .*docs.tsv"):
            open_source(tmp_path / "docs.tsv")

    @pytest.mark.parametrize("name", [name.upper() for name in WRITERS])
    def test_names_in_capitals(self, tmp_path: Path, name: str) -> None:
        WRITERS[name.lower()](tmp_path / name, DOCS)
        assert pairs(open_source(tmp_path / name)) == pairs(open_source(tmp_path)) == PAIRS

    @pytest.mark.parametrize("name", ["c.csv", "e.jsonl.bz2", "f.parq", "README.md", "sub/d.jsonl", "d.jsonl/x"])
    def test_nothing_in_a_folder_is_left_out(self, tmp_path: Path, name: str) -> None:
        write_lines(tmp_path / "a.jsonl", DOCS)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
        odd = name.split("/")[0]
        with pytest.raises(
            ValueError, match=rf"{tmp_path} also holds '{odd}', which would be left out; move them away"
        ):
            open_source(tmp_path)

    def test_columns_of_one_name(self, tmp_path: Path) -> None:
        frame = pd.DataFrame([["a", "x", "y"]], columns=["docno", "text", "text"])
        with pytest.raises(ValueError, match=r"source: expected one column of each name, got .*; rename some"):
            open_source(frame)
        columns = [pa.array(["a"]), pa.array(["x"]), pa.array(["b"])]
        pq.write_table(pa.Table.from_arrays(columns, ["docno", "text", "docno"]), tmp_path / "docs.parquet")
        with pytest.raises(ValueError, match=r"docs.parquet: docno: expected one column of this name, got 2"):
            open_source(tmp_path / "docs.parquet")

    @pytest.mark.parametrize("name", ["list", "iterator", "frame", "dataset", "docs.jsonl", "docs.parquet"])
    def test_fields_that_are_refused(self, tmp_path: Path, name: str) -> None:
        docs = [{**doc, "doc_vec": [0.5]} for doc in DOCS]
        kinds: dict[str, Callable[[], Any]] = {
            "list": lambda: docs,
            "iterator": lambda: iter(docs),
            "frame": lambda: pd.DataFrame(docs),
            "dataset": lambda: pytest.importorskip("datasets").Dataset.from_list(docs),
        }
        source = kinds[name]() if name in kinds else WRITERS[name](tmp_path / name, docs)
        with pytest.raises(ValueError, match=r": doc_vec: not now$"):
            count_documents(open_source(source, refused={"doc_vec": "not now"}))


class TestWindows:
    def test_sizes(self) -> None:
        windows = list(open_source(iter(DOCS)).windows(2))
        assert [(w.start, len(w.docnos)) for w in windows] == [(0, 2), (2, 2), (4, 1)]

    def test_are_read_when_they_are_asked_for(self) -> None:
        n_read = 0

        def records() -> Iterator[dict[str, str | None]]:
            nonlocal n_read
            for record in DOCS:
                n_read += 1
                yield record

        next(iter(open_source(records()).windows(2)))
        assert n_read == 2


class TestStarted:
    @pytest.mark.parametrize("make", [list, iter])
    def test_nothing_is_lost(self, make: Callable[[list[Any]], Any]) -> None:
        assert pairs(open_source(make(DOCS)).started(2).started()) == PAIRS

    def test_too_few(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"source: expected at least 1 document, list has 0$"):
            open_source([]).started()
        path = tmp_path / "empty.jsonl"
        path.write_text("")
        with pytest.raises(ValueError, match=f"expected at least 1 document, {path} has 0"):
            open_source(path).started()
        with pytest.raises(ValueError, match="source: expected at least 2 documents, list_iterator has 1; why not"):
            open_source(iter(DOCS[:1])).started(2, reason="why not")


BAD = [
    ({"docno": 7}, TypeError, r": docno: expected str, got 7 \(int\); write docnos as strings"),
    ({"docno": None}, ValueError, r": docno is missing \(None\)"),
    ({"docno": ""}, ValueError, r": docno: expected at least one character, got ''"),
    (
        {"text": None},
        ValueError,
        r" \(docno 'd1'\): text is missing \(None\); drop the document, or give it the text ''",
    ),
    ({"text": float("nan")}, ValueError, r" \(docno 'd1'\): text is missing \(nan\)"),
    ({"text": 3}, TypeError, r" \(docno 'd1'\): text: expected str, got 3 \(int\)"),
    ({"text": b"x"}, TypeError, r" \(docno 'd1'\): text: expected str, got b'x' \(bytes\)"),
    ({"text": ["x"]}, TypeError, r" \(docno 'd1'\): text: expected str, got \['x'\] \(list\)"),
    ({"text": "a\ud800"}, ValueError, r" \(docno 'd1'\): text: a lone surrogate is not valid text"),
    ({"docno": "\udfff"}, ValueError, r" .*: docno: a lone surrogate is not valid text"),
]


@pytest.mark.parametrize(("change", "error", "match"), BAD)
def test_bad_records_are_named(change: dict[str, Any], error: type[Exception], match: str) -> None:
    docs = [DOCS[0], {**DOCS[1], **change}, *DOCS[2:]]
    with pytest.raises(error, match=f"list, record 1{match}"):
        count_documents(open_source(docs))


@pytest.mark.parametrize("name", WRITERS)
def test_bad_records_of_files_are_named(tmp_path: Path, name: str) -> None:
    where = "row 1" if name == "docs.parquet" else "line 2"
    path = WRITERS[name](tmp_path / name, [DOCS[0], {"docno": "d1", "text": None}])
    with pytest.raises(ValueError, match=rf"{name}, {where} \(docno 'd1'\): text is missing"):
        count_documents(open_source(path))
    path = WRITERS[name](tmp_path / name, [{"docno": 0, "text": ""}, {"docno": 1, "text": ""}])
    with pytest.raises(
        TypeError, match=rf"{name}, {'row 0' if 'row' in where else 'line 1'}: docno: expected str, got 0"
    ):
        count_documents(open_source(path))
    path = WRITERS[name](tmp_path / name, [DOCS[0], DOCS[0]])
    with pytest.raises(DuplicateDocnoError, match=rf"{name}, {where}: docno 'd0' is that of .*{name}, .* already"):
        count_documents(open_source(path))


def test_duplicates_across_files_and_windows(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", DOCS)
    write_lines(tmp_path / "b.jsonl", DOCS[4:])
    with pytest.raises(DuplicateDocnoError, match=r"b.jsonl, line 1: docno 'd4' is that of .*a.jsonl, line 5 already"):
        pairs(open_source(tmp_path))


def test_missing_fields() -> None:
    with pytest.raises(ValueError, match=r"list, record 0 \(docno 'a'\): expected 'text', the record has \['docno'\]"):
        count_documents(open_source([{"docno": "a"}]))
    with pytest.raises(TypeError, match="list, record 0: expected a record with 'docno' and 'text', got 'a b'"):
        count_documents(open_source(["a b"]))


class TestDamagedFiles:
    @pytest.mark.parametrize(
        "line", [b"{", b"\xff", b'{"docno": "a"} x', b"[" * 200_000, b'{"n": ' + b"9" * 5000 + b"}"]
    )
    def test_lines(self, tmp_path: Path, line: bytes) -> None:
        path = tmp_path / "docs.jsonl"
        path.write_bytes(json.dumps(DOCS[0]).encode() + b"\n" + line + b"\n")
        with pytest.raises(ValueError, match=r"docs.jsonl, line 2: expected a JSON object, got '"):
            count_documents(open_source(path))

    @pytest.mark.parametrize("end", [b"\n", b"\r\n \n\n", b"\t"])
    def test_blank_lines_stand_at_the_end_only(self, tmp_path: Path, end: bytes) -> None:
        path = tmp_path / "docs.jsonl"
        lines = [json.dumps(doc).encode() + b"\n" for doc in DOCS]
        path.write_bytes(b"".join(lines) + end)
        assert pairs(open_source(path)) == PAIRS
        path.write_bytes(lines[0] + b"\n\n" + lines[1])
        with pytest.raises(ValueError, match=r"docs.jsonl, line 2: expected a JSON object, got a blank line before"):
            count_documents(open_source(path))

    def test_no_objects(self, tmp_path: Path) -> None:
        with pytest.raises(TypeError, match=r"docs.jsonl, line 1: expected a record with 'docno' and 'text', got 3"):
            count_documents(open_source(write_lines(tmp_path / "docs.jsonl", [3])))

    def test_a_torn_gzip(self, tmp_path: Path) -> None:
        path = write_gzip(tmp_path / "docs.jsonl.gz", DOCS)
        path.write_bytes(path.read_bytes()[:-12])
        with pytest.raises(ValueError, match=r"docs.jsonl.gz: the file is damaged after line \d"):
            count_documents(open_source(path))

    @pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
    def test_a_damaged_gzip(self, tmp_path: Path, place: float) -> None:
        path = write_gzip(tmp_path / "docs.jsonl.gz", [{"docno": f"d{i}", "text": f"{i * i}"} for i in range(300)])
        data = bytearray(path.read_bytes())
        data[int(place * len(data))] ^= 0xFF
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"docs.jsonl.gz(: the file is damaged after|,) line \d"):
            count_documents(open_source(path))

    def test_parquet(self, tmp_path: Path) -> None:
        path = write_parquet(tmp_path / "docs.parquet", DOCS)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match=r"docs.parquet: the file is damaged or not Parquet"):
            open_source(path)
        path.write_bytes(data[:4] + b"\xff" * 60 + data[64:])  # the pages, not the footer
        with pytest.raises(ValueError, match=r"docs.parquet: the file is damaged after row 0"):
            count_documents(open_source(path))
        write_parquet(path, [{"docno": "a"}])
        with pytest.raises(ValueError, match=r"docs.parquet: expected the columns 'text', got \['docno'\]"):
            open_source(path)


def test_docnos_that_an_index_cannot_hold() -> None:
    for docno in ("a\0", "a\0b"):
        with pytest.raises(
            ValueError, match=r"list, record 0 .*: docno: an index cannot hold docnos with a NUL character"
        ):
            count_documents(open_source([{"docno": docno, "text": ""}]))


def test_json_lines_may_be_called_json(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.json", DOCS)
    assert count_documents(open_source(tmp_path / "a.json")) == len(DOCS)
    (tmp_path / "a.json").write_text("[\n{}]")
    with pytest.raises(ValueError, match=r"a.json, line 1: expected a JSON object, got '\["):
        count_documents(open_source(tmp_path / "a.json"))
