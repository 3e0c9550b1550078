# Everything needs only git, make and Python 3.11 or newer: the first target that is made sets up .venv.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
KILLS ?= 2000

# What the caller's shell has on its path must not decide what is tested.
unexport PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test lint format coverage bench sim crash wheel clean
.DEFAULT_GOAL := help

help: ## say what can be made
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 18

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Runtara needs Python 3.11 or newer; this is " + sys.version)'
	@echo "setting up .venv"
	@rm -f $@
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq -c constraints.txt setuptools wheel
	@$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

demo: $(READY) ## watch runs survive kill -9
	@$(BIN)/runtara demo

test: lint ## lint, types, and every test
	@$(BIN)/python -m pytest

lint: $(READY) ## ruff (rules and format) and mypy
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: $(READY) ## let ruff repair what it can
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

coverage: $(READY) ## every test, and the lines and branches that none of them reaches
	@$(BIN)/coverage run -m pytest
	@$(BIN)/coverage report --show-missing --skip-covered

bench: $(READY) ## measure speed, beside the raw limit of this machine
	@$(BIN)/python -m benchmarks

sim: $(READY) ## the deterministic simulation, many more seeds than in the tests
	@$(BIN)/python -m tests.simulation $(if $(SEEDS),--seeds $(SEEDS))

crash: $(READY) ## kill -9 a writer KILLS times (default 2000), and check every word it said
	@$(BIN)/python -m tests.crash --kills $(KILLS)

wheel: $(READY) ## build dist/*.whl
	@rm -rf build
	@$(BIN)/python -m pip wheel -qq --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

clean: ## remove all that was made, .venv included
	rm -rf .venv build dist *.egg-info .coverage htmlcov .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
