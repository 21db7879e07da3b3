# Every target sets up what it needs in .venv by itself, and does so again only when the pins change.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests and studies start many interpreters, which import faster from bytecode; an environment for
# containers often turns that off. `__pycache__` is in .gitignore.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup study test test-slow test-engines test-faults mutants written check lint types format bench clean help

help:
	@echo "make study      compare 8 strategies on MNIST (fetches it), to a report, in ten minutes; FULL=1: whole"
	@echo "make test       the tests           make test-slow   the long ones too"
	@echo "make check      lint, types, tests  make bench       benchmarks against the peers"
	@echo "make test-engines   Slurm and other engines, as far as they are installed"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "Paceline needs Python 3.11 (set PYTHON=/path/to/python)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned packages into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,mpi,privacy,data,spark,watch,pdf,tensorboard,notebook]' >$(VENV)/pip.log 2>&1; \
	status=$$?; grep -v '^WARNING: Location' $(VENV)/pip.log; exit $$status
	@$(BIN)/python -c "import paceline.api" || { echo "the installation is incomplete: see above"; exit 1; }
	@touch $@

study: $(STAMP)
	@$(BIN)/paceline study --fetch $(if $(FULL),--full)

# Three parts at the same time. Tests that start processes run one after the other, in two processes
# with one thread each, which can be forked safely; all others run under pytest-xdist.
define in_three_parts
	@failed=0; said=$$(mktemp -d); real="$(BIN)/python -m pytest -q"; \
	$$real -m '$(1) and processes' tests/multiprocess/test_[o-z]*.py >$$said/one 2>&1 & one=$$!; \
	$$real -m '$(1) and processes' tests --ignore-glob 'tests/multiprocess/test_[o-z]*.py' \
		>$$said/two 2>&1 & two=$$!; \
	trap "kill $$one $$two 2>/dev/null; rm -rf $$said" EXIT INT TERM; \
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m '$(1) and not processes' \
		--ignore tests/multiprocess || failed=1; \
	echo "tests that start processes:"; \
	wait $$one || failed=1; cat $$said/one; \
	wait $$two || failed=1; cat $$said/two; \
	exit $$failed
endef

test: $(STAMP)
	$(call in_three_parts,not slow and not engines)

test-slow: $(STAMP)
	$(call in_three_parts,slow and not engines)
	@PACELINE_EXPLORE=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal \
		-m 'hypothesis and not slow and not engines and not processes'
	@PACELINE_EXPLORE=1 $(BIN)/python -m pytest -q \
		-m 'hypothesis and not slow and not engines and processes'

# Real engines: Slurm and the others. It installs none of them: the table at the end names those that
# were skipped, with the command that installs each.
test-engines: $(STAMP)
	@$(BIN)/python -m pytest -q -m engines tests/engines

# Resumable: started again, the trials go on with those that are missing in runs/fault-trials; the
# fuzz by parts: python tests/faults/fuzz.py --from 4000 --to 5000
test-faults: $(STAMP)
	@$(BIN)/python -m tests.faults.trials --to 1000 --jobs 3 --out runs/fault-trials
	@$(BIN)/python tests/faults/fuzz.py --from 0 --to 10000

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/mypy

format: $(STAMP)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# What is made from the code: the lists in the documentation, the signatures for editors.
written: $(STAMP)
	@PACELINE_WRITE_DOCS=1 $(BIN)/python -m pytest -q tests/test_docs.py tests/test_signatures.py

check: lint types test

mutants: $(STAMP)
	@$(BIN)/python tests/mutants.py

bench: $(STAMP)
	@$(BIN)/paceline data fetch mnist
	@$(BIN)/paceline bench strategies
	@$(BIN)/paceline bench codecs
	@$(BIN)/paceline bench balance
	@$(BIN)/paceline bench privacy

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
