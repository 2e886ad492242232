# make demo    set up .venv with foretoken alone, fetch SmolLM2 (93 MB), let it answer, compare with plain decoding;
#              offline with the bundled pair of models
# make test    set up the rest, the lab included, then everything that must hold before a change lands
#
# Variables:  PYTHON=python3.12             the interpreter that makes .venv (3.10 or newer)
#             PIP_EXTRA="--extra-index-url https://download.pytorch.org/whl/cpu"
#                                           more options for pip; this one takes the small CPU build of torch on Linux
#             PROMPT="..." METHODS=none,suffix
#                                           what `make demo` asks and compares, `make bench` compares
#             WORKERS=4                     processes that share the tests; models are loaded once in each
#             PACKAGE=core.tree             what `make mutants` changes: core, verifiers, engine, or a module of theirs

PYTHON ?= python3
PIP_EXTRA ?=
PROMPT ?=
METHODS ?=
WORKERS ?= 2
PACKAGE ?= core

BIN := .venv/bin
PRODUCT := .venv/.product
STAMP := .venv/.stamp
# the variables hold for what pip builds a package with; which of the two it reads depends on its version
PIP := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help product setup demo bench fix check types style test test-all wheel release-check mutants clean

help:
	@echo "make demo    let SmolLM2 answer (93 MB; offline: the bundled pair), then compare with plain decoding"
	@echo "make test    every check and every test (ten minutes on two cores)"
	@echo "make test-all the same, with every method under every rule in every variant, and the long tests (an hour)"
	@echo "make check   lint, format, types, imports, spelling"
	@echo "make fix     let ruff repair what it can, and write the tables of the documentation"
	@echo "make bench   all methods over the bundled suite, report in bench-report/"
	@echo "make wheel   a wheel in dist/, the native decoder compiled for this kind of machine (a minute)"
	@echo "make release-check  all that can be checked before a tag: tests, site, wheel, source archive"
	@echo "make mutants change PACKAGE line by line, and list the changes that no test notices (hours; not in CI)"
	@echo "make clean   remove .venv, caches and reports"

product: $(PRODUCT)
setup: $(STAMP)

# torch first: pip then keeps that build, whatever the others ask for
$(PRODUCT): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed: make PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (a minute or more)"
	@$(PIP) $(PIP_EXTRA) torch
	@$(PIP) $(PIP_EXTRA) -e .
	@touch $@

# foretoken with the tools of its developers, and the lab
$(STAMP): $(PRODUCT) lab/pyproject.toml
	@echo "installing the developers' tools and the lab (a minute or more)"
	@$(PIP) $(PIP_EXTRA) -e ".[dev]" -e "./lab[retrieval]"
	@touch $@

# needs foretoken alone
demo: product
	@scripts/demo.sh $(BIN) "$(PROMPT)" "$(METHODS)"

bench: setup
	mkdir -p bench-report
	$(BIN)/foretoken bench --model zoo:base --methods $(or $(METHODS),none,auto,draft_model,ngram,suffix) --out bench-report/bench.json --report bench-report/bench.html

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python scripts/tables.py
	$(BIN)/python scripts/records.py

check: setup
	@$(MAKE) --no-print-directory --output-sync=line -j 2 types style

types:
	$(BIN)/mypy

style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python scripts/check_words.py

# a file stays with one process, which loads its models once; in their order, so that the long files of behaviour and
# golden tests come first and no process waits at the end for one that another began late
PYTEST := $(BIN)/pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# pytest comes last: its closing line is the result
test: check
	$(PYTEST)

test-all: check
	$(PYTEST) --all-variants -m "not network"

wheel: setup
	$(BIN)/python -m pip wheel --no-deps -w dist .

# a source archive must build the same wheel, and the site must have no broken link
release-check: test
	@$(PIP) -e ".[docs]" build
	$(BIN)/mkdocs build --strict --quiet --site-dir build/site
	rm -rf build/release && $(BIN)/python -m build --outdir build/release .
	$(BIN)/python -m venv build/release/fresh
	PIP_CONSTRAINT=constraints.txt build/release/fresh/bin/python -m pip install --quiet $(PIP_EXTRA) torch build/release/*.whl
	build/release/fresh/bin/foretoken generate "Anna has 15 apples and eats 4. How many are left?" --max-tokens 32
	@echo "ready: tag it v$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("foretoken"))')"

# the first run collects which test reaches which function; later ones go on where they were stopped
mutants: setup
	@$(PIP) -e ".[mutants]"
	OMP_NUM_THREADS=1 $(BIN)/mutmut run --max-children $(WORKERS) "foretoken.$(PACKAGE)*"
	$(BIN)/mutmut results

clean:
	rm -rf .venv mutants build dist bench-report .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests lab -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info lab/src/*.egg-info
