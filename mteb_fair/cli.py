"""``python -m mteb_fair``: MTEB's command line with the models and tasks of this package, and calibration settings."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import mteb
from mteb.cli.build_cli import build_cli
from mteb.models.model_implementations import MODEL_REGISTRY

from fair_calibration import PRESETS, FairConfig
from mteb_fair.loading import UnknownModelError
from mteb_fair.names import nearest
from mteb_fair.position_task import TaskDataError
from mteb_fair.registry import get_tasks, register, register_model
from mteb_fair.sources import DATA_VARIABLE

_SETTINGS = tuple(field.name for field in fields(FairConfig))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    parser = build_parser()
    args = parser.parse_args(arguments)
    if not hasattr(args, "func"):
        parser.print_help()
        return 2
    try:
        if getattr(args, "data_folder", None):
            os.environ[DATA_VARIABLE] = args.data_folder
        register()
        if args.func.__name__ == "run":
            args.model = choose_model(args)
            if args.domains and not args.tasks:
                raise ValueError("--domains: expected PosIR or PosIRCrossLingual among the --tasks, got none")
        if getattr(args, "tasks", None):
            args.tasks = task_names(args.tasks, getattr(args, "domains", None))
        if args.func.__name__ == "run" and not args.benchmarks:
            check_selection(args)
        check_benchmarks(getattr(args, "benchmarks", None) or ())
        if args.func.__name__ == "run":
            print(f"model: {args.model}", file=sys.stderr)
    except (TypeError, ValueError) as error:
        parser.exit(2, f"mteb_fair: error: {error}\n")
    try:
        args.func(args)
    except (UnknownModelError, TaskDataError) as error:
        parser.exit(2, f"mteb_fair: error: {error}\n")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Returns MTEB's parser, with our options added to ``run``."""
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
        "With any of these, --model is calibrated. Without, a name that MTEB knows is that model, as with `mteb run`; "
        "local folders and other names are calibrated with the default settings, or those they were saved with.",
    )
    group.add_argument("--preset", choices=sorted(PRESETS), help="The settings to start from.")
    group.add_argument("--strength", type=float, help="In [0, 1]; 0 is the plain model.")
    group.add_argument("--basket-size", type=int, help="Tokens per basket.")
    group.add_argument("--layers", help="A fraction of the depth (0.5), a count (6), 'all', or indices (3,4,5).")
    group.add_argument("--pooling", help="auto, cls, last or mean.")
    group.add_argument("--isolate", help="auto, none, bos or bos_eos.")
    group.add_argument("--isolated-share", help="preserve, equal or a number in [0, 1).")
    group.add_argument("--last-basket", help="equal or proportional.")
    group.add_argument("--min-content", type=int, help="Content tokens from which on documents are calibrated.")
    group.add_argument("--chunk-size", type=int, help="Encode documents in even chunks instead, of that many tokens.")
    group.add_argument("--unit-size", type=int, help="With --chunk-size and mean pooling: tokens per part joined.")
    group.add_argument("--ridge", type=float, help="With --chunk-size: how much to prefer the parts' mean.")
    group.add_argument(
        "--no-calibrate-untyped",
        action="store_true",
        help="Encode texts that are neither queries nor documents (STS, classification...) plainly.",
    )
    group.add_argument("--max-seq-length", type=int, help="Tokens at which texts are truncated.")
    group.add_argument("--base-name", help="What to call a local model, as organization/name.")
    group.add_argument("--domains", nargs="+", help="PosIR's domains, such as law_judiciary, of the --tasks.")
    group.add_argument("--data-folder", help=f"The folder with local copies of the datasets; sets {DATA_VARIABLE}.")


def choose_model(args: argparse.Namespace) -> str:
    """Returns the registered name of the model that the arguments ask for, registering it if it is not.

    Raises:
        ValueError: There is no model, a setting is out of range, or the name can be neither a model nor a folder.
    """
    if not args.model:
        raise ValueError("--model: expected a name or a folder, got none")
    given = {name: value for name in _SETTINGS if (value := _parse(name, getattr(args, name))) is not None}
    options: dict[str, Any] = {"max_seq_length": args.max_seq_length, "base_name": args.base_name}
    options = {name: value for name, value in options.items() if value is not None}
    if args.no_calibrate_untyped:
        options["calibrate_untyped"] = False
    settings = bool(given or options or args.preset)
    revision = args.model_revision
    is_folder = Path(args.model).is_dir()
    if Path(args.model).is_file():
        raise ValueError(f"--model: expected a name or a folder, {args.model!r} is a file")
    if not is_folder and args.model in MODEL_REGISTRY:
        if revision is not None and revision != (listed := MODEL_REGISTRY[args.model].revision):
            raise ValueError(f"--model-revision: MTEB has {args.model!r} at {listed}, got {revision}")
        if not settings:
            return str(args.model)
        if args.model.startswith("mteb_fair/"):
            raise ValueError(f"--model: {args.model!r} has its settings in its name; give the base model with settings")
    if not is_folder and (args.model.startswith("mteb_fair/") or "/" not in args.model or args.model.startswith(".")):
        raise ValueError(
            f"--model: {args.model!r} is neither a folder nor a registered model; the nearest names are "
            f"{nearest(args.model, MODEL_REGISTRY)}"
        )
    config = None
    if given or args.preset:
        config = FairConfig.from_dict({**PRESETS[args.preset or "published"].to_dict(), **given})
    return register_model(Path(args.model) if is_folder else args.model, config=config, revision=revision, **options)


def _parse(name: str, value: Any) -> Any:
    """Reads the settings that are of more than one type."""
    if value is None or name not in ("layers", "isolated_share"):
        return value
    try:
        if name == "layers" and "," in value:
            return [int(part) for part in value.split(",") if part.strip()]
        return int(value) if name == "layers" and value.lstrip("-").isdigit() else float(value)
    except ValueError:
        return value  # a word, which FairConfig knows or names in its error


def check_benchmarks(names: Sequence[str]) -> None:
    """Checks that MTEB has benchmarks by these names.

    Raises:
        ValueError: It has not.
    """
    lookup = importlib.import_module("mteb.benchmarks.get_benchmark")
    known = {**lookup._build_registry(), **lookup._build_aliases_registry()}
    for name in names:
        if name not in known:
            raise ValueError(f"--benchmarks: {name!r} is unknown; the nearest names are {nearest(name, known)}")


def check_selection(args: argparse.Namespace) -> None:
    """Checks that there is something to run.

    Raises:
        ValueError: No task has the languages, types and categories, or one has none of the splits.
    """
    tasks = mteb.get_tasks(
        categories=args.categories, task_types=args.task_types, languages=args.languages, tasks=args.tasks
    )
    if not tasks:
        raise ValueError(
            f"--tasks: none of {args.tasks or 'all'} has the languages {args.languages} and what else is asked"
        )
    for task in tasks:
        if args.eval_splits and not set(args.eval_splits) & set(task.metadata.eval_splits):
            raise ValueError(
                f"--eval-splits: {task.metadata.name} has {list(task.metadata.eval_splits)}, got {args.eval_splits}"
            )


def task_names(names: Sequence[str], domains: Sequence[str] | None) -> list[str]:
    """Returns the names that the tasks have in MTEB: those on local data end in a hash, those on domains name them.

    Raises:
        ValueError: A task is unknown, or there are domains without a task that has any.
    """
    return [task.metadata.name for task in get_tasks(names, domains=domains)]
