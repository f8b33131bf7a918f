"""Measures what `fair_evaluation.tuning.tune` chooses without labels, and what the choice is worth with them.

    python benchmarks/tuning.py --record benchmarks/records/tune.jsonl --passages xquad-dev.en.jsonl
    python benchmarks/tuning.py --record benchmarks/records/tune.jsonl --passages xquad-dev.en.jsonl --table

For each encoder of `encoders` and each geometry of `ways`, `tune` gets one rotation of the documents, and no question.
Every result is a line of the record, written at once, and what is recorded is not measured again. The table takes the
values with labels from the record of `ways`.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from encoders import ENCODERS, encoder_facts
from rotations import Record, markdown
from sentence_transformers import SentenceTransformer
from ways import GEOMETRIES, OWN, PLAIN, PUBLISHED, collections, study_parser

from fair_evaluation.tuning import tune

WAYS = {0.0: PLAIN, 0.5: PUBLISHED, 0.75: "strength .75", 1.0: "strength 1"}
WAYS_RECORD = Path(__file__).parent / "records" / "ways.jsonl"


def main() -> None:
    """Measures what the record lacks, and prints the table."""
    parser = study_parser(__doc__)
    parser.add_argument("--seed", type=int, action="append", help="of the texts drawn; repeatable; default: 0")
    args = parser.parse_args()
    record = Record(args.record)
    source = args.passages.stem if args.passages else OWN
    if not args.table:
        for study in collections(args, GEOMETRIES):
            texts = study.data.texts[: study.data.n_documents]
            for seed in args.seed or [0]:
                key = {**study.where, "seed": seed}
                row = record.get(key, partial(_tune, study.model, texts, seed, study.where["encoder"]))
                print(key, row["chosen"], flush=True)
    print(table(record, Record(WAYS_RECORD), source))


def _tune(model: SentenceTransformer, texts: list[str], seed: int, encoder: str) -> dict[str, Any]:
    tuning = tune(model, texts, seed=seed, show_progress_bar=False)
    columns = ["strength", "score", "mean", "psi", "behind", "error", "cosine"]
    return {
        "chosen": tuning.config.strength,
        "counts": tuning.counts._asdict(),
        "curve": tuning.curve[columns].to_dict("records"),
        **encoder_facts(encoder),
    }


def table(record: Record, ways: Record, source: str) -> str:
    """Returns nDCG@10 / PSI with labels of the plain model, the default and the choices, for one set of passages."""
    rows = []
    for encoder in ENCODERS:
        for geometry in GEOMETRIES:
            where = {"encoder": encoder, "passages": source, "geometry": geometry}
            chosen = [row["chosen"] for row in record.rows if where.items() <= row.items()]
            labelled = {strength: ways.find({**where, "way": way}) for strength, way in WAYS.items()}
            cells = {strength: f"{row['ndcg']:.3f} / {row['psi']:.3f}" for strength, row in labelled.items() if row}
            if chosen and cells:
                best = max(cells, key=lambda strength: (labelled[strength] or {})["harmonic_mean"])
                picked = ", ".join(f"{s:g}: {cells.get(s, 'not in the record')}" for s in sorted(set(chosen)))
                shares = ", ".join(f"{s:g} ({chosen.count(s)})" for s in sorted(set(chosen)))
                rows.append([encoder, geometry, cells[0.0], cells[0.5], shares, picked, f"{best:g}: {cells[best]}"])
    header = ["encoder", "documents", "plain", "default", "chosen (seeds)", "the choice", "best harmonic mean"]
    return markdown(header, rows)


if __name__ == "__main__":
    main()
