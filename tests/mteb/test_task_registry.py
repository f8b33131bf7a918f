from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import mteb
import pytest

import mteb_fair
from mteb_fair.tasks import TASKS
from tests.mteb.layouts import write_posir


@pytest.fixture(autouse=True)
def _registered() -> None:
    mteb_fair.register()


def test_importing_registers_nothing() -> None:
    code = """
import mteb, mteb_fair
from mteb.models.model_implementations import MODEL_REGISTRY
assert not [name for name in MODEL_REGISTRY if name.startswith("mteb_fair/")]
n_models, n_tasks, n_benchmarks = len(MODEL_REGISTRY), len(mteb.get_tasks()), len(mteb.get_benchmarks())
mteb_fair.register()
mteb_fair.register()
assert len(MODEL_REGISTRY) == n_models
assert len(mteb.get_tasks()) == n_tasks + 5
assert len(mteb.get_benchmarks()) == n_benchmarks + 1
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


class TestTasks:
    def test_mteb_finds_them(self) -> None:
        for name, cls in TASKS.items():
            assert type(mteb.get_task(name)) is cls
        assert {task.metadata.name for task in mteb.get_tasks(languages=["kor"])} >= {"PosIR", "PosIRCrossLingual"}

    def test_the_benchmark(self) -> None:
        benchmark = mteb.get_benchmark("PositionFair")
        names = [task.metadata.name for task in benchmark.tasks]
        assert names == ["PosIR", "PosIRCrossLingual", "FineWeb-PosQ", "SQuAD-PosQ", "ColDeRReranking"]
        assert [task.metadata.name for task in mteb_fair.get_tasks()] == names

    def test_colder_in_older_versions_of_mteb(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(importlib.import_module("mteb.get_tasks")._TASKS_REGISTRY, "ColDeRReranking")
        assert [task.metadata.name for task in mteb_fair.get_tasks()][-1] == "SQuAD-PosQ"

    def test_local_data_in_english_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        english = {"corpus": {"d": "ba"}, "queries": {"q": ("ba", [0, 9], 100, 300)}, "qrels": [("q", "d", 1)]}
        write_posir(tmp_path / "PosIR", "eng-Latn", "law", **english)
        monkeypatch.setenv("MTEB_FAIR_DATA", str(tmp_path))
        with caplog.at_level("WARNING", "mteb_fair"):
            names = [task.metadata.name for task in mteb_fair.get_tasks("PositionFair")]
        assert names[0].startswith("PosIR-local-")
        assert names[1:] == ["FineWeb-PosQ", "SQuAD-PosQ", "ColDeRReranking"]
        assert "PositionFair: PosIRCrossLingual is left out" in caplog.text
        with pytest.raises(ValueError, match=r"with languages that PosIRCrossLingual has; found .*'eng-Latn'"):
            mteb_fair.get_tasks("PosIRCrossLingual")

    def test_another_task_of_the_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        registry = importlib.import_module("mteb.get_tasks")._TASKS_REGISTRY
        monkeypatch.setitem(registry, "PosIR", mteb_fair.SQuADPosQ)
        with pytest.raises(ValueError, match="MTEB has another task named 'PosIR'"):
            mteb_fair.register()


class TestGetTasks:
    def test_subsets_of_colder(self) -> None:
        """The benchmark has the subset about positions, and the task by its name all of them."""
        for tasks in (
            mteb_fair.get_tasks(),
            mteb.get_benchmark("PositionFair").tasks,
            mteb_fair.get_tasks(None, languages=["eng"]),
        ):
            (colder,) = (task for task in tasks if task.metadata.name == "ColDeRReranking")
            assert colder.hf_subsets == ["position_bias"]
        (colder,) = mteb_fair.get_tasks("ColDeRReranking")
        assert "position_bias" in colder.hf_subsets
        assert len(colder.hf_subsets) == 7

    def test_revisions(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        commit = "0123456789abcdef" * 2 + "01234567"
        (task,) = mteb_fair.get_tasks("SQuAD-PosQ", revision=commit)
        assert task.metadata.name == "SQuAD-PosQ-rev-0123456789ab"
        assert task.metadata.revision == commit
        found = mteb.get_task(task.metadata.name)  # as MTEB does with its results
        asked = []
        monkeypatch.setattr(
            "fair_evaluation.benchmarks.sources.snapshot_download",
            lambda name, *, revision, **_: asked.append((name, revision)) or tmp_path,
        )
        with pytest.raises(ValueError, match="found none"):
            found.load_data()
        assert asked == [("rajpurkar/squad_v2", commit)]
        own = mteb_fair.SQuADPosQ.metadata.revision
        (task,) = mteb_fair.get_tasks("SQuAD-PosQ", revision=own)
        assert (task.metadata.name, task.metadata.revision) == ("SQuAD-PosQ", own)
        (task,) = mteb_fair.get_tasks("PosIR", domains=["law"], revision=commit)
        assert task.metadata.name == "PosIR-law-rev-0123456789ab"

    @pytest.mark.parametrize(
        ("tasks", "given", "message"),
        [
            (
                "PosIR",
                {"revision": "main"},
                "revision: expected a commit of infgrad/PosIR-Benchmark-v1, 40 hexadecimal",
            ),
            ("PosIR", {"revision": "0" * 40, "data_folder": "."}, "revision: the data in a folder have none"),
            ("PositionDemoRetrieval", {"revision": "0" * 40}, "revision: the data of .* come with this package"),
            ("PositionDemoRetrieval", {"data_folder": "."}, "data_folder: the data of .* come with this package"),
            ("ColDeRReranking", {"revision": "0" * 40}, "revision: 'ColDeRReranking' is MTEB's own task"),
            (None, {"revision": "0" * 40}, "revision: expected a single task for it"),
        ],
    )
    def test_bad_revisions(self, tasks: str | None, given: dict[str, str], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            mteb_fair.get_tasks(tasks, **given)

    def test_nanobeir_beside_ours(self) -> None:
        names = [task.metadata.name for task in mteb_fair.get_tasks(["PositionDemoRetrieval", "NanoBEIR"])]
        assert names[0] == "PositionDemoRetrieval"
        assert len(names) == 14
        assert all(name.startswith("Nano") for name in names[1:])

    def test_mtebs_own(self) -> None:
        (task,) = mteb_fair.get_tasks("NanoArguAnaRetrieval", languages=["eng"])
        assert task.metadata.name == "NanoArguAnaRetrieval"

    @pytest.mark.parametrize(
        ("name", "near"), [("posir", "PosIR"), ("FineWebPosQ", "FineWeb-PosQ"), ("NanoArguana", "NanoArguAnaRetrieval")]
    )
    def test_unknown(self, name: str, near: str) -> None:
        with pytest.raises(ValueError, match=f"tasks: '{name}' is unknown; the nearest names are .*'{near}'"):
            mteb_fair.get_tasks(name)

    def test_languages(self) -> None:
        names = [task.metadata.name for task in mteb_fair.get_tasks(None, languages=["eng"])]
        # PosIRCrossLingual has no English queries.
        assert names == ["PosIR", "FineWeb-PosQ", "SQuAD-PosQ", "ColDeRReranking"]
        with pytest.raises(ValueError, match=r"languages: no task of PositionFair has any of \['xyz'\]"):
            mteb_fair.get_tasks(None, languages=["xyz"])
        with pytest.raises(ValueError, match=r"languages: FineWeb-PosQ has none of \['fra'\]"):
            mteb_fair.get_tasks(["PosIR", "FineWeb-PosQ"], languages=["fra"])
        with pytest.raises(ValueError, match="languages: no task of NanoBEIR has any"):
            mteb_fair.get_tasks("NanoBEIR", languages=["kor"])
        with pytest.raises(
            ValueError, match=r"languages: expected None or a list of at least one, such as \['eng'\], got \[\]"
        ):
            mteb_fair.get_tasks("PosIR", languages=[])

    def test_no_tasks(self) -> None:
        with pytest.raises(ValueError, match="tasks: expected at least one name"):
            mteb_fair.get_tasks([])
        for tasks in (5, [None], [mteb_fair.PositionDemoRetrieval()]):
            with pytest.raises(TypeError, match="tasks: expected None, a name or names of tasks, got "):
                mteb_fair.get_tasks(tasks)  # type: ignore[arg-type]

    def test_bad_arguments(self, tmp_path: Path) -> None:
        with pytest.raises(
            ValueError, match=r"languages: expected None or a list of at least one, such as \['eng'\], got 'eng'"
        ):
            mteb_fair.get_tasks("PosIR", languages="eng")
        with pytest.raises(ValueError, match="data_folder: expected a single task for it"):
            mteb_fair.get_tasks(["PosIR", "FineWeb-PosQ"], data_folder=tmp_path)
        with pytest.raises(ValueError, match="data_folder: 'NanoArguAnaRetrieval' is MTEB's own task"):
            mteb_fair.get_tasks("NanoArguAnaRetrieval", data_folder=tmp_path)
