"""The main comparison of the paper (arXiv 2606.02737): three models, PosIR by length, FineWeb-PosQ and NanoBEIR.

Needs the hub and a GPU::

    python benchmarks/reproduce_paper.py

What is in the output folder is not computed again: stop and resume as you like, or begin with ``--domains``. Without
the hub it runs on stand-ins, such as a local model and local data in the hub's layout (see docs/mteb.md)::

    python benchmarks/reproduce_paper.py --models path/to/model --tasks PosIR FineWeb-PosQ --data-folder path/to/data
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

import mteb_fair
from mteb_fair.comparison import add_change, compare, parse_models
from mteb_fair.scores import SCORE
from mteb_fair.sources import DATA_VARIABLE

MODELS = ("Alibaba-NLP/gte-multilingual-base", "BAAI/bge-m3", "Qwen/Qwen3-Embedding-0.6B")
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
    mteb_fair.register()
    table = compare(
        parse_models(args.models),
        mteb_fair.get_tasks(args.tasks, languages=args.languages, domains=args.domains),
        output=args.output,
        strengths=list(dict.fromkeys((0.0, args.strength))),
        max_seq_length=args.max_seq_length,
        batch_size=args.batch_size,
        progress=not args.no_progress,
    )
    table = add_change(table)
    table.to_csv(args.output / "reproduction.csv", index=False)
    report = side_by_side(table, args.strength)
    print(report.to_string(index=False, float_format=lambda value: f"{value:.3f}", na_rep="-"))
    print("\n".join(claims(table, args.strength)))
    return report


def side_by_side(table: pd.DataFrame, strength: float) -> pd.DataFrame:
    """Returns plain and calibrated in one row, with the published plain PSI where there is one."""
    keys = ["model", "task", "split", "subset", "length"]
    rows = []
    plain, fair = (table[table["strength"] == s].set_index(keys) for s in (0.0, strength))
    for key, row in plain.iterrows():
        model, task, _, subset, length = key
        is_english = task.startswith("PosIR") and subset == "eng-Latn"
        rows.append(
            {
                **dict(zip(keys, key, strict=True)),
                "nDCG plain": row[SCORE],
                "nDCG fair": fair.loc[key, SCORE],
                "nDCG change": fair.loc[key, "ndcg_change"],
                "PSI published": PUBLISHED.get(model.split("/")[-1], {}).get(length) if is_english else None,
                "PSI plain": row["psi"],
                "PSI fair": fair.loc[key, "psi"],
                "PSI change": fair.loc[key, "psi_change"],
            }
        )
    return pd.DataFrame(rows)


def claims(table: pd.DataFrame, strength: float) -> list[str]:
    """Says in how many cases PSI fell, how far, and what became of nDCG@10, beside what is published."""
    fair = table[table["strength"] == strength]
    psi = fair.loc[fair["task"].str.match("PosIR|FineWeb") & fair["n"].gt(0), "psi_change"].dropna().astype(float)
    ndcg = fair["ndcg_change"].dropna().astype(float)
    measured = []
    if len(psi):
        measured.append(f"PSI falls in {(psi < 0).sum()} of {len(psi)} cases, by up to {max(0.0, -psi.min()):.0%}")
    if len(ndcg):
        measured.append(f"nDCG@10 changes by {ndcg.min():+.1%} to {ndcg.max():+.1%}")
    return [f"measured:  {'; '.join(measured) or 'nothing to compare'}", CLAIMS]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="names, or organization/name=folder")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--languages", nargs="+", default=["eng"], help="of PosIR")
    parser.add_argument("--domains", nargs="+", help="of PosIR; all by default")
    parser.add_argument("--strength", type=float, default=0.5)
    parser.add_argument("--max-seq-length", type=int, help="tokens; each model's by default")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--data-folder", type=Path, help="local copies of the datasets")
    parser.add_argument("--output", type=Path, default=Path("reproduction"))
    parser.add_argument("--no-progress", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
