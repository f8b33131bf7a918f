from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mteb
import pytest

from fair_evaluation.benchmarks.posir import labels_of
from mteb_fair import PosIR, PosIRCrossLingual, get_tasks
from tests.mteb.layouts import write_posir

Evaluate = Callable[[Any], dict[str, dict[str, Any]]]
SECOND = 1 / math.log2(3)


@pytest.mark.parametrize(
    ("span", "tokens", "labels"),
    [
        ((0, 0), 512, ("bin00", "q1_bin00")),
        ((0, 100), 513, ("bin00", "q2_bin00")),  # the middle is 5 %: bins are closed above
        ((4, 108), 1024, ("bin01", "q2_bin01")),
        ((500, 500), 1025, ("bin09", "q3_bin09")),
        ((990, 1000), 1536, ("bin19", "q3_bin19")),
        ((1000, 1000), 1537, ("bin19", "q4_bin19")),
        ((140, 160), 1, ("bin02", "q1_bin02")),  # 15 %, which is no binary fraction
    ],
)
def test_bins_and_quartiles(span: tuple[int, int], tokens: int, labels: tuple[str, str]) -> None:
    assert labels_of(span, 1000, tokens, where="here") == labels


@pytest.mark.parametrize(
    ("span", "length", "tokens", "message"),
    [
        ((1,), 10, 10, "here: expected pos_char_span as two numbers"),
        ((1, 2), float("nan"), 10, "here: expected pos_char_span as two numbers"),
        ((1, 2), 0, 10, "here: expected positive lengths"),
        ((1, 2), 10, 0, "here: expected positive lengths"),
        ((-1, 5), 10, 10, "here: expected a span within the document"),
        ((200, 300), 100, 10, "here: expected a span within the document"),
        ((9, 12), 10, 10, "here: expected a span within the document"),
        ((5, 1), 10, 10, "here: expected a span within the document"),
    ],
)
def test_bad_numbers(span: tuple[float, ...], length: float, tokens: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        labels_of(span, length, tokens, where="here")


@pytest.mark.parametrize("with_file", [True, False])
def test_domains_without_queries_are_said(with_file: bool, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_posir(folder, "eng-Latn", "sports", corpus={"d": "red"}, queries={}, qrels=[])
    if not with_file:
        (folder / "eng-Latn" / "sports" / "queries.parquet").unlink()
    with caplog.at_level("WARNING", "mteb_fair"):
        PosIR(data_folder=folder).load_data()
    assert "eng-Latn: the domains ['sports'] have documents but no queries" in caplog.text
    assert "fra-Latn" not in caplog.text


@pytest.mark.parametrize("domain", ["a/b", "../x", "", "a b", 3])
def test_names_of_domains(domain: Any) -> None:
    with pytest.raises(ValueError, match="domains: expected names of letters, digits, '_' and '-', got"):
        get_tasks("PosIR", domains=["law", domain])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two English domains, one French; ids are the same everywhere."""
    write_posir(
        tmp_path,
        "eng-Latn",
        "law",
        corpus={"d1": "red red", "d2": "red", "d3": "blue"},
        queries={
            "q1": ("red", [0, 10], 100, 300),  # bin00, q1, first: 1
            "q2": ("red", [90, 100], 100, 300),  # bin18, q1, second
            "q3": ("blue", [0, 10], 100, 2000),  # bin00, q4, first: 1
        },
        qrels=[("q1", "d1", 1), ("q2", "d2", 1), ("q3", "d3", 1)],
    )
    write_posir(
        tmp_path,
        "eng-Latn",
        "news",
        corpus={"d1": "red red red red", "d2": "green green", "d3": "green"},
        queries={"q1": ("green", [0, 10], 100, 300)},  # bin00, q1, second
        qrels=[("q1", "d3", 1)],
    )
    write_posir(
        tmp_path,
        "fra-Latn",
        "law",
        corpus={"d1": "rouge"},
        queries={"q1": ("red", [40, 60], 100, 700)},  # bin09, q2
        qrels=[("q1", "d1", 1)],
    )
    return tmp_path


class TestScores:
    def test_queries_of_all_domains_are_pooled(self, folder: Path, evaluate: Evaluate) -> None:
        scores = evaluate(PosIR(data_folder=folder))["eng-Latn"]
        # bin00 of all lengths: q1 and q3 of law, q1 of news.
        assert scores["bin00_n"] == 3
        assert scores["bin00_ndcg_at_10"] == pytest.approx((1 + 1 + SECOND) / 3)
        assert scores["bin18_ndcg_at_10"] == pytest.approx(SECOND)
        assert scores["psi"] == pytest.approx(1 - SECOND / ((2 + SECOND) / 3))
        # The first quartile's score is the mean of its bins, not of its queries.
        assert scores["q1_bin00_n"] == 2
        first, last = (1 + SECOND) / 2, SECOND
        assert scores["q1_position_mean_ndcg_at_10"] == pytest.approx((first + last) / 2)
        assert scores["q1_psi"] == pytest.approx(1 - last / first)
        assert scores["q1_harmonic_mean"] == pytest.approx(2 / (1 / first + 1 / last))
        assert scores["q1_slope"] == pytest.approx((last - first) / (18 / 20))
        # One bin has no slope, no bin no score.
        assert (scores["q4_position_mean_ndcg_at_10"], scores["q4_psi"], scores["q4_slope"]) == (1, 0, None)
        assert (scores["q3_position_mean_ndcg_at_10"], scores["q3_psi"]) == (None, None)
        assert scores["main_score"] == pytest.approx((1 + SECOND + 1 + SECOND) / 4, abs=1e-5)

    def test_domains_do_not_mix(self, folder: Path, evaluate: Evaluate) -> None:
        # "red red red red" of news would come first otherwise.
        scores = evaluate(PosIR(data_folder=folder, domains=["law"]))["eng-Latn"]
        assert scores["bin00_ndcg_at_10"] == 1

    def test_cross_lingual_searches_in_english(self, folder: Path, evaluate: Evaluate) -> None:
        scores = evaluate(PosIRCrossLingual(data_folder=folder))
        assert list(scores) == ["fra-Latn_eng-Latn"]
        assert scores["fra-Latn_eng-Latn"]["bin09_ndcg_at_10"] == 1

    def test_json_on_disk_has_no_nan(self, folder: Path, tmp_path: Path, keyword_encoder: Any) -> None:
        cache = mteb.ResultCache(tmp_path / "cache")
        task = PosIR(data_folder=folder)
        mteb.evaluate(keyword_encoder, task, cache=cache, show_progress_bar=False)
        path = next((tmp_path / "cache").rglob(f"{task.metadata.name}.json"))

        def refuse(constant: str) -> None:
            raise AssertionError(constant)

        json.loads(path.read_text(), parse_constant=refuse)


class TestSelection:
    def test_names_tell_the_data(self, folder: Path) -> None:
        every, law = PosIR(data_folder=folder), PosIR(data_folder=folder, domains=["law"])
        assert every.metadata.name.startswith("PosIR-local-")
        assert law.metadata.name.startswith("PosIR-law-local-")
        assert every.hf_subsets == ["eng-Latn", "fra-Latn"]
        again = mteb.get_task(law.metadata.name)
        assert isinstance(again, PosIR)
        assert (again.domains, again.data_folder) == (("law",), law.data_folder)

    def test_many_domains_make_a_short_name(self) -> None:
        domains = [f"domain{i}" for i in range(5)]
        names = {PosIR(domains=d).metadata.name for d in (domains, domains[::-1], domains[1:])}
        assert len(names) == 2
        assert all(len(name) < 40 for name in names)

    def test_languages(self, folder: Path) -> None:
        (task,) = get_tasks("PosIR", languages=["fra"], data_folder=folder)
        assert task.hf_subsets == ["fra-Latn"]
        (task,) = get_tasks("PosIRCrossLingual", languages=["kor-Kore"])
        assert task.hf_subsets == ["kor-Kore_eng-Latn"]
        with pytest.raises(ValueError, match=r"none of \['kor'\]; its languages are \['eng-Latn', 'fra-Latn'\]"):
            get_tasks("PosIR", languages=["kor"], data_folder=folder)

    def test_unknown_domain(self, folder: Path) -> None:
        with pytest.raises(ValueError, match=r"domains: \['lax'\] are not in .*; the nearest to 'lax' are \['law'"):
            PosIR(data_folder=folder, domains=["lax"]).load_data()

    @pytest.mark.parametrize("domains", [[], "law"])
    def test_bad_domains(self, domains: Any) -> None:
        with pytest.raises(ValueError, match="domains: expected None or a list of at least one domain"):
            PosIR(domains=domains)

    def test_a_folder_of_another_layout(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text("{}\n")
        with pytest.raises(ValueError, match=r"expected <lang-Script>/<domain>/queries.parquet in it"):
            PosIR(data_folder=tmp_path)


class TestBadData:
    def test_a_query_without_relevant_documents(self, tmp_path: Path) -> None:
        queries = {"q1": ("red", [0, 1], 10, 10), "q2": ("red", [0, 1], 10, 10)}
        write_posir(tmp_path, "eng-Latn", "law", corpus={"d": "red"}, queries=queries, qrels=[("q1", "d", 1)])
        with pytest.raises(ValueError, match=r"1 queries have no relevant document, such as \['law/q2'\]"):
            PosIR(data_folder=tmp_path).load_data()

    def test_a_span_that_is_missing(self, tmp_path: Path) -> None:
        write_posir(
            tmp_path, "eng-Latn", "law",
            corpus={"d": "red"}, queries={"q1": ("red", None, 10, 10)}, qrels=[("q1", "d", 1)],
        )  # fmt: skip
        with pytest.raises(ValueError, match="query 'q1': expected pos_char_span as two numbers"):
            PosIR(data_folder=tmp_path).load_data()

    def test_a_span_that_ends_beyond_the_document(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        queries = {"q1": ("red", [8, 11], 10, 10), "q2": ("red", [0, 10], 10, 10)}
        qrels = [("q1", "d", 1), ("q2", "d", 1)]
        write_posir(tmp_path, "eng-Latn", "law", corpus={"d": "red"}, queries=queries, qrels=qrels)
        task = PosIR(data_folder=tmp_path)
        with caplog.at_level("WARNING", "mteb_fair"):
            task.load_data()
        assert "the spans of 1 queries end beyond their documents: ['q1']" in caplog.text
        assert task._labels["eng-Latn"]["law/q1"] == ("bin18", "q1_bin18")  # the middle is at 9.5 of 10


def test_every_hub_subset_has_its_language() -> None:
    assert len(PosIR.metadata.hf_subsets) == 10
    assert len(PosIRCrossLingual.metadata.hf_subsets) == 9
    assert PosIR.metadata.is_filled()
    assert PosIRCrossLingual.metadata.hf_subsets_to_langscripts["fra-Latn_eng-Latn"] == ["fra-Latn", "eng-Latn"]
