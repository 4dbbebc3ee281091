# `make demo` and `make test` set up all that they need; the rest is for hands-on work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help setup demo test check lock lab-up lab-down clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(VENV)/.ready  ## the virtual environment, with `dflash` in it
$(VENV)/.ready: pyproject.toml constraints.txt requirements/no-deps.txt requirements/judge.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[trainer,dev]'
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements/no-deps.txt
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .cache/judge --requirement requirements/judge.txt
	touch $@

check: setup  ## ruff, mypy --strict, shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	shellcheck $$(git ls-files '*.sh')
