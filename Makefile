# Two commands do everything: `make demo` (the whole story) and `make test` (all that CI runs).
# Both make .venv by themselves; nothing has to be installed by hand.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint unit chaos bench clean

demo: $(STAMP)
	$(BIN)/keepstep demo --out demo-out

test: lint unit

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: $(STAMP)
	$(BIN)/python -m pytest -m "not chaos and not gpu"

chaos: $(STAMP)
	$(BIN)/python -m pytest -m chaos

bench: $(STAMP)
	$(BIN)/python benchmarks/bench_take.py --out benchmarks/results/take.json

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) demo-out build src/*.egg-info
