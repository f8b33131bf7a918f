"""kill -9 at every moment: real SIGKILLs to real processes, forked by one that has loaded the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def test_kills_lose_nothing_and_leave_nothing_that_looks_whole_but_is_not(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.indexing.kill_sweep", str(tiny_folder()), str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    # Manifest, two shards, marker: of 26 kills, those after a shard was written keep 19 shards together.
    assert results["sweep_build"] == {"moments": 4 + 2 * 9 + 4, "kept": 19}
    assert results["kill_while_encoding"] == {"named": True, "encoded": 7}  # of 10, as a shard of 3 was there
    assert results["sweep_index"]["moments"] > 26 + 10
    assert results["sweep_index"]["whole"] > 3
