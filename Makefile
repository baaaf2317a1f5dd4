# Every target installs what it needs: `make demo` and `make test` work on a fresh machine with
# Python 3.10 or newer. Stamp files in .venv record what is installed, so a second run is quick.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCHRUN := $(BIN)/python -m torch.distributed.run --standalone --shutdown-timeout 300
RECIPE ?= recipes/demo.yaml
# Three test files at a time, the longest first (conftest.py), keep two cores busy: some wait.
THREE_AT_ONCE := -n 3 --dist loadfile --no-loadscope-reorder
SGLANG_CPU := sglang==0.5.21 xgrammar==0.2.7 compressed-tensors==0.18.0
TE_PYTHON := transformer-engine==2.11.0 onnxscript==0.5.6 onnx==1.23.2 onnx_ir==1.1.0 ml_dtypes==0.6.0
SGLANG_COMPAT := extras/sglang_cpu
EXTRAS := extras/simulate extras/migrate extras/reward_server extras/sandbox

.PHONY: help demo test pytest lint format docs schema attacks verl-flags recipes constraints sglang-cpu slurm browser soak trl clean

help:
	@echo "make demo        train a small model by PPO on two processes (about five minutes)"
	@echo "make test        run lint and all tests"
	@echo "make lint        run ruff (rules and format) and pyright (types)"
	@echo "make format      reformat the code with ruff, and correct links to lines in the documentation"
	@echo "make docs        build the documentation as a site in build/docs"
	@echo "make schema      write docs/recipe.schema.json and docs/recipe_reference.md from mppo/recipe/sections"
	@echo "make attacks     print docs/attacks.md from the rows of tests/attacks"
	@echo "make verl-flags  write verl's flags into docs/migrating.md from tests/verl_flags"
	@echo "make recipes     write the tables of docs/recipes.md from the recipes' headers"
	@echo "make constraints write constraints.txt, the versions of this environment"
	@echo "make soak        kill and resume a run at random for ten minutes"
	@echo "make sglang-cpu  install SGLang for the CPU into the environment"
	@echo "make slurm       install Slurm for the cluster tests (Debian, as root)"
	@echo "make browser     install Chromium for the tests of the report (Debian, as root)"
	@echo "make trl         make an environment with TRL for benchmarks/ppo_step.py"
	@echo "make clean       remove the environments"

demo: $(VENV)/.mppo
	OMP_NUM_THREADS=1 $(TORCHRUN) --nproc_per_node=2 mppo/train.py --config $(RECIPE)

# Types are checked beside the first tests.
test: $(VENV)/.test slurm browser
	@$(MAKE) --no-print-directory --jobs=2 lint pytest

# Some hundred processes of the tests import mppo, and may not be allowed to store its bytecode.
pytest: $(VENV)/.test
	$(BIN)/python -m compileall -q mppo checkpoints_convert extras tests
	env -u MAKEFLAGS OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
	  $(BIN)/python -m pytest $(THREE_AT_ONCE) --durations=15

# The types of optional packages are checked too.
lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python tests/support/line_links.py

schema: $(VENV)/.mppo
	$(BIN)/python -m mppo.recipe.load --json-schema > docs/recipe.schema.json
	$(BIN)/python -m mppo.recipe.reference > docs/recipe_reference.md

# Warnings are errors: a broken link between pages ends the build.
docs: $(VENV)/.docs
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -b html docs build/docs
	@echo "open build/docs/index.html"

attacks: $(VENV)/.test
	@PYTHONPATH=tests:tests/support $(BIN)/python -m attacks.document

verl-flags: $(VENV)/.test
	PYTHONPATH=tests:tests/support $(BIN)/python -m verl_flags.document

soak: $(VENV)/.mppo
	$(BIN)/python benchmarks/soak.py

recipes: $(VENV)/.test
	PYTHONPATH=tests/support $(BIN)/python -m recipe_table

constraints: $(VENV)/.test
	$(BIN)/python tests/support/constraints.py > constraints.txt

sglang-cpu: $(VENV)/.sglang

trl: $(VENV)-trl/.trl

# Debian's Slurm for the cluster tests, if root can install it; otherwise they are skipped with a reason.
slurm:
	@command -v slurmctld >/dev/null || ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ] || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null; } || \
	  echo "Slurm could not be installed; its tests will be skipped"

# Debian's Chromium for the tests of the report, if root can install it; otherwise they are skipped.
browser:
	@command -v chromium >/dev/null || ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ] || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; } || \
	  echo "Chromium could not be installed; the tests of the report's page will be skipped"

clean:
	rm -rf $(VENV) $(VENV)-trl

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "cannot make $(VENV): on Debian, apt-get install python3-venv"; exit 1; }

$(VENV)/.mppo: pyproject.toml | $(VENV)/bin/python
	@echo "installing into $(VENV) (once)"
	$(PIP) -e ".[cpu,agents]"
	@touch $@

$(VENV)/.lint: pyproject.toml | $(VENV)/bin/python
	$(PIP) "ruff>=0.12" "pyright[nodejs]==1.1.414"
	@touch $@

$(VENV)/.sglang: $(SGLANG_COMPAT)/pyproject.toml $(SGLANG_COMPAT)/requirements.txt | $(VENV)/.mppo
	$(PIP) -r $(SGLANG_COMPAT)/requirements.txt
	$(PIP) --no-deps $(SGLANG_CPU) ./$(SGLANG_COMPAT)
	@touch $@

# Transformer Engine's Python, whose compiled part the simulation replaces; not importable as is.
$(VENV)/.te: | $(VENV)/bin/python
	$(PIP) --no-deps --upgrade --target $(VENV)/te $(TE_PYTHON)
	@touch $@

$(VENV)/.test: pyproject.toml $(EXTRAS:=/pyproject.toml) $(VENV)/.mppo $(VENV)/.sglang $(VENV)/.te $(VENV)/.lint $(VENV)/.docs
	$(PIP) -e ".[cpu,agents,mpi,rewards,parquet,plan,tensorboard,wandb,mlflow,swanlab,dev]" \
	  $(addprefix -e ./,$(EXTRAS))
	@touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.mppo
	$(PIP) -e ".[cpu,docs]"
	@touch $@

# TRL 1.12 is the last with a PPOTrainer.
$(VENV)-trl/.trl:
	$(PYTHON) -m venv $(VENV)-trl
	$(VENV)-trl/bin/python -m pip install --quiet --disable-pip-version-check \
	  torch==2.13.0 trl==1.12.0 transformers==5.12.1 accelerate datasets
	@touch $@
