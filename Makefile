# The commands of this project. Each of them works as the first one on a bare machine with Python 3.10+ and a C++ compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help install serve test test-clients test-exhaustive test-torch lint bench clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.ready ## prepare .venv with everything that serving needs

serve: install ## fetch the default model at first use and serve it on port 8000 (ARGS="--port 8001")
	$(BIN)/cllm serve $(ARGS)

test: $(VENV)/.ready-test ## run the whole test suite (ARGS="-k radix" for a part)
	$(BIN)/cllm pull smollm2
	$(BIN)/python -m pytest -m "not alone" -n auto --dist worksteal $(ARGS)
	$(BIN)/python -m pytest -m alone $(ARGS) || [ $$? -eq 5 ]  # 5: the part that was asked for has none of them

test-exhaustive: $(VENV)/.ready-test ## what `make test` takes samples of: every call fails in turn, and sanitizers
	$(BIN)/cllm pull smollm2
	CLLM_TESTS=exhaustive $(BIN)/python -m pytest -m exhaustive -n auto --dist worksteal $(ARGS)

test-clients: $(VENV)/.ready-clients ## install clients (openai, anthropic, litellm ...), and try them with the default model
	$(BIN)/cllm pull smollm2
	$(BIN)/python -m pytest tests/clients $(ARGS)

test-torch: $(VENV)/.ready-torch ## install torch, and run the tests that need it (ARGS="-k gguf" for a part)
	$(BIN)/cllm pull smollm2
	$(BIN)/python -m pytest tests/on_torch $(ARGS)

lint: $(VENV)/.ready-dev ## ruff and mypy
	$(BIN)/ruff check src tests benchmarks scripts
	$(BIN)/ruff format --check src tests benchmarks scripts
	$(BIN)/mypy

bench: $(VENV)/.ready-bench ## measure cLLM beside llama.cpp's own server (under ten minutes); bench-results/index.html
	$(BIN)/cllm bench all --json bench-results/latest.json --report bench-results $(ARGS)

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@echo "cLLM: making the virtual environment $(VENV)"
	$(PYTHON) -m venv $(VENV)

# Each stamp stands for one part of the environment, so that nothing is compiled twice, and nothing that is not needed.
$(VENV)/.ready: pyproject.toml CMakeLists.txt $(wildcard csrc/*) scripts/install.py | $(BIN)/python
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

$(VENV)/.ready-bench: $(VENV)/.ready
	$(BIN)/python scripts/install.py bench
	@touch $@
