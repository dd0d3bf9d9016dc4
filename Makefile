# make demo | test | lint | format | typecheck | hooks | clean
#
# Each target makes the environment that it needs on first use: .venv, CPU torch, the package and its development tools.
#   VENV=DIR      another environment, created if it is not there; one that exists keeps its torch, triton, transformers
#   PYTHON=EXE    an interpreter that has everything already; nothing is installed
#   TORCH=SPEC    what a new environment installs as torch, with options of pip, e.g.
#                 TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
#   BASE=EXE      the interpreter that creates the environment (3.11 or newer)
VENV ?= .venv
BASE ?= python3
TORCH ?= torch==2.13.0
TESTS ?= tests
WORKERS ?= 2
PIP_FLAGS ?= --quiet --disable-pip-version-check

ifdef PYTHON
RUN := $(PYTHON)
READY :=
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.stepquant-ready
endif

# One thread a process: workers share the cores, and torch's threads get in each other's way.
test: export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint format typecheck setup hooks clean

demo: $(READY)
	$(RUN) -m stepquant.compile recipe=tiny_gdn_6bit output=build/tiny_gdn_6bit

test: $(READY)
	$(RUN) -m pytest -n $(WORKERS) $(TESTS)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

typecheck: $(READY)
	$(RUN) -m mypy

setup: $(READY)

hooks: $(READY)
	$(RUN) -m pre_commit install

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(VENV)/.stepquant-ready: pyproject.toml setup.py requirements/ci.txt
	@if [ ! -x $(VENV)/bin/python ]; then \
		echo "creating $(VENV)" && $(BASE) -m venv $(VENV) && touch $(VENV)/.stepquant-made; \
	fi
	@if ! $(RUN) -c "import torch" 2>/dev/null; then \
		echo "installing $(TORCH) (choose another with TORCH=...)" && $(RUN) -m pip install $(PIP_FLAGS) $(TORCH); \
	fi
	@echo "installing stepquant and its development tools"
	@if [ -e $(VENV)/.stepquant-made ]; then \
		$(RUN) -m pip install $(PIP_FLAGS) --constraint requirements/ci.txt --editable ".[dev]"; \
	else \
		$(RUN) -m pip install $(PIP_FLAGS) --editable ".[dev]"; \
	fi
	@touch $@
