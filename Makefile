# `make demo` and `make test` set up all that they need; the rest is for hands-on work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LAB := $(BIN)/python -m tests.lab.lab
LAB_PACKAGES := lxc mmdebstrap openssh-server openssh-client sudo perl procps iproute2
TEST_PACKAGES := zsh fish shellcheck nftables faketime g++ python3-dev chromium

.PHONY: help setup demo test check chaos overfit gpu tables lock lab-packages lab-up lab-down clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(VENV)/.ready  ## the virtual environment, with `dflash` in it
$(VENV)/.ready: pyproject.toml constraints.txt requirements/no-deps.txt requirements/judge.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "dflash needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || tests/lab/packages.sh python3-venv
	@echo "setting up .venv (PyTorch among it: a few minutes, once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[trainer,dev]'
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements/no-deps.txt
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .cache/judge --requirement requirements/judge.txt
	touch $@

demo: lab-packages setup  ## a drafter trained in a container, from launch to kill, explained by doing
	@$(BIN)/python -m tests.lab.demo

test: lab-packages setup  ## every test, the lab's included
	@tests/lab/packages.sh $(TEST_PACKAGES)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup $(PYTEST)

chaos: lab-packages setup  ## each fault at each moment of each verb: the table, and chaos.json (half an hour)
	@tests/lab/packages.sh $(TEST_PACKAGES)
	@$(BIN)/python -m tests.lab.chaos $(CHAOS)

overfit: setup  ## a drafter learns eight answers by heart; the official package accepts whole blocks
	@$(BIN)/python -m tests.trainer.overfit

gpu: $(if $(GPU_PYTHON),,setup)  ## on a machine with GPUs: tests, benchmarks, a real run, into benchmarks/results
	$(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu $(GPU)

tables: setup  ## the tables of benchmarks/README.md, made from the newest record
	$(BIN)/python -m benchmarks.tables

check: setup  ## ruff, mypy --strict, shellcheck
	@tests/lab/packages.sh shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	shellcheck $$(git ls-files '*.sh') .ci/run

lock: setup  ## newest versions that pyproject.toml allows, into constraints.txt
	$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[trainer,dev]'
	{ sed -n '/^#/p' constraints.txt; \
	  $(BIN)/python -m pip freeze --exclude-editable | grep -vwE "$$(sed -n 's/==.*//p' requirements/no-deps.txt | paste -sd'|')"; \
	} > constraints.new
	mv constraints.new constraints.txt

lab-packages:
	@[ "$$(uname -s)" = Linux ] \
		|| { echo "The lab needs Linux with LXC: run this in a Debian 12 virtual machine."; exit 1; }
	@[ "$$(id -u)" = 0 ] || { echo "The lab needs root, for LXC and namespaces: sudo make $(MAKECMDGOALS)"; exit 1; }
	@tests/lab/packages.sh $(LAB_PACKAGES)

lab-up: lab-packages setup  ## the hands-on lab: sshd on 127.0.0.1:22022, container 200
	@$(LAB) up

lab-down:  ## takes the hands-on lab away, whatever state it is in
	@if [ -x $(BIN)/python ]; then $(LAB) down; fi

clean: lab-down  ## the lab and everything that was built or cached
	rm -rf $(VENV) .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
