"""`PositionTask`: an MTEB retrieval task whose scores are also given by the position of the answer in the document."""

from __future__ import annotations

import importlib
import math
import os
from abc import abstractmethod
from collections.abc import Mapping
from functools import partialmethod
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.timing import TimingStack

from fair_calibration.model_source import is_commit
from fair_evaluation.benchmarks.position_data import PositionData
from fair_evaluation.benchmarks.sources import fingerprint, hub_folder
from mteb_fair.scores import METRIC, SCORE, Grouping, score_groups
from mteb_fair.tasks.partitioned_search import PartitionedSearch

SPLIT = "test"


class OtherLanguagesError(ValueError):
    """A task has none of the requested languages, or none of those in its local data."""


class PositionMetadata(TaskMetadata):
    """MTEB's metadata of a task, with the descriptive statistics in this package instead of in MTEB's."""

    @property
    def descriptive_stat_path(self) -> Path:
        """The file of the descriptive statistics, which `calculate_descriptive_statistics` of a task writes."""
        return Path(__file__).parent / "descriptive_stats" / f"{self.name}.json"


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
    return PositionMetadata(**{**shared, **facts})


class PositionTask(AbsTaskRetrieval):
    """A retrieval task whose scores are also given by position group (`mteb_fair.scores`).

    The data come from the hub, or from a local folder in the same layout. The name of a task on local data ends in a
    hash of the data, and that of a task on another revision in the commit, since MTEB tells results apart by the task's
    name alone.
    """

    groupings: ClassVar[tuple[Grouping, ...]]
    dataset_name: ClassVar[str]
    """The name of the dataset's folder in the folder that the environment variable ``MTEB_FAIR_DATA`` names."""
    partitioned: ClassVar[bool] = False
    """Whether each query searches only the documents of its part, as `PartitionedSearch` does."""
    embedded: ClassVar[bool] = False
    """Whether the data come with this package, so that there is nothing to choose."""
    _whole: ClassVar[type[PositionTask] | None] = None
    """The class of the whole task, in the classes that MTEB's registry has for local and selected data."""

    def __init__(
        self,
        *,
        data_folder: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        selection: Mapping[str, Any] | None = None,
        suffix: str = "",
        **kwargs: Any,
    ) -> None:
        """Finds the data, which `load_data` reads.

        Args:
            data_folder: The folder with the data; None means the hub.
            revision: The commit of the dataset on the hub; None means that of the task's metadata.
            selection: The arguments with which a subclass selects a part of the data.
            suffix: What the selection adds to the task's name.
            **kwargs: Further arguments of MTEB's `AbsTask`.

        Raises:
            ValueError: The folder does not exist, or holds no data files or none of the task's languages, ``revision``
                is not a commit, or there is no choice of data.
        """
        whole = self._whole or type(self)
        name, updates = whole.metadata.name + suffix, {}
        if given := [n for n, v in (("data_folder", data_folder), ("revision", revision)) if v is not None]:
            if self.embedded:
                raise ValueError(f"{given[0]}: the data of {name} come with this package, leave it out")
            if len(given) > 1:
                raise ValueError(f"revision: the data in a folder have none, got {revision!r} with {data_folder!r}")
        if revision is not None:
            if not is_commit(revision):
                raise ValueError(
                    f"revision: expected a commit of {whole.metadata.dataset['path']}, 40 hexadecimal digits, since "
                    f"branches and tags move, got {revision!r}"
                )
            if revision != whole.metadata.revision:
                name += f"-rev-{revision[:12]}"
                updates = {"dataset": {**whole.metadata.dataset, "revision": revision}}
        self.data_folder = None if data_folder is None else Path(data_folder).resolve()
        if self.data_folder is not None:
            if not self.data_folder.is_dir():
                raise ValueError(f"data_folder: expected the folder of {name}, there is no folder {str(data_folder)!r}")
            digest = fingerprint(self.data_folder)
            name += f"-local-{digest[:8]}"
            updates = {
                "dataset": {"path": str(self.data_folder), "revision": f"local-{digest}"},
                "eval_langs": whole.local_languages(self.data_folder),
            }
        self.metadata = whole.metadata.model_copy(update={"name": name, **updates})
        self._labels: dict[str, dict[str, tuple[str, ...]]] = {}
        if name != whole.metadata.name:  # MTEB looks the tasks of its results up by their names, and reads the class
            source = {"data_folder": self.data_folder, "revision": revision}
            make = partialmethod(whole.__init__, **source, **(selection or {}))
            attributes = {"__init__": make, "__module__": whole.__module__, "__doc__": whole.__doc__}
            attributes |= {"metadata": self.metadata, "_whole": whole}
            registry = importlib.import_module("mteb.get_tasks")._TASKS_REGISTRY
            registry[name] = type(whole.__name__, (whole,), attributes)
        super().__init__(**kwargs)

    @classmethod
    def local_languages(cls, folder: Path) -> Any:  # noqa: ARG003
        """Returns the languages in a folder with local data, as MTEB's metadata have them."""
        return cls.metadata.eval_langs

    @abstractmethod
    def read(self, subset: str) -> PositionData:
        """Reads the data of one subset."""

    def folder(self, *patterns: str) -> Path:
        """Returns the folder of the data; files on the hub that match ``patterns`` are downloaded first."""
        if self.data_folder is not None:
            return self.data_folder
        return hub_folder(self.metadata.dataset["path"], self.metadata.dataset["revision"], patterns)

    def load_data(self, num_proc: int | None = None, *, timer: TimingStack | None = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Reads and checks the data of the chosen subsets.

        Raises:
            ValueError: The data cannot be found, read or used, or have changed since the task was made.
        """
        if self.data_loaded:
            return
        if self.data_folder is not None and f"local-{fingerprint(self.data_folder)}" != self.metadata.revision:
            raise ValueError(
                f"{self.data_folder}: the data have changed since the task {self.metadata.name!r} was made, so its "
                "name would be wrong for them; make the task again"
            )
        subsets: dict[str, Any] = {}
        with (timer or TimingStack())("Data loading", log_message=f"Loading dataset {self.metadata.name}..."):
            for subset in self.hf_subsets:
                data = self.read(subset)
                data.check(f"{self.metadata.name}, {subset}")
                self._labels[subset] = data.labels
                texts = {
                    name: Dataset.from_dict({"id": list(texts), "text": list(texts.values())})
                    for name, texts in (("corpus", data.corpus), ("queries", data.queries))
                }
                subsets[subset] = {SPLIT: {**texts, "relevant_docs": data.relevant, "top_ranked": None}}
        self.dataset = subsets
        self.data_loaded = True

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
            entry |= score_groups(grouping, per_query, self._labels[hf_subset])
        return entry

    def _evaluate_subset(self, model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        model = PartitionedSearch(model) if self.partitioned else model
        # MTEB's nAUC is NaN where all queries score the same, which is not valid JSON.
        scores = super()._evaluate_subset(model, *args, **kwargs)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in scores.items()}
