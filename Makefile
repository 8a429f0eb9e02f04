# make         set up .venv and run the main job: it writes haversine_mesh.png
# make check   lint, types, and the tests that need little time: three minutes on two cores
# make docs    the documents by Sphinx, with warnings as errors: build/docs/index.html
# make test    all tests that need no GPU (those that do run where there is one)
# make lint    formatting and style
# make types   mypy, strict
# make usual   usual expressions on CPU devices beside Dask's threads: fails where ours are slower
# make versions  the oldest and the newest Python, Dask and NumPy: it writes docs/versions.md
# make clean   remove what make has made
#
# Needs Python 3.10 or later with venv and pip. PYTHON=python3.12 chooses another one, and
# EXTRA=cuda13 (or nothing) another extra than the one that nvidia-smi suggests.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin

# One device is one thread; BLAS's own threads on top would only get in their way.
export OMP_NUM_THREADS ?= 1
# Tests start many processes: sources are compiled by the first, not by each.
unexport PYTHONDONTWRITEBYTECODE

# The CUDA that the driver supports decides which CuPy to install; no driver, no CuPy.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -nE 's/.*CUDA[A-Za-z ]* Version: *([0-9]+).*/\1/p' | head -n 1)
EXTRA ?= $(if $(CUDA),$(if $(filter 1 2 3 4 5 6 7 8 9 10 11 12,$(CUDA)),cuda12,cuda13))
comma := ,
PLUS := $(if $(EXTRA),$(comma)$(EXTRA))

.PHONY: run check docs test lint types usual versions clean
.DEFAULT_GOAL := run

run: $(VENV)/.run
	$(BIN)/gpuscheduler run haversine_mesh --png haversine_mesh.png

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(if $(CUDA),,--ignore=tests/gpu)
	GPUSCHEDULER_EXAMPLES=$${GPUSCHEDULER_EXAMPLES:-75} PYTHONPATH=tests/support/fake_cuda:. \
	  $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/gpu
	$(BIN)/python tests/conformance/run.py ci -n $(JOBS)
	$(if $(CUDA),$(BIN)/python tests/conformance/run.py array --gpu -n $(JOBS))

# Tests that decide with numbers, without devices, and the order of the rooms.
FAST := tests/ir tests/frontend tests/plan tests/cli tests/runtime/test_state.py \
  tests/runtime/test_tape.py tests/runtime/test_admission.py \
  tests/test_structure.py tests/test_options.py

check: lint types
	GPUSCHEDULER_EXAMPLES=$${GPUSCHEDULER_EXAMPLES:-10} $(BIN)/python -m pytest -q -n $(JOBS) \
	  --dist loadgroup $(FAST)

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

usual: $(VENV)/.test
	$(BIN)/python -m graphs.bench usual

versions: $(VENV)/.test
	$(BIN)/python tests/tools/versions.py

clean:
	rm -rf $(VENV) build dist *.egg-info haversine_mesh.png .mypy_cache .pytest_cache .ruff_cache

$(VENV)/.run: pyproject.toml $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[plot$(PLUS)]"
	touch $@

$(VENV)/.test: pyproject.toml $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[test,$(or $(EXTRA),nvrtc)]"
	touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[docs$(PLUS)]"
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
