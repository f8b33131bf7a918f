"""FineWeb-PosQ: questions about web pages, grouped by the third that holds the answer (arXiv 2505.13950)."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from fair_evaluation.benchmarks.position_data import PositionData
from fair_evaluation.benchmarks.sources import HubDataset, data_files, read_rows
from fair_evaluation.position_collections import PLACES

SOURCE = HubDataset(
    name="FineWeb-PosQ",
    repository="NovaSearch/FineWeb-PosQ",
    revision="main",
    url="https://arxiv.org/abs/2505.13950",
)
_CLASSES = {"beginning": "beginning", "middle": "middle", "end": "end", "before": "beginning", "after": "end"}


def read_fineweb_posq(folder: Path) -> PositionData:
    """Reads all data files. Rows with the same page share a document, and rows with the same question a query.

    Raises:
        ValueError: The data cannot be read or used; the file and the row are named.
    """
    data = PositionData()
    for path in data_files(folder):
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
