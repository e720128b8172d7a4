# Everything goes through .venv, which `make install` creates. PYTHON=python3.12 make install picks an interpreter;
# ARGS passes arguments on (make test ARGS="-k codec", make demo ARGS="--run.steps=5").
PYTHON ?= python3
PY := .venv/bin/python
BIN := .venv/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install format lint types test test-full test-gpu proto proto-check docs build check demo bench clean
.NOTPARALLEL:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: .venv/.installed  ## make .venv with the package, the tools and the inference engine of this machine

.venv/.installed: pyproject.toml scripts/install.sh
	PYTHON="$(PYTHON)" scripts/install.sh
	@touch $@

format: install  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: install  ## ruff and the import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install  ## mypy and pyright, both strict
	$(BIN)/mypy
	$(BIN)/pyright

test: install  ## the tests of every day (below 8 minutes on two cores)
	$(PY) -m pytest tests/unit tests/contract tests/e2e -m "not full and not gpu" $(ARGS)

test-full: install  ## all tests that need no GPU
	$(PY) -m pytest tests/unit tests/contract tests/e2e -m "not gpu" $(ARGS)

test-gpu: install  ## the tests that need a CUDA device
	$(PY) -m pytest tests/gpu $(ARGS)

proto: install  ## regenerate src/headrace/v1 from proto/
	PYTHON="$(PYTHON)" scripts/proto.sh write

proto-check: install  ## lint the protos, compare the stubs, look for breaking changes
	PYTHON="$(PYTHON)" scripts/proto.sh check

docs: install  ## rewrite the pages that are made from the sources
	$(PY) scripts/write_docs.py

build: install  ## wheel and source distribution into dist/
	rm -rf dist
	$(PY) -m hatchling build

# One after another: the type checkers want 2 GB each.
check: lint types proto-check test  ## what CI runs

demo: install  ## train the demonstration's model and watch the reward grow
	$(PY) -m headrace.clients.cli.main train examples/demo/config.toml $(ARGS)

bench: install  ## figures of this machine
	$(PY) -m headrace.clients.cli.main bench $(ARGS)

clean:  ## remove what the tools leave behind, but not .venv and no run
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
