# One command per job; continuous integration calls the same ones. Needs make, Python >= 3.11 with pip, and a network.
#
# make VENV=DIR uses (or creates) the environment in DIR; make PYTHON=python3.12 creates it with that interpreter;
# make VENV_FLAGS=--system-site-packages creates one that sees what is installed already, such as a torch for a GPU;
# make PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" takes the smaller torch without CUDA.

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
PIP_FLAGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS)
DEMO_PROMPT := Write a Python function that adds up the numbers of a list, and explain it.

.DEFAULT_GOAL := help
.PHONY: help demo test check lint check-slow bench clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.foredraft ## generate with the built-in model, with and without drafts
	$(BIN)/foredraft generate "$(DEMO_PROMPT)" --max-tokens 128 --compare -k 3

test: lint ## ruff, mypy and all tests but the slow ones
	@test -x /usr/bin/chromium || echo "There is no /usr/bin/chromium: the tests of the page are skipped (apt-get install chromium)"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile

check: lint ## ruff, mypy and the rules of the source tree: seconds
	$(BIN)/python -m pytest tests/test_imports.py

lint: $(VENV)/.foredraft-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check-slow: $(VENV)/.foredraft-dev ## the slow tests
	$(BIN)/python -m pytest -m slow

bench: $(VENV)/.foredraft ## speed, acceptance and prefix cache of the built-in model, to benchmarks/results/
	$(BIN)/foredraft bench speed --peers transformers-dynamic,transformers-static \
		--output benchmarks/results/speed.json
	$(BIN)/foredraft bench acceptance --output benchmarks/results/acceptance.json
	$(BIN)/foredraft bench cache --output benchmarks/results/cache.json

clean: ## remove caches and build outputs, but not the environment
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)

# torch comes first and as one version, unless there is one: for a range pip may fetch gigabytes of a newer build.
$(VENV)/.foredraft: pyproject.toml | $(BIN)/python
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) torch==2.13.0
	$(PIP) --editable .
	@touch $@

# The constraint keeps torch as it is: a newer torchvision would bring the torch that it belongs to. One that is built
# for another torch of the same version cannot be imported, and neither can transformers then: it is put apart, where
# tests/conftest.py finds it.
$(VENV)/.foredraft-dev: $(VENV)/.foredraft
	$(BIN)/python -c "import torch; print(f'torch=={torch.__version__}')" >$(VENV)/constraints.txt
	$(PIP) --constraint $(VENV)/constraints.txt --editable ".[dev]"
	@$(BIN)/python -c "import torchvision" 2>/dev/null || { \
		version=$$($(BIN)/python -c "from importlib.metadata import version; print(version('torchvision'))"); \
		$(BIN)/python -m pip uninstall --quiet --yes torchvision; \
		$(PIP) --quiet --no-deps --upgrade --target $(VENV)/apart torchvision==$$version && \
		$(BIN)/python tests/media/torchvision_operators.py $(VENV)/apart/torchvision; }
	@touch $@
