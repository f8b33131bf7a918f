"""The main comparison of the paper (arXiv 2606.02737): three models, PosIR by length, FineWeb-PosQ and NanoBEIR.

Needs the hub and a GPU::

    python benchmarks/reproduce_paper.py

This is `examples/mteb_leaderboard.py` with other defaults, followed by the published figures; it takes the same
arguments. Without the hub it runs on a local model and local data in the hub's layout (see docs/mteb.md)::

    python benchmarks/reproduce_paper.py --models path/to/model --tasks PosIR FineWeb-PosQ --data-folder path/to/data
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import mteb_leaderboard

DEFAULTS = (
    *("--models", "Alibaba-NLP/gte-multilingual-base", "BAAI/bge-m3", "Qwen/Qwen3-Embedding-0.6B"),
    *("--tasks", "PosIR", "FineWeb-PosQ", "NanoBEIR"),
    *("--languages", "eng", "--output", "reproduction"),
)
# Published PSI of the plain models on English PosIR, by length quartile.
PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "bge-m3": {"q1": 0.23, "q2": 0.37, "q3": 0.44, "q4": 0.40},
    "gte-multilingual-base": {"q1": 0.07, "q2": 0.24, "q3": 0.32, "q4": 0.38},
    "Qwen3-Embedding-0.6B": {"q1": 0.10, "q2": 0.29, "q3": 0.39, "q4": 0.39},
}
CLAIMS = "published: PSI falls in all 16 cases, by up to 43 %; nDCG@10 rises by up to 4.8 %"


def main(arguments: Sequence[str] | None = None) -> pd.DataFrame:
    """Evaluates what is missing, and prints measured beside published figures."""
    table = mteb_leaderboard.main([*DEFAULTS, *(sys.argv[1:] if arguments is None else arguments)])
    english = table["task"].str.startswith("PosIR") & (table["subset"] == "eng-Latn") & (table["strength"] == 0)
    table["psi_published"] = [
        PUBLISHED.get(model.split("/")[-1], {}).get(length) if is_plain else None
        for model, length, is_plain in zip(table["model"], table["length"], english, strict=True)
    ]
    if len(known := table[table["psi_published"].notna()]):
        print(
            f"\nPSI of the plain models:\n{known[['model', 'length', 'psi', 'psi_published']].to_string(index=False)}"
        )
    print("\n".join(claims(table)))
    return table


def claims(table: pd.DataFrame) -> list[str]:
    """Describes in how many cases PSI fell, how far, and how nDCG@10 changed, and what is published about it."""
    fair = table[table["strength"] > 0]
    psi = fair.loc[fair["task"].str.match("PosIR|FineWeb") & fair["n"].gt(0), "psi_change_%"].dropna().astype(float)
    ndcg = fair["ndcg_at_10_change_%"].dropna().astype(float)
    measured = []
    if len(psi):
        measured.append(f"PSI falls in {(psi < 0).sum()} of {len(psi)} cases, by up to {max(0.0, -psi.min()):.0f} %")
    if len(ndcg):
        measured.append(f"nDCG@10 changes by {ndcg.min():+.1f} % to {ndcg.max():+.1f} %")
    return [f"measured:  {'; '.join(measured) or 'nothing to compare'}", CLAIMS]


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
