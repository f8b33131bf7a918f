"""Models by settings by tasks: everything evaluated that is not on disk yet, as one table."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import mteb
import pandas as pd
from mteb.abstasks import AbsTask
from mteb.models.model_implementations import MODEL_REGISTRY
from tqdm.auto import tqdm
from transformers.utils import logging as hf_logging

from fair_calibration import FairConfig
from mteb_fair.encoder import FairEncoder
from mteb_fair.registry import register_model
from mteb_fair.scores import SCORE
from mteb_fair.summary import summarize

logger = logging.getLogger("mteb_fair")
BaseModel: TypeAlias = str | os.PathLike[str]
"""A Hugging Face name or a local folder."""


def compare(
    models: Sequence[BaseModel] | Mapping[str, BaseModel],
    tasks: Iterable[AbsTask],
    *,
    output: str | os.PathLike[str],
    strengths: Sequence[float] = (0.0, 0.5),
    config: FairConfig | None = None,
    max_seq_length: int | None = None,
    batch_size: int = 32,
    progress: bool = True,
) -> pd.DataFrame:
    """Evaluates every model at every strength on every task.

    Args:
        models: Hugging Face names, which are loaded only if a result is missing, and local folders. A mapping says what
            to call them, as "organization/name"; folders of one last name need it.
        tasks: Such as `get_tasks` returns.
        output: The folder of results, an MTEB cache; what it holds is not computed again. A result that cannot be read,
            as after a full disk, is set aside as ".corrupt" with a warning, and computed again.
        strengths: 0 is the plain model.
        config: The other settings.
        max_seq_length: Where texts are truncated, in tokens; None is each model's.
        batch_size: Texts per forward pass.
        progress: Whether to show progress bars.

    Returns:
        The columns "model" and "strength", and those of `summarize`.

    Raises:
        ValueError: There are no models, tasks or strengths, one occurs twice, or an evaluation failed.
    """
    tasks = list(tasks)
    for name, values in (("models", models), ("tasks", tasks), ("strengths", strengths)):
        if not values or isinstance(values, str):
            raise ValueError(f"{name}: expected a list of at least one, got {values!r}")
    options: dict[str, Any] = {} if max_seq_length is None else {"max_seq_length": max_seq_length}
    named = list(models.items()) if isinstance(models, Mapping) else [(_label(model), model) for model in models]
    configs = [FairConfig.from_dict({**(config or FairConfig()).to_dict(), "strength": s}) for s in strengths]
    _check_distinct(
        "models",
        [label for label, _ in named],
        "; a mapping says what to call them, as {'organization/name': folder}, and in scripts organization/name=folder",
    )
    _check_distinct("tasks", [task.metadata.name for task in tasks])
    _check_distinct("strengths", [settings.strength for settings in configs])
    _set_corrupt_aside(Path(output), tasks)
    cache = mteb.ResultCache(Path(output))
    frames = []
    n_results = len(models) * len(strengths) * len(tasks)
    with _library_bars(progress), tqdm(total=n_results, disable=not progress, unit="result") as bar:
        for label, model in named:
            for settings in configs:
                subject = _subject(model, settings, {**options, "base_name": label})
                for task in tasks:
                    bar.set_description(f"{label} at {settings.strength}, {task.metadata.name}")
                    result = mteb.evaluate(
                        subject,
                        task,
                        cache=cache,
                        encode_kwargs={"batch_size": batch_size, "show_progress_bar": progress},
                        show_progress_bar=progress,
                    )
                    table = summarize(result.task_results)
                    table = table[table["subset"].isin(task.hf_subsets)]  # the cache may hold more
                    table.insert(0, "strength", settings.strength)
                    table.insert(0, "model", label)
                    frames.append(table)
                    bar.update()
    return pd.concat([frame.astype(object) for frame in frames], ignore_index=True)


@contextmanager
def _library_bars(shown: bool) -> Iterator[None]:
    """Hides the bars of datasets and transformers, which are global settings, for as long as this lasts."""
    libraries = [
        (datasets.is_progress_bar_enabled, datasets.disable_progress_bars, datasets.enable_progress_bars),
        (hf_logging.is_progress_bar_enabled, hf_logging.disable_progress_bar, hf_logging.enable_progress_bar),
    ]
    restore = []
    for is_enabled, disable, enable in libraries:
        if not shown and is_enabled():
            disable()
            restore.append(enable)
    try:
        yield
    finally:
        for enable in restore:
            enable()


def parse_models(values: Iterable[str]) -> dict[str, str]:
    """Reads models as scripts take them, names and folders, the latter also as "organization/name=folder".

    Returns:
        The models by what to call them, as `compare` takes them.

    Raises:
        ValueError: Two are called the same.
    """
    named = []
    for value in values:
        label, separator, folder = value.partition("=")
        named.append((label, folder) if separator and not Path(value).exists() else (_label(value), value))
    _check_distinct("models", [label for label, _ in named], "; write organization/name=folder")
    return dict(named)


def _label(model: BaseModel) -> str:
    """Returns what to call a base model."""
    path = Path(model)
    return f"local/{path.resolve().name}" if path.is_dir() else os.fspath(model)


def _check_distinct(what: str, values: Sequence[Any], hint: str = "") -> None:
    if twice := sorted({value for value in values if values.count(value) > 1}):
        raise ValueError(f"{what}: expected each once, got {twice} more than once{hint}")


def _set_corrupt_aside(folder: Path, tasks: Iterable[AbsTask]) -> None:
    for path in sorted(path for task in tasks for path in folder.rglob(f"{task.metadata.name}.json")):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # also what is not UTF-8
            aside = path.with_name(f"{path.name}.corrupt")
            path.replace(aside)
            logger.warning("%s is no complete result (%s): set aside as %s, computed again", path, error, aside.name)


def _subject(model: BaseModel, config: FairConfig, options: dict[str, Any]) -> Any:
    """Returns what MTEB evaluates."""
    if Path(model).is_dir():
        return FairEncoder(model, config=config, **options)
    return MODEL_REGISTRY[register_model(model, config=config, **options)]


def add_change(table: pd.DataFrame, *, base: float = 0.0) -> pd.DataFrame:
    """Adds to each row of `compare`'s table how much score and PSI changed against the strength ``base``.

    Returns:
        The table with the columns "ndcg_change" and "psi_change": relative, -0.43 for 43 % less; missing where the
        base's value is 0 or missing.
    """
    keys = ["model", "task", "split", "subset", "length"]
    plain = table[table["strength"] == base].set_index(keys)
    rows = []
    for row in table.to_dict("records"):
        key = tuple(row[name] for name in keys)
        for column, name in ((SCORE, "ndcg_change"), ("psi", "psi_change")):
            before = plain[column].get(key) if key in plain.index else None
            row[name] = float(row[column]) / float(before) - 1 if pd.notna(before) and before else None
        rows.append(row)
    return pd.DataFrame(rows, columns=[*table.columns, "ndcg_change", "psi_change"])
