from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mteb
import pytest

from mteb_fair import FineWebPosQ, PosIR, summarize
from mteb_fair.summary import COLUMNS, groupings_of
from tests.mteb.layouts import write_fineweb, write_posir

SECOND = 1 / math.log2(3)


def test_posir_by_language_and_pooled(tmp_path: Path, keyword_encoder: Any) -> None:
    for language, text in (("eng-Latn", "red"), ("fra-Latn", "red red red")):
        write_posir(
            tmp_path,
            language,
            "law",
            corpus={"d1": "red red", "d2": text},
            queries={"q1": ("red", [0, 10], 100, 300), "q2": ("red", [90, 100], 100, 300)},
            qrels=[("q1", "d1", 1), ("q2", "d2", 1)],
        )
    result = mteb.evaluate(keyword_encoder, PosIR(data_folder=tmp_path), cache=None, show_progress_bar=False)
    table = summarize(result.task_results)
    assert tuple(table.columns) == COLUMNS
    assert table["length"].tolist() == ["all", "q1", "q2", "q3", "q4"] * 2
    rows = table.set_index(["subset", "length"])
    assert rows.loc[("eng-Latn", "q1"), "psi"] == pytest.approx(1 - SECOND)
    assert rows.loc[("fra-Latn", "q1"), "slope"] == pytest.approx((1 - SECOND) / 0.9)
    assert math.isnan(rows.loc[("eng-Latn", "q2"), "psi"])
    pooled = summarize(result.task_results, pool_subsets=True).set_index("length")
    assert pooled.loc["all", "n"] == 4
    assert pooled.loc["all", "ndcg_at_10"] == pytest.approx((1 + SECOND) / 2)
    assert pooled.loc["q1", "psi"] == pytest.approx(0)  # what one language favours the other does not


def test_other_tasks(tmp_path: Path, keyword_encoder: Any) -> None:
    write_fineweb(tmp_path, [("red", "red", ["end"])])
    result = mteb.evaluate(keyword_encoder, FineWebPosQ(data_folder=tmp_path), cache=None, show_progress_bar=False)
    (row,) = summarize(result.task_results).to_dict("records")
    assert (row["n"], row["ndcg_at_10"], row["psi"]) == (1, 1, 0)
    result.task_results[0].task_name = "NanoArguAnaRetrieval"
    (row,) = summarize(result.task_results).to_dict("records")
    assert row["ndcg_at_10"] == 1
    assert math.isnan(row["psi"])


def test_names() -> None:
    assert groupings_of("PosIR-law-local-12345678") == PosIR.groupings
    assert groupings_of("PosIRCrossLingual") == PosIR.groupings
    assert groupings_of("PosIRX") == ()
