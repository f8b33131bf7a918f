"""What a strength chosen without labels is worth: `tune`, flat reflection, the published default and an oracle.

    python benchmarks/tuning.py --passages FILE --record benchmarks/records/tuning.jsonl   # about 15 minutes
    python benchmarks/tuning.py --passages FILE --record benchmarks/records/tuning.jsonl --table

The passages of FILE (JSON lines, see `fair_evaluation.position_collections.load_passages`) and the project's own are split by
article into halves. `tune` and `segment_reflection` see documents of about 480 tokens of one half, without questions;
what they choose is tested on the questions of the other half. Then the halves change places. The oracle takes the
strength with the best harmonic mean over the places in the test itself, so nothing can beat it. Every result is a line
of the record, written at once.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import transformers
from position_data import LENGTHS, PositionData, Record, build_data, load_model, markdown, split_articles, summarize
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from tqdm.auto import tqdm

from fair_calibration import FairSentenceTransformer, calibrate
from fair_evaluation.position_collections import Passage, load_passages
from fair_evaluation.reflection import segment_reflection
from fair_evaluation.tuning import tune

STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # what `tune` compares if nothing else is asked
PUBLISHED = 0.5
N_TEXTS = 20
N_GROUPINGS = 2  # of the passages into documents, to have so many texts
GUIDES = {
    "plain": lambda rows: _at(rows, 0.0),
    "published default": lambda rows: _at(rows, PUBLISHED),
    "tune": lambda rows: next(row for row in rows if row["chosen"]),
    "best score of tune": lambda rows: max(rows, key=lambda row: row["score"]),
    "flattest reflection, slope": lambda rows: min(rows, key=lambda row: abs(row["slope"])),
    "flattest reflection, spread": lambda rows: min(rows, key=lambda row: row["spread"]),
    "oracle": lambda rows: max(rows, key=lambda row: row["harmonic_mean"]),
}


def main() -> None:
    """Runs what the record lacks, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=Path, help="JSON lines; left out: only the project's own passages")
    parser.add_argument("--record", type=Path, required=True, help="a JSON lines file, read and added to")
    parser.add_argument("--table", action="store_true", help="only print the tables of the record")
    args = parser.parse_args()
    sources = [args.passages, None] if args.passages else [None]
    record = Record(args.record)
    if not args.table:
        transformers.utils.logging.disable_progress_bar()
        model = load_model()
        for half, path in product(("tuning", "test"), sources):
            passages = split_articles(load_passages(path))
            other = "test" if half == "tuning" else "tuning"
            _run(record, model, {"source": _name(path), "half": half}, passages[half], passages[other])
    print(tables(record, [_name(path) for path in sources]))


def _name(path: Path | None) -> str:
    return path.stem if path else "embedded"


def _run(
    record: Record, model: SentenceTransformer, where: dict[str, Any], seen: list[Passage], held: list[Passage]
) -> None:
    """Chooses on ``seen``, and tests on ``held``."""
    groupings = [build_data(seen, LENGTHS[480], model, seed) for seed in range(N_GROUPINGS)]
    texts = list(dict.fromkeys(text for data in groupings for text in data.texts[: data.n_documents]))[:N_TEXTS]
    record.get({"what": "tune", **where}, lambda: _tune(model, texts))
    test = build_data(held, LENGTHS[480], model)
    queries = model.encode_query([question.text for question in test.questions], normalize_embeddings=True)
    fair = calibrate(model)
    for strength in tqdm(STRENGTHS, desc=" ".join(where.values()), unit="strength"):
        key = {**where, "strength": strength}
        record.get({"what": "reflection", **key}, partial(_reflect, fair, texts, strength))
        record.get({"what": "test", **key}, partial(_test, fair, test, queries, strength))


def _tune(model: SentenceTransformer, texts: list[str]) -> dict[str, Any]:
    tuning = tune(model, texts, max_texts=N_TEXTS)
    columns = ["strength", "score", "mean", "psi", "behind", "error", "cosine", "chosen"]
    return {"curve": tuning.curve[columns].round(5).to_dict("records"), **tuning.counts._asdict()}


def _reflect(model: FairSentenceTransformer, texts: list[str], strength: float) -> dict[str, Any]:
    summary = segment_reflection(model, texts, strength=strength, show_progress_bar=False).summary
    return {name: round(value, 5) for name, value in summary._asdict().items()}


def _test(model: FairSentenceTransformer, data: PositionData, queries: Any, strength: float) -> dict[str, Any]:
    vectors = model.encode_document(data.texts, batch_size=16, normalize_embeddings=True, strength=strength)
    sizes = {"documents": data.n_documents, "questions": len(data.questions), "tokens": data.n_tokens}
    return {**summarize(data.evaluate(queries @ np.asarray(vectors).T)), **sizes}


def tables(record: Record, sources: list[str]) -> str:
    """Returns the tables of the docs: what each guide chooses and gives, and all settings."""
    parts = []
    for source, half in product(sources, ("tuning", "test")):
        rows = _join(record, {"source": source, "half": half})
        if rows is None:
            continue
        oracle = GUIDES["oracle"](rows)["harmonic_mean"]
        cells = []
        for guide, choose in GUIDES.items():
            row = choose(rows)
            scores = [f"{row[name]:.3f}" for name in ("ndcg", "psi", "harmonic_mean")]
            cells.append([guide, f"{row['strength']:g}", *scores, f"{row['harmonic_mean'] - oracle:+.3f}"])
        header = ["guide", "strength", "nDCG@10", "PSI", "harmonic mean", "to the oracle"]
        parts += [f"{source}, chosen on the {half} half, tested on the other:", markdown(header, cells)]
        header = ["strength", "score of tune", "reflection slope", "spread", "cosine", "test nDCG@10", "test PSI"]
        names = ("score", "slope", "spread", "cosine", "ndcg", "psi")
        cells = [[f"{row['strength']:g}", *(f"{row[name]:.3f}" for name in names)] for row in rows]
        parts.append(markdown(header, [*cells, _agreement(rows)]))
    return "\n\n".join(parts)


def _agreement(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the rank correlations with the harmonic mean in the test."""
    held = [row["harmonic_mean"] for row in rows]
    guides = ([row["score"] for row in rows], [-abs(row["slope"]) for row in rows], [-row["spread"] for row in rows])
    found = [f"{spearmanr(guide, held).statistic:.2f}" for guide in guides]
    return ["rank correlation with the test's harmonic mean", *found, "", "", ""]


def _join(record: Record, where: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Returns the settings with what the guides say and the test gives, or None where it is not complete."""
    tuned = record.find({"what": "tune", **where})
    keys = [{**where, "strength": strength} for strength in STRENGTHS]
    found = [(record.find({"what": "reflection", **key}), record.find({"what": "test", **key})) for key in keys]
    if tuned is None:
        return None
    rows = []
    for strength, (reflection, test) in zip(STRENGTHS, found, strict=True):
        if reflection is None or test is None:
            return None
        rows.append({**reflection, **test, **_at(tuned["curve"], strength), **_measures(test)})
    return rows


def _measures(test: dict[str, Any]) -> dict[str, Any]:
    return {name: test[name] for name in ("ndcg", "psi", "harmonic_mean")}  # the curve has a psi of its own


def _at(rows: list[dict[str, Any]], strength: float) -> dict[str, Any]:
    return next(row for row in rows if row["strength"] == strength)


if __name__ == "__main__":
    main()
