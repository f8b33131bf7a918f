"""SQuAD-PosQ: the questions of SQuAD v2, grouped by the character at which their answer starts."""

from __future__ import annotations

from typing import Any

from mteb_fair.position_task import PositionData, PositionTask, build_metadata
from mteb_fair.scores import Grouping
from mteb_fair.sources import data_files, read_rows

EDGES = (0, 100, 200, 300, 400, 500)
GROUPS = tuple(f"{edge}+" for edge in EDGES)
_PARTS = ("train", "validation")


def groups_of(answer_start: int) -> tuple[str, ...]:
    """Returns the groups of an answer: as published, both edges belong to a group, so 100 is in 0+ and in 100+."""
    ends = (*EDGES[1:], float("inf"))
    return tuple(name for name, a, b in zip(GROUPS, EDGES, ends, strict=True) if a <= answer_start <= b)


class SQuADPosQ(PositionTask):
    """Questions of SQuAD v2 (train and validation) with an answer, over all of its passages."""

    metadata = build_metadata(
        name="SQuAD-PosQ",
        description=(
            "The answerable questions of SQuAD v2 over all its paragraphs, grouped by the character at which the "
            "answer starts: from 0, 100, 200, 300, 400 and 500 on."
        ),
        reference="https://arxiv.org/abs/2505.13950",
        dataset={"path": "rajpurkar/squad_v2", "revision": "main"},
        date=("2016-01-01", "2018-12-31"),
        domains=["Encyclopaedic", "Written"],
        license="cc-by-sa-4.0",
        annotations_creators="human-annotated",
        bibtex_citation=r"""
@inproceedings{rajpurkar2018know,
  author = {Pranav Rajpurkar and Robin Jia and Percy Liang},
  booktitle = {Proceedings of the 56th Annual Meeting of the Association for Computational Linguistics},
  title = {Know What You Don't Know: Unanswerable Questions for {SQuAD}},
  year = {2018},
}
""",
    )
    groupings = (Grouping(name="", groups=GROUPS),)
    dataset_name = "SQuAD-PosQ"

    def read(self, subset: str) -> PositionData:  # noqa: ARG002
        """Reads the files whose names hold "train" or "validation"."""
        folder = self.folder("*.parquet", "*.jsonl")
        files = [path for path in data_files(folder) if any(part in path.name for part in _PARTS)]
        if not files:
            raise ValueError(f"{folder}: expected files with {' or '.join(_PARTS)} in their names, found none")
        data = PositionData()
        documents: dict[str, str] = {}
        for path in files:
            for row in read_rows(path, ["id", "context", "question", "answers"]):
                context = row["context"]
                if context not in documents:
                    documents[context] = f"d{len(documents)}"
                    data.add_document(documents[context], context, where=path)
                if (start := _first_start(row["answers"])) is None:
                    continue  # unanswerable: its paragraph is part of the corpus, as published
                query = str(row["id"])
                if start < 0:
                    raise ValueError(f"{path}: query {query!r}: expected an answer_start from 0 on, got {start}")
                data.add_query(query, row["question"], labels=groups_of(start), where=path)
                data.relevant[query] = {documents[context]: 1}
        return data


def _first_start(answers: Any) -> int | None:
    starts = list(answers["answer_start"])
    return int(starts[0]) if starts else None
