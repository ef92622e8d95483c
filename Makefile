# Every command sets itself up: it creates .venv where it is missing and installs the pinned dependencies into it.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
MODULES := $(subst /,.,$(patsubst src/%.py,%,$(filter-out %__init__.py,$(wildcard src/*/*/*.py))))

.PHONY: help demo test wheel docs prove bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    fit the diabetes data, compare with simpler models, write report.html and diabetes.safetensors"
	@echo "make test    run the test suite, ruff and mypy"
	@echo "make wheel   build the wheel, install it into a clean environment and run the examples of all pages there"
	@echo "make docs    build the API reference from the docstrings into site/"
	@echo "make prove   run the long proofs, the mutants and the random starts, and write docs/proofs.md (hours)"
	@echo "make bench   time a training step against GPyTorch and the paper's algorithm, products and the distributions (20 minutes)"
	@echo "make clean   remove .venv and every cache"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "deepwishart needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Setting up .venv (a minute or two, once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

demo: $(READY)
	@$(BIN)/deepwishart demo --force

test: $(READY)
	@$(BIN)/python -m pytest

# Outside of the repository nothing but the wheel can be imported.
wheel:
	@rm -rf dist .venv-wheel
	@$(PYTHON) -m venv .venv-wheel
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
		.venv-wheel/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@PIP_CONSTRAINT=constraints.txt .venv-wheel/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	@.venv-wheel/bin/python tests/run_examples.py README.md docs/*.md
	@.venv-wheel/bin/deepwishart --version

docs: $(READY)
	@$(BIN)/python -c "import sys, deepwishart as d, pdoc.__main__ as p; [getattr(d, name) for name in d.__all__]; \
		p.cli(sys.argv[1:])" --docformat google --math --output-directory site deepwishart $(MODULES)
	@echo "Wrote site/index.html"

prove: $(READY)
	@$(BIN)/python -m pytest --prove
	@$(BIN)/python -m tests.mutants
	@$(BIN)/python -m tests.random_starts

bench: $(READY)
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[bench]"
	@PYTHONPATH=. $(BIN)/python benchmarks/step_time.py
	@$(BIN)/python benchmarks/products.py
	@$(BIN)/python benchmarks/distributions.py

clean:
	rm -rf .venv .venv-wheel dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
