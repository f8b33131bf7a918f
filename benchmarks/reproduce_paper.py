"""The main comparison of the paper (arXiv 2606.02737): three models, PosIR by length, FineWeb-PosQ and NanoBEIR.

Needs the hub and a GPU::

    python benchmarks/reproduce_paper.py

Results in the output folder are not computed again, so the script can be stopped and resumed; ``--domains`` selects a
part to begin with. Without the hub it runs on a local model and local data in the hub's layout (see docs/mteb.md)::

    python benchmarks/reproduce_paper.py --models path/to/model --tasks PosIR FineWeb-PosQ --data-folder path/to/data
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mteb
import pandas as pd

import mteb_fair
from mteb_fair.tasks.sources import DATA_VARIABLE

MODELS = ("Alibaba-NLP/gte-multilingual-base", "BAAI/bge-m3", "Qwen/Qwen3-Embedding-0.6B")
KEYS = ["model", "task", "split", "subset", "length"]
TASKS = ("PosIR", "FineWeb-PosQ", "NanoBEIR")
# Published PSI of the plain models on English PosIR, by length quartile.
PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "bge-m3": {"q1": 0.23, "q2": 0.37, "q3": 0.44, "q4": 0.40},
    "gte-multilingual-base": {"q1": 0.07, "q2": 0.24, "q3": 0.32, "q4": 0.38},
    "Qwen3-Embedding-0.6B": {"q1": 0.10, "q2": 0.29, "q3": 0.39, "q4": 0.39},
}
CLAIMS = "published: PSI falls in all 16 cases, by up to 43 %; nDCG@10 rises by up to 4.8 %"


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    """Evaluates what is missing, and prints measured beside published figures."""
    args = parse(arguments)
    if args.data_folder is not None:
        os.environ[DATA_VARIABLE] = str(args.data_folder)
    tasks = mteb_fair.get_tasks(args.tasks, languages=args.languages, domains=args.domains)
    rows = []
    for model in args.models:
        plain, fair = (evaluate(args, tasks, model, strength) for strength in (0.0, args.strength))
        rows += side_by_side(plain, fair)
    report = pd.DataFrame(rows)
    report.to_csv(args.output / "reproduction.csv", index=False)
    print(report.to_string(index=False, float_format=lambda value: f"{value:.3f}", na_rep="-"))
    print("\n".join(claims(report)))
    return report


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
    table.insert(0, "model", meta.adapted_from)
    subsets = {(task.metadata.name, subset) for task in tasks for subset in task.hf_subsets}
    table = table[[key in subsets for key in zip(table["task"], table["subset"], strict=True)]]  # others are on disk
    return table.set_index(KEYS)


def side_by_side(plain: pd.DataFrame, fair: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns plain and calibrated in one row, with the published plain PSI where there is one."""
    rows = []
    for key, row in plain.iterrows():
        model, task, _, subset, length = key
        is_english = task.startswith("PosIR") and subset == "eng-Latn"
        rows.append(
            {
                **dict(zip(KEYS, key, strict=True)),
                "queries": row["n"],
                "nDCG plain": row["ndcg_at_10"],
                "nDCG fair": fair.loc[key, "ndcg_at_10"],
                "nDCG change %": change(row["ndcg_at_10"], fair.loc[key, "ndcg_at_10"]),
                "PSI published": PUBLISHED.get(model.split("/")[-1], {}).get(length) if is_english else None,
                "PSI plain": row["psi"],
                "PSI fair": fair.loc[key, "psi"],
                "PSI change %": change(row["psi"], fair.loc[key, "psi"]),
            }
        )
    return rows


def change(before: float | None, after: float | None) -> float | None:
    """Returns how much a value changed, in percent of the value before; None where that is 0 or missing."""
    return 100 * (after / before - 1) if before and after is not None and pd.notna(before) else None


def claims(report: pd.DataFrame) -> list[str]:
    """Describes in how many cases PSI fell, how far, and how nDCG@10 changed, and what is published about it."""
    by_position = report["task"].str.match("PosIR|FineWeb") & report["queries"].gt(0)
    psi = report.loc[by_position, "PSI change %"].dropna().astype(float)
    ndcg = report["nDCG change %"].dropna().astype(float)
    measured = []
    if len(psi):
        measured.append(f"PSI falls in {(psi < 0).sum()} of {len(psi)} cases, by up to {max(0.0, -psi.min()):.0f} %")
    if len(ndcg):
        measured.append(f"nDCG@10 changes by {ndcg.min():+.1f} % to {ndcg.max():+.1f} %")
    return [f"measured:  {'; '.join(measured) or 'nothing to compare'}", CLAIMS]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names, or organization/name=folder")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--languages", nargs="+", default=["eng"], help="languages of PosIR")
    parser.add_argument("--domains", nargs="+", help="domains of PosIR; all by default")
    parser.add_argument("--strength", type=float, default=0.5)
    parser.add_argument("--max-seq-length", type=int, help="tokens; each model's own by default")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--data-folder", type=Path, help="local copies of the datasets")
    parser.add_argument("--output", type=Path, default=Path("reproduction"))
    parser.add_argument("--no-progress", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
