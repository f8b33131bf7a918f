"""Adds the tasks and the benchmark of this package to MTEB's registries, and finds tasks by their names."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mteb
import mteb.benchmarks.benchmarks
from mteb.abstasks import AbsTask
from mteb.benchmarks.benchmark import Benchmark
from mteb.get_tasks import MTEBTasks

from fair_calibration.nearest_names import nearest_names
from fair_evaluation.benchmarks.sources import local_folder
from mteb_fair.tasks import TASKS, FineWebPosQ, PosIR, PosIRCrossLingual, SQuADPosQ
from mteb_fair.tasks.position_task import OtherLanguagesError

logger = logging.getLogger("mteb_fair")

BENCHMARK = "PositionFair"
NANOBEIR = "NanoBEIR"
_POSITION_SUBSETS = {"ColDeRReranking": ["position_bias"]}
"""MTEB's own tasks that belong to the benchmark, in versions of MTEB that have them, with the subsets that do."""


def register() -> None:
    """Adds the tasks and the benchmark of this package to MTEB's registries; calling it again changes nothing.

    Models are added one by one, by `register_model`.

    Raises:
        ValueError: MTEB has another task by one of the names.
    """
    module: Any = importlib.import_module("mteb.get_tasks")  # the plain import yields the function of that name
    for name, task in TASKS.items():
        if (other := module._TASKS_REGISTRY.setdefault(name, task)) is not task:
            raise ValueError(f"MTEB has another task named {name!r}: {other}")
    module.TASK_LIST = (*module.TASK_LIST, *(t for t in TASKS.values() if t not in module.TASK_LIST))
    if not hasattr(mteb.benchmarks.benchmarks, "POSITION_FAIR"):
        mteb.benchmarks.benchmarks.POSITION_FAIR = Benchmark(  # type: ignore[attr-defined]
            name=BENCHMARK,
            tasks=get_tasks(BENCHMARK),
            description=(
                "Retrieval by the position of the answer in the document: nDCG@10 by position group, position "
                "sensitivity index (PSI), harmonic mean and slope. NanoBEIR beside it shows whether general retrieval "
                "suffers."
            ),
            reference="https://arxiv.org/abs/2606.02737",
        )
        lookup = importlib.import_module("mteb.benchmarks.get_benchmark")
        lookup._build_registry.cache_clear()
        lookup._build_aliases_registry.cache_clear()


def get_tasks(
    tasks: str | Iterable[str] | None = None,
    *,
    languages: Sequence[str] | None = None,
    domains: Sequence[str] | None = None,
    data_folder: str | os.PathLike[str] | None = None,
    revision: str | None = None,
) -> MTEBTasks:
    """Returns tasks of this package and of MTEB by name.

    Args:
        tasks: Names of tasks, "NanoBEIR" for its 13 tasks, or "PositionFair" for those of the benchmark; None means
            "PositionFair". The benchmark has the subset "position_bias" of MTEB's ColDeRReranking, and by its own name
            the task has all subsets.
        languages: Languages of the queries, such as "eng" or "eng-Latn". Tasks of "PositionFair" and "NanoBEIR" that
            have none of them are left out.
        domains: Domains of PosIR, such as "law_judiciary"; other tasks have none.
        data_folder: The local folder with the data of a single task; None means the task's folder in the one that the
            environment variable ``MTEB_FAIR_DATA`` names, or else the hub.
        revision: The commit of the dataset of a single task on the hub; None means the task's own.

    Raises:
        TypeError: ``tasks`` are not names.
        ValueError: A task is unknown, has none of the languages, or does not take the arguments, or no task is left.
    """
    given: Any = [BENCHMARK] if tasks is None else [tasks] if isinstance(tasks, str) else tasks
    names = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"tasks: expected None, a name or names of tasks, got {tasks!r}")
    if not names:
        raise ValueError("tasks: expected at least one name, or None for those of the benchmark, got none")
    if languages is not None and (isinstance(languages, str) or not languages):
        raise ValueError(f"languages: expected None or a list of at least one, such as ['eng'], got {languages!r}")
    if domains is not None and not {"PosIR", "PosIRCrossLingual", BENCHMARK}.intersection(names):
        raise ValueError(f"domains: only PosIR and PosIRCrossLingual have some, and {names} has neither")
    is_single = len(names) == 1 and names[0] not in (BENCHMARK, NANOBEIR)
    if data_folder is not None and not is_single:
        raise ValueError(f"data_folder: expected a single task for it, got {names}; see MTEB_FAIR_DATA for several")
    if revision is not None and not is_single:
        raise ValueError(f"revision: expected a single task for it, got {names}")
    chosen: list[AbsTask] = []
    for name in names:
        if name not in (BENCHMARK, NANOBEIR):
            chosen.append(_get_task(name, languages, domains, data_folder, revision=revision))
            continue
        members: dict[str, list[str] | None]
        if name == BENCHMARK:
            members = {task.metadata.name: None for task in (PosIR, PosIRCrossLingual, FineWebPosQ, SQuADPosQ)}
            members |= {name: subsets for name, subsets in _POSITION_SUBSETS.items() if name in _mteb_registry()}
        else:
            members = {task.metadata.name: None for task in mteb.get_benchmark(NANOBEIR).tasks}
        found = []
        for member, subsets in members.items():
            try:
                found.append(_get_task(member, languages, domains, None, subsets=subsets))
            except OtherLanguagesError as error:
                logger.warning("%s: %s is left out (%s)", name, member, error)
        if not found:
            raise ValueError(f"languages: no task of {name} has any of {sorted(languages or ())}")
        chosen += found
    return MTEBTasks(chosen)


def _get_task(
    name: str,
    languages: Sequence[str] | None,
    domains: Sequence[str] | None,
    data_folder: str | os.PathLike[str] | None,
    *,
    revision: str | None = None,
    subsets: list[str] | None = None,
) -> AbsTask:
    task: AbsTask
    if (cls := TASKS.get(name)) is not None:
        folder = None if data_folder is None else Path(data_folder)
        if folder is None and revision is None and not cls.embedded:  # a revision is one of the hub
            folder = local_folder(cls.dataset_name)
        selection: dict[str, Any] = {"domains": domains} if domains is not None and issubclass(cls, PosIR) else {}
        task = cls(data_folder=folder, revision=revision, **selection)
    else:
        if name not in _mteb_registry():
            near = nearest_names(name, [*TASKS, BENCHMARK, NANOBEIR, *_mteb_registry()])
            raise ValueError(f"tasks: {name!r} is unknown; the nearest names are {near}")
        if data_folder is not None:
            raise ValueError(f"data_folder: {name!r} is MTEB's own task and reads from the hub alone")
        if revision is not None:
            raise ValueError(f"revision: {name!r} is MTEB's own task, whose revision MTEB pins")
        task = mteb.get_task(name, hf_subsets=subsets)
    if languages is not None:
        # The first language of a subset is that of the queries.
        offered = {subset: codes[0] for subset, codes in task.metadata.hf_subsets_to_langscripts.items()}
        matching = [s for s in task.hf_subsets if {offered[s], offered[s].split("-")[0]}.intersection(languages)]
        task.hf_subsets = matching
        if not task.hf_subsets:
            raise OtherLanguagesError(
                f"languages: {name} has none of {sorted(languages)}; its languages are {sorted(set(offered.values()))}"
            )
    return task


def _mteb_registry() -> dict[str, Any]:
    registry: dict[str, Any] = importlib.import_module("mteb.get_tasks")._TASKS_REGISTRY
    return registry
