from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import mteb
import pandas as pd
import pytest

from mteb_fair import FairEncoder, PositionDemoRetrieval, get_tasks
from mteb_fair.comparison import add_change, compare, parse_models
from tests.mteb.layouts import write_fineweb, write_posir

ROOT = Path(__file__).parents[2]


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_posir(
        tmp_path / "data" / "PosIR",
        "eng-Latn",
        "law",
        corpus={f"d{i}": f"ba{'ln'[i % 2]} du text {i}" for i in range(5)},
        queries={f"q{i}": (f"text {i}", [20 * i, 20 * i + 1], 100, 300) for i in range(5)},
        qrels=[(f"q{i}", f"d{i}", 1) for i in range(5)],
    )
    write_fineweb(tmp_path / "data" / "FineWeb-PosQ", [("red", "red", ["end"]), ("blue", "blue", ["middle"])])
    return tmp_path / "data"


class TestCompare:
    def test_what_is_on_disk_is_not_computed_again(
        self, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = {"output": tmp_path, "strengths": [0, 1], "progress": False}
        first = compare([tiny_path], [PositionDemoRetrieval()], **settings)
        assert first["strength"].tolist() == [0, 1]
        monkeypatch.setattr("mteb_fair.encoder.FairEncoder.encode", None)
        again = compare([tiny_path], [PositionDemoRetrieval()], **settings)
        # MTEB rounds what it writes.
        pd.testing.assert_frame_equal(again.infer_objects(), first.infer_objects(), atol=1e-5)

    def test_a_hub_model_is_not_loaded_for_results_on_disk(self, tiny_path: Path, tmp_path: Path) -> None:
        tasks = [PositionDemoRetrieval()]
        expected = compare([tiny_path], tasks, output=tmp_path, strengths=[0.5], progress=False)
        with pytest.raises(ValueError, match="'BAAI/bge-m3' is no folder, and could not be"):  # its result is not there
            compare(["BAAI/bge-m3"], tasks, output=tmp_path, strengths=[0.5], progress=False)
        (result,) = tmp_path.rglob("PositionDemoRetrieval.json")
        meta = mteb.get_model_meta("mteb_fair/BAAI__bge-m3@strength=0.5")
        place = mteb.ResultCache(tmp_path).get_task_result_path("PositionDemoRetrieval", meta)
        place.parent.mkdir(parents=True)
        shutil.copy(result, place)
        table = compare(["BAAI/bge-m3"], tasks, output=tmp_path, strengths=[0.5], progress=False)
        assert table["model"].tolist() == ["BAAI/bge-m3"]
        assert table["psi"].astype(float).tolist() == pytest.approx(expected["psi"].astype(float).tolist(), abs=1e-5)

    @pytest.mark.parametrize("name", ["models", "strengths"])
    def test_nothing_to_do(self, name: str, tmp_path: Path) -> None:
        settings = {"models": ["BAAI/bge-m3"], "strengths": [0.5], name: []}
        with pytest.raises(ValueError, match=f"{name}: expected a list of at least one"):
            compare(tasks=get_tasks("PositionDemoRetrieval"), output=tmp_path, **settings)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"models": ["a/model", "b/model"]}, r"models: .* got \['local/model'\] .*; a mapping says what to call"),
            ({"models": ["x/y", "x/y"]}, r"models: expected each once, got \['x/y'\] more than once"),
            ({"strengths": (0, 0.5, 0.0)}, r"strengths: expected each once, got \[0.0\]"),
            ({"tasks": [PositionDemoRetrieval(), PositionDemoRetrieval()]}, r"tasks: .* got \['PositionDemoRetrieval"),
        ],
    )
    def test_what_occurs_twice(
        self, changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for folder in ("a/model", "b/model"):
            (tmp_path / folder).mkdir(parents=True)
        settings = {"models": ["x/y"], "tasks": [PositionDemoRetrieval()], **changes}
        with pytest.raises(ValueError, match=message):
            compare(**settings, output=tmp_path / "out", progress=False)

    def test_names_of_a_mapping(self, tiny_path: Path, tmp_path: Path) -> None:
        models = {"a/first": tiny_path, "b/second": tiny_path}
        table = compare(models, [PositionDemoRetrieval()], output=tmp_path, strengths=[0], progress=False)
        assert table["model"].tolist() == ["a/first", "b/second"]

    def test_killed_at_any_time(self, tiny_path: Path, tmp_path: Path) -> None:
        """What was complete when a process was killed stays, and a second run ends as if there had been no first."""
        tasks = [PositionDemoRetrieval()]
        expected = compare([tiny_path], tasks, output=tmp_path / "whole", strengths=[0, 0.5, 1], progress=False)
        pid = os.fork()
        if pid == 0:
            encode, calls = FairEncoder.encode, []

            def encode_or_die(self: FairEncoder, *args: Any, **kwargs: Any) -> Any:
                calls.append(None)
                if len(calls) > per_result:  # in the midst of the second result
                    os.kill(os.getpid(), signal.SIGKILL)
                return encode(self, *args, **kwargs)

            per_result = 6  # queries and documents of three collections
            FairEncoder.encode = encode_or_die  # type: ignore[method-assign]
            compare([tiny_path], tasks, output=tmp_path / "cut", strengths=[0, 0.5, 1], progress=False)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        assert len(list((tmp_path / "cut").rglob("PositionDemoRetrieval.json"))) == 1
        table = compare([tiny_path], tasks, output=tmp_path / "cut", strengths=[0, 0.5, 1], progress=False)
        pd.testing.assert_frame_equal(table.infer_objects(), expected.infer_objects(), atol=1e-5)

    def test_languages_beside_others_on_disk(self, tiny_path: Path, data: Path, tmp_path: Path) -> None:
        french = {"corpus": {"d": "ba"}, "queries": {"q": ("ba", [0, 9], 100, 300)}, "qrels": [("q", "d", 1)]}
        write_posir(data / "PosIR", "fra-Latn", "law", **french)
        for language, subset in (("eng", "eng-Latn"), ("fra", "fra-Latn"), ("eng", "eng-Latn")):
            tasks = get_tasks("PosIR", languages=[language], data_folder=data / "PosIR")
            table = compare([tiny_path], tasks, output=tmp_path / "out", strengths=[0], progress=False)
            assert set(table["subset"]) == {subset}

    @pytest.mark.parametrize("share", [0, 0.5])
    def test_a_result_that_was_cut_off(
        self, share: float, tiny_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        settings = {"output": tmp_path, "strengths": [0], "progress": False}
        first = compare([tiny_path], [PositionDemoRetrieval()], **settings)
        (path,) = tmp_path.rglob("PositionDemoRetrieval.json")
        text = path.read_text()
        path.write_text(text[: int(len(text) * share)])
        with caplog.at_level(logging.WARNING, "mteb_fair"):
            again = compare([tiny_path], [PositionDemoRetrieval()], **settings)
        pd.testing.assert_frame_equal(again.infer_objects(), first.infer_objects(), atol=1e-5)
        assert f"{path} is no complete result" in caplog.text
        assert path.with_name("PositionDemoRetrieval.json.corrupt").is_file()
        assert json.loads(path.read_text())["scores"]


def test_models_of_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a/model", "b/model", "c=d"):
        (tmp_path / folder).mkdir(parents=True)
    assert parse_models(["BAAI/bge-m3", "a/model", "me/second=b/model", "c=d"]) == {
        "BAAI/bge-m3": "BAAI/bge-m3",
        "local/model": "a/model",
        "me/second": "b/model",
        "local/c=d": "c=d",
    }
    with pytest.raises(ValueError, match=r"models: .* got \['local/model'\] .* organization/name=folder"):
        parse_models(["a/model", "b/model"])


SPLITS = [(0.0, "dev", 0.5), (0.0, "test", 0.25), (0.5, "dev", 0.75), (0.5, "test", 0.125)]


def test_change_by_hand() -> None:
    columns = ["model", "strength", "task", "split", "subset", "length", "ndcg_at_10", "psi"]
    rows = [
        ["m", 0.0, "t", "test", "s", "all", 0.5, 0.4],
        ["m", 0.5, "t", "test", "s", "all", 0.6, 0.1],
        ["m", 0.0, "nano", "test", "s", "all", 0.0, None],
        ["m", 0.5, "nano", "test", "s", "all", 0.6, None],
        ["other", 0.5, "t", "test", "s", "all", 0.6, 0.1],
    ]
    changed = add_change(pd.DataFrame(rows, columns=columns).astype(object))
    assert changed["ndcg_change"].iloc[:2].tolist() == pytest.approx([0, 0.2])
    assert changed["psi_change"].iloc[:2].tolist() == pytest.approx([0, -0.75])
    assert changed[["ndcg_change", "psi_change"]].iloc[2:].isna().all(axis=None)


def test_change_of_each_split() -> None:
    columns = ["model", "strength", "task", "split", "subset", "length", "ndcg_at_10", "psi"]
    rows = [["m", s, "t", split, "s", "all", score, None] for s, split, score in SPLITS]
    assert add_change(pd.DataFrame(rows, columns=columns).astype(object))["ndcg_change"].tolist() == [0, 0, 0.5, -0.5]


def test_leaderboard(tiny_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    table = script("examples/mteb_leaderboard.py").main(
        ["--models", str(tiny_path), "--output", str(tmp_path / "out"), "--no-progress", "--max-seq-length=64"]
    )
    assert table["strength"].tolist() == [0.0, 0.5]
    printed = capfd.readouterr()
    assert "PositionDemoRetrieval" in printed.out
    assert "%|" not in printed.err  # no bars
    assert (tmp_path / "out" / "leaderboard.png").stat().st_size > 5000
    assert len(pd.read_csv(tmp_path / "out" / "leaderboard.csv")) == 2


def test_reproduction_on_stand_ins(
    tiny_path: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTEB_FAIR_DATA", str(data))  # restored afterwards, also from what the script sets
    module = script("benchmarks/reproduce_paper.py")
    monkeypatch.setitem(module.PUBLISHED, tiny_path.name, {"q1": 0.123})
    report = module.main(
        [
            *("--models", str(tiny_path), "--tasks", "PosIR", "FineWeb-PosQ", "--data-folder", str(data)),
            *("--output", str(tmp_path / "out"), "--no-progress"),
        ]
    )
    rows = report.set_index(["task", "length"])
    (posir,) = {name for name in report["task"] if name.startswith("PosIR-local-")}
    assert rows.loc[(posir, "q1"), "PSI published"] == 0.123
    assert rows.loc[(posir, "q1"), "nDCG plain"] == rows.loc[(posir, "all"), "nDCG plain"]  # one query a bin
    assert pd.isna(rows.loc[(posir, "q2"), "PSI plain"])
    printed = capsys.readouterr().out
    assert "measured:  " in printed
    assert module.CLAIMS in printed


def test_reproduction_of_the_plain_model_alone(tiny_path: Path, tmp_path: Path) -> None:
    arguments = ["--models", f"a/b={tiny_path}", "--tasks", "PositionDemoRetrieval", "--strength", "0", "--no-progress"]
    report = script("benchmarks/reproduce_paper.py").main([*arguments, "--output", str(tmp_path)])
    assert report["model"].tolist() == ["a/b"]
    assert report["PSI plain"].tolist() == report["PSI fair"].tolist()


def test_claims_by_hand() -> None:
    module = script("benchmarks/reproduce_paper.py")
    columns = ["task", "strength", "n", "psi_change", "ndcg_change"]
    rows = [["PosIR", 0.5, 3, -0.43, 0.048], ["FineWeb-PosQ", 0.5, 3, 0.1, -0.01], ["NanoX", 0.5, None, None, 0.0]]
    (measured, published) = module.claims(pd.DataFrame(rows, columns=columns), 0.5)
    assert measured == "measured:  PSI falls in 1 of 2 cases, by up to 43%; nDCG@10 changes by -1.0% to +4.8%"
    assert published.startswith("published: PSI falls in all 16 cases")
