from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fair_evaluation.benchmarks.squad_posq import groups_of
from mteb_fair import SQuADPosQ
from tests.mteb.layouts import write_squad


@pytest.mark.parametrize(
    ("start", "groups"),
    [(0, ("0+",)), (99, ("0+",)), (100, ("0+", "100+")), (499, ("400+",)), (500, ("400+", "500+")), (9999, ("500+",))],
)
def test_groups(start: int, groups: tuple[str, ...]) -> None:
    assert groups_of(start) == groups


def test_scores_by_hand(tmp_path: Path, evaluate: Callable[[Any], dict[str, dict[str, Any]]]) -> None:
    write_squad(
        tmp_path,
        [
            ("q1", "red red", "red", [3]),  # first
            ("q2", "red", "red", [100, 7]),  # second: 1 / log2(3); the first answer counts, in both groups it touches
            ("q3", "only in the haystack red red red", "why?", []),  # pushes both down by one
        ],
    )
    write_squad(tmp_path, [("q4", "blue", "blue", [450])], part="validation")
    task = SQuADPosQ(data_folder=tmp_path)
    scores = evaluate(task)["default"]
    second, third = 1 / math.log2(3), 1 / math.log2(4)
    assert (scores["0+_n"], scores["100+_n"], scores["400+_n"]) == (2, 1, 1)
    assert scores["0+_ndcg_at_10"] == pytest.approx((second + third) / 2)
    assert scores["100+_ndcg_at_10"] == pytest.approx(third)
    assert scores["400+_ndcg_at_10"] == 1
    assert (scores["200+_n"], scores["200+_ndcg_at_10"]) == (0, None)
    assert scores["psi"] == pytest.approx(1 - third)
    assert scores["main_score"] == pytest.approx((second + third + 1) / 3, abs=1e-5)


def test_files_of_neither_part(tmp_path: Path) -> None:
    write_squad(tmp_path, [("q1", "red", "red", [0])], part="other")
    with pytest.raises(ValueError, match="expected files with train or validation in their names, found none"):
        SQuADPosQ(data_folder=tmp_path).load_data()


def test_a_negative_start(tmp_path: Path) -> None:
    write_squad(tmp_path, [("q1", "red", "red", [-1])])
    with pytest.raises(ValueError, match="query 'q1': expected an answer_start from 0 on, got -1"):
        SQuADPosQ(data_folder=tmp_path).load_data()


@pytest.mark.parametrize(
    "answers", [None, [], {"text": ["x"]}, {"answer_start": None}, {"answer_start": [None]}, {"answer_start": ["3"]}]
)
def test_answers_that_are_none(answers: object, tmp_path: Path) -> None:
    row = {"id": "q1", "context": "red", "question": "red", "answers": answers}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    with pytest.raises(
        ValueError, match=r"train.jsonl: query 'q1': expected answers with a list of numbers as answer_start"
    ):
        SQuADPosQ(data_folder=tmp_path).load_data()
