from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pyterrier as pt
import pytest

from fair_evaluation import from_run
from fair_evaluation.passages import hold_out_sentences
from fair_evaluation.position_collections import load_passages
from fair_evaluation.probe_files import probe_collections, probe_frames, read_probes, write_probes
from fair_evaluation.probes import ProbeDocument, build_probes
from pyterrier_fair import PositionDataset


@pytest.fixture(scope="module")
def probes() -> list[ProbeDocument]:
    passages = load_passages()
    return list(
        build_probes(
            passages[:6], filler=passages[6:40], length=1200, places=3, tokenizer=lambda text: len(text.split())
        )
    )


class TestFiles:
    def test_there_and_back(self, probes: list[ProbeDocument], tmp_path: Path) -> None:
        path = tmp_path / "probes.jsonl"
        assert write_probes(iter(probes), path) == len(probes) == 6
        assert list(read_probes(path)) == probes
        assert list(read_probes(str(path))) == probes
        assert [p.name for p in tmp_path.iterdir()] == ["probes.jsonl"]

    def test_the_same_seed_gives_the_same_bytes(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            held = hold_out_sentences(load_passages(), seed=3)
            write_probes(
                build_probes(held, length=600, tokenizer=lambda text: len(text.split()), seed=3), tmp_path / name
            )
        assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()

    def test_other_scripts_and_odd_characters(self, probes: list[ProbeDocument], tmp_path: Path) -> None:
        odd = ProbeDocument(rotation=0, docno="d", text='雨\u2028\x85\n"é', n_tokens=1, queries=probes[0].queries)
        write_probes([odd], tmp_path / "odd")
        assert list(read_probes(tmp_path / "odd")) == [odd]
        assert "雨" in (tmp_path / "odd").read_text(encoding="utf-8")

    def test_a_failure_leaves_no_file(self, probes: list[ProbeDocument], tmp_path: Path) -> None:
        def failing() -> Any:
            yield probes[0]
            raise RuntimeError("interrupted")

        with pytest.raises(RuntimeError, match="interrupted"):
            write_probes(failing(), tmp_path / "probes.jsonl")
        assert not (tmp_path / "probes.jsonl").exists()

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("{", "JSONDecodeError"),
            ("[]", "TypeError"),
            ('{"docno": "d"}', "KeyError: 'queries'"),
            ('{"docno": "d", "queries": []}', "TypeError"),
            ('{"docno": "d", "queries": [{"qid": "q"}]}', "TypeError"),
        ],
    )
    def test_lines_that_are_none(self, probes: list[ProbeDocument], tmp_path: Path, line: str, reason: str) -> None:
        path = tmp_path / "probes.jsonl"
        write_probes(probes[:1], path)
        with path.open("a") as file:
            file.write(line + "\n")
        found = read_probes(path)
        assert next(found) == probes[0]
        message = f"{path}, line 2: expected a document of write_probes, got "
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            next(found)
        assert reason in str(error.value)

    def test_the_bar(self, probes: list[ProbeDocument], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_probes(probes, tmp_path / "a")
        assert capsys.readouterr().err == ""
        write_probes(probes, tmp_path / "b", show_progress_bar=True)
        assert "probes: 100%" in capsys.readouterr().err


class TestFrames:
    def test_columns_and_rows(self, probes: list[ProbeDocument]) -> None:
        frames = probe_frames(iter(probes))
        assert list(frames.topics) == ["qid", "query", "rotation", "place", "index", "position", "question"]
        assert list(frames.qrels) == ["qid", "docno", "label"]
        assert list(frames.docs) == ["docno", "text", "rotation", "n_tokens"]
        queries = [query for probe in probes for query in probe.queries]
        assert frames.topics["qid"].tolist() == frames.qrels["qid"].tolist() == [query.qid for query in queries]
        assert frames.qrels["docno"].tolist() == [query.docno for query in queries]
        assert set(frames.qrels["label"]) == {1}
        assert frames.docs["text"].tolist() == [probe.text for probe in probes]
        assert frames.topics["rotation"].tolist() == [probe.rotation for probe in probes for _ in probe.queries]

    def test_none(self) -> None:
        assert [len(frame) for frame in probe_frames([])] == [0, 0, 0]

    def test_they_are_what_an_evaluation_takes(self, probes: list[ProbeDocument]) -> None:
        topics, qrels, docs = probe_frames(probes)
        assert docs["docno"].is_unique
        found = qrels[topics["index"] != 2].assign(score=1.0)  # what stands last is not found
        result = from_run(found, qrels, positions=topics, position="place", unit="question")
        assert result.groups["mean"].tolist() == [1, 1, 0]
        assert result.psi == 1
        by_bin = from_run(found, qrels, positions=topics, unit="question")
        assert by_bin.psi == 1
        assert by_bin.groups.loc[by_bin.groups["position"] < 0.6, "mean"].dropna().eq(1).all()


class TestCollections:
    def test_they_make_pyterrier_datasets(self, probes: list[ProbeDocument]) -> None:
        collections = probe_collections(iter(probes))
        assert len(collections) == 3
        frames = probe_frames(probes)
        for rotation, collection in enumerate(collections):
            dataset = PositionDataset(collection)
            of = frames.topics[frames.topics["rotation"] == rotation]
            pd.testing.assert_frame_equal(dataset.get_topics(), of[["qid", "query", "place"]].reset_index(drop=True))
            docs = frames.docs[frames.docs["rotation"] == rotation][["docno", "text"]]
            assert list(dataset.get_corpus_iter(verbose=False)) == docs.to_dict("records")
            texts = pt.text.get_text(dataset)(dataset.get_qrels())["text"]
            assert set(texts) == set(docs["text"])

    @pytest.mark.parametrize("kept", [[], [1], [0, 2]])
    def test_rotations_that_are_missing(self, probes: list[ProbeDocument], kept: list[int]) -> None:
        message = f"probes: expected documents of all rotations from 0 on, got the rotations {kept}"
        with pytest.raises(ValueError, match=re.escape(message)):
            probe_collections(probe for probe in probes if probe.rotation in kept)


def test_a_line_is_json_with_everything(probes: list[ProbeDocument], tmp_path: Path) -> None:
    write_probes(probes[:1], tmp_path / "probes.jsonl")
    record = json.loads((tmp_path / "probes.jsonl").read_text(encoding="utf-8"))
    assert list(record) == ["rotation", "docno", "text", "n_tokens", "queries"]
    assert list(record["queries"][0]) == ["qid", "query", "docno", "place", "index", "position", "question"]
