PYTHON ?= python3
BIN := .venv/bin
# Two workers with one thread each: more threads than cores slow each other down tenfold.
WORKERS ?= 2

.PHONY: setup demo bench docs fuzz bias left-out rates test test-long lint format wheel clean
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

# The site, with its gallery drawn and its notebooks executed: out/site/index.html.
docs: setup
	OMP_NUM_THREADS=1 $(BIN)/python docs/site/build.py

# Build, check, install in a fresh environment, and run the README's lines there.
wheel: setup
	$(BIN)/python tests/wheel.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A worker takes whole files, whose fixtures are then made once; in the order of tests/conftest.py, slow ones first. What is
# compiled is kept for the processes that tests start, whatever the surroundings say. A worker that dies ends the run, with the
# name of its test: xdist would start another one and, with whole files to a worker, wait for ever for what the first had left.
# Types are checked beside the tests, which leave a core free now and then, and told after them.
test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p out; $(BIN)/mypy > out/mypy.txt 2>&1 & types=$$!; \
	PYTHONDONTWRITEBYTECODE= SPIRITLEVEL_COVERAGE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m "not long"; tests=$$?; \
	wait $$types; types=$$?; cat out/mypy.txt; exit $$((tests + types))

# What `make test` leaves out: the benchmark on a tiny network, several processes, studies on Ray and Slurm, peaks of memory, whether errors
# hold in hundreds of repetitions, the accessibility of further pages. CI runs both.
test-long: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m long

# Thousands of random inputs against definitions; the figures go to out/fuzz.json and docs/reliability.md.
fuzz: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz $(FUZZ)

# Fifty seeds on six networks: whether estimates that are not linear in the Hessian are biased. The table of docs/reliability.md.
bias: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz.bias $(BIAS)

# Forty networks of which few samples carry nearly all curvature, against dense Hessians. A table of docs/reliability.md.
left-out: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz.left_out $(LEFT_OUT)

# A hundred networks by searches, against dense Hessians: how often a certified eigenvalue is not right. A table of docs/reliability.md.
rates: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz.rates $(RATES)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv out dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
