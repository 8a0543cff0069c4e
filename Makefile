# `make demo` and `make test` work on a fresh clone: they build .venv with the first Python >= 3.11
# found (or `make PYTHON=/path/to/python`) and install what they need, once.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test check bench clean

help:
	@echo "make demo    stream a story from the bundled model"
	@echo "make test    run all tests"
	@echo "make check   ruff, mypy"
	@echo "make bench   run the benchmarks"
	@echo "make clean   remove .venv and caches"

demo: $(VENV)/.kvik
	$(BIN)/kvik generate --echo --seed 7 --max-tokens 200 "Once upon a time"

test: $(VENV)/.kvik-test
	$(BIN)/python -m pytest

check: $(VENV)/.kvik-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.kvik
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis dist

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "kvik needs Python 3.11 or newer: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp for each set of dependencies; a change of either file installs again.
$(VENV)/.kvik: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.kvik-test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[test]'
	@touch $@

$(VENV)/.kvik-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[test,dev]'
	@touch $@
