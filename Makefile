# `make demo` and `make test` each do all the set-up on a fresh machine, then their job.
VENV := .venv
BIN := $(VENV)/bin
MODEL := .cache/models/SmolLM2-135M-Instruct
INSTALLED := $(VENV)/.installed

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: help demo test lint types unit engine setup format clean

help:
	@echo "make demo    replay a multi-agent trace, plain vLLM and TokenDance side by side"
	@echo "make test    lint, types, unit tests, tests with a real vLLM"
	@echo "make setup   only the set-up: $(VENV) and the small model in $(MODEL)"
	@echo "make format  format the code"
	@echo "make clean   remove what make set up"

demo: setup
	$(BIN)/tokendance demo

test: lint types unit engine

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m tokendance.bench.tables --check

types: $(INSTALLED)
	$(BIN)/mypy

unit: $(INSTALLED)
	$(BIN)/pytest -q tests/unit

engine: setup
	$(BIN)/pytest -q tests/engine

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

setup: $(INSTALLED) $(MODEL)/config.json

$(INSTALLED): pyproject.toml scripts/setup.sh
	scripts/setup.sh $(VENV)
	@touch $@

$(MODEL)/config.json: | $(INSTALLED)
	$(BIN)/tokendance model $(MODEL)

clean:
	rm -rf $(VENV) .cache build dist
