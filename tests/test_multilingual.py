from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fair_calibration import EvenChunks, FairConfig
from fair_evaluation.position_collections import load_passages

SCRIPT = Path(__file__).parents[1] / "examples" / "multilingual.py"
TRANSLATIONS = sorted((SCRIPT.parent / "translations").glob("*.jsonl"))


def test_the_example(
    tiny_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = importlib.util.spec_from_file_location("multilingual", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    # The tiny model reads 128 tokens.
    monkeypatch.setattr(
        example, "SETTINGS", {"calibrated": FairConfig(basket_size=16), "even chunks": EvenChunks(chunk_size=32)}
    )
    picture = tmp_path / "out" / "languages.png"
    arguments = ["--model", str(tiny_folder()), "--quiet", "--output", str(picture)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    example.main()
    sizes, table, *_ = capsys.readouterr().out.split("\n\n")
    assert sizes.endswith("questions in each language")
    head, *lines = [re.split(r"\s+(?!chunks)", line.strip()) for line in table.splitlines()]
    assert head == ["documents", "questions", "model", "nDCG@10", "beginning", "middle", "end", "PSI"]
    languages = ["English", "German", "Spanish", "Chinese"]
    own = [(language, language) for language in languages]
    asked_in_english = [(language, "English") for language in languages[1:]]
    models = ["plain", "calibrated", "even chunks"]
    assert [tuple(line[:3]) for line in lines] == [(*pair, m) for pair in own + asked_in_english for m in models]
    assert len({tuple(line[3:]) for line in lines[:3]}) == 3  # the settings have an effect
    for line in lines:
        ndcg, *places, psi = map(float, line[3:])
        assert ndcg == pytest.approx(sum(places) / 3, abs=2e-3)
        assert psi == pytest.approx(1 - min(places) / max(places), abs=2e-2)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", TRANSLATIONS, ids=lambda path: path.stem)
def test_translations_have_the_passages_and_questions_of_the_source(path: Path) -> None:
    source, translated = load_passages(), load_passages(path)  # which checks that answers stand where they should
    assert [p.passage_id for p in translated] == [p.passage_id for p in source]
    assert [[q.id for q in p.questions] for p in translated] == [[q.id for q in p.questions] for p in source]
    assert not {p.text for p in translated} & {p.text for p in source}
    assert all(q.answer for p in translated for q in p.questions)


def test_there_are_three_translations() -> None:
    assert [path.stem for path in TRANSLATIONS] == ["de", "es", "zh"]
