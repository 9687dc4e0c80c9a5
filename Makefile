# Two commands do everything: `make demo` (the whole story) and `make test` (all that CI runs).
# Both make .venv by themselves; nothing has to be installed by hand.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Some virtual machines announce AMX without allowing it. oneDNN believes the announcement, and the first bf16 matrix
# product of torch (a bare nn.Linear) then dies of SIGILL. This is the best that oneDNN can do without AMX.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

FAST_LOG := .tests-computing.log

.PHONY: demo test lint unit docs chaos fuzz bench clean

demo: $(STAMP)
	$(BIN)/keepstep demo --out demo-out

test: lint unit

lint: $(STAMP) docs
	$(BIN)/ruff check src tests benchmarks examples mkdocs_links.py
	$(BIN)/ruff format --check src tests benchmarks examples mkdocs_links.py
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The site, in build/site. No network; a link that leads nowhere fails.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Two runs side by side, because there are two cores: tests that compute, and tests that start torch again and again.
# tests/conftest.py says which is which.
unit: $(STAMP)
	$(BIN)/python -m pytest -p no:cacheprovider -m "computing and not chaos and not gpu" > $(FAST_LOG) 2>&1 & fast=$$!; \
	$(BIN)/python -m pytest -m "not computing and not chaos and not gpu"; slow=$$?; \
	wait $$fast; fast=$$?; cat $(FAST_LOG); rm -f $(FAST_LOG); test $$slow -eq 0 -a $$fast -eq 0

chaos: $(STAMP)
	$(BIN)/python -m pytest -m chaos

# Bad bytes for everything that reads from outside: two minutes for each of twelve targets.
fuzz: $(STAMP)
	FUZZ_S=120 $(BIN)/python -m pytest tests/fuzz

bench: $(STAMP)
	$(BIN)/python benchmarks/bench_take.py --out benchmarks/results/take.json
	$(BIN)/python benchmarks/bench_walk.py --out benchmarks/results/walk.json
	$(BIN)/python benchmarks/bench_parity.py --out benchmarks/results/parity.json
	$(BIN)/python benchmarks/bench_exchange.py --out benchmarks/results/exchange.json
	$(BIN)/python benchmarks/bench_nodes.py --out benchmarks/results/nodes.json
	$(BIN)/python benchmarks/bench_recovery.py --out benchmarks/results/recovery.json
	$(BIN)/python benchmarks/bench_keeper_death.py --out benchmarks/results/keeper-death.json

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) demo-out build src/*.egg-info
