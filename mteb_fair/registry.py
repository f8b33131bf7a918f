"""Puts models, tasks and the benchmark of this package into MTEB's registries."""

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
from mteb.models.model_implementations import MODEL_REGISTRY

from fair_calibration import PRESETS, FairConfig
from mteb_fair.demo import PositionDemoRetrieval
from mteb_fair.encoder import FairEncoder, load_variant
from mteb_fair.fineweb_posq import FineWebPosQ
from mteb_fair.identity import Variant
from mteb_fair.loading import commit_of, default_prompts, describe_base, pinned
from mteb_fair.names import nearest
from mteb_fair.posir import PosIR, PosIRCrossLingual
from mteb_fair.position_task import OtherLanguagesError, PositionTask
from mteb_fair.squad_posq import SQuADPosQ

logger = logging.getLogger("mteb_fair")

TASKS: dict[str, type[PositionTask]] = {
    task.metadata.name: task for task in (PosIR, PosIRCrossLingual, FineWebPosQ, SQuADPosQ, PositionDemoRetrieval)
}
"""The tasks by name."""
BENCHMARK = "PositionFair"
NANOBEIR = "NanoBEIR"
BASE_MODELS = (
    "Alibaba-NLP/gte-multilingual-base",
    "BAAI/bge-m3",
    "Qwen/Qwen3-Embedding-0.6B",
    "Qwen/Qwen3-Embedding-4B",
    "Qwen/Qwen3-Embedding-8B",
    "intfloat/multilingual-e5-small",
    "intfloat/multilingual-e5-base",
    "intfloat/multilingual-e5-large",
    "sentence-transformers/all-MiniLM-L6-v2",
    "sentence-transformers/all-MiniLM-L12-v2",
    "ibm-granite/granite-embedding-107m-multilingual",
    "ibm-granite/granite-embedding-278m-multilingual",
    "ibm-granite/granite-embedding-english-r2",
    "ibm-granite/granite-embedding-small-english-r2",
    "Snowflake/snowflake-arctic-embed-m-v1.5",
    "Snowflake/snowflake-arctic-embed-m-v2.0",
    "Snowflake/snowflake-arctic-embed-l-v2.0",
    "nomic-ai/nomic-embed-text-v1.5",
    "nomic-ai/modernbert-embed-base",
    "Alibaba-NLP/gte-modernbert-base",
)
"""The models that are registered in the settings of `REGISTERED`; any other is with `register_model`."""
REGISTERED: tuple[FairConfig, ...] = (FairConfig(strength=0.0), *PRESETS.values())
"""The plain model, in the same wrapper, and the variants that the papers compare."""


def register() -> None:
    """Makes MTEB know the models, tasks and the benchmark of this package; calling it again changes nothing.

    Raises:
        ValueError: MTEB has something else by one of the names.
    """
    for base in BASE_MODELS:
        if base not in MODEL_REGISTRY:
            logger.info("%s is not in this version of MTEB and is not registered", base)
            continue
        for config in REGISTERED:
            if Variant(base_name=base, config=config).name not in MODEL_REGISTRY:
                register_model(base, config=config)
    module: Any = importlib.import_module("mteb.get_tasks")  # the plain import yields the function of that name
    for name, task in TASKS.items():
        if (other := module._TASKS_REGISTRY.setdefault(name, task)) is not task:
            raise ValueError(f"MTEB has another task named {name!r}: {other}")
    module.TASK_LIST = (*module.TASK_LIST, *(t for t in TASKS.values() if t not in module.TASK_LIST))
    if not hasattr(mteb.benchmarks.benchmarks, "POSITION_FAIR"):
        mteb.benchmarks.benchmarks.POSITION_FAIR = build_benchmark()  # type: ignore[attr-defined]
        lookup = importlib.import_module("mteb.benchmarks.get_benchmark")
        lookup._build_registry.cache_clear()
        lookup._build_aliases_registry.cache_clear()


def register_model(
    base_model: str | os.PathLike[str],
    *,
    config: FairConfig | None = None,
    base_name: str | None = None,
    revision: str | None = None,
    **options: Any,
) -> str:
    """Registers a base model with settings and returns the name by which MTEB then loads it.

    Args:
        base_model: A Hugging Face name, or a local folder, which is loaded to learn its identity.
        config: The calibration; None is the default, or what a local model was saved with.
        base_name: What to call a local model, as "organization/name".
        revision: The commit of a Hugging Face model; None is the one that MTEB has, or else the newest, which the hub
            is asked for.
        **options: `FairEncoder`'s ``calibrate_untyped``, ``max_seq_length``, ``embed_dim`` and ``model_prompts``.

    Raises:
        UnknownModelError: Neither MTEB, the hub nor its cache knows the name.
        ValueError: A setting is out of range, or another model or revision is registered by the name.
    """
    if Path(base_model).exists():
        base_model = Path(base_model).resolve()  # found again from any folder
        if revision is not None:
            raise ValueError(f"revision: folders have none, got {revision!r} for {str(base_model)!r}")
        encoder = FairEncoder(base_model, config=config, base_name=base_name, device="cpu", **options)
        variant, meta = encoder.variant, encoder.mteb_model_meta
    else:
        name = os.fspath(base_model)
        if (prompts := options.get("model_prompts")) is not None and prompts == default_prompts(name):
            del options["model_prompts"]
        variant = Variant(base_name=base_name or name, config=config or FairConfig(), **options)
        if name not in MODEL_REGISTRY:
            revision = commit_of(name, revision)
        meta = describe_base(name, loader=load_variant)
        meta = meta.model_copy(
            update={
                "name": variant.name,
                "revision": revision or meta.revision,
                "adapted_from": name,
                "experiment_kwargs": variant.experiment_kwargs,
            }
        )
    other = MODEL_REGISTRY.get(variant.name)
    if other is not None and (other.adapted_from, other.revision) != (meta.adapted_from, meta.revision):
        raise ValueError(
            f"register_model: {variant.name!r} is registered for {other.adapted_from} at the revision "
            f"{other.revision}, now {meta.adapted_from} at {meta.revision} was given; call one of them by another "
            "base_name"
        )
    loader_kwargs = {**pinned(base_model)[1], "base_model": str(base_model), "base_name": base_name}
    loader_kwargs |= variant.loader_kwargs
    MODEL_REGISTRY[variant.name] = meta.model_copy(
        update={"loader_kwargs": {name: value for name, value in loader_kwargs.items() if value is not None}}
    )
    return variant.name


def build_benchmark() -> Benchmark:
    """Returns the position-aware tasks as one MTEB benchmark; `get_tasks("NanoBEIR")` belongs beside it."""
    return Benchmark(
        name=BENCHMARK,
        tasks=get_tasks(BENCHMARK),
        description=(
            "Retrieval by the position of the answer in the document: nDCG@10 by position group, position sensitivity "
            "index (PSI), harmonic mean and slope. NanoBEIR beside it shows whether general retrieval suffers."
        ),
        reference="https://arxiv.org/abs/2606.02737",
    )


def get_tasks(
    tasks: str | Iterable[str] | None = None,
    *,
    languages: Sequence[str] | None = None,
    domains: Sequence[str] | None = None,
    data_folder: str | os.PathLike[str] | None = None,
) -> MTEBTasks:
    """Returns tasks of this package, and of MTEB, by name.

    Args:
        tasks: Names of tasks, "NanoBEIR" for its 13 tasks, or "PositionFair" for the benchmark's; None is that.
        languages: Such as "eng" or "eng-Latn": of the queries in the tasks of this package. Of "PositionFair" and
            "NanoBEIR" only the tasks that have one are returned.
        domains: PosIR's domains, such as "law_judiciary"; other tasks have none.
        data_folder: The local folder of a single task's data.

    Raises:
        ValueError: There are none, or one is unknown, has none of the languages, or cannot take the arguments.
    """
    names = [BENCHMARK] if tasks is None else [tasks] if isinstance(tasks, str) else list(tasks)
    if not names:
        raise ValueError("tasks: expected at least one name, or None for the benchmark's, got none")
    if languages is not None and not languages:
        raise ValueError("languages: expected None or at least one language, got none")
    if isinstance(languages, str):
        raise ValueError(f"languages: expected a list, got {languages!r}; write [{languages!r}]")
    if domains is not None and not {"PosIR", "PosIRCrossLingual", BENCHMARK}.intersection(names):
        raise ValueError(f"domains: only PosIR and PosIRCrossLingual have some, and {names} has neither")
    chosen: list[AbsTask] = []
    for name in names:
        if name == BENCHMARK:
            expanded = [task.metadata.name for task in (PosIR, PosIRCrossLingual, FineWebPosQ, SQuADPosQ)]
        elif name == NANOBEIR:
            expanded = [task.metadata.name for task in mteb.get_benchmark(NANOBEIR).tasks]
        else:
            expanded = [name]
        if data_folder is not None and (len(names) > 1 or len(expanded) > 1):
            raise ValueError(f"data_folder: expected a single task for it, got {names}; see MTEB_FAIR_DATA for several")
        found = []
        for each in expanded:
            try:
                found.append(_get_task(each, languages, domains, data_folder))
            except OtherLanguagesError as error:
                if expanded == [name]:
                    raise
                logger.warning("%s: %s is left out (%s)", name, each, error)
        if not found:
            raise ValueError(f"languages: no task of {name} has any of {sorted(languages or ())}")
        chosen += found
    return MTEBTasks(chosen)


def _get_task(
    name: str,
    languages: Sequence[str] | None,
    domains: Sequence[str] | None,
    data_folder: str | os.PathLike[str] | None,
) -> AbsTask:
    cls = TASKS.get(name)
    if cls is None:
        known = importlib.import_module("mteb.get_tasks")._TASKS_REGISTRY
        if name not in known:
            near = nearest(name, [*TASKS, BENCHMARK, NANOBEIR, *known])
            raise ValueError(f"tasks: {name!r} is unknown; the nearest names are {near}")
        if data_folder is not None:
            raise ValueError(f"data_folder: {name!r} is MTEB's own task and reads from the hub alone")
        try:
            return mteb.get_task(name, languages=None if languages is None else list(languages))
        except ValueError as error:  # MTEB's own: no subsets, or no language codes
            raise OtherLanguagesError(f"languages: {name} has none of {sorted(languages or ())} ({error})") from error
    arguments: dict[str, Any] = {"data_folder": data_folder}
    if domains is not None and issubclass(cls, PosIR):
        arguments["domains"] = domains
    task = cls(**arguments)
    if task.unusable is not None:
        raise task.unusable
    if languages is not None:
        available = task.metadata.hf_subsets_to_langscripts
        asked = {language for language in languages if language}
        subsets = [s for s, codes in available.items() if asked & {codes[0], codes[0].split("-")[0]}]
        if not subsets:
            offered = sorted({codes[0] for codes in available.values()})
            raise OtherLanguagesError(f"languages: {name} has none of {sorted(asked)}; its languages are {offered}")
        task.hf_subsets = subsets
    return task
