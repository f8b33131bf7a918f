from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mteb
import pytest
from mteb.models.model_implementations import MODEL_REGISTRY

from mteb_fair.cli import build_parser, choose_model, main, select_tasks
from mteb_fair.scores import COLUMNS
from mteb_fair.task_registry import register
from tests.mteb.layouts import write_fineweb


def choose(*arguments: str) -> str:
    register()
    return choose_model(build_parser().parse_args(["run", *arguments]))


def run(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mteb_fair", *arguments],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )


class TestChoice:
    def test_a_name_of_mteb_is_mtebs_model(self) -> None:
        assert choose("-m", "BAAI/bge-m3") == "BAAI/bge-m3"

    @pytest.mark.parametrize(
        ("arguments", "settings"),
        [
            (["--strength", "0.3"], "strength=0.3"),
            (["--config", "full"], "strength=1.0,isolated_share=equal"),
            (["--config", '{"min_content": 64, "strength": 1}'], "strength=1.0,min_content=64"),
            (["--config", "even_chunks"], "even_chunks,strength=0.8"),
            (["--config", '{"chunk_size": 64, "ridge": 0.1}'], "even_chunks,strength=0.8,chunk_size=64,ridge=0.1"),
            (["--config", "full", "--strength", "0.5"], "strength=0.5,isolated_share=equal"),
            (["--config", '{"layers": [3, 4]}'], "strength=0.5,layers=at3+4"),
            (["--no-calibrate-untyped"], "strength=0.5,calibrate_untyped=False"),
            (["--max-seq-length", "512"], "strength=0.5,max_seq_length=512"),
            (["--strength", "0", "--passage-size", "128"], "strength=0.0,passage_size=128"),
        ],
    )
    def test_settings(self, arguments: list[str], settings: str) -> None:
        assert choose("-m", "BAAI/bge-m3", *arguments) == f"mteb_fair/BAAI__bge-m3@{settings}"

    def test_a_folder(self, tiny_path: Path) -> None:
        assert choose("-m", str(tiny_path)) == f"mteb_fair/local__{tiny_path.name}@strength=0.5"
        assert choose("-m", str(tiny_path), "--base-name", "a/b", "--strength", "0") == "mteb_fair/a__b@strength=0.0"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "--model: expected a name or a folder, got none"),
            (["-m", "BAAI/bge-m4", "--strength", "1"], r"nearest names that MTEB knows are .*BAAI/bge-m3"),
            (["-m", "./nowhere"], "there is no folder './nowhere', and it cannot be the name of a model"),
            (["-m", "bge-m3"], "nearest names that MTEB knows are .*'BAAI/bge-m3'"),
            (["-m", "BAAI/bge-m3", "--config", '{"x": 1}'], r"unknown FairConfig settings \['x'\]"),
            (
                ["-m", "mteb_fair/BAAI__bge-m3@strength=0.5"],
                "is the name of a base model with settings, .* give the base",
            ),
            (["-m", "BAAI/bge-m3", "--config", "half"], "config: expected the name of a preset"),
            (["-m", "BAAI/bge-m3", "--config", '{"layers": "many"}'], r"layers: expected one of \['all'\], got 'many'"),
        ],
    )
    def test_errors(self, arguments: list[str], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            choose(*arguments)


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", "-m", "BAAI/bge-m3", "-t", "posir"])
    assert stop.value.code == 2
    assert "mteb_fair: error: tasks: 'posir' is unknown; the nearest names are ['PosIR'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["-m", "BAAI/bge-m3", "-t", "Demo"],
            "tasks: 'Demo' is unknown; the nearest names are ['PositionDemoRetrieval'",
        ),
        (["-m", "BAAI/bge-m3", "-b", "PositionFare"], "'PositionFare' not found. Did you mean: PositionFair?"),
        (
            ["-m", "BAAI/bge-m3", "--data-folder", "."],
            "--data-folder: expected --tasks or --benchmarks that read from it",
        ),
        (
            ["-m", "BAAI/bge-m4", "-t", "PositionDemoRetrieval"],
            "'BAAI/bge-m4' is not a folder, not in the local cache",
        ),
        (
            ["-m", "BAAI/bge-m3", "-t", "PosIR", "--model-revision", "abc"],
            "Model revision abc not found for model BAAI/bge-m3. Expected 5617",
        ),
        (
            ["-m", "BAAI/bge-m3", "-t", "FineWeb-PosQ", "--languages", "fra"],
            "none of ['FineWeb-PosQ'] has --languages fra",
        ),
        (
            ["-m", "BAAI/bge-m3", "-t", "PosIR", "--eval-splits", "dev"],
            "--eval-splits: PosIR has ['test'], got ['dev']",
        ),
        (["-m", __file__, "-t", "PosIR"], "--model: expected a name or a folder, "),
        (
            ["-m", "BAAI/bge-m3", "-t", "FineWeb-PosQ", "--domains", "law"],
            "domains: only PosIR and PosIRCrossLingual have",
        ),
        (
            ["-m", "BAAI/bge-m3", "-t", "PosIR", "--data-folder", "no/where"],
            "--data-folder: there is no folder 'no/where'",
        ),
        (
            ["-m", "BAAI/bge-m3", "-t", "PosIR", "--prediction-folder", __file__],
            "--prediction-folder: expected a folder, ",
        ),
        (["-m", "BAAI/bge-m3", "-t", "PosIR", "--max-seq-length", "0"], "max_seq_length: expected an integer of at"),
        (["-m", "BAAI/bge-m3"], "--tasks: expected names of tasks, or --benchmarks, got neither"),
        (
            ["-m", "BAAI/bge-m3", "-b", "PositionFair", "--languages", "eng"],
            "--benchmarks: MTEB would ignore --languages; give one or the other",
        ),
        (["-m", "BAAI/bge-m3", "-t", "PosIR", "--device", "99"], "--device: expected devices of this machine"),
        (["-m", "BAAI/bge-m3", "-t", "PosIR", "--batch-size", "0"], "--batch-size: expected an integer of at least 1"),
        (["-m", "BAAI/bge-m3", "-t", "PosIR", "--num-proc", "-1"], "--num-proc: expected an integer of at least 1"),
        (
            ["-m", "BAAI/bge-m3", "-t", "PosIR", "STSBenchmark", "--passage-size", "64"],
            "--passage-size: ['STSBenchmark'] search no documents that could be cut",
        ),
        (
            ["-m", "BAAI/bge-m3", "-t", "PositionDemoRetrieval", "--data-folder", str(Path(__file__).parent)],
            "has no data of these tasks; expected a folder for each dataset, named FineWeb-PosQ or PosIR or SQuAD-PosQ",
        ),
        (["-m", "./nope", "-t", "PosIR"], "there is no folder './nope', and it cannot be the name of a model"),
        (
            ["-m", "BAAI/bge-m3", "-b", "PositionFair", "--domains", "law"],
            "--domains: expected PosIR or PosIRCrossLingual",
        ),
    ],
)
def test_unknown_names_are_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("MTEB_FAIR_DATA", "")  # which --data-folder changes; restored afterwards
    caplog.set_level("WARNING", "mteb")  # which `mteb run` changes; restored afterwards
    with pytest.raises(SystemExit) as stop:
        main(["run", *arguments, "--output-folder", str(tmp_path)])
    assert stop.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("mteb_fair: error: ")
    assert message in last


def test_revisions() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    name = choose("-m", "someone/some-model", "--model-revision", commit)
    assert MODEL_REGISTRY.pop(name).revision == commit


def test_what_is_wrong_with_data_is_one_line(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTEB_FAIR_DATA", str(tmp_path))  # restored afterwards
    write_fineweb(tmp_path / "FineWeb-PosQ", [("red", "red", ["elsewhere"])])
    arguments = ["-m", str(tiny_path), "-t", "FineWeb-PosQ", "--output-folder", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        main(["run", *arguments, "--no-co2-tracker"])
    assert stop.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("mteb_fair: error: ")
    assert "row 0: expected places among" in last


def test_wrong_columns_are_one_line(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTEB_FAIR_DATA", str(tmp_path))  # restored afterwards
    (tmp_path / "FineWeb-PosQ").mkdir()
    (tmp_path / "FineWeb-PosQ" / "a.jsonl").write_text('{"question": "q", "text": "t"}\n')
    arguments = ["-m", str(tiny_path), "-t", "FineWeb-PosQ", "--output-folder", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        main(["run", *arguments, "--no-co2-tracker"])
    assert stop.value.code == 2
    assert "['content', 'span_class'] are not in ['question', 'text']" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (
            KeyboardInterrupt(),
            130,
            "mteb_fair: interrupted; finished results are kept, and the same command resumes",
        ),
        (RuntimeError("no\nGPU"), 2, "mteb_fair: error: RuntimeError: no GPU (-v 3 shows where)"),
    ],
)
def test_what_happens_in_mteb_is_one_line(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("mteb.get_model", fail)
    arguments = ["run", "-m", "BAAI/bge-m3", "-t", "PositionDemoRetrieval", "--output-folder", "out"]
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == status
    assert capsys.readouterr().err.splitlines()[-1] == line
    with pytest.raises(type(error) if status == 2 else SystemExit):
        main([*arguments, "-v", "3"])


def test_errors_of_mteb_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["available-tasks", "-t", "posir"])
    assert "mteb_fair: error: KeyError: " in capsys.readouterr().err


def test_domains_are_part_of_the_task() -> None:
    register()
    args = build_parser().parse_args(["run", "-t", "PosIR", "FineWeb-PosQ", "--domains", "law", "arts"])
    assert [task.metadata.name for task in select_tasks(args)] == args.tasks == ["PosIR-arts+law", "FineWeb-PosQ"]
    assert mteb.get_task("PosIR-arts+law").domains == ("arts", "law")


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "available-tasks" in capsys.readouterr().out


def test_the_demo_task_and_local_data_in_a_process(tiny_path: Path, tmp_path: Path) -> None:
    write_fineweb(tmp_path / "data" / "FineWeb-PosQ", [("red", "red", ["end"]), ("blue", "blue", ["middle"])])
    process = run(
        "run", "-m", str(tiny_path), "-t", "PositionDemoRetrieval", "FineWeb-PosQ", "--data-folder", "data",
        "--config", '{"strength": 1, "basket_size": 16}', "--output-folder", "out",
        "--no-co2-tracker", "--batch-size", "16",
        folder=tmp_path,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    name = f"mteb_fair/local__{tiny_path.name}@strength=1.0,basket_size=16"
    assert f"model: {name}" in process.stderr
    (path,) = (tmp_path / "out").rglob("PositionDemoRetrieval.json")
    assert name.replace("/", "__") in path.parts
    assert json.loads(path.read_text())["scores"]["test"][0]["beginning_n"] > 0
    meta = json.loads((path.parent / "model_meta.json").read_text())
    assert meta["experiment_kwargs"]["basket_size"] == 16
    (path,) = (tmp_path / "out").rglob("FineWeb-PosQ-local-*.json")
    assert json.loads(path.read_text())["scores"]["test"][0]["end_n"] == 1
    header, *rows = process.stdout.splitlines()
    assert tuple(header.split()) == COLUMNS
    assert [row.split()[0] for row in rows[:2]] == ["PositionDemoRetrieval", path.stem]
    assert str(path.relative_to(tmp_path)) in process.stdout
    assert rows[-1] == "next: the same command with --strength 0 evaluates the plain model, to compare with."
    assert "Traceback" not in process.stderr
    assert "Warning" not in process.stderr


def test_other_models_of_the_name_in_the_results(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "mteb")  # which `mteb run` changes; restored afterwards
    other = tmp_path / "results" / f"mteb_fair__local__{tiny_path.name}@strength=0.25" / "0123456789abcdef"
    other.mkdir(parents=True)
    arguments = ["-m", str(tiny_path), "-t", "PositionDemoRetrieval", "--output-folder", str(tmp_path)]
    with pytest.raises(SystemExit) as stop:
        main(["run", *arguments, "--strength", "0.25", "--no-co2-tracker"])
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert "holds results of another model of this name (0123456789abcdef)" in printed
    assert "give this model a --base-name, or use another folder" in printed
    assert not list(tmp_path.rglob("*.json"))
