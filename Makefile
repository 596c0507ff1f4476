# rackwright: `make help`
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.locked

.PHONY: help rehearse test test-fast lint bench lock clean

help: ## what there is
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 14

# The locked dependencies, every one with its hash; made anew only when the lock changes.
$(STAMP): requirements/dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; run: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setting up $(VENV) from requirements/dev.lock: a minute or two"
	@(while sleep 5 && kill -0 $$$$ 2>/dev/null; do echo "  still setting up $(VENV)"; done) & tick=$$!; \
	  trap 'kill $$tick' EXIT; set -e; \
	  $(PYTHON) -m venv $(VENV); \
	  $(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/dev.lock; \
	  $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

rehearse: $(STAMP) ## the whole pipeline on this machine, no GPU needed; the service stays up
	@$(BIN)/rackwright site rehearsal -y

test: $(STAMP) ## every test: fast, real hosts, the real engine
	@$(BIN)/python -m pytest --numprocesses 2

test-fast: $(STAMP) ## pure functions and recorded outputs, under a minute
	@$(BIN)/python -m pytest --numprocesses 2 tests/unit -m "not slow"

lint: $(STAMP) ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(STAMP) ## figures as ratios and counts of one run
	@$(BIN)/python tests/bench/run.py

lock: $(STAMP) ## resolve our own dependencies anew
	@$(BIN)/uv pip compile pyproject.toml --extra hub --extra dev --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --quiet --upgrade -o requirements/dev.lock

clean: ## remove the virtual environment and caches
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
