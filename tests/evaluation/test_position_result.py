from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import pandas as pd
import pytest

from fair_evaluation import evaluate_positions

ROWS = pd.DataFrame(
    [("a", 1.0, "beginning", 100), ("b", 0.6, "beginning", 600), ("c", 0.2, "end", 100), ("d", 0.6, "end", 600)],
    columns=["qid", "score", "position", "length"],
)


def test_what_is_printed() -> None:
    result = evaluate_positions(ROWS, length="length", order=["beginning", "middle", "end"], name="mine", n_resamples=9)
    lines = [line.split() for line in str(result).splitlines()]
    assert str(result).splitlines()[0] == "mine, score: 4 queries in 3 groups; 95 % intervals of 9 resamples"
    assert lines[1] == ["group", "n", "mean", "interval"]
    assert lines[2][:3] == ["beginning", "2", "0.800"]
    assert lines[3] == ["middle", "0", "-"]
    assert lines[4][:3] == ["end", "2", "0.400"]
    assert [line[0] for line in lines[5:9]] == ["mean", "PSI", "harmonic", "slope"]
    assert lines[6][1] == "0.500"
    low, high = (f"{bound:.3f}" for bound in result.intervals["psi"])
    assert str(result).splitlines()[6].endswith(f"0.500  [{low}, {high}]")
    assert lines[9] == ["length", "n", "mean", "psi", "harmonic_mean", "slope"]
    # Scores 1 and .2 at 1/6 and 5/6 of the documents.
    assert lines[10] == ["(0,", "512]", "2", "0.600", "0.800", "0.333", "-1.200"]
    assert "note: no queries in middle: the measures leave these groups out" in str(result).splitlines()


def test_through_json() -> None:
    result = evaluate_positions(ROWS, length="length", order=["beginning", "middle", "end"], n_resamples=9)
    content = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert content == result.to_dict()
    assert content["psi"] == result.psi
    assert content["intervals"]["psi"] == list(result.intervals["psi"])
    assert content["lengths"]["(0, 512]"]["groups"][0]["mean"] == 1.0
    assert content["groups"][1] == {"group": "middle", "position": 0.5, "n": 0, "mean": None, "low": None, "high": None}
    assert "rows" not in content


def test_it_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        evaluate_positions(ROWS, length="length").psi = 0.0  # type: ignore[misc]
