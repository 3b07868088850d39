# The tasks of this repository. Each does its own set-up; `make help` lists them.

ARGS =
WORKERS = 2
VENV = .venv
PY = $(VENV)/bin/python
SETUP = PYTHON="$(PYTHON)" sh scripts/setup.sh
PYTEST = $(PY) -m pytest --numprocesses $(WORKERS) --dist worksteal

# matplotlib would keep its font list in the home directory.
export MPLCONFIGDIR := $(CURDIR)/.cache/matplotlib

.DEFAULT_GOAL := help
.PHONY: help setup setup-tpu setup-gpu quickstart test test-all test-oldest test-tpu test-gpu lint format docs rehearsals bench bench-trainer lock clean

help: ## List the tasks
	@echo 'usage: make TASK [ARGS="..."] [PYTHON=/path/to/python3.13]'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{ printf "  %-13s %s\n", $$1, $$2 }'

setup: ## Make .venv with the pinned packages (the other tasks do this first)
	@$(SETUP) .venv requirements/dev.txt

setup-tpu: ## Make .venv-tpu, which compiles for TPUs, too, without one
	@$(SETUP) .venv-tpu requirements/tpu.txt

setup-gpu: ## Make .venv-gpu, which compiles for NVIDIA GPUs, too, without one
	@$(SETUP) .venv-gpu requirements/gpu.txt

quickstart: setup ## Train a small model on the CPU, as 8 devices; ARGS="--num-steps 20" changes the run
	$(PY) -m train run configs/quickstart.py --platform cpu $$(sh scripts/run_dir.sh runs/quickstart $(ARGS)) $(ARGS)

test: setup ## Run the tests without the slow ones; ARGS="tests/test_conformance.py -k zigzag" picks some
	$(PYTEST) $(ARGS)

test-all: setup ## Run the slow tests, too
	$(PYTEST) -m "slow or not slow" $(ARGS)

test-oldest: VENV = .venv-oldest
test-oldest: ## Run the tests on the oldest JAX that is supported, in .venv-oldest
	@$(SETUP) .venv-oldest requirements/oldest.txt
	$(PYTEST) $(ARGS)

test-tpu: VENV = .venv-tpu
test-tpu: setup-tpu ## Run the tests that compile for a TPU, without one, in .venv-tpu
	$(PYTEST) -m "tpu and not slow" $(ARGS)

test-gpu: VENV = .venv-gpu
test-gpu: setup-gpu ## Run the tests that compile for an NVIDIA GPU, without one, in .venv-gpu (3.3 GB to download)
	$(PYTEST) -m "gpu and not slow" $(ARGS)

lint: setup ## Check style, format, types and the direction of the imports
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m pyrefly check
	$(PY) $(VENV)/bin/lint-imports --no-cache

format: setup ## Format the code and mend what ruff can mend
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

docs: setup ## Write docs/options.md from the tables in code
	$(PY) scripts/options_page.py

rehearsals: setup setup-tpu setup-gpu ## Compile the presets for their machines and write docs/rehearsals.md; ARGS="8b-1m-v5p" takes some
	$(PY) scripts/rehearsals.py $(ARGS)

bench: setup ## Time the attention against jax.nn.dot_product_attention
	$(PY) -m benchmarks.attention $(ARGS)

bench-trainer: setup ## Time the train step on 8 simulated devices against one, its data and its checkpoints
	$(PY) -m benchmarks.trainer $(ARGS)

lock: setup ## Pin the packages of pyproject.toml anew; ARGS=--upgrade takes the newest of each
	sh scripts/lock.sh $(ARGS)

clean: ## Remove the virtual environments, caches and builds; runs/ stays
	rm -rf .venv .venv-oldest .venv-tpu .venv-gpu .cache .hypothesis .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
