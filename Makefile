# `make` alone lists the targets. Each one does its own set-up; nothing but Python >= 3.11 and make is needed.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
MEMBERS := sdk protos scheduler service gpu_workers tests
PROJECTS := pyproject.toml $(MEMBERS:%=%/pyproject.toml)
SOURCES := $(MEMBERS) bench examples tools
PYTEST := $(BIN)/python -m pytest
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo demo-sft demo-dpo demo-rl test test-slow check protos openapi bench install fmt ratchet clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z -]+:.*## / {printf "  make %-26s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: install ## SFT → DPO → RL on a real model, each from the last checkpoint, from the SDK to the bill (OUT=folder)
	$(BIN)/python examples/demo.py $(if $(OUT),--out $(OUT))

demo-sft demo-dpo demo-rl: install ## one of them alone, from the base model
	$(BIN)/python examples/demo.py $(@:demo-%=%) $(if $(OUT),--out $(OUT))

test: install ## every test that is not slow, in two lanes: first the units, then the real processes
	$(PYTEST) tests -m "not slow and not e2e" -n 2 --dist loadfile -q
	$(PYTEST) tests -m "e2e and not slow" -n 2 --dist loadfile -q

test-slow: install ## the tests that need longer
	@$(PYTEST) tests -m slow -q; code=$$?; \
	if [ $$code -eq 5 ]; then echo "no test is marked slow yet"; else exit $$code; fi

check: install ## lint, types, import contracts, generated code, architecture, scheduler and SDK tests (< 60 s)
	@tools/check.sh $(BIN) $(SOURCES)

protos: install ## regenerate the gRPC messages
	$(BIN)/python protos/generate.py

openapi: install ## write docs/openapi.json anew
	$(BIN)/python -m finery_service.openapi_file docs/openapi.json

bench: install bench/.venv/.ready ## all benchmarks, or ONLY=name (ARGS="its options"); appends to bench/results.json
	$(BIN)/python bench/run.py $(ONLY) $(ARGS)

install: $(VENV)/.members ## the virtual environment with all dependencies and all members, editable

fmt: install ## format and fix what can be fixed
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

ratchet: install ## record sizes that fell in tests/architecture/ratchet.json
	$(BIN)/python tests/architecture/sizes.py

clean: ## remove the environment, caches and output
	rm -rf $(VENV) .mypy_cache .ruff_cache .import_linter_cache .hypothesis .pytest_cache out
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# TRL lives in an environment of its own, with the same torch and transformers.
bench/.venv/.ready: tools/make_venv.sh constraints.txt bench/requirements.txt
	@tools/make_venv.sh bench/.venv
	bench/.venv/bin/python -m pip install -qq -c constraints.txt -r bench/requirements.txt
	@touch $@

$(VENV)/.python:
	@tools/make_venv.sh $(VENV)
	@touch $@

# Third-party packages first, so that our own unpublished names are never asked of an index.
$(VENV)/.packages: $(VENV)/.python constraints.txt tools/requirements.py $(PROJECTS)
	$(BIN)/python tools/requirements.py > $(VENV)/requirements.txt
	$(BIN)/python -m pip install -qq -c constraints.txt -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.members: $(VENV)/.packages
	$(BIN)/python -m pip install -qq --no-deps --no-index --no-build-isolation $(MEMBERS:%=-e %)
	$(BIN)/python -m pip check
	@touch $@
