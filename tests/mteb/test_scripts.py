from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
import torch
from sentence_transformers import SentenceTransformer

from mteb_fair import get_tasks
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


def test_changes_by_hand() -> None:
    columns = ["model", "strength", "task", "split", "subset", "length", "ndcg_at_10", "psi"]
    rows = [
        ["m", 0.0, "t", "test", "s", "all", 0.5, 0.4],
        ["m", 0.5, "t", "test", "s", "all", 0.6, 0.1],
        ["m", 0.0, "nano", "test", "s", "all", 0.0, None],
        ["m", 0.5, "nano", "test", "s", "all", 0.6, None],
        ["other", 0.5, "t", "test", "s", "all", 0.6, 0.1],
        ["m", 0.0, "t", "dev", "s", "all", 0.25, None],
        ["m", 0.5, "t", "dev", "s", "all", 0.125, None],
    ]
    table = pd.DataFrame(rows, columns=columns).astype(object)
    changed = script("examples/mteb_leaderboard.py").add_changes(table)
    assert changed["ndcg_at_10_change_%"].iloc[:2].tolist() == pytest.approx([0, 20])
    assert changed["psi_change_%"].iloc[:2].tolist() == pytest.approx([0, -75])
    assert changed[["ndcg_at_10_change_%", "psi_change_%"]].iloc[2:5].isna().all(axis=None)
    assert changed["ndcg_at_10_change_%"].iloc[5:].tolist() == [0, -50]


class TestLeaderboard:
    def run(self, *arguments: str | Path) -> pd.DataFrame:
        table: pd.DataFrame = script("examples/mteb_leaderboard.py").main([*map(str, arguments), "--no-progress"])
        return table

    def test_results_on_disk_are_not_computed_again(
        self, tiny_path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("matplotlib")
        arguments = ("--models", tiny_path, "--output", tmp_path, "--max-seq-length=64", "--strengths", "0", "0.5")
        first = self.run(*arguments)
        assert first["strength"].tolist() == [0.0, 0.5]
        assert set(first["model"]) == {f"local/{tiny_path.name}"}
        printed = capfd.readouterr()
        assert "PositionDemoRetrieval" in printed.out
        assert "psi_change_%" in printed.out
        assert "%|" not in printed.err  # no bars
        assert (tmp_path / "leaderboard.png").stat().st_size > 5000
        assert len(pd.read_csv(tmp_path / "leaderboard.csv")) == 2
        monkeypatch.setattr("mteb_fair.encoder.FairEncoder.encode", None)
        # MTEB rounds what it writes.
        pd.testing.assert_frame_equal(self.run(*arguments).infer_objects(), first.infer_objects(), atol=1e-3)

    def test_languages_beside_others_on_disk(self, tiny_path: Path, data: Path, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        french = {"corpus": {"d": "ba"}, "queries": {"q": ("ba", [0, 9], 100, 300)}, "qrels": [("q", "d", 1)]}
        write_posir(data / "PosIR", "fra-Latn", "law", **french)
        module = script("examples/mteb_leaderboard.py")
        arguments = ["--models", str(tiny_path), "--output", str(tmp_path / "out"), "--no-progress"]
        for language, subset in (("eng", "eng-Latn"), ("fra", "fra-Latn"), ("eng", "eng-Latn")):
            tasks = get_tasks("PosIR", languages=[language], data_folder=data / "PosIR")
            table = module.evaluate(module.parse(arguments), tasks, str(tiny_path), 0.0)
            assert set(table["subset"]) == {subset}

    def test_folders_of_one_name(self, tiny_path: Path, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        for folder in ("a/model-x", "b/model-x"):
            model = SentenceTransformer(str(tiny_path), device="cpu")
            with torch.no_grad():
                next(model.parameters()).mul_(1 if folder < "b" else 2)
            model.save_pretrained(str(tmp_path / folder))
        folders = [tmp_path / "a/model-x", tmp_path / "b/model-x"]
        arguments = ("--output", tmp_path / "out", "--strengths", "0", "--models")
        with pytest.raises(ValueError, match=r"base_name: 'local/model-x' was the name of another model before"):
            self.run(*arguments, *folders)
        table = self.run(*arguments, folders[0], f"me/second={folders[1]}")
        assert table["model"].tolist() == ["local/model-x", "me/second"]


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
    (posir,) = {name for name in report["task"] if name.startswith("PosIR-local-")}
    rows = report.set_index(["task", "length", "strength"])
    assert rows.loc[(posir, "q1", 0), "psi_published"] == 0.123
    assert pd.isna(rows.loc[(posir, "q1", 0.5), "psi_published"])
    assert rows.loc[(posir, "q1", 0), "ndcg_at_10"] == rows.loc[(posir, "all", 0), "ndcg_at_10"]  # one query a bin
    assert pd.isna(rows.loc[(posir, "q2", 0), "psi"])
    printed = capsys.readouterr().out
    assert "PSI of the plain models:" in printed
    assert "measured:  " in printed
    assert module.CLAIMS in printed


def test_reproduction_of_the_plain_model_alone(tiny_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--models", f"a/b={tiny_path}", "--tasks", "PositionDemoRetrieval", "--strengths=0", "--no-progress"]
    report = script("benchmarks/reproduce_paper.py").main([*arguments, "--output", str(tmp_path)])
    assert report["model"].tolist() == ["a/b"]
    assert report["psi_published"].isna().all()


def test_claims_by_hand() -> None:
    module = script("benchmarks/reproduce_paper.py")
    columns = ["strength", "task", "n", "psi_change_%", "ndcg_at_10_change_%"]
    rows = [[0.0, "PosIR", 3, 0.0, 0.0], [0.5, "PosIR", 3, -43.0, 4.8], [0.5, "FineWeb-PosQ", 3, 10.0, -1.0]]
    rows.append([0.5, "NanoX", None, None, 0.0])
    (measured, published) = module.claims(pd.DataFrame(rows, columns=columns))
    assert measured == "measured:  PSI falls in 1 of 2 cases, by up to 43 %; nDCG@10 changes by -1.0 % to +4.8 %"
    assert published.startswith("published: PSI falls in all 16 cases")
