"""SQuAD-PosQ: the questions of SQuAD v2, grouped by the character at which the answer starts."""

from __future__ import annotations

from fair_evaluation.benchmarks.position_data import PositionData
from fair_evaluation.benchmarks.squad_posq import GROUPS, SOURCE, read_squad_posq
from mteb_fair.scores import Grouping
from mteb_fair.tasks.position_task import PositionTask, build_metadata


class SQuADPosQ(PositionTask):
    """The answerable questions of SQuAD v2 (train and validation), searched in all of its paragraphs."""

    metadata = build_metadata(
        name="SQuAD-PosQ",
        description=(
            "The answerable questions of SQuAD v2 over all its paragraphs, grouped by the character at which the "
            "answer starts: from 0, 100, 200, 300, 400 and 500 on."
        ),
        reference=SOURCE.url,
        dataset={"path": SOURCE.repository, "revision": SOURCE.revision},
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
    dataset_name = SOURCE.name

    def read(self, subset: str) -> PositionData:  # noqa: ARG002
        """Reads the files with "train" or "validation" in their names."""
        return read_squad_posq(self.folder(*SOURCE.patterns))
