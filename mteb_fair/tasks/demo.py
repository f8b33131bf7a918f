"""The demo task: the passages that come with `fair_evaluation`, which need no download."""

from __future__ import annotations

from fair_evaluation.benchmarks.position_data import PART_END, PositionData
from fair_evaluation.position_collections import PLACES, build_collections, load_passages
from mteb_fair.scores import Grouping
from mteb_fair.tasks.position_task import PositionTask, build_metadata


class PositionDemoRetrieval(PositionTask):
    """Documents of three passages on different subjects; every passage is once at the beginning, middle and end.

    The three rotations of the passages are searched separately, so that a passage never competes with its copies.
    """

    metadata = build_metadata(
        name="PositionDemoRetrieval",
        description=(
            "Questions about passages that are joined, three of different subjects at a time, into documents of about "
            "500 tokens. Every passage stands once at the beginning, in the middle and at the end of its document."
        ),
        reference="https://arxiv.org/abs/2606.02737",
        dataset={"path": "fair_evaluation/data/passages.jsonl", "revision": "1"},
        date=("2026-01-01", "2026-12-31"),
        domains=["Written", "Encyclopaedic", "Constructed"],
        license="apache-2.0",
        sample_creation="created",
        bibtex_citation="",
    )
    groupings = (Grouping(name="", groups=PLACES),)
    dataset_name = "PositionDemo"
    partitioned = True
    embedded = True

    def read(self, subset: str) -> PositionData:  # noqa: ARG002
        """Builds the documents from the embedded passages."""
        data = PositionData()
        for rotation, collection in enumerate(build_collections(load_passages())):
            part = f"rotation{rotation}{PART_END}"
            for document in collection.documents:
                data.add_document(part + document["docno"], document["text"], where=self.metadata.name)
            for query in collection.queries:
                data.add_query(part + query.qid, query.query, labels=[query.place], where=self.metadata.name)
                data.relevant[part + query.qid] = {part + query.docno: 1}
        return data
