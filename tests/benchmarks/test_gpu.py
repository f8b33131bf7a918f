"""The script for GPUs runs, on a CPU and on sizes that say nothing about speed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.flash import pretend_flash_attention

SMALL = ["--device", "cpu", "--tiny", "--lengths", "20", "--batch-tokens", "20", "--pairs", "2", "--dtypes", "bfloat16"]


def test_all_parts_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton", reason="the package triton, which exists for Linux, is not installed")
    import gpu
    import gpu_kernel

    record = tmp_path / "gpu.jsonl"
    with pretend_flash_attention():
        assert gpu.main([*SMALL, "--record", str(record)]) == 0
    records = [json.loads(line) for line in record.read_text().splitlines()]
    assert {r["part"] for r in records} == {"equality", "speed", "index", "blocks"}
    checks = [r for r in records if r["part"] == "equality"]
    assert {r["dtype"] for r in checks} == gpu_kernel.DTYPES.keys()
    assert {r["padding"] for r in checks} == {"left", "right", "unpadded"}
    assert all(max(r["off"] for r in checks if r["dtype"] == dtype) > 0 for dtype in gpu_kernel.DTYPES)
    speed = {(r["attention"], r["pooling"], r["kernel"]) for r in records if r["part"] == "speed"}
    implementations, poolings = ("sdpa", "flash_attention_2"), ("cls", "last", "mean")
    assert speed == {(a, p, kernel) for a in implementations for p in poolings for kernel in ("torch", "triton")} | {
        ("sdpa", pooling, "torch, pooled_row_only") for pooling in ("cls", "last")
    }
    output = capsys.readouterr().out
    assert "| flash_attention_2 | bfloat16 | mean | 1 x 20 | triton | " in output
    assert "skipped" not in output


def test_wrong_results_and_what_is_skipped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import gpu
    import gpu_kernel

    def fail_in_float32(_: object, dtype: torch.dtype, *__: object) -> float:
        if dtype == torch.float32:
            raise RuntimeError("it did not compile")
        return 1.0

    def time_models(run: Any, kernels: list[str], _: str) -> None:
        assert kernels == ["torch"]
        run.args.seconds = 0
        assert not run.has_time("models")

    monkeypatch.setattr(gpu_kernel, "_largest_difference", fail_in_float32)
    monkeypatch.setattr(gpu, "check_device", lambda _: None)
    monkeypatch.setattr(gpu, "time_models", time_models)
    assert gpu.main(SMALL) == 1
    output = capsys.readouterr().out
    assert "equality, float32: 3 cases, 3 failed, 0 off by too much" in output
    assert "equality, bfloat16: 2 cases, 0 failed, 2 off by too much, the worst by 1" in output
    assert "skipped: timing the kernel: it failed in some of the cases above" in output
    assert "skipped: models: out of time\nskipped: index building: out of time" in output


def test_time_and_memory_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_run import Run

    waits: list[None] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 4 * 2**20)
    run = Run(argparse.Namespace(device="cuda", seconds=60, record=None))
    assert run.machine["device"] == "a card"
    assert run.peak_mib(lambda: None) == 3
    assert 0 < run.seconds(lambda: None) < 1
    assert len(waits) == 4


def test_needs_a_card() -> None:
    import gpu

    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            gpu.main([])
