"""``python -m mteb_fair``: MTEB's command line with the tasks of this package and with settings of the calibration."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mteb
from mteb.abstasks import AbsTask
from mteb.cli.build_cli import build_cli
from mteb.models.model_implementations import MODEL_REGISTRY
from mteb.results import TaskResult

from fair_calibration import PRESETS, EvenChunks, FairConfig
from fair_calibration.settings import Settings, choose_settings, setting_names, settings_from_text
from mteb_fair.loading import is_folder
from mteb_fair.nearest_names import nearest_names
from mteb_fair.registry import get_tasks, register, register_model
from mteb_fair.summary import summarize
from mteb_fair.tasks.sources import DATA_VARIABLE
from mteb_fair.variant import PREFIX

_SETTINGS = tuple(dict.fromkeys([*setting_names(FairConfig), *setting_names(EvenChunks)]))
_ONLY_CHUNKS = set(setting_names(EvenChunks)) - set(setting_names(FairConfig))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status. Errors are one line; ``-v 3`` shows where they come from."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    warnings.filterwarnings("ignore", category=FutureWarning)  # of MTEB's own calls of other libraries
    parser = build_parser()
    args = parser.parse_args(arguments)
    if not hasattr(args, "func"):
        parser.print_help()
        return 2
    try:
        tasks = _prepare(args)
        args.func(args)
        if tasks:
            report(args, tasks)
    except KeyboardInterrupt:
        kept = (
            f"finished results are kept in {args.output_folder}, and the same command resumes" if _is_run(args) else ""
        )
        parser.exit(130, f"mteb_fair: interrupted{'; ' * bool(kept)}{kept}\n")
    except Exception as error:
        if getattr(args, "verbosity", 0) >= 3:
            raise
        message = " ".join(str(error).split())
        if not isinstance(error, (TypeError, ValueError)):
            message = f"{type(error).__name__}: {message} (-v 3 shows where)"
        parser.exit(2, f"mteb_fair: error: {message}\n")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Returns MTEB's parser with our options added to ``run``."""
    parser = build_cli()
    parser.prog = "python -m mteb_fair"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                subparser.prog = f"{parser.prog} {name}"
            _add_options(action.choices["run"])
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "calibration",
        "With any of these, --model is calibrated. Without them, a name that MTEB knows is that model, as with `mteb "
        "run`; local folders and other names are calibrated with the settings they were saved with, or the defaults.",
    )
    group.add_argument(
        "--config", help=f"A preset ({', '.join(sorted(PRESETS))}), or settings as JSON: '{{\"strength\": 0.4}}'."
    )
    descriptions = {**_descriptions(EvenChunks), **_descriptions(FairConfig)}
    for name in _SETTINGS:
        group.add_argument(f"--{name.replace('_', '-')}", help=descriptions[name].replace("%", "%%"))
    group.add_argument(
        "--no-calibrate-untyped",
        action="store_true",
        help="Encode texts that are neither queries nor documents (STS, classification...) as the plain model does.",
    )
    group.add_argument("--max-seq-length", type=int, help="The number of tokens at which texts are truncated.")
    group.add_argument("--base-name", help="The name of a local model, as organization/name.")
    group.add_argument("--domains", nargs="+", help="The domains of PosIR in --tasks, such as law_judiciary.")
    group.add_argument("--data-folder", help=f"The folder with local copies of the datasets; sets {DATA_VARIABLE}.")


def _descriptions(kind: type[Settings]) -> dict[str, str]:
    """Returns what the docstring of a settings class says about each setting."""
    lines = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2].splitlines()
    described: dict[str, str] = {}
    name = ""
    for line in lines:
        if line.startswith("    ") and not line.startswith("     "):
            name, _, line = line.strip().partition(": ")
        described[name] = f"{described.get(name, '')} {line.strip()}".strip()
    return described


def _is_run(args: argparse.Namespace) -> bool:
    return bool(args.func.__name__ == "run")


def _prepare(args: argparse.Namespace) -> list[AbsTask]:
    """Checks the arguments, puts registered names in their place, and returns the tasks of ``run``."""
    if getattr(args, "data_folder", None):
        if not Path(args.data_folder).is_dir():
            raise ValueError(f"--data-folder: there is no folder {args.data_folder!r}")
        os.environ[DATA_VARIABLE] = args.data_folder
    register()
    check_benchmarks(getattr(args, "benchmarks", None) or ())
    if _is_run(args):
        _check_run(args)
    if getattr(args, "tasks", None) and args.func.__name__ in ("run", "_available_tasks"):
        args.tasks = task_names(args.tasks, getattr(args, "domains", None))
    if not _is_run(args):
        return []
    tasks = select_tasks(args)
    args.model = choose_model(args)
    if args.model.startswith(PREFIX):
        check_results(args.model, Path(args.output_folder))
    print(f"model: {args.model}", file=sys.stderr)
    return tasks


def check_results(model: str, output_folder: Path) -> None:
    """Checks that the output folder holds no results of another model by the same name.

    Raises:
        ValueError: It does, and MTEB's tables would show the results of one as those of the other.
    """
    meta = mteb.get_model_meta(model)
    folder = output_folder / "results" / meta.model_name_as_path()
    others = [path.name for path in folder.glob("*") if path.is_dir() and path.name != meta.revision]
    if others:
        raise ValueError(
            f"--output-folder: {folder} holds results of another model of this name ({', '.join(sorted(others))}), and "
            "the results of the two would be mixed up; give this model a --base-name, or use another folder"
        )


def _check_run(args: argparse.Namespace) -> None:
    for name in ("batch_size", "num_proc"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected an integer of at least 1, got {value}")
    if args.co2_tracker and importlib.util.find_spec("codecarbon") is None:
        raise ValueError("--co2-tracker: the package codecarbon is not installed; pip install 'mteb[codecarbon]'")
    for name in ("output_folder", "prediction_folder"):
        if (path := getattr(args, name)) is not None and Path(path).is_file():
            raise ValueError(f"--{name.replace('_', '-')}: expected a folder, {path!r} is a file")
    if args.domains and not args.tasks:
        raise ValueError("--domains: expected PosIR or PosIRCrossLingual among the --tasks, got none")


def choose_model(args: argparse.Namespace) -> str:
    """Returns the registered name of the model that the arguments ask for, registering it if necessary.

    Raises:
        TypeError: A setting is not one of the chosen way of encoding.
        ValueError: There is no such model, or a setting is out of range.
    """
    if not args.model:
        raise ValueError("--model: expected a name or a folder, got none")
    model: Any = Path(args.model) if is_folder(args.model) else args.model
    if isinstance(model, Path) and not model.is_dir():
        raise ValueError(f"--model: expected a name or a folder, {args.model!r} is a file")
    given = {name: _parse(value) for name in _SETTINGS if (value := getattr(args, name)) is not None}
    config = None if args.config is None else settings_from_text(args.config)
    if config is None and _ONLY_CHUNKS & set(given):
        config = EvenChunks()
    options = {"max_seq_length": args.max_seq_length, "base_name": args.base_name}
    options = {name: value for name, value in options.items() if value is not None}
    if args.no_calibrate_untyped:
        options["calibrate_untyped"] = False
    has_settings = bool(given or options or config is not None)
    revision = args.model_revision
    if model in MODEL_REGISTRY and not model.startswith(PREFIX):
        if revision is not None and revision != (registered := MODEL_REGISTRY[model].revision):
            raise ValueError(f"--model-revision: MTEB has {model!r} at {registered}, got {revision}")
        if not has_settings:
            return str(model)
    elif isinstance(model, str) and model.startswith(PREFIX):
        if has_settings:
            raise ValueError(f"--model: {model!r} has its settings in its name; give the base model with settings")
        return model if model in MODEL_REGISTRY else register_model(model, revision=revision)
    elif isinstance(model, str) and ("/" not in model or model.startswith((".", "/", "~"))):
        raise ValueError(
            f"--model: {model!r} is neither a folder nor the name of a model; the nearest names are "
            f"{nearest_names(model, MODEL_REGISTRY)}"
        )
    choose_settings(config, given if config is not None else {}, default=FairConfig())  # before a model is loaded
    return register_model(model, config=config, revision=revision, **given, **options)


def _parse(text: str) -> Any:
    """Reads a setting: a number, indices such as "3,4,5", or a word."""
    if "," in text:
        text = f"[{text.strip(',')}]"
    try:
        return json.loads(text)
    except ValueError:
        return text  # `FairConfig` knows the word or reports it


def check_benchmarks(names: Sequence[str]) -> None:
    """Checks that MTEB has benchmarks by these names.

    Raises:
        ValueError: A name is unknown.
    """
    lookup = importlib.import_module("mteb.benchmarks.get_benchmark")
    known = {**lookup._build_registry(), **lookup._build_aliases_registry()}
    for name in names:
        if name not in known:
            raise ValueError(f"--benchmarks: {name!r} is unknown; the nearest names are {nearest_names(name, known)}")


def task_names(names: Sequence[str], domains: Sequence[str] | None) -> list[str]:
    """Returns the names of tasks in MTEB, which also tell local data and selected domains apart.

    Raises:
        ValueError: A task is unknown, or there are domains without a task that has any.
    """
    return [task.metadata.name for task in get_tasks(names, domains=domains)]


def select_tasks(args: argparse.Namespace) -> list[AbsTask]:
    """Returns the tasks that ``run`` evaluates.

    Raises:
        ValueError: No task has the languages, types and categories, or a task has none of the splits.
    """
    if args.benchmarks:
        return [task for benchmark in mteb.get_benchmarks(names=args.benchmarks) for task in benchmark.tasks]
    tasks = mteb.get_tasks(
        categories=args.categories, task_types=args.task_types, languages=args.languages, tasks=args.tasks
    )
    if not tasks:
        raise ValueError(
            f"--tasks: none of {args.tasks or 'all'} has the languages {args.languages} and what else is asked for"
        )
    for task in tasks:
        if args.eval_splits and not set(args.eval_splits) & set(task.metadata.eval_splits):
            raise ValueError(
                f"--eval-splits: {task.metadata.name} has {list(task.metadata.eval_splits)}, got {args.eval_splits}"
            )
    return list(tasks)


def report(args: argparse.Namespace, tasks: Sequence[AbsTask]) -> None:
    """Prints nDCG@10 and PSI of the tasks that were evaluated, where the results are, and what to do next."""
    cache = mteb.ResultCache(Path(args.output_folder))
    meta = mteb.get_model_meta(args.model)
    paths = {task.metadata.name: Path(cache.get_task_result_path(task.metadata.name, meta)) for task in tasks}
    found = [path for path in paths.values() if path.is_file()]
    if not found:
        print(f"results: in {args.output_folder}")
        return
    table = summarize(TaskResult.from_disk(path) for path in found)
    print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}", na_rep="-"))
    print("psi is 1 - min / max over the position groups: 0 is position-fair, as if the answer could stand anywhere.")
    print("results: " + "\n         ".join(str(path) for path in found))
    if str(meta.name).startswith(PREFIX) and (meta.experiment_kwargs or {}).get("strength") != 0:
        print("next: the same command with --strength 0 evaluates the plain model, to compare with.")
    else:
        print("next: the same command with --strength 0.5 evaluates the calibrated model, to compare with.")
