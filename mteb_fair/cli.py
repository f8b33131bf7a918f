"""``python -m mteb_fair``: MTEB's command line with the tasks of this package and with settings of the calibration."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mteb
from mteb.abstasks import AbsTask, AbsTaskRetrieval
from mteb.cli.build_cli import build_cli
from mteb.models.model_implementations import MODEL_REGISTRY
from mteb.results import TaskResult

from fair_calibration.settings import settings_from_text
from fair_calibration.validation import validate_positive_int
from fair_evaluation.benchmarks.sources import DATA_VARIABLE
from fair_evaluation.command_arguments import add_settings
from fair_indexing.pool import check_devices
from mteb_fair.loading import is_folder
from mteb_fair.model_registry import register_model
from mteb_fair.scores import summarize
from mteb_fair.task_registry import get_tasks, register
from mteb_fair.tasks import TASKS
from mteb_fair.variant import PREFIX


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
        if args.func.__name__ == "run":
            run(args)
        else:
            register()
            args.func(args)
    except KeyboardInterrupt:
        parser.exit(130, "mteb_fair: interrupted; finished results are kept, and the same command resumes\n")
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
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        command.prog = f"{parser.prog} {name}"
    group: Any = commands.choices["run"].add_argument_group(
        "calibration",
        "With any of these, --model is calibrated. Without them, a name that MTEB knows is that model, as with `mteb "
        "run`; local folders and other names are calibrated with the settings they were saved with, or the defaults.",
    )
    add_settings(group)
    group.add_argument(
        "--no-calibrate-untyped",
        action="store_false",
        dest="calibrate_untyped",
        default=None,
        help="Encode texts that are neither queries nor documents (STS, classification...) as the plain model does.",
    )
    group.add_argument("--max-seq-length", type=int, help="The number of tokens at which texts are truncated.")
    group.add_argument(
        "--passage-size",
        type=int,
        help="Cut documents into passages of at most so many tokens, and rank each by its best passage.",
    )
    group.add_argument("--base-name", help="The name of a local model, as organization/name.")
    data: Any = commands.choices["run"].add_argument_group("data of position tasks")
    data.add_argument("--domains", nargs="+", help="The domains of PosIR in --tasks, such as law_judiciary.")
    data.add_argument("--data-folder", help=f"The folder with local copies of the datasets; sets {DATA_VARIABLE}.")
    return parser


def run(args: argparse.Namespace) -> None:
    """Runs MTEB's command ``run`` with registered tasks and models, and reports its results."""
    for name in ("output_folder", "prediction_folder"):
        if (path := getattr(args, name)) is not None and Path(path).is_file():
            raise ValueError(f"--{name.replace('_', '-')}: expected a folder, {path!r} is a file")
    if args.data_folder is not None:
        if not Path(args.data_folder).is_dir():
            raise ValueError(f"--data-folder: there is no folder {args.data_folder!r}")
        os.environ[DATA_VARIABLE] = args.data_folder
    if args.device is not None:
        check_devices([f"cuda:{args.device}"], name="--device")
    for name in ("batch_size", "num_proc"):
        if (value := getattr(args, name)) is not None:
            validate_positive_int(f"--{name.replace('_', '-')}", value)
    register()
    tasks = select_tasks(args)
    check_tasks(args, tasks)
    args.model = choose_model(args)
    if args.model.startswith(PREFIX):
        check_results(args.model, Path(args.output_folder))
    print(f"model: {args.model}", file=sys.stderr)
    args.func(args)
    report(args, tasks)


def select_tasks(args: argparse.Namespace) -> list[AbsTask]:
    """Returns the tasks that ``run`` evaluates. Names in ``args.tasks`` become those of local and selected data."""
    if args.domains and not args.tasks:
        raise ValueError("--domains: expected PosIR or PosIRCrossLingual among the --tasks, got none")
    if args.benchmarks:
        names = ("tasks", "task_types", "categories", "languages", "eval_splits")
        if given := [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]:
            raise ValueError(f"--benchmarks: MTEB would ignore {', '.join(given)}; give one or the other")
        return [task for benchmark in mteb.get_benchmarks(names=args.benchmarks) for task in benchmark.tasks]
    if args.tasks:
        args.tasks = [task.metadata.name for task in get_tasks(args.tasks, domains=args.domains)]
    elif args.data_folder is not None:
        raise ValueError("--data-folder: expected --tasks or --benchmarks that read from it, got neither")
    elif not (args.task_types or args.categories or args.languages):
        raise ValueError("--tasks: expected names of tasks, or --benchmarks, got neither")
    tasks = mteb.get_tasks(
        categories=args.categories, task_types=args.task_types, languages=args.languages, tasks=args.tasks
    )
    if not tasks:
        given = {"--languages": args.languages, "--task-types": args.task_types, "--categories": args.categories}
        asked = " and ".join(f"{option} {' '.join(values)}" for option, values in given.items() if values)
        which = f"none of {args.tasks}" if args.tasks else "no task of MTEB"
        raise ValueError(f"--tasks: no task is left, since {which} has {asked}")
    for task in tasks:
        if args.eval_splits and not set(args.eval_splits) & set(task.metadata.eval_splits):
            raise ValueError(
                f"--eval-splits: {task.metadata.name} has {list(task.metadata.eval_splits)}, got {args.eval_splits}"
            )
    return list(tasks)


def check_tasks(args: argparse.Namespace, tasks: Sequence[AbsTask]) -> None:
    """Checks that the tasks suit the arguments before a model or data are downloaded."""
    if args.data_folder is not None and not any(getattr(task, "data_folder", None) for task in tasks):
        datasets = sorted({cls.dataset_name for cls in TASKS.values() if not cls.embedded})
        raise ValueError(
            f"--data-folder: {args.data_folder!r} has no data of these tasks; expected a folder for each dataset, "
            f"named {' or '.join(datasets)}"
        )
    if args.passage_size is not None:
        others = [task.metadata.name for task in tasks if not isinstance(task, AbsTaskRetrieval)]
        if others:
            raise ValueError(
                f"--passage-size: {others[:3]} search no documents that could be cut; give retrieval and reranking "
                "tasks alone"
            )


def choose_model(args: argparse.Namespace) -> str:
    """Returns the registered name of the model that the arguments ask for, registering it if necessary."""
    if not args.model:
        raise ValueError("--model: expected a name or a folder, got none")
    if Path(args.model).is_file():
        raise ValueError(f"--model: expected a name or a folder, {args.model!r} is a file")
    options: dict[str, Any] = {"config": None if args.config is None else settings_from_text(args.config)}
    for name in ("strength", "calibrate_untyped", "max_seq_length", "passage_size", "base_name"):
        options[name] = getattr(args, name)
    options = {name: value for name, value in options.items() if value is not None}
    if args.model in MODEL_REGISTRY and not is_folder(args.model) and not options:
        return str(args.model)
    return register_model(args.model, revision=args.model_revision, **options)


def check_results(model: str, output_folder: Path) -> None:
    """Checks that the output folder holds no results of another model by the same name, which MTEB would mix up."""
    meta = mteb.get_model_meta(model)
    folder = output_folder / "results" / meta.model_name_as_path()
    others = [path.name for path in folder.glob("*") if path.is_dir() and path.name != meta.revision]
    if others:
        raise ValueError(
            f"--output-folder: {folder} holds results of another model of this name ({', '.join(sorted(others))}), and "
            "the results of the two would be mixed up; give this model a --base-name, or use another folder"
        )


def report(args: argparse.Namespace, tasks: Sequence[AbsTask]) -> None:
    """Prints nDCG@10 and PSI of the tasks that were evaluated, where the results are, and what to do next."""
    cache, meta = mteb.ResultCache(Path(args.output_folder)), mteb.get_model_meta(args.model)
    paths = [Path(cache.get_task_result_path(task.metadata.name, meta)) for task in tasks]
    table = summarize(TaskResult.from_disk(path) for path in paths if path.is_file())
    print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}", na_rep="-"))
    print("psi is 1 - min / max over the position groups: 0 is position-fair, as if the answer could stand anywhere.")
    print("results: " + "\n         ".join(str(path) for path in paths))
    is_calibrated = str(meta.name).startswith(PREFIX) and (meta.experiment_kwargs or {}).get("strength") != 0
    strength, model = ("0", "plain") if is_calibrated else ("0.5", "calibrated")
    print(f"next: the same command with --strength {strength} evaluates the {model} model, to compare with.")
