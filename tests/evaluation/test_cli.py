"""The commands of ``python -m fair_calibration``, on a tiny model and small files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from fair_evaluation.cli import build_parser, main
from tests.core.tiny_models import documents


@pytest.fixture(scope="module")
def model(tiny_folder: Callable[..., Path]) -> str:
    return str(tiny_folder("bert", "mean"))


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents([100, 110, 120, 150])))
    return str(path)


CONFIG = '{"strength": 1.0, "basket_size": 32, "layers": "all"}'


def test_truncation(model: str, texts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["truncation", model, texts, "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("1 of 4 documents (25.0%) lose")
    main(["truncation", model, texts, "--quiet", "--limit", "3"])
    assert capsys.readouterr().out.startswith("0 of 3 documents")


def test_attention(model: str, texts: str, tmp_path: Path) -> None:
    output, plot = tmp_path / "attention.csv", tmp_path / "attention.png"
    main(["attention", model, texts, "--config", CONFIG, "--quiet", "--output", str(output), "--plot", str(plot)])
    table = pd.read_csv(output)
    assert (table.groupby(["layer", "n_baskets"])["share_calibrated"].sum() - 1).abs().max() < 1e-5
    # Mean pooling isolates nothing, so at full strength all baskets get the same.
    assert (table["share_calibrated"] * table["n_baskets"] - 1).abs().max() < 1e-4
    assert plot.stat().st_size > 1000


def test_reflection(model: str, texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--compare", "--segments", "2", "--config", CONFIG, "--quiet", "--plot", str(tmp_path / "r.png")]
    main(["reflection", model, texts, *arguments])
    printed = capsys.readouterr().out
    assert "plain: slope" in printed
    assert "calibrated: slope" in printed
    assert "(3 of 4 documents, 0 too short, 1 truncated)" in printed


def test_tune(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(documents([130 + i for i in range(9)])))
    main(["tune", model, str(path), "--strengths", "1", "--basket-sizes", "32", "--max-seq-length", "128", "--quiet"])
    printed = capsys.readouterr().out
    assert printed.startswith("Chosen: strength ")
    chosen = json.loads(printed.rsplit("as JSON: ", 1)[1])
    assert chosen["strength"] in (0.0, 1.0)
    assert chosen["basket_size"] in (32, 128)


def test_underflow(model: str, texts: str, tmp_path: Path) -> None:
    output = tmp_path / "underflow.csv"
    main(
        ["underflow", model, texts, "--lengths", "16", "32", "--dtypes", "float16", "--output", str(output), "--quiet"]
    )
    table = pd.read_csv(output)
    assert set(table["length"]) == {16, 32}
    assert table["share_zero"].between(0, 1).all()


def test_probes(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passages, output = tmp_path / "passages.jsonl", tmp_path / "probes.jsonl"
    rows = [{"text": f"{text}.", "name": f"title {i}"} for i, text in enumerate(documents([20, 20, 20, 20]))]
    passages.write_text("\n".join(map(json.dumps, rows)))
    settings = ["--title", "name", "--length", "60", "--places", "2", "--quiet"]
    main(["probes", model, str(passages), str(output), *settings])
    assert capsys.readouterr().out == f"4 documents in {output}\n"
    probes = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(query["query"] for probe in probes for query in probe["queries"]) == sorted(
        2 * [r["name"] for r in rows]
    )


def test_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, end in (("a", 0.25), ("b", 0.5)):
        rows = [
            {"qid": i, "position": p, "score": s} for i, (p, s) in enumerate(10 * [("beginning", 0.5), ("end", end)])
        ]
        pd.DataFrame(rows).to_csv(tmp_path / f"{name}.csv", index=False)
    result = tmp_path / "result.json"
    main(["evaluate", str(tmp_path / "a.csv"), "--against", str(tmp_path / "b.csv"), "--json", str(result)])
    assert "PSI 0.500 (a) - 0.000 (b) = 0.500" in capsys.readouterr().out
    assert [each["psi"] for each in json.loads(result.read_text())] == [0.5, 0.0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "texts.jsonl, line 1: expected JSON with the field 'text'"),
        ('{"body": "x"}', "texts.jsonl, line 1: expected JSON with the field 'text'"),
        ('{"text": 5}', "texts.jsonl, line 1: expected a text in the field 'text', got 5"),
    ],
)
def test_bad_texts(content: str, message: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.jsonl").write_text(content)
    with pytest.raises(SystemExit) as stop:
        main(["truncation", model, str(tmp_path / "texts.jsonl"), "--quiet"])
    assert stop.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("fair_calibration: error: ")
    assert message in last


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("truncation", "attention", "reflection", "tune", "underflow", "probes", "evaluate"):
        with pytest.raises(SystemExit) as stop:
            build_parser().parse_args([command, "--help"])
        assert stop.value.code == 0
        assert f"python -m fair_calibration {command}" in capsys.readouterr().out


def test_as_a_module() -> None:
    process = subprocess.run([sys.executable, "-m", "fair_calibration", "--help"], capture_output=True, text=True)
    assert process.returncode == 0
    assert "reflection" in process.stdout
