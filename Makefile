PYTHON ?= python3
BIN := .venv/bin
# Two workers with one thread each: more threads than cores slow each other down tenfold.
WORKERS ?= 2

.PHONY: setup demo bench fuzz test lint format clean
.DEFAULT_GOAL := setup

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check "pip>=25.1"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[digits]" --group dev
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --group oracles
	touch $@

demo: setup
	$(BIN)/spiritlevel demo --out out/demo

# For real data and weights: make bench BENCH="--data-folder FOLDER --checkpoint FILE"
bench: setup
	OMP_NUM_THREADS=1 $(BIN)/spiritlevel bench $(BENCH)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS)

# Thousands of random inputs against definitions; the figures go to out/fuzz.json and docs/reliability.md.
fuzz: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz $(FUZZ)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv out dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
