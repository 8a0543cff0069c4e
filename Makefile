# `make demo` and `make test` work on a fresh clone: they build .venv with the first Python >= 3.11
# found (or `make PYTHON=/path/to/python`) and install what they need, once.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Without isolation the build finds its tools where it left them, and compiles only what changed.
INSTALL_KVIK := $(PIP_INSTALL) --no-build-isolation -e
KVIK := pyproject.toml constraints.txt $(wildcard csrc/*) $(VENV)/.build-tools

.PHONY: help demo test test-full test-nightly check bench clean

help:
	@echo "make demo          stream a story from the bundled model"
	@echo "make test          run the fast tests: on every edit"
	@echo "make test-full     run all tests: before a merge"
	@echo "make test-nightly  run all tests with ten times the examples, drawn anew"
	@echo "make check         ruff, mypy, and the form of sources and documents"
	@echo "make bench         measure the bundled model here (kvik bench)"
	@echo "make clean         remove .venv, build and caches"

demo: $(VENV)/.kvik
	$(BIN)/kvik generate --echo --seed 7 --max-tokens 200 "Once upon a time"

# Tests start hundreds of processes: without bytecode each would compile the package again. A worker
# takes 1.3 GiB of memory, and one of them 3 more for a while.
WORKERS ?= 2
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
test: $(VENV)/.kvik-test
	$(PYTEST)

test-full: $(VENV)/.kvik-test
	$(PYTEST) --tier=full

test-nightly: $(VENV)/.kvik-test
	$(PYTEST) --tier=nightly --timeout=3000 --fuzz-seconds=300

check: $(VENV)/.kvik-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q --tier=check
	$(BIN)/python tools/mutants.py --check
	$(BIN)/python tools/size.py

bench: $(VENV)/.kvik
	for verb in latency throughput startup batching techniques; do $(BIN)/kvik bench $$verb || exit 1; done

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .hypothesis dist

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "kvik needs Python 3.11 or newer: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp for each set of dependencies; a change of what it stands for installs again. Where nothing
# can compile csrc/, kvik is installed without its native kernels, and says so when it runs.
$(VENV)/.build-tools: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) cmake nanobind ninja scikit-build-core
	@touch $@

$(VENV)/.kvik: $(KVIK)
	$(INSTALL_KVIK) .
	@touch $@

$(VENV)/.kvik-test: $(KVIK)
	$(INSTALL_KVIK) '.[test]'
	@touch $@

$(VENV)/.kvik-dev: $(KVIK)
	$(INSTALL_KVIK) '.[test,dev]'
	@touch $(VENV)/.kvik $(VENV)/.kvik-test $@
