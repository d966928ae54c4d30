# openk3: set-up, demo, tests and checks. Override PYTHON, VENV, TORCH or MINUTES on the command line.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
VENV ?= .venv
BIN := $(VENV)/bin
# Another release in the supported range may be named here, with pip options behind it (an index of CPU builds, say).
TORCH ?= $(shell grep '^torch==' constraints.txt)
# Time of `make demo`, in minutes.
MINUTES ?= 8
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# A candidate must run, be 3.11 or 3.12, and be able to create an environment with pip.
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& { echo "$$p"; break; }; done)

.PHONY: help setup demo test test-slow check format tree bench clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | column -t -s $$'\t'

setup: $(VENV)/.ready ## create .venv and install everything (once)

$(VENV)/.ready: pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
		[ -n "$(PYTHON)" ] || { echo "no Python 3.11 or 3.12 with venv and pip found; try: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.11" >&2; exit 1; }; \
		echo "creating $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv $(VENV); \
	fi
	@echo "installing $(TORCH), then openk3 with its development tools"
	@$(PIP) install $(TORCH)
# CUDA builds of torch bring the triton that they need: the pin is for the others.
	@own=$$($(BIN)/python -c 'import importlib.util as i; print("triton" if i.find_spec("triton") else "torch")'); \
	$(PIP) install -c <(grep -v -e '^torch==' -e "^$$own==" constraints.txt) -e '.[dev]'
	@touch $@

demo: setup ## train a small K3 on this machine (8 minutes, or MINUTES=)
	$(BIN)/openk3 quickstart --minutes $(MINUTES)

test: setup ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-slow: setup ## load, fuzzing, clients and the web chat in Chromium: at most 30 minutes
	@$(BIN)/python -c 'import lm_eval, playwright, ray' 2>/dev/null || $(PIP) install -c <(grep -v '^torch==' constraints.txt) -e '.[harness,cluster]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "slow and not gpu"

check: setup ## lint, format, types, layers, code shape
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest tests/test_code_shape.py

format: setup ## rewrite files in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tree: setup ## write the tree and the tables of results into README.md
	$(BIN)/python tests/readme_tree.py

bench: setup ## measure the CPU ratios
	OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE $(BIN)/python benchmarks/cpu.py

clean: ## remove caches and build outputs, keep .venv and runs
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
