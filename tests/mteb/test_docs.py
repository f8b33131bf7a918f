"""Executes docs/mteb.md from top to bottom; blocks after a "not run" comment are compiled only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "mteb.md"
BLOCK = re.compile(r"(?P<skip><!-- not run: [^>]*-->\n)?```python\n(?P<code>.*?)```", re.DOTALL)


def test_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = list(BLOCK.finditer(DOCS.read_text(encoding="utf-8")))
    assert len(blocks) > 5
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        code = compile(block["code"], f"{DOCS.name}, block {number}", "exec")
        if block["skip"] is None:
            exec(code, names)
    # What the page promises of the real model.
    plain, fair = names["scores"][0], names["scores"][0.5]
    assert fair["psi"] < plain["psi"] - 0.03
    assert fair["main_score"] > plain["main_score"]
    found = {result.model_name for result in names["results"].model_results}
    assert len(found) == 2
