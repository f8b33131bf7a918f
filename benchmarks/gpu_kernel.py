"""The kernel alone: whether it is equal to torch's functions, and other block sizes than those that it chooses."""

from __future__ import annotations

import itertools
import statistics
from functools import partial
from typing import Any

import torch
from encode import MIB
from gpu_run import Run
from torch import Tensor

from fair_calibration import FairConfig
from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.access.attention_call import FusedCall
from fair_calibration.method import one_pass
from fair_calibration.method.baskets import build_baskets
from fair_calibration.method.calibrated_pass import CalibratedPass
from fair_calibration.method.kernel_blocks import Blocks, choose_blocks
from fair_calibration.method.one_pass import OnePass

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Relative to values of about 1: twice the rounding of the output, and that of weights held in the dtype.
TOLERANCE = {"float32": 5e-5, "bfloat16": 4e-2, "float16": 5e-3}


def check_equality(run: Run) -> None:
    """Compares the kernel with torch's functions on random attention calls."""
    tiny = run.args.tiny
    settings: list[dict[str, Any]] = [
        {"basket_size": 8 if tiny else 128},
        {"basket_size": 5 if tiny else 100, "isolate": "bos_eos", "isolated_share": "equal"},
        {"basket_size": 20 if tiny else 300, "isolate": "bos", "isolated_share": 0.1, "last_basket": "proportional"},
    ]
    dims = (8,) if tiny else (32, 64, 96, 128, 256)
    masks = ("none", "causal", "window", "mask tensor")
    cases = itertools.product(DTYPES, dims, ("cls", "last", "mean"), ("right", "left", "unpadded"), masks)
    # Compiling takes a second or more, so only some of the cases are tried, and settings take turns.
    for i, (dtype, dim, pooling, padding, mask) in enumerate(cases):
        step = 17 if tiny else 2 if (dtype, dim) == ("bfloat16", 64) else 7
        if i % step or (mask == "mask tensor" and padding == "unpadded"):
            continue
        if not run.has_time("further cases of equality", share=0.4):
            return
        config = FairConfig(min_content=1, strength=0.7, **settings[i % len(settings)]).resolve(pooling)
        case = {
            "part": "equality", "dtype": dtype, "dim": dim, "pooling": pooling, "padding": padding, "mask": mask,
            "setting": i % len(settings),
        }  # fmt: skip
        try:
            off = _largest_difference(run, DTYPES[dtype], dim, padding, mask, config)
        except Exception as error:  # where it is compiled and launched for the first time, anything may go wrong
            run.report(**case, off=None, ok=False, error=f"{type(error).__name__}: {error}"[:500])
        else:
            run.report(**case, off=off, ok=off <= TOLERANCE[dtype])


def _largest_difference(run: Run, dtype: torch.dtype, dim: int, padding: str, mask: str, config: FairConfig) -> float:
    """Returns the largest difference between the kernel and torch's functions in float32 in one call."""
    lengths, n_heads, n_kv, window = ((21, 9), 4, 2, 4) if run.args.tiny else ((700, 333), 8, 2, 130)
    length = max(lengths)
    positions, n_tokens = torch.arange(length), torch.tensor(lengths)[:, None]
    is_token = positions >= length - n_tokens if padding == "left" else positions < n_tokens
    baskets = build_baskets(is_token.long(), config).to(run.device)
    is_token = is_token.to(run.device)
    generator = torch.Generator(run.device).manual_seed(dim)

    def normal(n: int) -> Tensor:
        shape = (len(lengths), length, n, dim)
        return torch.randn(shape, generator=generator, device=run.device).to(dtype).transpose(1, 2)

    query, key, value = normal(n_heads), normal(n_kv), normal(n_kv)
    tensor = is_token[:, None, None] & torch.ones(length, length, dtype=torch.bool, device=run.device).tril()
    bias = AttentionBias(
        tensor if mask == "mask tensor" else None, None, mask == "causal", window if mask == "window" else None
    )
    offsets = None
    if padding == "unpadded":
        query, key, value = (t.transpose(1, 2)[is_token].transpose(0, 1)[None] for t in (query, key, value))
        offsets = torch.nn.functional.pad(is_token.sum(1).cumsum(0), (1, 0)).int()
        is_token = torch.ones(1, query.shape[2], dtype=torch.bool, device=run.device)
    outputs = []
    for kernel, cast in (("torch", torch.float32), ("triton", dtype)):
        tensors = [t.to(cast) for t in (query, key, value)]
        plain = torch.zeros_like(tensors[0].transpose(1, 2))
        call = FusedCall("Attention", *tensors, dim**-0.5, bias, lambda plain=plain: (plain, None), offsets=offsets)
        this = CalibratedPass(frozenset({0}), baskets, config, kernel=kernel)  # type: ignore[arg-type]
        outputs.append(this.attend(call)[0].float())
    return float((outputs[0] - outputs[1])[is_token].abs().max())


def time_blocks(run: Run) -> None:
    """Times calls of the kernel with other block sizes than those that are chosen."""
    tiny, dtype = run.args.tiny, "bfloat16"
    length, n_documents, n_heads = (24, 1, 2) if tiny else (2048, 8, 12)
    for dim in (16,) if tiny else (64, 128):
        config = FairConfig(basket_size=8 if tiny else 128).resolve("mean")
        baskets = build_baskets(torch.ones(n_documents, length, dtype=torch.int64), config).to(run.device)
        shape = (n_documents, n_heads, length, dim)
        query, key, value = (torch.randn(shape, device=run.device).to(DTYPES[dtype]) for _ in range(3))
        output = torch.empty_like(query).transpose(1, 2).contiguous()
        call = FusedCall("Attention", query, key, value, dim**-0.5, AttentionBias(None, None, False), tuple)  # type: ignore[arg-type]
        chosen = choose_blocks(length, config.basket_size, dim, DTYPES[dtype])
        others = [(64, 4, 2), (64, 4, 3), (64, 8, 2), (128, 8, 2), (128, 8, 3), (32, 4, 2)]
        for blocks in [chosen, *(Blocks(rows, chosen.keys, *rest) for rows, *rest in others)][: 2 if tiny else None]:
            if not run.has_time(f"blocks {tuple(blocks)} for heads of {dim}"):
                return
            one_pass.choose_blocks = lambda *_, blocks=blocks: blocks
            this = OnePass(baskets, config)
            try:
                times = [run.seconds(partial(this.calibrate, output, call)) for _ in range(3 if tiny else 20)]
            except Exception as error:  # such as too much shared memory
                run.skipped.append(f"blocks {tuple(blocks)} for heads of {dim}: {str(error)[:100]}")
                continue
            finally:
                one_pass.choose_blocks = choose_blocks
            moved = sum(t.numel() * t.element_size() for t in (query, key, value, output))
            run.report(
                part="blocks", dtype=dtype, dim=dim, tokens=length, **blocks._asdict(), is_chosen=blocks == chosen,
                milliseconds=1000 * statistics.median(times), mib=moved / MIB,
            )  # fmt: skip
