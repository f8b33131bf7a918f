from __future__ import annotations

import subprocess
import sys

import fair_evaluation


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = ["torch", "matplotlib", "mteb", "pyterrier", "transformers", "ir_measures"]
    code = f"import sys, fair_evaluation; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert result.stdout.strip() == "[]"


def test_what_it_says_it_has_is_there() -> None:
    assert sorted(fair_evaluation.__all__) == list(fair_evaluation.__all__)
    for name in fair_evaluation.__all__:
        assert getattr(fair_evaluation, name).__doc__
