"""FineWeb-PosQ: questions about web pages, grouped by the third of the page that holds the answer."""

from __future__ import annotations

from fair_evaluation.benchmarks.fineweb_posq import SOURCE, read_fineweb_posq
from fair_evaluation.benchmarks.position_data import PositionData
from fair_evaluation.position_collections import PLACES
from mteb_fair.scores import Grouping
from mteb_fair.tasks.position_task import PositionTask, build_metadata


class FineWebPosQ(PositionTask):
    """Generated questions about pages of FineWeb-edu of 500 to 1024 words."""

    metadata = build_metadata(
        name="FineWeb-PosQ",
        description=(
            "Questions generated from a span at the beginning, in the middle or at the end of a web page of 500 to "
            "1024 words. A question counts in each of the places that its span touches."
        ),
        reference=SOURCE.url,
        dataset={"path": SOURCE.repository, "revision": SOURCE.revision},
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
    dataset_name = SOURCE.name

    def read(self, subset: str) -> PositionData:  # noqa: ARG002
        """Reads all data files."""
        return read_fineweb_posq(self.folder(*SOURCE.patterns))
