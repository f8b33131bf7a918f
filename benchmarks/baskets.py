"""Measures strengths on documents of 2, 3 and 4 baskets, and what the last basket of a document should get.

    python benchmarks/baskets.py --record benchmarks/records/baskets.jsonl --passages xquad-dev.en.jsonl
    python benchmarks/baskets.py --record benchmarks/records/baskets.jsonl
    python benchmarks/baskets.py --record benchmarks/records/baskets.jsonl --table

A document's last basket usually has fewer tokens than the others. It gets an equal share of the attention, or a share
by its size ("proportional"), or the baskets of a document are made equally long, as few as before. With two baskets
that is the setting "halves"; with more it is no setting of `FairConfig` and measured with a basket size for each
document ("even", with the sizes that `fair_calibration` has for chunks).
"""

from __future__ import annotations

import os
from collections import defaultdict
from functools import partial
from itertools import product
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from encoders import ENCODERS
from rotations import Geometry, Record, markdown
from sentence_transformers import SentenceTransformer
from ways import Array, Bench, collections, encode_documents, number, study_parser

from fair_calibration import FairConfig, calibrate
from fair_calibration.even_chunks.chunks import even_chunks

GEOMETRIES = {
    "2 x 75": Geometry(n_places=2, least=50, most=90, low=132, high=170),
    "2 x 110": Geometry(n_places=2, least=60, most=125, low=190, high=250),
    "3 x 110": Geometry(n_places=3, least=60, most=125, low=280, high=380),
    "4 x 110": Geometry(n_places=4, least=60, most=125, low=400, high=500),
}
STRENGTHS = (0.25, 0.5, 0.75, 1.0)


def main() -> None:
    """Measures what the record lacks, and prints the tables."""
    args = study_parser(__doc__).parse_args()
    record = Record(args.record)
    if not args.table:
        for study in collections(args, GEOMETRIES):
            bench = Bench(study.model, study.data)
            kinds = product(STRENGTHS, kinds_of_last_basket(GEOMETRIES[study.where["geometry"]]))
            for setting in [{"strength": 0.0}, *({"strength": s, "last": last} for s, last in kinds)]:
                key = {**study.where, **setting}
                row = record.get(key, partial(_row, bench, study.facts, **setting))
                print(key, row["ndcg"], row["psi"], flush=True)
    print(table(record))


def kinds_of_last_basket(geometry: Geometry) -> tuple[str, ...]:
    """Returns what is measured on documents of a geometry, by the names that the record has for it."""
    return ("equal", "proportional", "halves" if geometry.n_places == 2 else "even")


def _row(bench: Bench, facts: dict[str, Any], *, strength: float, last: str = "equal") -> dict[str, Any]:
    if strength == 0:
        return bench.describe(bench.plain) | facts
    if last == "even":
        vectors = _encode_evenly(bench.model, bench.data.texts, strength)
    else:
        config = FairConfig(strength=strength, last_basket=last)  # type: ignore[arg-type]
        vectors = encode_documents(calibrate(bench.model, config), bench.data.texts)
    return bench.describe(bench.evaluate_vectors(f"{last} {strength}", vectors)) | facts


def _encode_evenly(model: SentenceTransformer, texts: list[str], strength: float) -> Array:
    """Encodes every text with the size of baskets that makes its baskets equally long, as few as with 128 tokens."""
    prompt = (model.prompts or {}).get("document") or ""
    n_isolated = int(model[1].pooling_mode == "cls")
    by_size: dict[int, list[int]] = defaultdict(list)
    for i, text in enumerate(texts):
        n = len(model.tokenizer(prompt + text)["input_ids"]) - n_isolated
        by_size[max(stop - first for first, stop in even_chunks(n, FairConfig().basket_size))].append(i)
    vectors: list[Any] = [None] * len(texts)
    for size, numbers in by_size.items():
        fair = calibrate(model, FairConfig(strength=strength, basket_size=size))
        for i, vector in zip(numbers, encode_documents(fair, [texts[i] for i in numbers]), strict=True):
            vectors[i] = vector
    return np.stack(vectors)


def table(record: Record) -> str:
    """Returns nDCG@10 / PSI of every strength, one line for each encoder, collection and kind of last basket."""
    rows = []
    for encoder in ENCODERS:
        for source in dict.fromkeys(row["passages"] for row in record.rows):
            for geometry, shape in GEOMETRIES.items():
                where = {"encoder": encoder, "passages": source, "geometry": geometry}
                if (plain := record.find({**where, "strength": 0.0})) is None:
                    continue
                for last in kinds_of_last_basket(shape):
                    found = [record.find({**where, "strength": s, "last": last}) for s in STRENGTHS]
                    size = f"{geometry} ({plain['tokens']:.0f} tokens)"
                    rows.append([encoder, source, size, last, *(_cell(row) for row in [plain, *found])])
    return markdown(["encoder", "passages", "documents", "last basket", "plain", *map(str, STRENGTHS)], rows)


def _cell(row: dict[str, Any] | None) -> str:
    return f"{number(row['ndcg'])} / {number(row['psi'])}" if row else ""


if __name__ == "__main__":
    main()
