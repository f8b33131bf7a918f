from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fair_evaluation import from_mteb

ENTRY: dict[str, Any] = {
    "ndcg_at_10": 0.6,
    "beginning_ndcg_at_10": 0.8,
    "beginning_n": 4,
    "middle_ndcg_at_10": None,
    "middle_n": 0,
    "end_ndcg_at_10": 0.4,
    "end_n": 4,
    "position_mean_ndcg_at_10": 0.6,
    "psi": 0.5,
    "hf_subset": "default",
}
POSIR: dict[str, Any] = {
    "hf_subset": "eng-Latn",
    **{f"bin0{i}_ndcg_at_10": score for i, score in enumerate((0.9, 0.45))},
    **{f"bin0{i}_n": n for i, n in enumerate((3, 5))},
    "psi": 0.5,
    "q1_bin00_ndcg_at_10": 0.8,
    "q1_bin00_n": 2,
    "q1_bin01_ndcg_at_10": 0.2,
    "q1_bin01_n": 1,
    "q1_psi": 0.75,
    "q2_bin00_ndcg_at_10": None,
    "q2_bin00_n": 0,
    "q2_bin01_ndcg_at_10": None,
    "q2_bin01_n": 0,
    "q2_psi": None,
}


def result(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"task_name": "FineWeb-PosQ", "scores": {"test": list(entries)}}


def test_by_hand() -> None:
    (found,) = from_mteb(result(ENTRY)).values()
    assert (found.name, found.measure, found.n_queries, found.rows) == ("FineWeb-PosQ", "nDCG@10", None, None)
    assert found.groups["group"].tolist() == ["beginning", "middle", "end"]
    assert found.groups["n"].tolist() == [4, 0, 4]
    assert found.psi == ENTRY["psi"]
    assert found.mean == pytest.approx(0.6)
    assert found.harmonic_mean == pytest.approx(2 / (1 / 0.8 + 1 / 0.4))
    assert found.slope == pytest.approx(-0.6)  # from 1/6 to 5/6
    assert found.intervals == {}
    assert found.notes == ("no queries in middle: the measures leave these groups out",)
    assert from_mteb(result(ENTRY), name="bge-m3")["default"].name == "bge-m3"


def test_length_classes() -> None:
    (found,) = from_mteb(result(POSIR)).values()
    assert found.groups["group"].tolist() == ["bin00", "bin01"]
    assert found.psi == pytest.approx(0.5)
    assert list(found.lengths) == ["q1"]  # q2 has no queries
    assert found.lengths["q1"].groups["group"].tolist() == ["bin00", "bin01"]
    assert found.lengths["q1"].psi == pytest.approx(0.75)
    json.dumps(found.to_dict(), allow_nan=False)
    assert str(found).splitlines()[0] == "FineWeb-PosQ, nDCG@10: 2 groups"


def test_a_file_with_several_languages(tmp_path: Path) -> None:
    path = tmp_path / "PosIR.json"
    path.write_text(json.dumps(result(POSIR, {**POSIR, "hf_subset": "fra-Latn", "bin00_ndcg_at_10": 0.45})))
    for where in (path, str(path)):
        found = from_mteb(where)
        assert list(found) == ["eng-Latn", "fra-Latn"]
        assert found["fra-Latn"].psi == 0


def test_no_queries_at_all() -> None:
    empty = {"hf_subset": "default", "end_ndcg_at_10": None, "end_n": 0}
    found = from_mteb(result(empty))["default"]
    assert (found.mean, found.psi, found.harmonic_mean, found.slope) == (None, None, None, None)
    json.dumps(found.to_dict(), allow_nan=False)


def test_measures_are_those_of_the_task() -> None:
    """What `mteb_fair` writes is read back with the same measures, for any of its groupings."""
    scores = pytest.importorskip("mteb_fair.scores")
    groups = tuple(f"bin{i:02d}" for i in range(20))
    queries = {f"{g}-{number}": (g, 0.9 - i / 40) for i, g in enumerate(groups) for number in range(i)}
    per_query = {query: score for query, (_, score) in queries.items()}
    labels = {query: (group, f"q3_{group}") for query, (group, _) in queries.items()}
    entry = scores.score_groups(scores.Grouping(name="", groups=groups), per_query, labels)
    inner = scores.Grouping(name="q3", groups=tuple(f"q3_{group}" for group in groups))
    entry |= scores.score_groups(inner, per_query, labels)
    found = from_mteb(result({"hf_subset": "x", **entry}))["x"]
    for part, prefix in ((found, ""), (found.lengths["q3"], "q3_")):
        assert part.psi == pytest.approx(entry[f"{prefix}psi"])
        assert part.harmonic_mean == pytest.approx(entry[f"{prefix}harmonic_mean"])
        assert part.slope == pytest.approx(entry[f"{prefix}slope"])
        assert part.mean == pytest.approx(entry[f"{prefix}position_mean_ndcg_at_10"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            result({"hf_subset": "default", "ndcg_at_10": 0.5}),
            "expected scores of position groups, such as 'end_ndcg_at_10' and 'end_n'",
        ),
        ({"task_name": "x"}, "expected a result of MTEB with the scores of one split, got the keys ['task_name']"),
        ({"scores": {"test": [ENTRY], "dev": [ENTRY]}}, "with the scores of one split, got the keys ['test', 'dev']"),
        ({"scores": []}, "with the scores of one split"),
    ],
)
def test_other_results(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        from_mteb(content)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[1]")
    with pytest.raises(
        ValueError, match=re.escape(f"{path}: expected a result of MTEB with the scores of one split, got list")
    ):
        from_mteb(path)
    with pytest.raises(FileNotFoundError):
        from_mteb(tmp_path / "none.json")
