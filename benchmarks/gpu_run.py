"""What one run of ``gpu.py`` has found, how much time it has left, and how it measures time and memory."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from encode import MIB, device_name, software


class Run:
    """One run of ``gpu.py``, given its command line arguments."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.records: list[dict[str, Any]] = []
        self.skipped: list[str] = []
        self.machine = {"device": device_name(args.device), **software()}
        self._start = time.monotonic()

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

    def seconds(self, function: Callable[[], Any]) -> float:
        """Returns the time that a call takes, until the device has finished."""
        self._synchronize()
        start = time.perf_counter()
        with torch.inference_mode():
            function()
        self._synchronize()
        return time.perf_counter() - start

    def peak_mib(self, function: Callable[[], Any]) -> float:
        """Returns the peak memory that a call allocates on the device, in MiB; 0 on CPUs, where it is not measured."""
        if self.device.type != "cuda":
            return 0.0
        self._synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.inference_mode():
            function()
        self._synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MIB

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def tables(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of a summary, in Markdown."""
    checks = [record for record in records if record["part"] == "equality"]
    for dtype in dict.fromkeys(check["dtype"] for check in checks):
        own = [check for check in checks if check["dtype"] == dtype]
        offs = [check["off"] for check in own if check["off"] is not None]
        n_failed = len(own) - len(offs)
        n_wrong = sum(not check["ok"] for check in own) - n_failed
        found = f"{n_failed} failed, {n_wrong} off by too much, the worst by {max(offs, default=0.0):.2g}"
        yield f"equality, {dtype}: {len(own)} cases, {found}"
    yield "\nThe aims are 1.02 times the plain model's time with cls and last-token pooling, 1.10 with mean pooling."
    yield "\n| attention | dtype | pooling | documents x tokens | kernel | time / plain | extra peak memory | plain |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for r in records:
        if r["part"] == "speed":
            quartiles = ", ".join(f"{q:.2f}" for q in r["quartiles"])
            yield (
                f"| {r['attention']} | {r['dtype']} | {r['pooling']} | {r['documents']} x {r['tokens']} | "
                f"{r['kernel']} | {r['ratio']:.2f} [{quartiles}] | {r['extra_peak_mib']:.1f} MiB | "
                f"{r['plain_ms']:.1f} ms, {r['plain_peak_mib']:.0f} MiB |"
            )
    yield ""
    for r in records:
        if r["part"] == "blocks":
            blocks = f"{r['rows']} x {r['keys']}, {r['n_warps']} warps, {r['n_stages']} stages"
            chosen = " (the one chosen)" if r["is_chosen"] else ""
            yield f"blocks, heads of {r['dim']}: {blocks}: {r['milliseconds']:.3g} ms{chosen}"
        if r["part"] == "index":
            yield f"index, {r['encoder']}: {r['docs_per_s']:.0f} documents/s, {r['ratio']:.2f} of SBertBiEncoder's time"
