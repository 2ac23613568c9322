# One command file; CI runs the same targets.
PYTHON ?= python3
SEEDS ?= 50
DURATION ?= 60
WORKERS ?= 3
BIN := .venv/bin
STAMP := .venv/.installed
PYTEST := $(BIN)/python -m pytest
PEERS := .venv-peers/bin
PEERS_STAMP := .venv-peers/.installed
DELETION_RACES := tests/contracts/test_deletion_races.py
CODE := src tests $(wildcard examples benchmarks docs)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-system coverage check format bench bench-peers sim mutants chaos notify chat chief eval clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv with the pinned dependencies and this project (PYTHON=python3.13)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: install ## Run the freight demo (POSTGRES=1: on an embedded Postgres)
	$(BIN)/postroad demo $(if $(filter-out 0,$(POSTGRES)),--postgres)

test: install ## Run the tests, then the contracts on the standard library's SQLite (ARGS='-k outbox')
	POSTROAD_TEST_SQLITE=bundled $(PYTEST) -n $(WORKERS) --dist loadgroup --ignore tests/system --ignore tests/races \
		--ignore $(DELETION_RACES) $(ARGS)
	@if [ -d tests/contracts ] && [ -z "$(ARGS)" ]; then set -x; \
		POSTROAD_TEST_SQLITE=stdlib $(PYTEST) -n $(WORKERS) --dist loadgroup tests/contracts \
			--ignore tests/contracts/test_crash_everywhere.py --ignore $(DELETION_RACES) \
			-k 'sqlite and not atransact and not run_sync and not Interleavings and not ReportsMeetEnds'; fi

test-system: install ## Run what takes real processes, kills and stalls, two versions on one database, and every race
	POSTROAD_TEST_SQLITE=bundled $(PYTEST) -n $(WORKERS) --dist loadgroup tests/system tests/races $(DELETION_RACES) $(ARGS)

coverage: install ## Measure branch coverage (coverage loads the standard library's SQLite, so the tests use it too)
	POSTROAD_TEST_SQLITE=stdlib $(BIN)/coverage run -m pytest --ignore tests/system --ignore tests/races $(ARGS)
	$(BIN)/coverage report

check: install ## Lint, format check, types, floors, style ratchet
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy src $(wildcard tests/typing)
	$(BIN)/lint-imports
	$(PYTEST) tests/style

format: install ## Format the code and repair what the linter can
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: install ## Run the benchmarks (JSON=1: print JSON)
	$(BIN)/python -m benchmarks $(if $(filter-out 0,$(JSON)),--json)

bench-peers: $(PEERS_STAMP) ## Measure Postroad beside other queues, in .venv-peers (JSON=1, ARGS='--rounds 5')
	$(PEERS)/python -m benchmarks.peers $(if $(filter-out 0,$(JSON)),--json) $(ARGS)

$(PEERS_STAMP): pyproject.toml benchmarks/peers/requirements.txt benchmarks/peers/constraints.txt
	test -x $(PEERS)/python || $(PYTHON) -m venv .venv-peers
	$(PEERS)/python -m pip install --quiet --disable-pip-version-check -c benchmarks/peers/constraints.txt \
		-r benchmarks/peers/requirements.txt -e '.[demo]'
	@touch $@

sim: install ## Run the seeded simulation (SEEDS=500)
	$(BIN)/python -m postroad.testing.simulation --seeds $(SEEDS)

mutants: install ## Plant bugs and see how soon the simulation finds each (JSON=1: print JSON)
	$(BIN)/python -m postroad.testing.simulation --mutants $(if $(filter-out 0,$(JSON)),--json)

chaos: install ## Kill, stop and rob real processes of their databases, and check everything (DURATION=60 SEED=1)
	$(BIN)/python -m postroad.testing.chaos --duration $(DURATION) $(if $(SEED),--seed $(SEED)) $(ARGS)

notify: install ## Run the notifying example in a folder of its own
	folder=$$(mktemp -d) && cd $$folder && $(CURDIR)/$(BIN)/python $(CURDIR)/examples/notify/notify.py; rm -rf $$folder

chat: install ## Serve the chat in a folder of its own, on loopback (PORT=8087)
	folder=$$(mktemp -d) && trap 'rm -rf $$folder' EXIT && cd $$folder && \
		$(CURDIR)/$(BIN)/python $(CURDIR)/examples/chat/web.py $(PORT)

chief: install ## Play half a minute in the chief's room, in a folder of its own
	folder=$$(mktemp -d) && cd $$folder && $(CURDIR)/$(BIN)/python $(CURDIR)/examples/chief/chief.py; rm -rf $$folder

eval: install ## Run the freight scenarios
	$(BIN)/postroad eval examples/freight/scenarios/*.yaml

clean: ## Remove what was built, the environment too
	rm -rf .venv .venv-peers build dist .coverage .coverage.* htmlcov
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
