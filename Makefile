# The commands of this repository. They need make and Python 3.11 or newer; the rest is installed into $(VENV).
# A second run skips what is done: each environment has a stamp file that depends on pyproject.toml and constraints.txt.

VENV ?= .venv
CACHE ?= .cache
# Interpreters, tried in this order; CI's is first. To choose one: make test PYTHON=python3.12 VENV=.venv-3.12
PYTHON ?= python3.11 python3 python3.12 python3.13
# Test processes. More pytest options: make test PYTEST_ARGS="-x -k partial"
JOBS ?= 2
PYTEST_ARGS ?=

BIN = $(VENV)/bin
GGUF = $(CACHE)/SmolLM2-135M-Instruct.Q4_1.gguf
CHECKPOINT = $(CACHE)/smollm2

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-smoke check format clean
.PRECIOUS: $(VENV)/.installed-%

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r target text; do \
	    printf '%-18s %s\n' "$$target" "$$text"; done

demo: $(VENV)/.installed-demo ## download a small Llama, convert it, ask it a question on eight simulated devices
	@echo "==> fetch: download the demo model, 93 MB (about half a minute; skipped if done before)"
	@$(BIN)/python -m treering.infer.demo fetch --cache $(CACHE) >/dev/null
	@if [ -e $(CHECKPOINT)/model.json ]; then \
	    echo "==> convert: skipped, since $(CHECKPOINT) exists"; \
	else \
	    echo "==> convert: the GGUF file to a checkpoint in $(CHECKPOINT) (about half a minute)"; \
	    $(BIN)/treering convert $(GGUF) $(CHECKPOINT); \
	fi
	@echo "==> generate: on 8 simulated CPU devices, the KV cache sharded over all (about half a minute, mostly compiling)"
	@$(BIN)/treering generate $(CHECKPOINT) --chat --prompt "What is the capital of France?" \
	    --cpu-devices 8 --mesh.context 8

# $(call pytest,TIER,OPTIONS): one tier of tests. Exit status 5 says that no test was selected: a message, no failure.
define pytest
@status=0; $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(2) $(PYTEST_ARGS) || status=$$?; \
if [ $$status -eq 5 ]; then echo "==> $(1): no test was selected"; exit 0; fi; exit $$status
endef

test: $(VENV)/.installed-dev ## the default tests (ten to fourteen minutes on two cores)
	@echo "==> test: the default tests in $(JOBS) processes (ten to fourteen minutes on two cores)"
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

test-long: $(VENV)/.installed-dev ## the long tests (about a quarter of an hour)
	@echo "==> test-long: the tests marked long in $(JOBS) processes (about a quarter of an hour on two cores)"
	$(call pytest,test-long,-m long)

test-smoke: $(VENV)/.installed-test ## a few quick tests that touch every part; the only ones that need no torch
	@echo "==> test-smoke: the tests marked smoke (a minute or two)"
	$(call pytest,test-smoke,-m smoke)

check: $(VENV)/.installed-dev ## format, lint, types, import directions (about a minute)
	@echo "==> check: format, lint, types, import directions (about a minute)"
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	PYTHONPATH=. $(BIN)/lint-imports

format: $(VENV)/.installed-dev ## rewrite the files as `make check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environments and the cache
	rm -rf .venv* .cache

# -qq: errors only. An environment without a working pip, as a killed run leaves it, is created again.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    found=; \
	    for python in $(PYTHON); do \
	        if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	            found=$$python; break; \
	        fi; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo "Python 3.11 or newer is needed, and none of these is: $(PYTHON)." >&2; \
	        echo "Install it, or give its path: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; \
	        exit 2; \
	    fi; \
	    echo "==> environment: $(VENV), from $$found ($$("$$found" -V))"; \
	    "$$found" -m venv --clear $(VENV) || { \
	        echo "$$found cannot create a virtual environment: on Debian and Ubuntu, install python3-venv." >&2; exit 2; }; \
	fi
	@echo "==> install: treering[$*] and its dependencies into $(VENV) (one to three minutes)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@
