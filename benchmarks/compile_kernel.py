"""Compiles the Triton kernel for GPUs, without one, in the variants that `method.one_pass` can choose.

    python benchmarks/compile_kernel.py --record benchmarks/records/compile_kernel.jsonl

For each variant and target (sm_80: A100; sm_90: H100, H200) the registers of a thread, the bytes of its stack (to which
registers are spilled) and the shared memory of a block are printed and recorded. A variant fails if it does not compile
or takes more shared memory than the target has. Needs the package triton, for Linux; about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fair_calibration.method.kernel_blocks import PRECISION, block_of, choose_blocks

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""The most shared memory that a block can have, by target."""
TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
_FLOATS = ("exponent_scale", "strength", "fixed_share")


class Variant(NamedTuple):
    """What decides how the kernel is compiled."""

    target: int  # the compute capability, times 10
    dtype: str
    dim: int  # the head size
    is_pooled: bool  # whether pooled rows alone are computed
    basket_size: int
    ranges: bool
    gather: bool


def variants(targets: Sequence[int], dims: Sequence[int]) -> Iterator[Variant]:
    """Yields the variants: pooled rows and all rows, every kind of mask, baskets in one block of keys and in several.

    float16 is compiled as bfloat16 is, so that it and small and large baskets are tried with heads of 64 alone.
    """
    masks = ((False, False), (True, False), (True, True))
    cases = [("float32", dim, 128) for dim in dims] + [("bfloat16", dim, 128) for dim in dims]
    cases += [("float16", 64, 128), *((dtype, 64, size) for dtype in ("float32", "bfloat16") for size in (16, 512))]
    for target, (dtype, dim, size), is_pooled, mask in itertools.product(targets, cases, (True, False), masks):
        yield Variant(target, dtype, dim, is_pooled, size, *mask)


def compile_variant(variant: Variant) -> dict[str, Any]:
    """Compiles one variant, and returns what it takes."""
    os.environ.pop("TRITON_INTERPRET", None)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fair_calibration.method.one_pass_kernel import one_pass

    target, dtype, dim, is_pooled, basket_size, ranges, gather = variant
    blocks = choose_blocks(1 if is_pooled else 4096, basket_size, dim, getattr(torch, dtype))
    constants = {
        "RANGES": ranges,
        "GATHER": gather,
        "SINGLE": blocks.keys >= basket_size,
        "D": dim,
        "BLOCK_D": block_of(dim),
        "DV": dim,
        "BLOCK_DV": block_of(dim),
        "BLOCK_ROWS": blocks.rows,
        "BLOCK_KEYS": blocks.keys,
        "PRECISION": PRECISION,
        "AS_FLOAT32": False,
    }
    pointers = dict.fromkeys(("query", "key", "value", "output"), TYPES[dtype])
    pointers |= {"sequences": "*i32", "slots": "*i64", "isolated": "*i32", "lowest": "*i32", "highest": "*i32"}
    signature: dict[str, str] = {}
    divisible: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, name in enumerate(one_pass.arg_names):
        signature[name] = pointers.get(name, "fp32" if name in _FLOATS else "constexpr" if name in constants else "i32")
        if name in pointers or ("_stride_" in name and not name.startswith("range")):
            divisible[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=one_pass,
        signature=signature,
        constexprs={(one_pass.arg_names.index(name),): value for name, value in constants.items()},
        attrs=divisible,
    )
    options = {"num_warps": blocks.n_warps, "num_stages": blocks.n_stages}
    result: dict[str, Any] = {**variant._asdict(), **blocks._asdict(), "precision": PRECISION}
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    except Exception as error:  # a compiler may fail in any way; the record says how
        return {**result, "error": f"{type(error).__name__}: {error}"[:300]}
    registers, stack = _resources(compiled.asm["cubin"])
    return {**result, "registers": registers, "stack_bytes": stack, "shared_bytes": compiled.metadata.shared}


def _resources(cubin: bytes) -> tuple[int, int]:
    """Returns the registers of a thread, and the bytes of its stack, to which registers are spilled."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", report.stdout)[-1]
    return int(registers), int(stack)


def problem(result: dict[str, Any]) -> str | None:
    """Returns why a variant cannot be used as it is, or None."""
    if "error" in result:
        return str(result["error"])
    if result["shared_bytes"] > SHARED_BYTES[result["target"]]:
        return f"needs {result['shared_bytes']} bytes of shared memory"
    return None


def main() -> None:
    """Compiles the variants asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", type=int, choices=SHARED_BYTES, default=list(SHARED_BYTES))
    parser.add_argument("--dims", nargs="+", type=int, default=[32, 64, 96, 128, 256], help="head sizes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--record", type=Path, help="a JSON lines file to write")
    args = parser.parse_args()
    todo = list(variants(args.targets, args.dims))
    n_problems = 0
    with ProcessPoolExecutor(args.processes) as pool:
        results = []
        for variant, result in zip(todo, pool.map(compile_variant, todo), strict=True):
            results.append(result)
            wrong = problem(result)
            n_problems += wrong is not None
            print(
                *variant,
                *(result.get(name, "-") for name in ("registers", "stack_bytes", "shared_bytes")),
                wrong or "",
                flush=True,
            )
    if args.record is not None:
        args.record.write_text("".join(json.dumps(result) + "\n" for result in results), encoding="utf-8")
    print(f"{len(todo)} variants, {n_problems} with problems")
    if n_problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
