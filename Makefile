# make demo | test | lint | format | typecheck | hooks | clean
#
# Each target makes the environment that it needs on first use: .venv with the packages of requirements/*.lock, checked by
# hash, torch's CPU build among them (requirements/install.sh; other systems and Pythons get what pyproject.toml allows).
#   VENV=DIR      another environment, created if it is not there; one that exists keeps its torch, triton, transformers
#   PYTHON=EXE    an interpreter that has everything already; nothing is installed
#   TORCH=SPEC    what is installed as torch where there is none, with options of pip, e.g.
#                 TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
#   BASE=EXE      the interpreter that creates the environment (3.11 or newer)
VENV ?= .venv
BASE ?= python3
export TORCH
TESTS ?= tests
WORKERS ?= 2

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

$(VENV)/.stepquant-ready: pyproject.toml setup.py $(wildcard requirements/*)
	@if [ ! -x $(VENV)/bin/python ]; then \
		echo "creating $(VENV)" && $(BASE) -m venv $(VENV) && touch $(VENV)/.stepquant-made; \
	fi
	@requirements/install.sh $(RUN) $$(test -e $(VENV)/.stepquant-made && echo locked || echo ranges)
	@touch $@
