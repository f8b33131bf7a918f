"""The script for GPUs runs, on a CPU and on sizes that say nothing about speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch


def test_all_parts_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the package triton, which exists for Linux, is not installed")
    import gpu

    record = tmp_path / "gpu.jsonl"
    small = [
        "--device",
        "cpu",
        "--tiny",
        "--lengths",
        "20",
        "--dtypes",
        "float32",
        "--batch-tokens",
        "40",
        "--pairs",
        "2",
    ]
    assert gpu.main([*small, "--record", str(record)]) == 0
    records = [json.loads(line) for line in record.read_text().splitlines()]
    assert {r["part"] for r in records} == {"equality", "speed", "index", "blocks"}
    checks = [r for r in records if r["part"] == "equality"]
    assert {r["dtype"] for r in checks} == {"float32", "bfloat16", "float16"}
    assert all(max(r["off"] for r in checks if r["dtype"] == dtype) > 0 for dtype in gpu.DTYPES)
    speed = {(r["pooling"], r["kernel"]) for r in records if r["part"] == "speed"}
    kernels = {(pooling, kernel) for pooling in ("cls", "last", "mean") for kernel in ("torch", "triton")}
    assert speed == kernels | {(pooling, "torch, pooled_row_only") for pooling in ("cls", "last")}
    assert "| sdpa | float32 | mean | 2 x 20 | triton | " in capsys.readouterr().out
    monkeypatch.setattr(gpu, "_kernel_error", lambda *_: 1.0)
    monkeypatch.setattr(gpu, "time_models", lambda *_: None)
    monkeypatch.setattr(gpu, "time_index", lambda *_: None)
    monkeypatch.setattr(gpu, "time_blocks", lambda *_: None)
    assert gpu.main(small) == 1


def test_needs_a_card() -> None:
    import gpu

    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            gpu.main([])
