"""Which settings suit mean pooling: strength, layers, basket size, isolation and last basket, by document length.

    python benchmarks/study.py --passages FILE --record benchmarks/records/study.jsonl     # about half an hour
    python benchmarks/study.py --passages FILE --record benchmarks/records/study.jsonl --table

FILE has passages with questions as JSON lines (`fair_evaluation.position_collections.load_passages`); without it, those that come
with the project are used. Its articles are split in two halves. The whole grid is run on the tuning half, in documents
of about 480 tokens; the best of each basket size, by the harmonic mean over the places of nDCG@10, and four references
make the shortlist. That is run on the test half at all lengths, on the project's own passages, and on the tuning half
at all lengths.

Every result is a line of the record, written at once; what stands there is not measured again. ``--table`` prints the
tables from the record alone.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import transformers
from position_data import (
    LENGTHS,
    PositionData,
    Record,
    build_data,
    compare,
    load_model,
    markdown,
    signed,
    split_articles,
    summarize,
)
from tqdm.auto import tqdm

from fair_calibration import FairConfig, calibrate
from fair_evaluation import PositionEvaluation
from fair_evaluation.position_collections import load_passages

PUBLISHED = FairConfig(layers=3, isolate="none")  # the published default, for MiniLM
PLAIN = FairConfig(strength=0.0)
LAYERS, ISOLATE = (1, 2, 3, "all"), ("none", "bos", "bos_eos")  # of MiniLM's 6 layers; 3 is the published half
GRID = [
    FairConfig(strength=strength, layers=layers, basket_size=basket_size, isolate=isolate)
    for strength, layers, basket_size, isolate in [
        *product((1.0,), LAYERS, (64, 128, 256), ISOLATE),
        *product((0.5, 0.75), LAYERS, (128,), ISOLATE),
    ]
]
REFERENCES = [
    FairConfig(strength=strength, layers=3, isolate=isolate) for strength in (0.5, 1.0) for isolate in ("none", "bos")
]
GRID_LENGTH = 480


def main() -> None:
    """Runs what the record lacks, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=Path, help="JSON lines; default: the project's own")
    parser.add_argument("--record", type=Path, required=True, help="a JSON lines file, read and added to")
    parser.add_argument("--table", action="store_true", help="only print the tables of the record")
    args = parser.parse_args()
    source = args.passages.stem if args.passages else "embedded"
    record = Record(args.record)
    if not args.table:
        transformers.utils.logging.disable_progress_bar()
        _run(args.passages, source, record)
    print(tables(record, source))


def _run(path: Path | None, source: str, record: Record) -> None:
    model = load_model()
    halves = split_articles(load_passages(path))
    grid = _Bench(record, model, {"source": source, "half": "tuning", "length": GRID_LENGTH}, halves["tuning"])
    grid.run([PLAIN, *GRID])
    chosen = shortlist(record, source)
    for length in LENGTHS:
        where = {"source": source, "half": "test", "length": length}
        _Bench(record, model, where, halves["test"]).run(_both_rules(chosen))
    if path is not None:
        where = {"source": "embedded", "half": "all", "length": 480}
        _Bench(record, model, where, load_passages()).run(_both_rules(chosen))
    for length in LENGTHS:
        where = {"source": source, "half": "tuning", "length": length}
        _Bench(record, model, where, halves["tuning"]).run(_both_rules(chosen))


class _Bench:
    """Settings on one set of documents."""

    def __init__(self, record: Record, model: Any, where: dict[str, Any], passages: Any) -> None:
        self.record, self.model, self.where = record, model, where
        self.data: PositionData = build_data(passages, LENGTHS[where["length"]], model)
        self.queries = model.encode_query([q.text for q in self.data.questions], normalize_embeddings=True)
        self._published: PositionEvaluation | None = None

    def run(self, configs: list[FairConfig]) -> None:
        for config in tqdm(configs, desc=" ".join(map(str, self.where.values())), unit="setting"):
            self.record.get({**self.where, "config": _varied(config)}, self._measure(config))

    def _measure(self, config: FairConfig) -> Callable[[], dict[str, Any]]:
        def measure() -> dict[str, Any]:
            start = time.perf_counter()
            result = self._evaluate(config)
            seconds = time.perf_counter() - start
            if self._published is None:
                self._published = result if config == PUBLISHED else self._evaluate(PUBLISHED)
            return {
                **summarize(result),
                **compare(result, self._published),
                "documents": self.data.n_documents,
                "questions": len(self.data.questions),
                "tokens": self.data.n_tokens,
                "seconds": seconds,
            }

        return measure

    def _evaluate(self, config: FairConfig) -> PositionEvaluation:
        fair = calibrate(self.model, config)
        vectors = fair.encode_document(self.data.texts, batch_size=16, normalize_embeddings=True)
        return self.data.evaluate(self.queries @ np.asarray(vectors).T, name=config.to_json())


def _varied(config: FairConfig) -> dict[str, Any]:
    names = ("strength", "layers", "basket_size", "isolate", "last_basket")
    return {name: getattr(config, name) for name in names}


def shortlist(record: Record, source: str) -> list[FairConfig]:
    """Returns the references, and of each basket size the settings with the best harmonic mean on the tuning half."""
    rows = _rows(record, source, "tuning", GRID_LENGTH)
    best = []
    for basket_size in dict.fromkeys(config.basket_size for config in GRID):
        found = [c for c in GRID if c in rows and c.basket_size == basket_size and c not in REFERENCES]
        best += sorted(found, key=lambda config: -rows[config]["harmonic_mean"])[:1]
    return [*REFERENCES, *best]


def _both_rules(configs: list[FairConfig]) -> list[FairConfig]:
    """Returns plain, each setting, and three of the references with a proportional last basket."""
    chosen = [config for config in REFERENCES if config.strength == 1 or config == PUBLISHED]
    return [PLAIN, *configs, *(config.updated(last_basket="proportional") for config in chosen)]


def _rows(record: Record, source: str, half: str, length: int) -> dict[FairConfig, dict[str, Any]]:
    where = {"source": source, "half": half, "length": length}
    return {
        FairConfig.from_dict(row["config"]): row
        for row in record.rows
        if all(row[name] == value for name, value in where.items())
    }


def tables(record: Record, source: str) -> str:
    """Returns the tables of the docs: effects and best settings of the grid, the last basket, and the test."""
    grid = _rows(record, source, "tuning", GRID_LENGTH)
    parts = [f"Grid, {_size(grid)}, means over the other settings (nDCG@10 / PSI):", _effects(grid)]
    ranked = sorted((c for c in GRID if c in grid), key=lambda config: -grid[config]["harmonic_mean"])
    header = ["strength", "layers", "basket", "isolate", "nDCG@10", "PSI", "harmonic mean"]
    chosen = [PLAIN, *REFERENCES, *(config for config in ranked[:8] if config not in REFERENCES)]
    cells = [[*_settings(config)[:4], *_scores(grid[config])] for config in chosen if config in grid]
    parts += ["The best of the grid beside plain and the references:", markdown(header, cells)]
    chosen = shortlist(record, source)
    for half in ("tuning", "test"):
        by_length = {length: _rows(record, source, half, length) for length in LENGTHS}
        parts += [f"{half} half by length (nDCG@10 / PSI):", _lengths(by_length, chosen)]
    for name, where in {"test half": (source, "test", 480), "embedded": ("embedded", "all", 480)}.items():
        rows = _rows(record, *where)
        if rows:
            parts += [f"{name}, {_size(rows)}; differences to the published default:", _differences(rows, chosen)]
    return "\n\n".join(parts)


def _effects(rows: dict[FairConfig, dict[str, Any]]) -> str:
    cells = []
    for name in ("strength", "layers", "basket_size", "isolate"):
        # Only strength 1 was run with all baskets: baskets are compared there, all else at 128 tokens.
        kept = {
            c: row
            for c, row in rows.items()
            if c in GRID and (c.strength == 1 if name == "basket_size" else c.basket_size == 128)
        }
        for value in dict.fromkeys(getattr(config, name) for config in GRID):
            found = [row for config, row in kept.items() if getattr(config, name) == value]
            if found:
                ndcg, psi, mean = (np.mean([row[k] for row in found]) for k in ("ndcg", "psi", "harmonic_mean"))
                cells.append([name, str(value), f"{ndcg:.3f}", f"{psi:.3f}", f"{mean:.3f}"])
    return markdown(["setting", "value", "nDCG@10", "PSI", "harmonic mean"], cells)


def _lengths(by_length: dict[int, dict[FairConfig, dict[str, Any]]], chosen: list[FairConfig]) -> str:
    configs = _both_rules(chosen)
    measured = [rows for rows in by_length.values() if rows]
    header = ["strength", "layers", "basket", "isolate", "last basket"]
    header += [f"{next(iter(rows.values()))['tokens']:.0f} tokens" for rows in measured]
    cells = []
    for config in configs:
        scores = (rows.get(config) for rows in measured)
        found = [f"{row['ndcg']:.3f} / {row['psi']:.3f}" if row else "" for row in scores]
        cells.append([*_settings(config), *found])
    return markdown(header, cells)


def _differences(rows: dict[FairConfig, dict[str, Any]], chosen: list[FairConfig]) -> str:
    header = ["strength", "layers", "basket", "isolate", "last basket", "nDCG@10", "PSI", "nDCG difference"]
    header += ["PSI difference"]
    cells = []
    for config in _both_rules(chosen):
        if config in rows:
            row = rows[config]
            low, high = row["psi_interval"]
            differences = [signed(row[f"{k}_difference"], row[f"{k}_difference_interval"]) for k in ("ndcg", "psi")]
            scores = [f"{row['ndcg']:.3f}", f"{row['psi']:.3f} [{low:.3f}, {high:.3f}]"]
            cells.append([*_settings(config), *scores, *differences])
    return markdown(header, cells)


def _settings(config: FairConfig) -> list[str]:
    if config.strength == 0:
        return ["plain", "", "", "", ""]
    return [
        f"{config.strength:g}",
        str(config.layers),
        str(config.basket_size),
        config.isolate,
        config.last_basket,
    ]


def _scores(row: dict[str, Any]) -> list[str]:
    return [f"{row['ndcg']:.3f}", f"{row['psi']:.3f}", f"{row['harmonic_mean']:.3f}"]


def _size(rows: dict[FairConfig, dict[str, Any]]) -> str:
    row = next(iter(rows.values()))
    return f"{row['documents']} documents of {row['tokens']:.0f} tokens, {row['questions']} questions"


if __name__ == "__main__":
    main()
