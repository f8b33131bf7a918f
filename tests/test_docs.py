"""Executes the code of every page from top to bottom; blocks after a "not run" comment are compiled only."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"(?P<skip><!-- not run: [^>]*-->\n)?```python\n(?P<code>.*?)```", re.DOTALL)
PAGES = sorted(path.name for path in DOCS.glob("*.md") if BLOCK.search(path.read_text(encoding="utf-8")))


def run_page(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for number, block in enumerate(BLOCK.finditer((DOCS / name).read_text(encoding="utf-8"))):
        code = compile(block["code"], f"{name}, block {number}", "exec")
        if block["skip"] is None:
            exec(code, names)
    return names


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MTEB_FAIR_DATA", raising=False)


def test_there_are_pages_with_code() -> None:
    assert {"getting-started.md", "pyterrier.md", "mteb.md", "evaluation.md"} <= set(PAGES)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "mteb.md"])
def test_page(page: str) -> None:
    assert run_page(page)


def test_mteb_page() -> None:
    names = run_page("mteb.md")
    # What the page promises of the real model.
    plain, fair = names["scores"][0], names["scores"][0.5]
    assert fair["psi"] < plain["psi"] - 0.03
    assert fair["main_score"] > plain["main_score"]
    found = {result.model_name for result in names["results"].model_results}
    assert len(found) == 2


def test_pyterriers_page() -> None:
    page = DOCS.parent / "pyterrier_fair" / "pt_docs" / "index.rst"
    blocks = re.findall(r"code-block:: python\n(?: +:.*\n)*\n((?: {4}.*\n|\n)+)", page.read_text(encoding="utf-8"))
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(textwrap.dedent(block), page.name, "exec"), names)
    assert names["results"]["name"].tolist() == ["plain", "fair"]
    assert names["results"]["nDCG@10"].between(0.8, 1).all()


def test_links_between_pages() -> None:
    for path in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_files_that_are_named_exist() -> None:
    """Those of the smoke run, and those that CONTRIBUTING.md and the README name."""
    root = DOCS.parent
    text = "".join((root / name).read_text(encoding="utf-8") for name in ("Makefile", "CONTRIBUTING.md", "README.md"))
    named = set(
        re.findall(r"(?<![\w/])(?:tests|benchmarks|docs|examples|fair_\w+|mteb_fair|pyterrier_fair)/[\w/.-]*\w", text)
    )
    assert len(named) > 20
    built = {"docs/_build", "docs/_build/index.html"}
    assert [name for name in sorted(named - built) if not (root / name).exists()] == []
