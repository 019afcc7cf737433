# Two commands for a newcomer: `make trace` and `make test`. The rest serves CI and people who change the code.
.PHONY: help trace test env lint types imports wheel-test gpu-check fuzz clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RANKS ?= 4
MUTANTS ?= 20000
PROMPT ?= gsm8k:17
# uv looks for local wheels only where it is told to, so what pip was told is passed on.
UV_ENV := $(if $(PIP_FIND_LINKS),UV_FIND_LINKS="$(PIP_FIND_LINKS)",)

help:
	@echo "make trace       record one traced run (RANKS=$(RANKS) PROMPT=$(PROMPT)) and say what was witnessed"
	@echo "make test        lint, types, import directions, tests and the built wheel; no GPU needed"
	@echo "make gpu-check   every GPU test and benchmark on this machine, one short table"
	@echo "make fuzz        import and gate on MUTANTS=$(MUTANTS) damaged traces, policies and bundles"
	@echo "make env         only the environment in $(VENV)"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v else f"alphamoe-trace needs Python 3.11 or newer, {sys.executable} is {v[0]}.{v[1]}: run make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the environment into $(VENV): the first time this downloads PyTorch, which can take minutes"
	@$(BIN)/python -m pip install -q --disable-pip-version-check uv
	@VIRTUAL_ENV="$(CURDIR)/$(VENV)" $(UV_ENV) $(BIN)/uv pip install -q -c constraints.txt -e '.[dev,triton]'
	@touch $(STAMP)

env: $(STAMP)

trace: env
	$(BIN)/alphamoe-trace --ranks $(RANKS) --prompt $(PROMPT)

test: lint types imports
	$(BIN)/python -m pytest
	$(BIN)/python tests/wheel_check.py

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

imports: env
	$(BIN)/lint-imports

wheel-test: env
	$(BIN)/python tests/wheel_check.py

gpu-check: env
	$(BIN)/python tests/gpu/run_all.py

fuzz: env
	$(BIN)/python tests/fuzz/run.py --mutants $(MUTANTS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
