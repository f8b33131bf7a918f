"""FineWeb-PosQ: questions about web pages, grouped by the third of the page that holds the answer."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from fair_evaluation.position_collections import PLACES
from mteb_fair.scores import Grouping
from mteb_fair.tasks.position_task import PositionTask, build_metadata
from mteb_fair.tasks.sources import data_files, read_rows
from mteb_fair.tasks.task_data import PositionData

_CLASSES = {"beginning": "beginning", "middle": "middle", "end": "end", "before": "beginning", "after": "end"}


class FineWebPosQ(PositionTask):
    """Generated questions about pages of FineWeb-edu of 500 to 1024 words."""

    metadata = build_metadata(
        name="FineWeb-PosQ",
        description=(
            "Questions generated from a span at the beginning, in the middle or at the end of a web page of 500 to "
            "1024 words. A question counts in each of the places that its span touches."
        ),
        reference="https://arxiv.org/abs/2505.13950",
        dataset={"path": "NovaSearch/FineWeb-PosQ", "revision": "main"},
        date=("2024-01-01", "2025-12-31"),
        domains=["Web", "Written"],
        license="not specified",
        bibtex_citation=r"""
@article{zeng2025myopic,
  author = {Zeng, Ziyang and others},
  journal = {arXiv preprint arXiv:2505.13950},
  title = {An Empirical Study of Position Bias in Modern Information Retrieval},
  year = {2025},
}
""",
    )
    groupings = (Grouping(name="", groups=PLACES),)
    dataset_name = "FineWeb-PosQ"

    def read(self, subset: str) -> PositionData:  # noqa: ARG002
        """Reads all data files. Rows with the same page share a document, and rows with the same question a query."""
        data = PositionData()
        for path in data_files(self.folder("*.parquet", "*.jsonl")):
            for number, row in enumerate(read_rows(path, ["question", "content", "span_class"])):
                where = f"{path}, row {number}"
                document = data.document_of(row["content"], what="content", where=where)
                if _is_missing(row["question"]):
                    continue  # part of the corpus alone, as published
                if not isinstance(row["question"], str):
                    raise ValueError(f"{where}: expected a string or null as question, got {row['question']!r}")
                places = _places(row["span_class"], where)
                query = f"{document}-{hashlib.blake2b(row['question'].encode(), digest_size=6).hexdigest()}"
                if query in data.queries:
                    data.labels[query] = tuple(p for p in PLACES if p in places or p in data.labels[query])
                else:
                    data.add_query(query, row["question"], labels=places, where=where)
                    data.add_judgement(query, document, 1, where=where)
        return data


def _is_missing(question: Any) -> bool:
    return question is None or question == "" or (isinstance(question, float) and math.isnan(question))


def _places(classes: Any, where: str) -> list[str]:
    if isinstance(classes, str) or classes is None or not hasattr(classes, "__iter__"):
        raise ValueError(f"{where}: expected span_class as a list of places, got {classes!r}")
    if unknown := [name for name in classes if name not in _CLASSES]:
        raise ValueError(f"{where}: expected places among {sorted(_CLASSES)} in span_class, got {unknown}")
    named = {_CLASSES[name] for name in classes}
    return [place for place in PLACES if place in named]
