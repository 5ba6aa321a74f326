# Everything a newcomer runs. `make help` lists it; each target makes its own .venv first (quick the second time).
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH ?= torch==2.13.0
EXTRAS ?= torch,render,math,jupyter,apptainer,s3
PYTEST ?= $(BIN)/python -m pytest -q
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test test-slow test-faults check format bench checkpoint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## make .venv with everything that tests and demo need

# torch goes first and pinned, so that a machine without a GPU keeps whatever CPU wheel its index has for this version.
$(STAMP): pyproject.toml configs/system.sh
	@bash configs/system.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install -qq '$(TORCH)'
	$(BIN)/python -m pip install -qq --editable '.[$(EXTRAS)]' --group dev
	touch $@

demo: setup ## a tiny policy learns to use tools, in five minutes on two cores
	$(BIN)/prorl demo

test: setup ## the fast suite
	$(PYTEST)

test-slow: setup ## tests of more than ten seconds
	$(PYTEST) -m 'slow and not gpu and not vllm'

test-faults: setup ## SIGKILL of every process kind in the middle of runs
	$(PYTEST) -m faults --timeout 600

check: setup ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## write the format that check wants
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## the pipeline's figures, quickly
	$(BIN)/prorl bench pipeline --quick

checkpoint: setup ## train the toy policy that `make demo` starts from (SEED=0 OUT=prorl/assets/toy), minutes of one core
	$(BIN)/python -m prorl.trainer.sft --seed $(or $(SEED),0) --out $(or $(OUT),prorl/assets/toy)

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
