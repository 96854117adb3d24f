# Needs Python 3.11 to 3.13, pip and make; everything else is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# With an NVIDIA GPU, pip chooses torch. Without one, the pinned CPU build is installed before anything
# else, because a torch that pip resolves by itself brings gigabytes of CUDA packages.
GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

# Files of tests that start ranks run three at a time: ranks wait for each other for much of their time.
TESTS := tests/unit
RANKS := tests/distributed tests/peers
ifeq ($(GPU),yes)
  RANKS += tests/gpu
  SELECT := -m "not nightly and not stress"
else
  CONSTRAINTS := -c constraints-cpu.txt
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help env demo test lint types contracts pytest nightly stress slurm plugins ray kubernetes sky site dist format

help: ## print this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

env: $(VENV)/.dev ## create .venv with everything for development

demo: $(VENV)/.demo ## install, then train on photos without and with balancing
	$(BIN)/bascule bench --photos "$$($(BIN)/python -c 'from pathlib import Path; import skimage; print(Path(skimage.__file__).parent / "data")')"

test: lint types contracts pytest ## install, then lint, types, import contracts and tests

lint: $(VENV)/.dev ## ruff: rules and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.dev ## pyright
	$(BIN)/pyright

contracts: $(VENV)/.dev ## import-linter: which package may import which
	$(BIN)/lint-imports --no-logo

pytest: $(VENV)/.dev ## what proves numbers, refusals and failures; where there is a GPU, on it too
	OMP_NUM_THREADS=1 $(BIN)/pytest $(SELECT) --numprocesses 2 $(TESTS)
	$(BIN)/pytest $(SELECT) --numprocesses 3 --dist loadfile --no-loadscope-reorder $(RANKS)

nightly: $(VENV)/.dev ## commands, guides, examples, scripts and hosts of plug-ins, as users start them
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "nightly and not stress" --numprocesses 2 --dist loadfile

stress: $(VENV)/.dev ## the tests that take minutes, and the cases that pytest leaves out
	$(BIN)/pytest -m stress --timeout 1800

SLURM := slurmctld slurmd slurm-client
slurm: $(VENV)/.dev ## the files of examples/slurm, on a Slurm of two nodes on this machine (Debian, root)
	@type slurmctld slurmd sbatch >/dev/null 2>&1 || { \
	  apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $(SLURM); } || { \
	  echo "make slurm: Slurm is not installed; as root of Debian: apt-get install $(SLURM)"; exit 1; }
	$(BIN)/pytest -m stress tests/slurm

# Trainers pin versions that exclude each other, so each has an environment of its own.
HOSTS := $(patsubst tests/plugins/pins/%.txt,%,$(wildcard tests/plugins/pins/*.txt))
plugins: $(HOSTS:%=plugins-%) ## the adapters, each with its trainer in .venv-plugins; or plugins-NAME

ray: plugins-ray ## Ray Train and Ray Serve on a local cluster of two nodes

.PRECIOUS: $(VENV)-plugins/%/.made
plugins-%: $(VENV)-plugins/%/.made
	$(VENV)-plugins/$*/bin/python -m pytest -o filterwarnings= tests/plugins/test_$*.py

$(VENV)-plugins/%/.made: tests/plugins/pins/%.txt constraints-cpu.txt pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --no-deps --retries 1 --extra-index-url $(TORCH_CPU_INDEX) \
	  $$(grep '^torch==' constraints-cpu.txt)
	$(@D)/bin/python -m pip install -r $< -e . pytest pytest-timeout
	@touch $@

# What checks files for clusters pins versions of its own, too; nothing of it starts a cluster.
kubernetes: $(VENV)-kubernetes/.made ## manifests, chart and Dockerfile, by the tools of their platforms
	$(VENV)-kubernetes/bin/python -m pytest -o filterwarnings= tests/kubernetes

sky: $(VENV)-sky/.made ## tasks of SkyPilot, by its own parser
	$(VENV)-sky/bin/python -m pytest -o filterwarnings= tests/sky

$(VENV)-kubernetes/.made $(VENV)-sky/.made: $(VENV)-%/.made: tests/%/pins.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet -r $<
	@touch $@

site: $(VENV)/.dev ## the documentation as a site, with all of the API: results/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A Python is the PATH's or pyenv's; else uv, which comes from the package index, knows or fetches one.
PYTHONS ?= 3.11 3.12 3.13
UV := $(VENV)-dist/build/bin/uv
FIND = PYENV_VERSION=$$version python$$version -c 'import sys; print(sys.executable)' 2>/dev/null \
  || $(UV) python find --no-project $$version 2>/dev/null \
  || { $(UV) python install --quiet $$version && $(UV) python find --no-project $$version; }

dist: ## wheel and sdist in dist/; the wheel's demo and unit tests with each of PYTHONS, in .venv-dist
	rm -rf dist $(VENV)-dist
	$(PYTHON) -m venv $(VENV)-dist/build
	$(VENV)-dist/build/bin/python -m pip install --quiet build uv
	$(VENV)-dist/build/bin/python -m build
	@for version in $(PYTHONS); do \
	  if python=$$($(FIND)); then $(MAKE) --no-print-directory dist-$$version PYTHON=$$python || exit 1; \
	  else echo "NOT TESTED with Python $$version: it is not on this machine, and uv cannot fetch it"; fi; \
	done
	@ls $(VENV)-dist/*/.passed  # at least one

# Unit tests are the checkout's; `bascule` is the wheel's.
dist-%:
	$(PYTHON) -m venv --clear $(VENV)-dist/$*
	$(VENV)-dist/$*/bin/python -m pip install --no-deps --retries 1 --extra-index-url $(TORCH_CPU_INDEX) \
	  $$(grep '^torch==' constraints-cpu.txt)
	$(VENV)-dist/$*/bin/python -m pip install --quiet $(CONSTRAINTS) "$$(echo dist/*.whl)[dev]"
	$(VENV)-dist/$*/bin/python -m pytest tests/wheel
	OMP_NUM_THREADS=1 $(VENV)-dist/$*/bin/python -m pytest --numprocesses 2 tests/unit
	@touch $(VENV)-dist/$*/.passed

format: $(VENV)/.dev ## let ruff fix and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Some systems ship Python without ensurepip; then the system's pip fills the environment.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(VENV) install pip; }

$(VENV)/.torch: constraints-cpu.txt | $(BIN)/python
ifneq ($(GPU),yes)
	$(PIP) install --no-deps --retries 1 --extra-index-url $(TORCH_CPU_INDEX) \
	  $$(grep '^torch==' constraints-cpu.txt)
endif
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "Installing bascule[demo] into $(VENV)"
	@$(PIP) install --quiet $(CONSTRAINTS) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "Installing bascule[dev] into $(VENV)"
	@$(PIP) install --quiet $(CONSTRAINTS) -e '.[dev]'
	@$(PIP) install --quiet --no-deps HolisticTraceAnalysis==0.5.0  # its parser alone; it asks for jupyterlab
	@touch $(VENV)/.demo $@
