"""SQuAD-PosQ: the questions of SQuAD v2, grouped by the character at which the answer starts (arXiv 2505.13950)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fair_evaluation.benchmarks.position_data import PositionData
from fair_evaluation.benchmarks.sources import HubDataset, check_id, check_numbers, data_files, read_rows

SOURCE = HubDataset(
    name="SQuAD-PosQ",
    repository="rajpurkar/squad_v2",
    revision="3ffb306f725f7d2ce8394bc1873b24868140c412",
    url="https://arxiv.org/abs/2505.13950",
)
EDGES = (0, 100, 200, 300, 400, 500)
GROUPS = tuple(f"{edge}+" for edge in EDGES)
_PARTS = ("train", "validation")


def groups_of(answer_start: int) -> tuple[str, ...]:
    """Returns the groups of an answer. As published, groups include both edges, so 100 is in "0+" and in "100+"."""
    ends = (*EDGES[1:], float("inf"))
    return tuple(name for name, a, b in zip(GROUPS, EDGES, ends, strict=True) if a <= answer_start <= b)


def read_squad_posq(folder: Path) -> PositionData:
    """Reads the files with "train" or "validation" in their names.

    Raises:
        ValueError: The data cannot be read or used; the file and the query are named.
    """
    files = [path for path in data_files(folder) if any(part in path.name for part in _PARTS)]
    if not files:
        raise ValueError(f"{folder}: expected files with {' or '.join(_PARTS)} in their names, found none")
    data = PositionData()
    for path in files:
        for row in read_rows(path, ["id", "context", "question", "answers"]):
            query = check_id(row["id"], path)
            where = f"{path}: query {query!r}"
            document = data.document_of(row["context"], what="context", where=where)
            if (start := _first_start(row["answers"], where)) is None:
                continue  # unanswerable: its paragraph is part of the corpus, as published
            data.add_query(query, row["question"], labels=groups_of(start), where=path)
            data.add_judgement(query, document, 1, where=path)
    return data


def _first_start(answers: Any, where: str) -> int | None:
    what = "answers with a list of numbers as answer_start"
    if not isinstance(answers, Mapping) or "answer_start" not in answers:
        raise ValueError(f"{where}: expected {what}, got {answers!r}")
    starts = check_numbers(answers["answer_start"], what, where)
    if starts and math.isnan(starts[0]):
        raise ValueError(f"{where}: expected {what}, got {answers!r}")
    if starts and starts[0] < 0:
        raise ValueError(f"{where}: expected an answer_start from 0 on, got {int(starts[0])}")
    return int(starts[0]) if starts else None
