# `make test` and `make demo` work as the first command on a fresh clone: they make the
# environment, install, and go. PYTHON chooses the interpreter that makes it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: install demo test test-slow test-slurm test-gpu lint bench

install: $(STAMP)

# torch first and by its pinned version: a range would pull the largest build there is.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "OELM needs Python 3.11 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $$(grep -E '^torch==' constraints.txt)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/oelm demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,eval]'
	$(BIN)/python -m pytest -m slow

# A real one-node Slurm, started and stopped by the tests; needs root on Debian, else says why not.
test-slurm: $(STAMP)
	PYTHON=$(BIN)/python tests/study/slurm/test.sh

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu -rs

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m benchmarks
