"""What Ray workers load, and what befalls them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fair_calibration import FairConfig, FairSentenceTransformer
from tests.indexing.faults import disk_full, kill

CONFIG = FairConfig(strength=0.8, basket_size=8)


def load(path: str) -> FairSentenceTransformer:
    return FairSentenceTransformer(path, config=CONFIG, device="cpu")


def load_with_fault(path: str, fault: str, shard: int, marker: Path) -> FairSentenceTransformer:
    """Loads the model, and lets the first worker that writes a shard die or find the disk full; the marker names it.

    With a folder as the marker it happens to every worker.
    """
    real = os.rename

    def rename(source: Any, target: Any, **kwargs: Any) -> None:
        if Path(target).name == f"{shard:012d}" and not marker.is_file():
            if not marker.is_dir():
                marker.write_text(str(os.getpid()))
            {"kill": kill, "disk full": disk_full}[fault]()
        real(source, target, **kwargs)

    os.rename = rename
    return load(path)
