from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mteb
import pytest

import mteb_fair
from fair_evaluation.benchmarks.position_data import PositionData
from mteb_fair import FineWebPosQ, PosIR
from mteb_fair.tasks import TASKS
from tests.mteb.layouts import write_fineweb


def data(**changes: Any) -> PositionData:
    values: dict[str, Any] = {
        "corpus": {"d": "text"},
        "queries": {"q": "question"},
        "relevant": {"q": {"d": 1}},
        "labels": {"q": ("end",)},
    }
    return PositionData(**(values | changes))


class TestChecks:
    def test_good_data(self) -> None:
        data().check("task")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"corpus": {}}, "task: the corpus is empty"),
            ({"queries": {}, "relevant": {}}, "task: there are no queries"),
            ({"relevant": {}}, r"task: 1 queries have no relevant document, such as \['q'\]"),
            ({"relevant": {"q": {"d": 0}}}, "1 queries have no relevant document"),
            ({"relevant": {"q": {"x": 1}}}, r"1 relevant documents are not in the corpus, such as \['x'\]"),
            ({"relevant": {"q": {"d": 1}, "p": {"d": 1}}}, r"1 judged queries do not exist, such as \['p'\]"),
        ],
    )
    def test_bad_data(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            data(**changes).check("task")

    def test_empty_documents_stay_and_are_said(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "mteb_fair"):
            data(corpus={"d": "text", "e": " "}).check("task")
        assert "task: 1 of 2 documents are empty, such as ['e']. They stay in the corpus." in caplog.text

    def test_rows(self) -> None:
        rows = PositionData()
        rows.add_document("d", "", where="file")
        with pytest.raises(ValueError, match="file: document 'd' occurs twice"):
            rows.add_document("d", "text", where="file")
        with pytest.raises(ValueError, match=r"file: document 'e': expected a text, got None \(NoneType\)"):
            rows.add_document("e", None, where="file")
        with pytest.raises(ValueError, match="file: query 'q' is empty"):
            rows.add_query("q", " ", labels=["end"], where="file")
        with pytest.raises(ValueError, match="file: query 'r' belongs to no position group"):
            rows.add_query("r", "text", labels=[], where="file")


class TestLocalData:
    def test_a_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"data_folder: expected the folder of PosIR, there is no .*nowhere'"):
            PosIR(data_folder=tmp_path / "nowhere")

    def test_other_data_are_another_task(self, tmp_path: Path, keyword_encoder: Any) -> None:
        write_fineweb(tmp_path / "a", [("red", "red", ["end"])])
        write_fineweb(tmp_path / "b", [("red", "red red", ["end"]), ("blue", "blue", ["middle"])])
        cache = mteb.ResultCache(tmp_path / "cache")
        counts = []
        for name in "ab":
            task = FineWebPosQ(data_folder=tmp_path / name)
            result = mteb.evaluate(keyword_encoder, task, cache=cache, show_progress_bar=False).task_results[0]
            counts.append(result.scores["test"][0]["middle_n"])
            assert result.dataset_revision == task.metadata.revision
            assert result.task.metadata.name == task.metadata.name  # MTEB finds it by name
        assert counts == [0, 1]

    def test_evaluating_twice_leaves_the_task_as_it_was(self, tmp_path: Path, evaluate: Callable[..., Any]) -> None:
        write_fineweb(tmp_path, [("red", "red", ["end"])])
        task = FineWebPosQ(data_folder=tmp_path)
        name = task.metadata.name
        assert evaluate(task) == evaluate(task)
        assert task.metadata.name == name
        assert not task.data_loaded

    def test_mteb_reads_its_registry(self, tmp_path: Path, keyword_encoder: Any) -> None:
        write_fineweb(tmp_path / "a", [("red", "red", ["end"]), ("blue", "blue", ["middle"])])
        task = FineWebPosQ(data_folder=tmp_path / "a")
        cache = mteb.ResultCache(tmp_path / "cache")
        mteb.evaluate(keyword_encoder, task, cache=cache, show_progress_bar=False)
        results = cache.load_results(load_experiments="match_name", require_model_meta=False)
        assert task.metadata.name in results.to_dataframe(aggregation_level="task", format="long")["task_name"].tolist()
        again = mteb.get_task(task.metadata.name)
        assert again.metadata == task.metadata
        assert isinstance(again, FineWebPosQ)
        assert type(again).metadata.name == task.metadata.name
        assert FineWebPosQ.metadata.name == "FineWeb-PosQ"
        selected = mteb.get_task(PosIR(domains=["law"]).metadata.name)
        assert (selected.metadata.name, selected.domains) == ("PosIR-law", ("law",))

    def test_by_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_fineweb(tmp_path / "FineWeb-PosQ", [("red", "red", ["end"])])
        assert mteb_fair.get_tasks("FineWeb-PosQ")[0].metadata.name == "FineWeb-PosQ"
        monkeypatch.setenv("MTEB_FAIR_DATA", str(tmp_path))
        assert mteb_fair.get_tasks("FineWeb-PosQ")[0].metadata.name.startswith("FineWeb-PosQ-local-")


def test_an_answer_that_nobody_finds(tmp_path: Path, evaluate: Callable[..., Any]) -> None:
    pages = [(None, f"red page {i}", None) for i in range(12)]
    write_fineweb(tmp_path, [("red", "the answer", ["end"]), *pages])
    scores = evaluate(FineWebPosQ(data_folder=tmp_path))["default"]
    assert (scores["end_ndcg_at_10"], scores["psi"], scores["harmonic_mean"], scores["slope"]) == (0, 0, 0, None)
    assert scores["nauc_ndcg_at_10_max"] is None  # MTEB's is NaN where all queries score the same


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_metadata_are_complete(task: Any) -> None:
    assert task.metadata.is_filled()
    task.metadata._validate_metadata()


class TestJudgements:
    @pytest.mark.parametrize("grade", [0.5, float("nan"), None, "1", True])
    def test_grades(self, grade: object) -> None:
        with pytest.raises(ValueError, match="here: expected an integer score of query 'q' and 'd', got"):
            PositionData().add_judgement("q", "d", grade, where="here")

    def test_twice(self) -> None:
        rows = PositionData()
        rows.add_judgement("q", "d", 1.0, where="here")
        assert rows.relevant == {"q": {"d": 1}}
        with pytest.raises(ValueError, match="here: query 'q' and document 'd' are judged twice"):
            rows.add_judgement("q", "d", 0, where="here")


class TestChangedData:
    def test_after_the_task_was_made(self, tmp_path: Path) -> None:
        write_fineweb(tmp_path, [("red", "red", ["end"])])
        task = FineWebPosQ(data_folder=tmp_path)
        write_fineweb(tmp_path, [("red", "red", ["middle"])])
        with pytest.raises(ValueError, match=r"the data have changed since the task 'FineWeb-PosQ-local-.*' was made"):
            task.load_data()

    def test_an_empty_folder_harms_no_other_task(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "FineWeb-PosQ").mkdir()
        monkeypatch.setenv("MTEB_FAIR_DATA", str(tmp_path))
        FineWebPosQ()  # as mteb.get_tasks makes every task there is
        with pytest.raises(ValueError, match=r"expected files that end in .parquet, .jsonl"):
            mteb_fair.get_tasks("FineWeb-PosQ")
        with pytest.raises(ValueError, match=r"expected files that end in .parquet"):
            FineWebPosQ(data_folder=tmp_path / "FineWeb-PosQ")
