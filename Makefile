# Every target works on a bare machine with Python 3.10+ and a C++ compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
REAL_MODELS ?= $(CURDIR)/build/real-models

.PHONY: help install serve test test-clients test-cluster test-exhaustive test-real test-slow test-torch lint bench clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.ready ## install cLLM into .venv

serve: install ## serve the default model on port 8000, and download it first if needed (ARGS="--port 8001")
	$(BIN)/cllm serve $(ARGS)

test: $(VENV)/.ready-test ## run the test suite (ARGS="-k radix" for a part of it)
	$(BIN)/cllm pull smollm2
	$(BIN)/python -m pytest -m "not alone and not slow" -n auto --dist worksteal $(ARGS)
	$(BIN)/python -m pytest -m "alone and not slow" $(ARGS) || [ $$? -eq 5 ]  # 5: ARGS selects none of them

test-slow: $(VENV)/.ready-test ## run the tests that take seconds each: many processes, long answers of real models
	$(BIN)/cllm pull smollm2
	$(BIN)/python -m pytest -m slow -n auto --dist worksteal $(ARGS)

test-exhaustive: $(VENV)/.ready-test ## run the long tests: every call fails in turn, in every way; and sanitizers
	$(BIN)/cllm pull smollm2
	EXHAUSTIVE_TESTS=1 $(BIN)/python -m pytest -m exhaustive -n auto --dist worksteal $(ARGS)

test-clients: $(VENV)/.ready-clients ## install API clients (openai, anthropic, litellm ...) and test them with the default model
	$(BIN)/cllm pull smollm2
	$(BIN)/python -m pytest tests/clients $(ARGS)

test-torch: $(VENV)/.ready-torch ## install torch and run the tests that need it (ARGS="-k gguf" for a part of them)
	$(BIN)/cllm pull smollm2
	$(BIN)/python -m pytest tests/on_torch $(ARGS)

test-real: $(VENV)/.ready-test ## fetch models with real weights (1.7 GB, once) and test with them
	$(BIN)/python scripts/real_models.py $(REAL_MODELS)
	REAL_MODELS=$(REAL_MODELS) $(BIN)/python -m pytest tests/real -s $(ARGS)

test-cluster: $(VENV)/.ready-cluster ## install Ray and run the tests of clusters, on several nodes in this machine (ARGS="-k drain")
	$(BIN)/cllm pull smollm2
	$(BIN)/python -m pytest tests/cluster $(ARGS)

lint: $(VENV)/.ready-dev ## run ruff and mypy
	$(BIN)/ruff check src tests scripts
	$(BIN)/ruff format --check src tests scripts
	$(BIN)/mypy

bench: $(VENV)/.ready-bench ## benchmark cLLM against llama.cpp's server (under ten minutes); writes bench-results/index.html
	$(BIN)/cllm bench all --json bench-results/latest.json --report bench-results $(ARGS)

clean: ## remove .venv and all build output
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@echo "cLLM: creating the virtual environment $(VENV)"
	$(PYTHON) -m venv $(VENV)

# One stamp file per part of the environment, so that nothing is compiled twice or without need.
$(VENV)/.ready: pyproject.toml CMakeLists.txt $(wildcard csrc/* csrc/bench/*) scripts/install.py | $(BIN)/python
	$(BIN)/python scripts/install.py
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/python scripts/install.py test
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready-dev
	$(BIN)/python scripts/install.py browser
	@touch $@

$(VENV)/.ready-clients: $(VENV)/.ready-dev
	$(BIN)/python scripts/install.py test-clients
	@touch $@

$(VENV)/.ready-torch: $(VENV)/.ready-dev
	$(BIN)/python scripts/install.py test-torch
	@touch $@

$(VENV)/.ready-cluster: $(VENV)/.ready-dev
	$(BIN)/python scripts/install.py cluster
	@touch $@

$(VENV)/.ready-bench: $(VENV)/.ready
	$(BIN)/python scripts/install.py bench
	@touch $@
