from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from fair_evaluation.query_positions import join_positions

SCORES = pd.DataFrame({"qid": ["a", "b"], "score": [0.5, 0.7], "other": 1})


def join(positions: Any, *, length: str | None = None, unit: str | None = None) -> pd.DataFrame:
    return join_positions(SCORES, positions, position="place", length=length, unit=unit, what="x")


def test_columns_that_are_not_asked_for_are_left_out() -> None:
    frame = pd.DataFrame({"qid": ["b", "a"], "place": ["end", "middle"], "n": [5, 6], "score": [9, 9]})
    found = join(frame, length="n").sort_values("qid")
    assert list(found) == ["qid", "place", "n", "score"]
    assert found.to_numpy().tolist() == [["a", "middle", 6, 0.5], ["b", "end", 5, 0.7]]


def test_a_query_in_several_rows_has_its_score_in_each() -> None:
    frame = pd.DataFrame({"qid": ["a", "a", "b"], "place": ["end", "middle", "end"]})
    assert join(frame)["score"].tolist() == [0.5, 0.5, 0.7]


def test_lists_and_categories_stay_what_they_are() -> None:
    assert join({"a": ["end", "middle"], "b": ["end"]})["place"].tolist() == [["end", "middle"], ["end"]]
    series = pd.Series(["end", "middle"], index=["a", "b"]).astype(pd.CategoricalDtype(["middle", "end"]))
    assert list(join(series)["place"].cat.categories) == ["middle", "end"]


@pytest.mark.parametrize("positions", [{"a": "end"}, {}, {"a": "end", "B": "end"}])
def test_queries_without_a_position(positions: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"positions: . of 2 queries of x have no position, such as"):
        join(positions)
