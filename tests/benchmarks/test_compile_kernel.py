"""The Triton kernel compiles for GPUs that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import json, sys, types
# The kernel needs nothing of what the package imports, which would take most of the time.
for name in ("fair_calibration", "fair_calibration.method"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [{root!r} + "/" + name.replace(".", "/")]
from compile_kernel import Variant, compile_variant, problem
results = [compile_variant(Variant(*values)) for values in {variants}]
print(json.dumps([{{**result, "problem": problem(result)}} for result in results]))
"""


def test_compiles() -> None:
    pytest.importorskip("triton", reason="the package triton, which exists for Linux, is not installed")
    # The target, dtype, head size, pooled rows, basket size, ranges, gather. All others: benchmarks/compile_kernel.py.
    variants = [(90, "float16", 32, True, 16, True, False)]
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    # In a process of its own, as here the kernel is interpreted.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    command = [sys.executable, "-c", COMPILE.format(variants=variants, root=str(root))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    for result in json.loads(done.stdout):
        assert result["problem"] is None
        assert 0 < result["registers"] <= 255


def test_what_is_a_problem() -> None:
    import compile_kernel

    fits = {"target": 80, "registers": 100, "stack_bytes": 0, "shared_bytes": 163 * 1024}
    assert compile_kernel.problem(fits) is None
    assert compile_kernel.problem({**fits, "shared_bytes": 164 * 1024}) == "needs 167936 bytes of shared memory"
    assert compile_kernel.problem({**fits, "target": 90, "shared_bytes": 164 * 1024}) is None
    assert compile_kernel.problem({"error": "CompilationError: no"}) == "CompilationError: no"
    variants = list(compile_kernel.variants((80,), (64, 128)))
    assert len(set(variants)) == len(variants) == (2 + 2 + 1 + 4) * 2 * 3
