"""`PositionTask`: an MTEB retrieval task whose scores are also given by the position of the answer in the document."""

from __future__ import annotations

import importlib
import logging
import math
import os
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.timing import TimingStack

from mteb_fair.scores import METRIC, SCORE, Grouping, score_groups, to_entry
from mteb_fair.tasks.sources import fingerprint, hub_folder, local_folder
from mteb_fair.tasks.task_data import PositionData

logger = logging.getLogger("mteb_fair")
SPLIT = "test"


class OtherLanguagesError(ValueError):
    """A task has none of the requested languages, or none of those in its local data."""


class TaskDataError(ValueError):
    """The data of a task cannot be found, read or used."""


def build_metadata(**facts: Any) -> TaskMetadata:
    """Builds the metadata of a position task from what all such tasks share and the facts of one."""
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


class PositionTask(AbsTaskRetrieval):
    """A retrieval task whose scores are also given by position group (`mteb_fair.scores`).

    The data come from the hub, or from a local folder in the same layout: the argument ``data_folder``, or the folder
    ``dataset_name`` inside the folder that the environment variable ``MTEB_FAIR_DATA`` names. The name of a task on
    local data ends in a hash of the data, since MTEB tells results apart by the task's name alone.
    """

    groupings: ClassVar[tuple[Grouping, ...]]
    dataset_name: ClassVar[str]
    _whole: ClassVar[type[PositionTask] | None] = None
    """The class of the whole task, in the classes that MTEB's registry has for local and selected data."""

    def __init__(self, *, data_folder: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        """Finds the data, which `load_data` reads.

        Args:
            data_folder: The folder with the data; None means the environment variable or else the hub.
            **kwargs: Further arguments of MTEB's `AbsTask`.

        Raises:
            ValueError: The folder does not exist or holds no data files.
        """
        whole = self._whole or type(self)
        self.metadata = whole.metadata
        self.data_folder = local_folder(self.dataset_name, data_folder)
        # `mteb.get_tasks` makes every task there is. So a fault of the folder that the environment names is raised only
        # when this task is asked for.
        self.unusable: ValueError | None = None
        self._labels: dict[str, dict[str, tuple[str, ...]]] = {}
        name, updates = self.metadata.name + self.selection_suffix(), {}
        if self.data_folder is not None:
            try:
                digest = fingerprint(self.data_folder)
                updates = {
                    "dataset": {"path": str(self.data_folder), "revision": f"local-{digest}"},
                    **self.local_metadata(self.data_folder),
                }
                name += f"-local-{digest[:8]}"
            except ValueError as error:
                if data_folder is not None:
                    raise
                self.unusable = error
        if name != self.metadata.name:
            self.metadata = self.metadata.model_copy(update={"name": name, **updates})
            # MTEB looks the tasks of its results up by their names.
            registry = importlib.import_module("mteb.get_tasks")._TASKS_REGISTRY
            registry[name] = _subclass(whole, self)
        super().__init__(**kwargs)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments with which `__init__` makes an equal task."""
        return {"data_folder": self.data_folder}

    def selection_suffix(self) -> str:
        """Returns what a selection of the data adds to the task's name, or "" if all data are used."""
        return ""

    def local_metadata(self, folder: Path) -> dict[str, Any]:  # noqa: ARG002
        """Returns the metadata that differ for local data, such as the languages."""
        return {}

    @abstractmethod
    def read(self, subset: str) -> PositionData:
        """Reads the data of one subset."""

    def folder(self, *patterns: str) -> Path:
        """Returns the folder of the data; data on the hub are downloaded first, those that match ``patterns``."""
        if self.data_folder is not None:
            return self.data_folder
        return hub_folder(self.metadata.dataset["path"], self.metadata.dataset["revision"], patterns)

    def load_data(self, num_proc: int | None = None, *, timer: TimingStack | None = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Reads and checks the data of the chosen subsets.

        Raises:
            TaskDataError: The data cannot be found, read or used.
        """
        if self.data_loaded:
            return
        try:
            self._load(timer or TimingStack())
        except ValueError as error:
            self.dataset = {}
            raise TaskDataError(str(error)) from error
        self.data_loaded = True

    def _load(self, timer: TimingStack) -> None:
        if self.unusable is not None:
            raise self.unusable
        if self.data_folder is not None and f"local-{fingerprint(self.data_folder)}" != self.metadata.revision:
            raise ValueError(
                f"{self.data_folder}: the data have changed since the task {self.metadata.name!r} was made, so its "
                "name would be wrong for them; make the task again"
            )
        self.dataset = {}
        with timer("Data loading", log_message=f"Loading dataset {self.metadata.name}..."):
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

    def unload_data(self) -> None:
        """Drops the data, but keeps the metadata of local data, which MTEB would reset."""
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
        # MTEB's nAUC is NaN where all queries score the same, which is not valid JSON.
        scores = super()._evaluate_subset(*args, **kwargs)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in scores.items()}


def _subclass(whole: type[PositionTask], task: PositionTask) -> type[PositionTask]:
    """Returns a class that makes tasks equal to ``task``, since MTEB also reads the metadata of classes."""
    arguments = task.arguments()

    def initialize(self: PositionTask, **kwargs: Any) -> None:
        whole.__init__(self, **{**arguments, **kwargs})

    attributes = {"__init__": initialize, "__module__": whole.__module__, "__doc__": whole.__doc__}
    return type(whole.__name__, (whole,), {**attributes, "metadata": task.metadata, "_whole": whole})


def _dataset(texts: Mapping[str, str]) -> Dataset:
    return Dataset.from_dict({"id": list(texts), "text": list(texts.values())})
