# Everything runs in .venv, made on first use. Only Python 3.11+ and make are needed.
PYTHON ?= python3
# The CPU build, where your package index has it under this name; for a GPU build: make demo TORCH=torch
TORCH ?= torch==2.13.0
BIN := .venv/bin
SMOKE := tests/core/test_model.py tests/core/test_transformer.py tests/core/test_query.py \
	tests/core/method/test_reference.py tests/core/access/test_discovery.py \
	tests/core/even_chunks tests/evaluation/test_measures.py tests/indexing/test_build.py \
	tests/pyterrier/test_conformance.py tests/mteb/test_scores.py

.PHONY: demo test smoke check lint docs clean

demo: .venv/installed  ## BM25, plain and calibrated dense retrieval compared by position, on the embedded data
	$(BIN)/python examples/quickstart.py $(ARGS)

test: .venv/installed  ## the test-suite
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile $(ARGS)

smoke: .venv/installed  ## a run of a minute and a half over the parts that everything else stands on
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile $(SMOKE) $(ARGS)

check: lint docs test  ## what CI runs

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: .venv/installed  ## the documentation, in docs/_build/index.html
	HF_HUB_OFFLINE=1 $(BIN)/python -m sphinx --fail-on-warning --quiet docs docs/_build

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build docs/_build results *.egg-info
