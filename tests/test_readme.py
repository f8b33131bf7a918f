"""The README's first Python block runs as printed, offline, and prints what the README shows after it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_first_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = README.read_text(encoding="utf-8")
    example = re.search(r"```python\n(?P<code>.*?)```\n\n```\n(?P<output>.*?)```", text, re.DOTALL)
    assert example is not None
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(example["code"], "README.md", "exec"), {})
    assert output.getvalue() == example["output"]


def test_other_blocks_are_python() -> None:
    for block in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL):
        compile(block, "README.md", "exec")
