# `make run` and `make test` each work as the first command on a machine with Python >= 3.11, pip and make.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: run test test-ci test-long test-longest test-slurm install check bench house clean

run: install
	@$(VENV)/bin/trainfast-tui

# Three processes on two cores: a test that waits for a training or a terminal leaves its core to another.
test: install
	$(VENV)/bin/python -m pytest -n 3 --dist loadgroup -m "not long and not longest and not slurm"

# The long tests that .ci/run keeps: each strategy and engine, and what is too slow for make test.
test-ci: install
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup -m ci

test-long: install
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup -m long $(TESTS)

test-longest: install
	$(VENV)/bin/python -m pytest -n 2 --dist loadgroup -m longest

# A real Slurm of two nodes on this machine, from Debian's packages, unpacked and not installed.
test-slurm: install
	@$(VENV)/bin/python tests/slurm/cluster.py $(TESTS)

check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# Lines, files and import edges by room, beside their budgets.
house: install
	$(VENV)/bin/python tests/house/measure.py

bench: install
	$(VENV)/bin/python -m benchmarks

install: $(INSTALLED)

# The stamp is the last thing written: an interrupted set-up starts over, a finished one costs nothing.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trainfast-tui needs Python >= 3.11; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[train,report,test]'
	@touch $@

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache
