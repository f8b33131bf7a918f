"""Adds the tasks, the benchmark and models with settings to MTEB's registries."""

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

from fair_calibration import EvenChunks, FairConfig
from fair_calibration.settings import Settings, choose_settings, setting_names
from mteb_fair.encoder import FairEncoder, load_variant
from mteb_fair.loading import commit_of, describe_base, is_folder, registered_loading, registered_prompts
from mteb_fair.nearest_names import nearest_names
from mteb_fair.tasks import TASKS, FineWebPosQ, PosIR, PosIRCrossLingual, SQuADPosQ
from mteb_fair.tasks.position_task import OtherLanguagesError
from mteb_fair.variant import PREFIX, Variant

logger = logging.getLogger("mteb_fair")

BENCHMARK = "PositionFair"
NANOBEIR = "NanoBEIR"


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
        mteb.benchmarks.benchmarks.POSITION_FAIR = build_benchmark()  # type: ignore[attr-defined]
        lookup = importlib.import_module("mteb.benchmarks.get_benchmark")
        lookup._build_registry.cache_clear()
        lookup._build_aliases_registry.cache_clear()


def register_model(
    base_model: str | os.PathLike[str],
    *,
    config: Settings | str | None = None,
    base_name: str | None = None,
    revision: str | None = None,
    **options: Any,
) -> str:
    """Adds a base model with settings to MTEB's registry, and returns the name by which MTEB then loads it.

    Hub models are not loaded for that; local models are, to learn their identity.

    Args:
        base_model: A Hugging Face name, a local folder, or the name of a variant such as
            "mteb_fair/BAAI__bge-m3@strength=0.5", which holds the settings.
        config: A `FairConfig`, an `EvenChunks` or the name of a preset; None means the defaults, or the settings that a
            local model was saved with.
        base_name: The name of a local model as "organization/name".
        revision: The commit of a Hugging Face model; None means the commit that MTEB has, or else the newest.
        **options: Single settings of ``config``, and ``calibrate_untyped``, ``max_seq_length``, ``embed_dim`` and
            ``model_prompts`` of `FairEncoder`.

    Raises:
        TypeError: There is no such option.
        ModelNotFoundError: There is no such folder or model.
        ValueError: A setting is out of range, or another model or revision is registered by the name.
    """
    if is_folder(base_model):
        base_model = Path(base_model).resolve()  # found again from any working directory
        if revision is not None:
            raise ValueError(f"revision: folders have none, got {revision!r} for {str(base_model)!r}")
        encoder = FairEncoder(base_model, config=config, base_name=base_name, device="cpu", **options)
        variant, meta = encoder.variant, encoder.mteb_model_meta
    else:
        name = os.fspath(base_model)
        if name.startswith(PREFIX):
            if config is not None or base_name is not None or options:
                raise ValueError(f"base_model: {name!r} holds its settings; give the base model with other settings")
            variant = Variant.from_name(name)
            base_model = name = variant.base_name
        else:
            variant = _variant_of(name, config, base_name, options)
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
            f"{other.revision}, now {meta.adapted_from} at {meta.revision} was given; give one of them another "
            "base_name"
        )
    loader_kwargs = {**registered_loading(base_model)[1], "base_model": str(base_model), "base_name": base_name}
    loader_kwargs |= variant.loader_kwargs
    MODEL_REGISTRY[variant.name] = meta.model_copy(
        update={"loader_kwargs": {name: value for name, value in loader_kwargs.items() if value is not None}}
    )
    return variant.name


def _variant_of(name: str, config: Settings | str | None, base_name: str | None, options: dict[str, Any]) -> Variant:
    """Returns the variant of a hub model that is not loaded."""
    single = {*setting_names(FairConfig), *setting_names(EvenChunks)}
    settings = choose_settings(
        config, {key: value for key, value in options.items() if key in single}, default=FairConfig()
    )
    others = {key: value for key, value in options.items() if key not in single}
    if others.get("model_prompts") == registered_prompts(name):
        others.pop("model_prompts", None)  # given or left out, the variant is the same
    return Variant(base_name=base_name or name, config=settings, **others)


def build_benchmark() -> Benchmark:
    """Builds the position-aware tasks as one MTEB benchmark; evaluate ``get_tasks("NanoBEIR")`` beside it."""
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
    """Returns tasks of this package and of MTEB by name.

    Args:
        tasks: Names of tasks, "NanoBEIR" for its 13 tasks, or "PositionFair" for those of the benchmark; None means
            "PositionFair".
        languages: Languages such as "eng" or "eng-Latn"; those of the queries in the tasks of this package. Tasks of
            "PositionFair" and "NanoBEIR" that have none of them are left out.
        domains: Domains of PosIR, such as "law_judiciary"; other tasks have none.
        data_folder: The local folder with the data of a single task.

    Raises:
        ValueError: A task is unknown, has none of the languages, or does not take the arguments, or no task is left.
    """
    names = [BENCHMARK] if tasks is None else [tasks] if isinstance(tasks, str) else list(tasks)
    if not names:
        raise ValueError("tasks: expected at least one name, or None for those of the benchmark, got none")
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
            near = nearest_names(name, [*TASKS, BENCHMARK, NANOBEIR, *known])
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
