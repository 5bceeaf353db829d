# Targets and their text: `make`. Everything runs in .venv, which the first target that needs it makes from requirements.lock.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
CONFIG ?= configs/demo.yaml
BUILD_CONFIG ?= configs/build.yaml
GPUS ?= 1
NODES ?= 1
NODE_RANK ?= 0
MODES ?= ddp zero2
ARGS ?=
PY := .venv/bin/python
READY := .venv/.ready

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY) ## set up .venv from the lock file

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) --version) found, 3.11 or newer is needed: apt-get install python3 python3-venv, or make PYTHON=python3.11 ..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "error: the venv module is missing: apt-get install python3-venv" >&2; exit 2; }
	@$(PY) -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear .venv  # a broken one is made again
	@echo "installing into .venv (some minutes and 6 GB the first time)"
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)

demo: $(READY) ## the main job end to end: sample data, flow, training, a kill, resume, audit, report
	$(PY) -m xctrain.demo

shards: $(READY) ## build shards: SOURCE=coco-folder OUT=folder [CONFIG=...] [ARGS=...]
	@test -n "$(SOURCE)" -a -n "$(OUT)" || { echo "error: give SOURCE=folder-in-COCO-layout and OUT=folder; make shards SOURCE=data/coco OUT=data/shards" >&2; exit 2; }
	$(PY) -m pipelines build $(if $(filter command line environment,$(origin CONFIG)),$(CONFIG),$(BUILD_CONFIG)) source.root="$(SOURCE)" out="$(OUT)" $(ARGS)

train: $(READY) ## train, or go on: GPUS=4 [CONFIG=...] [ARGS="section.field=value ..."] [NODES=2 NODE_RANK=0 MASTER=host] [DRY_RUN=1]
ifeq ($(CONFIG),configs/demo.yaml)
	@test -e data/sample-shards/manifest.json || $(MAKE) --no-print-directory sample-shards
endif
	$(PY) -m xctrain launch $(CONFIG) --processes $(GPUS) $(if $(filter-out 1,$(NODES)),--nodes $(NODES) --node-rank $(NODE_RANK) --master "$(MASTER)") $(if $(DRY_RUN),--dry-run) $(ARGS)

scaling: $(READY) ## the same job on several numbers of GPUs, as a table: GPUS="1 2 4" [MODES="ddp zero2"] [CONFIG=...] [ARGS=...]
ifeq ($(CONFIG),configs/demo.yaml)
	@test -e data/sample-shards/manifest.json || $(MAKE) --no-print-directory sample-shards
endif
	$(PY) -m xctrain scaling $(CONFIG) $(ARGS) --gpus $(GPUS) --modes $(MODES)

sample-shards: $(READY) ## the sample dataset as shards in data/sample-shards
	$(PY) -m pipelines sample --out data/sample
	$(PY) -m pipelines build $(BUILD_CONFIG) source.root=data/sample out=data/sample-shards

serve: $(READY) ## Prefect server, worker and deployment on this machine [ARGS="--port 4300"]
	$(PY) -m pipelines serve $(ARGS)

test: $(READY) ## CPU tests, under 15 minutes on 2 cores
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile $(ARGS)

test-slow: $(READY) ## soak, oracle and version-range tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -m slow $(ARGS)

test-gpu: $(READY) ## tests that need a CUDA device
	$(PY) -m pytest -m gpu $(ARGS)

check: $(READY) ## format, lint, types and import rules; changes nothing
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -q tests/system/test_import_rules.py

fix: $(READY) ## auto-fix format and lint
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

golden: $(READY) ## remake the golden values; a changed one is a break, see CHANGELOG.md
	$(PY) tests/golden/remake.py

bench: $(READY) ## benchmarks, one JSON line each
	@for file in benchmarks/*.py; do $(PY) $$file || exit 1; done

.PHONY: help install demo shards train scaling sample-shards serve test test-slow test-gpu check fix golden bench
