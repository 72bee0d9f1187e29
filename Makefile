# make demo, make test, make docs: from a fresh clone, with nothing but python3 (3.11 or newer) and a package registry.
PYTHON ?= python3
BIN := .venv/bin
unexport PYTHONDONTWRITEBYTECODE  # every process would compile every module

.PHONY: demo test test-all docs install

demo: install
	$(BIN)/python examples/demo.py

test: install
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# With further models of what the others show.
test-all: install
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --long

# The guides, as pages in site/. Quiet, it would count no warnings.
docs: install
	$(BIN)/mkdocs build --strict

install: .venv/installed

# torch comes first and by its exact version: a resolver left to choose may take a build with gigabytes of CUDA. What is
# imported is compiled then: to compile all 13,000 modules beforehand took two thirds of the installation.
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-compile -e '.[diffusers,examples,report,serve,docs,dev]'
	touch $@
