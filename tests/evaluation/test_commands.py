"""The commands of evaluation and diagnosis, on a tiny model and small files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from fair_calibration import FairConfig, FairSentenceTransformer
from fair_calibration.commands import main
from fair_evaluation.command_arguments import read_texts
from fair_evaluation.commands import COMMANDS
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
    assert "(3 of 4 documents measured, 0 too short, 1 truncated)" in printed


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
    rows = [
        {
            "article": f"a{i}",
            "passage_id": f"p{i}",
            "text": text,
            "questions": [{"id": f"q{i}", "text": f"question {i}", "answer": text[:3], "answer_start": 0}],
        }
        for i, text in enumerate(documents([30, 30, 30, 30]))
    ]
    passages.write_text("\n".join(map(json.dumps, rows)))
    settings = ["--length", "60", "--places", "2"]
    assert main(["probes", model, str(passages), str(output), "--questions", *settings]) == 0
    assert capsys.readouterr().out.startswith(f"4 documents in {output}, 2 in each of 2 rotations\n")
    probes = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(query["query"] for probe in probes for query in probe["queries"]) == sorted(
        2 * [f"question {i}" for i in range(4)]
    )
    assert set(probes[0]) == {"docno", "text", "rotation", "queries"}


def test_probes_of_passages_without_questions(model: str, tmp_path: Path) -> None:
    passages, output = tmp_path / "passages.txt", tmp_path / "probes.jsonl"
    sentences = [" ".join(f"Passage {i} has sentence {n} about animals." for n in range(4)) for i in range(24)]
    passages.write_text("\n".join(sentences))
    assert main(["probes", model, str(passages), str(output), "--length", "200", "--places", "2"]) == 0
    probes = [json.loads(line) for line in output.read_text().splitlines()]
    assert {probe["rotation"] for probe in probes} == {0, 1}
    for probe in probes:
        assert len(probe["queries"]) == 2
        for query in probe["queries"]:
            assert query["query"] not in probe["text"]
            assert any(query["query"] in passage for passage in sentences)


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


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the one line that a command with wrong arguments prints."""
    capsys.readouterr()
    arguments = [*arguments, *([] if arguments[0] in ("evaluate", "probes", "underflow") else ["--quiet"])]
    try:
        status = main(arguments)
    except SystemExit as stop:  # wrong arguments
        status = stop.code
    assert status == 2
    *others, line = capsys.readouterr().err.strip().splitlines()
    assert not any("Traceback" in other for other in others)
    assert line.startswith(f"fair-calibration {arguments[0]}: error: ")
    return line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "texts.jsonl, line 1: expected a JSON object with the field 'text' (Expecting property name"),
        ('{"body": "x"}', "texts.jsonl, line 1: expected a JSON object with the field 'text', got '{\"body\": \"x\"}'"),
        ("[1]", "texts.jsonl, line 1: expected a JSON object with the field 'text', got '[1]'"),
        ('{"text": 5}', "texts.jsonl, line 1: expected a string in the field 'text', got 5"),
        ("[" * 100_000, "texts.jsonl, line 1: expected a JSON object with the field 'text' (maximum recursion"),
        (r'{"text": "bees \ud800"}', "contain a lone surrogate"),
        ("", "expected at least one document"),
    ],
)
def test_bad_texts(content: str, message: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts.jsonl").write_text(content)
    assert message in fails(["truncation", model, str(tmp_path / "texts.jsonl")], capsys)


def test_encodings_of_texts(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes("one\n\ncaf\u00e9\n".encode("latin-1"))
    assert "texts.txt, line 3: expected text in UTF-8" in fails(["truncation", model, str(path)], capsys)
    path.write_bytes("\ufeffone\ntwo\n".encode())
    assert [*read_texts(str(path))] == ["one", "two"]


def test_arguments_are_refused_before_anything_is_encoded(
    model: str, texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails(["reflection", model, texts, "--seed", "-1"], capsys)
    assert "argument --seed: expected an integer of at least 0, got '-1'" in line
    line = fails(["reflection", model, texts, "--segments", "1"], capsys)
    assert "argument --segments: expected an integer of at least 2, got '1'" in line
    line = fails(["reflection", "no/where", texts, "--limit", "1"], capsys)
    assert "texts: expected at least two documents, " in line
    plot = ["--plot", str(tmp_path / "plot.png"), "--baskets", "2"]
    line = fails(["attention", model, texts, "--config", "even_chunks", *plot], capsys)
    assert "EvenChunks leaves the model's attention as it is" in line


def test_missing_paths(model: str, texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "texts: no file at 'nope.txt'" in fails(["reflection", model, "nope.txt"], capsys)
    assert "texts: a folder at" in fails(["tune", model, str(tmp_path)], capsys)
    assert "passages: no file at" in fails(["probes", model, "nope.jsonl", str(tmp_path / "out")], capsys)
    assert "scores: no file at" in fails(["evaluate", "nope.csv"], capsys)
    line = fails(["attention", model, texts, "--output", str(tmp_path / "nope" / "a.csv")], capsys)
    assert "--output: cannot write" in line
    line = fails(["attention", model, texts, "--plot", str(tmp_path / "plot.jpgg")], capsys)
    assert "--plot: expected a name that ends in one of" in line


def test_wrong_columns_of_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scores.csv"
    path.write_text("id,score,position\n1,0.5,end\n")
    assert f"{path}: rows: the columns ['qid'] are missing" in fails(["evaluate", str(path)], capsys)
    path.write_text("")
    assert str(path) in fails(["evaluate", str(path)], capsys)


def test_scores_with_the_column_of_topics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "scores.csv").write_text("qid,score,place\n1,0.5,end\n2,1.0,beginning\n")
    assert main(["evaluate", str(tmp_path / "scores.csv")]) == 0
    assert "2 queries in 2 groups" in capsys.readouterr().out


def test_documents_that_are_all_truncated(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(documents([100, 110, 120])))
    arguments = ["reflection", model, str(path), "--compare", "--segments", "2", "--max-seq-length", "64"]
    line = fails(arguments, capsys)
    assert "3 of 3 documents are longer than the model reads" in line
    assert "--max-seq-length 130" in line  # the number of the tiny model's positions
    assert main([*arguments[:-1], "128", "--quiet"]) == 0


def test_baskets_of_documents_of_mixed_length(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plot = tmp_path / "texts.txt", tmp_path / "attention.png"
    path.write_text("\n".join(documents([40, 70, 100, 101])))
    arguments = ["attention", model, str(path), "--config", CONFIG, "--plot", str(plot)]
    assert main([*arguments, "--quiet"]) == 0
    assert "Overall, in documents of 4 baskets (2 here, mean over all layers)" in capsys.readouterr().out
    assert plot.exists()
    assert main([*arguments[:3], "--quiet"]) == 0  # baskets of 128 tokens
    assert "a single basket, in which there is nothing to calibrate" in capsys.readouterr().out
    assert main([*arguments, "--baskets", "2", "--quiet"]) == 0
    plot.unlink()
    assert "--baskets: there are documents of [2, 3, 4] baskets, none of 9" in fails(
        [*arguments, "--baskets", "9"], capsys
    )
    assert not plot.exists()
    assert "--baskets: it chooses" in fails([*arguments[:-2], "--baskets", "2"], capsys)


def test_settings(model: str, texts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention", model, texts, "--config", "full", "--limit", "1", "--quiet"]) == 0
    assert "leaves the model's attention as it is" in fails(
        ["attention", model, texts, "--config", "even_chunks"], capsys
    )
    assert "one of ['even_chunks', 'full'" in fails(["attention", model, texts, "--config", "fulll"], capsys)
    assert "positions for 130 tokens, got 999" in fails(["truncation", model, texts, "--max-seq-length", "999"], capsys)


def test_saved_calibrated_model(model: str, texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "calibrated")
    FairSentenceTransformer(model, config=FairConfig(strength=0.25)).save_pretrained(folder)
    for arguments in (["truncation"], ["reflection", "--segments", "2", "--compare"]):
        capsys.readouterr()
        assert main([arguments[0], folder, texts, *arguments[1:], "--quiet"]) == 0
    assert "plain: slope" in capsys.readouterr().out


def test_numbers_are_checked(model: str, texts: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (("--limit", "0"), ("--max-seq-length", "-1"), ("--segments", "x"), ("--strength", "2")):
        with pytest.raises(SystemExit) as stop:
            main(["reflection", model, texts, option, value])
        assert stop.value.code == 2
        assert f"argument {option}: expected" in capsys.readouterr().err


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            main([command.name, "--help"])
        assert stop.value.code == 0
        assert f"fair-calibration {command.name}" in capsys.readouterr().out
