"""`PositionTask`: an MTEB retrieval task that knows where in its documents the answers stand."""

from __future__ import annotations

import importlib
import logging
import math
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.timing import TimingStack

from mteb_fair.scores import METRIC, SCORE, Grouping, score_groups, to_entry
from mteb_fair.sources import fingerprint, hub_folder, local_folder

logger = logging.getLogger("mteb_fair")
SPLIT = "test"
_NAMED = 5


class OtherLanguagesError(ValueError):
    """A task has none of the languages that are asked for, or that its local data have."""


def build_metadata(**facts: Any) -> TaskMetadata:
    """Returns the metadata of a position task: what is the same for all of them, and the facts of one."""
    shared: dict[str, Any] = {
        "type": "Retrieval",
        "category": "t2t",
        "modalities": ["text"],
        "eval_splits": [SPLIT],
        "eval_langs": ["eng-Latn"],
        "main_score": SCORE,
        "task_subtypes": ["Question answering"],
        "annotations_creators": "LM-generated",
        "dialect": [],
        "sample_creation": "found",
    }
    return TaskMetadata(**{**shared, **facts})


@dataclass(kw_only=True)
class PositionData:
    """One subset of a task, collected row by row; `check` says what is wrong with it.

    Attributes:
        corpus: The text of each document.
        queries: The text of each query.
        relevant: The relevant documents of each query.
        labels: The position groups of each query.
    """

    corpus: dict[str, str] = field(default_factory=dict)
    queries: dict[str, str] = field(default_factory=dict)
    relevant: dict[str, dict[str, int]] = field(default_factory=dict)
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def add_document(self, identifier: str, text: Any, *, where: object) -> None:
        """Adds a document.

        Raises:
            ValueError: The id is taken or the text is none.
        """
        _add(self.corpus, identifier, text, f"{where}: document")

    def add_query(self, identifier: str, text: Any, *, labels: Sequence[str], where: object) -> None:
        """Adds a query with its position groups.

        Raises:
            ValueError: The id is taken, the text is none or empty, or there are no groups.
        """
        _add(self.queries, identifier, text, f"{where}: query")
        if not text.strip():
            raise ValueError(f"{where}: query {identifier!r} is empty")
        if not labels:
            raise ValueError(f"{where}: query {identifier!r} belongs to no position group")
        self.labels[identifier] = tuple(labels)

    def check(self, where: str) -> None:
        """Checks that there are documents, queries, and a relevant document in the corpus for every query.

        Raises:
            ValueError: There are not.
        """
        if not self.corpus:
            raise ValueError(f"{where}: the corpus is empty")
        if not self.queries:
            raise ValueError(f"{where}: there are no queries")
        bare = [q for q in self.queries if not any(grade > 0 for grade in self.relevant.get(q, {}).values())]
        if bare:
            raise ValueError(f"{where}: {len(bare)} queries have no relevant document, such as {bare[:_NAMED]}")
        if strangers := [q for q in self.relevant if q not in self.queries]:
            raise ValueError(f"{where}: {len(strangers)} judged queries do not exist, such as {strangers[:_NAMED]}")
        positive = (d for judged in self.relevant.values() for d, grade in judged.items() if grade > 0)
        if lost := [d for d in positive if d not in self.corpus]:
            raise ValueError(f"{where}: {len(lost)} relevant documents are not in the corpus, such as {lost[:_NAMED]}")
        if empty := [d for d, text in self.corpus.items() if not text.strip()]:
            logger.warning(
                "%s: %d of %d documents are empty, such as %s. They stay in the corpus.",
                where, len(empty), len(self.corpus), empty[:_NAMED],
            )  # fmt: skip


class PositionTask(AbsTaskRetrieval):
    """A retrieval task whose scores are also given by position group (`mteb_fair.scores`).

    Data come from the hub, or from a local folder in the same layout: the argument ``data_folder``, or the folder named
    ``dataset_name`` within the one that the environment variable ``MTEB_FAIR_DATA`` names. The name of a task on local
    data ends in a hash of them, since MTEB knows results by the task's name alone.
    """

    groupings: ClassVar[tuple[Grouping, ...]]
    dataset_name: ClassVar[str]
    _whole: ClassVar[type[PositionTask] | None] = None
    """The class of the whole task, in the classes that MTEB's registry has for local and selected data."""

    def __init__(self, *, data_folder: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        """Finds the data; they are read by `load_data`.

        Args:
            data_folder: The folder to read the data from; None for the environment variable, and else the hub.
            **kwargs: `AbsTask`'s.

        Raises:
            ValueError: The folder does not exist or holds no data.
        """
        whole = self._whole or type(self)
        self.metadata = whole.metadata
        self.data_folder = local_folder(self.dataset_name, data_folder)
        self._labels: dict[str, dict[str, tuple[str, ...]]] = {}
        name, updates = self.metadata.name + self.selection_suffix(), {}
        if self.data_folder is not None:
            digest = fingerprint(self.data_folder)
            name += f"-local-{digest[:8]}"
            updates = {
                "dataset": {"path": str(self.data_folder), "revision": f"local-{digest}"},
                **self.local_metadata(self.data_folder),
            }
        if name != self.metadata.name:
            self.metadata = self.metadata.model_copy(update={"name": name, **updates})
            # MTEB looks the tasks of its results up by their names.
            registry = importlib.import_module("mteb.get_tasks")._TASKS_REGISTRY
            registry[name] = _subclass(whole, self)
        super().__init__(**kwargs)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments that make a task like this one."""
        return {"data_folder": self.data_folder}

    def selection_suffix(self) -> str:
        """Returns what a selection of the data adds to the task's name; nothing where all are used."""
        return ""

    def local_metadata(self, folder: Path) -> dict[str, Any]:  # noqa: ARG002
        """Returns what is different in the metadata of local data, such as the languages."""
        return {}

    @abstractmethod
    def read(self, subset: str) -> PositionData:
        """Reads one subset."""

    def folder(self, *patterns: str) -> Path:
        """Returns the folder of the data, downloading the files that fit ``patterns`` if they are the hub's."""
        if self.data_folder is not None:
            return self.data_folder
        return hub_folder(self.metadata.dataset["path"], self.metadata.dataset["revision"], patterns)

    def load_data(self, num_proc: int | None = None, *, timer: TimingStack | None = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Reads and checks the subsets chosen.

        Raises:
            ValueError: The data are not to be had, or something is wrong with them.
        """
        if self.data_loaded:
            return
        self.dataset = {}
        with (timer or TimingStack())("Data loading", log_message=f"Loading dataset {self.metadata.name}..."):
            for subset in self.hf_subsets:
                data = self.read(subset)
                data.check(f"{self.metadata.name}, {subset}")
                self._labels[subset] = data.labels
                self.dataset[subset] = {
                    SPLIT: {
                        "corpus": _dataset(data.corpus),
                        "queries": _dataset(data.queries),
                        "relevant_docs": data.relevant,
                        "top_ranked": None,
                    }
                }
        self.data_loaded = True

    def unload_data(self) -> None:
        """Drops the data; unlike MTEB's, the metadata of local data stay."""
        metadata = self.metadata
        super().unload_data()
        self._labels = {}
        self.metadata = metadata

    def task_specific_scores(
        self,
        scores: dict[str, dict[str, float]],
        qrels: Mapping[str, Mapping[str, int]],  # noqa: ARG002
        results: dict[str, dict[str, float]],  # noqa: ARG002
        hf_split: str,  # noqa: ARG002
        hf_subset: str,
    ) -> dict[str, float]:
        """Computes the scores by position group and the measures over them."""
        per_query = {query: metrics[METRIC] for query, metrics in scores.items()}
        entry: dict[str, Any] = {}
        for grouping in self.groupings:
            entry |= to_entry(grouping, score_groups(per_query, self._labels[hf_subset], grouping.groups))
        return entry

    def _evaluate_subset(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # MTEB's nAUC is NaN where all queries score the same, which no JSON reader but Python's takes.
        scores = super()._evaluate_subset(*args, **kwargs)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in scores.items()}


def _subclass(whole: type[PositionTask], task: PositionTask) -> type[PositionTask]:
    """Returns a class that makes tasks like ``task``: MTEB also reads the metadata of the classes themselves."""
    arguments = task.arguments()

    def initialize(self: PositionTask, **kwargs: Any) -> None:
        whole.__init__(self, **{**arguments, **kwargs})

    attributes = {"__init__": initialize, "__module__": whole.__module__, "__doc__": whole.__doc__}
    return type(whole.__name__, (whole,), {**attributes, "metadata": task.metadata, "_whole": whole})


def _add(texts: dict[str, str], identifier: str, text: Any, what: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{what} {identifier!r}: expected a text, got {text!r} ({type(text).__name__})")
    if identifier in texts:
        raise ValueError(f"{what} {identifier!r} occurs twice")
    texts[identifier] = text


def _dataset(texts: Mapping[str, str]) -> Dataset:
    return Dataset.from_dict({"id": list(texts), "text": list(texts.values())})
