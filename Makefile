# Two commands on a fresh machine: `make demo` and `make test`. Everything is installed into .venv, nothing else is touched.
#
#   make demo      install, then the main job end to end on whatever this machine has (about two minutes)
#   make demo-full the same with a thorough calibration and longer runs (about five minutes)
#   make test      install, then the tests
#   make test-all  the slow tests too
#   make check     what CI runs: ruff, mypy --strict, make test
#   make bench     speed of the engines
#   make bench-quick  every benchmark once with small sizes: does it run? (part of make test-all)
#   make fuzz      100,000 damaged files of every kind, within FUZZ_SECONDS=3600
#   make chaos     200 faults at random moments of real runs, within CHAOS_SECONDS=7200
#   make mutants   break a copy in 83 places: do the named tests notice? (about 10 CPU minutes)
#   make docs      the documentation as a site in site/
#   make results   every experiment, and experiments/RESULTS.md (hours; DATA=folder of published tables)
#   make results-quick  small versions of the experiments within five minutes: does all run?
#   make gpu       wheels and commands for a machine with a GPU and without a network (MINUTES=15)
#   make test-gpu  the tests that need a GPU
#   make real      contracts with real packages, each in an environment of its own (a network, some minutes)
#   make format    let ruff rewrite what it can of what `make check` complains about
#   make clean     remove .venv and all caches
#
# PYTHON=/path/to/python chooses the interpreter the environment is made of, WORKERS=4 the number of test processes.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.parsim-installed
WORKERS ?= 2
MINUTES ?= 15
FUZZ_SECONDS ?= 3600
CHAOS_SECONDS ?= 7200
# One thread per process: the tests use the cores by running in several processes.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest
PYTHONS := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python
SPREAD := -n $(WORKERS) --dist loadgroup

.PHONY: help setup demo demo-full test test-all test-gpu real check bench bench-quick results results-quick fuzz chaos mutants docs gpu format clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	@.ci/install $(VENV) $(STAMP)

demo: $(STAMP)
	@$(BIN)/parsim demo

demo-full: $(STAMP)
	@$(BIN)/parsim demo --full

test: $(STAMP)
	$(PYTEST) $(SPREAD) tests

test-all: $(STAMP)
	$(PYTEST) $(SPREAD) -m "" tests

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

test-gpu: $(STAMP)
	$(PYTEST) -n 0 -m gpu tests

real: $(STAMP)
	$(PYTEST) -n 0 -m real tests/real

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

fuzz: $(STAMP)
	$(PYTHONS) -m tests.fuzz.fuzzing --count 100000 --seconds $(FUZZ_SECONDS) --record tests/fuzz/results.jsonl

chaos: $(STAMP)
	$(PYTHONS) -m tests.chaos.chaos --count 200 --seconds $(CHAOS_SECONDS) --record tests/chaos/results.jsonl

mutants: $(STAMP)
	$(PYTHONS) -m tools.mutants

bench bench-quick: $(STAMP)
	@for file in benchmarks/bench_*.py; do $(BIN)/python $$file $(if $(filter bench-quick,$@),--quick) || exit 1; done

results results-quick: $(STAMP)
	$(PYTHONS) experiments/results.py $(if $(filter results-quick,$@),--quick,$(if $(DATA),--data $(DATA)))

gpu: $(STAMP)
	@$(BIN)/python experiments/one_gpu/prepare.py --minutes $(MINUTES)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build site .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
