from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mteb_fair import FineWebPosQ
from tests.mteb.layouts import write_fineweb


def test_scores_by_hand(tmp_path: Path, evaluate: Callable[[Any], dict[str, dict[str, Any]]]) -> None:
    write_fineweb(
        tmp_path,
        [
            ("red", "red red", ["beginning"]),  # first
            ("red", "red", ["middle", "end"]),  # second, in both places; another page's query of the same text
            ("blue", "red", ["end"]),  # the page has no blue, another has: second
            (None, "blue blue", None),  # haystack
            ("blue", "red", ["middle"]),  # the query above has another place
        ],
    )
    task = FineWebPosQ(data_folder=tmp_path)
    data = task.read("default")
    assert list(data.corpus.values()) == ["red red", "red", "blue blue"]
    assert len(data.queries) == 3
    scores = evaluate(task)["default"]
    second = 1 / math.log2(3)
    assert [scores[f"{place}_n"] for place in ("beginning", "middle", "end")] == [1, 2, 2]
    assert scores["beginning_ndcg_at_10"] == 1
    assert scores["middle_ndcg_at_10"] == scores["end_ndcg_at_10"]
    # "red" is second; "blue" scores 0 with the page "red" as with "red red", so it is second or third.
    assert scores["middle_ndcg_at_10"] in (pytest.approx((second + second) / 2), pytest.approx((second + 0.5) / 2))
    assert scores["psi"] == pytest.approx(1 - scores["middle_ndcg_at_10"])


def test_the_first_versions_names_of_places(tmp_path: Path) -> None:
    write_fineweb(tmp_path, [("red", "red", ["before"]), ("blue", "blue", ["after"])])
    data = FineWebPosQ(data_folder=tmp_path).read("default")
    assert list(data.labels.values()) == [("beginning",), ("end",)]


@pytest.mark.parametrize(
    ("classes", "message"),
    [("end", "expected span_class as a list of places, got 'end'"), (["top"], r"got \['top'\]"), ([], "no position")],
)
def test_bad_places(tmp_path: Path, classes: Any, message: str) -> None:
    write_fineweb(tmp_path, [("red", "red", classes)])
    with pytest.raises(ValueError, match=message):
        FineWebPosQ(data_folder=tmp_path).load_data()


@pytest.mark.parametrize(("question", "message"), [(5, "as question, got 5"), (["red"], r"as question, got \['red'\]")])
def test_questions_that_are_none(question: object, message: str, tmp_path: Path) -> None:
    rows = {"question": question, "content": "red", "span_class": ["end"]}
    (tmp_path / "pages.jsonl").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=f"pages.jsonl, row 0: expected a string or null {message}"):
        FineWebPosQ(data_folder=tmp_path).load_data()


def test_content_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "pages.jsonl").write_text(json.dumps({"question": "red", "content": ["red"], "span_class": ["end"]}))
    with pytest.raises(ValueError, match=r"row 0: expected a string as content, got \['red'\] \(list\)"):
        FineWebPosQ(data_folder=tmp_path).load_data()
