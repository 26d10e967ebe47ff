# `make demo` needs python3 (3.11 or newer) and nothing else: everything it installs goes into .venv, and the
# model into the user's cache directory.
#
# HEADRACE_VENV names a virtual environment that somebody else keeps (CI): it is used as it is, never installed into.

PYTHON ?= python3
VENV := $(or $(HEADRACE_VENV),.venv)
PY := $(VENV)/bin/python

# What was installed, and for which checkout: a new pyproject.toml or a copied environment installs again, a fresh
# `git checkout` of the same files does not.
STAMP := $(VENV)/.headrace-$(shell (cat pyproject.toml; pwd) | cksum | tr ' ' -)

# Tests run in so many processes side by side, each with a broker and a database of its own.
TEST_PROCESSES ?= 2

# The demo's stack keeps its logs and its state in the checkout.
export HEADRACE_STATE_DIR ?= $(CURDIR)/.headrace
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help venv given demo test check format stress docs clean

help: ## Show this help
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

venv: $(if $(HEADRACE_VENV),given,$(STAMP)) ## Make .venv and install Headrace into it, with everything for development

given:
	@test -x $(PY) || { echo "HEADRACE_VENV=$(HEADRACE_VENV) has no bin/python"; exit 1; }

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Headrace needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time fetches torch, which takes minutes."
	$(PY) -m pip install --quiet --editable '.[dev]'
	@rm -f $(VENV)/.headrace-* && touch $@

demo: venv ## Run the whole stack on this machine, with 64 example prompts, and show what came out
	@$(PY) -m headrace local demo examples/prompts.jsonl

test: venv ## Run all tests against Apache Kafka (or the embedded broker) and a real Postgres
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not stress" -n $(TEST_PROCESSES) --dist loadfile

stress: venv ## Run the tests that kill things
	OMP_NUM_THREADS=1 $(PY) -m pytest -m stress -n $(TEST_PROCESSES) --dist worksteal

check: venv ## Lint, formatting, types and the direction of imports
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) $(VENV)/bin/lint-imports

format: venv ## Put code into the project's format
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

docs: venv ## Write the generated pages of docs/ anew
	$(PY) -m headrace.cli.reference > docs/cli.md.new && mv docs/cli.md.new docs/cli.md
	$(PY) -m headrace.schemas.documents

clean: ## Remove what builds, tests and the demo left behind (not .venv)
	rm -rf build dist *.egg-info .headrace .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
