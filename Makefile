# Everything runs in a virtual environment of its own, set up at first use and again only when its pins change.
PYTHON ?= python3
VENV   ?= .venv
# of pytest: with three on two cores, none is idle while a test waits for a file or a signal
WORKERS ?= 3
RUN    ?= $(VENV)/bin/python
PIP     = $(VENV)/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt
LOWEST ?= $(VENV)-lowest
FOREIGN = tests/dataset tests/files tests/run/test_trust.py tests/run/test_searched_files.py
OWN     = $(findstring $(VENV),$(RUN))
ENV     = $(if $(OWN),$(VENV)/.titan,)
GPU_ENV = $(if $(OWN),$(VENV)/.gpu,)
PINS    = pyproject.toml constraints.txt
# the part of the further tests that this change runs
ROTATION = $(shell $(VENV)/bin/python -m tests.support.tiers)
# each worker computes on one thread: those of three workers would wait for each other on two cores
PYTEST  = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help train test test-rest test-all test-lowest sample tables planted chaos hangs rehearse rehearse-faults cuda-names lint bench measure modes gpu gpu-speeds clean

help:                    ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 18

train: $(ENV)            ## train a small Llama on real text
	$(RUN) -m titan.train $(ARGS)

test: $(VENV)/.test      ## every law, and most mechanisms once: about four minutes on two cores
	$(PYTEST) $(ARGS)

test-rest: $(VENV)/.test ## a twelfth of what `make test` leaves out, another in each change: ten minutes; PART=1/12 names it
	TITAN_TESTS=rest TITAN_PART=$(PART) $(PYTEST) $(ARGS)

test-all: $(VENV)/.test  ## all tests, and property tests with ten times as many examples: some hours; PART=1/8 runs a part
	TITAN_TESTS=all TITAN_PART=$(PART) TITAN_EXAMPLES=thorough $(PYTEST) $(ARGS)

test-lowest: $(LOWEST)/.titan  ## tests of data and of runs of others, with the lowest allowed versions: five minutes
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest $(FOREIGN) $(ARGS)

planted: $(VENV)/.test   ## faults planted in copies of the repository, which `make test` must find: twenty minutes
	$(VENV)/bin/python -m tests.support.planted $(ARGS)

sample: $(VENV)/.test    ## a twelfth of rehearse, hangs, chaos and planted, another in each change, and of tables: five minutes
	$(VENV)/bin/python -m tests.rehearsal.rehearse --part $(or $(PART),$(ROTATION))
	$(VENV)/bin/python -m tests.support.hangs --part $(or $(PART),$(ROTATION))
	$(VENV)/bin/python -m tests.support.chaos --kills 8 --part $(or $(PART),$(ROTATION))
	$(VENV)/bin/python -m tests.support.planted --part $(or $(PART),$(ROTATION))
	$(VENV)/bin/python -m tests.measure.tables marin

tables: $(VENV)/.test    ## figures of published studies, and titan's: laws, learning rates, mixtures, early stopping
	$(VENV)/bin/python -m tests.measure.tables $(ARGS)

chaos: $(VENV)/.test     ## runs killed a hundred times, in the midst of saves too, and compared: ten to twenty minutes
	$(VENV)/bin/python -m tests.support.chaos $(ARGS)

hangs: $(VENV)/.test     ## runs of which a rank hangs in sixty ways, and what they say: twenty minutes
	$(VENV)/bin/python -m tests.support.hangs $(ARGS)

rehearse: $(VENV)/.test  ## titan's CUDA path on a device that the CPU computes for: five minutes on two cores
	$(VENV)/bin/python -m tests.rehearsal.rehearse $(ARGS)

rehearse-faults: $(VENV)/.test  ## faults of CUDA branches, planted in copies of the repository, which make rehearse finds
	$(VENV)/bin/python -m tests.measure.rehearsal_faults $(ARGS)

cuda-names: $(VENV)/.test ## names of CUDA wheels, and code for GPUs: PYTHONS are interpreters with one (5 GB, no GPU needed)
	$(VENV)/bin/python -m tests.measure.cuda_names $(PYTHONS)
	$(VENV)/bin/python -m tests.measure.inductor $(lastword $(PYTHONS))

lint: $(VENV)/.lint      ## ruff, docstrings (pydoclint), mypy, the order of packages (import-linter), and the size
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/flake8 titan launchers
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --platform darwin --cache-dir .mypy_cache/darwin
	$(VENV)/bin/lint-imports --no-cache --no-logo
	$(VENV)/bin/python -m tests.measure.house_size

bench: $(ENV)            ## titan against the bare PyTorch loop
	$(RUN) -m tests.measure $(ARGS)

measure: $(VENV)/.test   ## what titan's parts cost: suite=data, generate, features, experts or scale
	$(VENV)/bin/python -m tests.measure $(if $(findstring suite=,$(ARGS)),,suite=data) $(ARGS)

gpu: $(GPU_ENV)          ## is a GPU right, and how fast: a report in ./acceptance, half an hour; RUN=python3 takes your Python
	$(RUN) -m tests.measure suite=acceptance cluster.device=cuda $(ARGS)

gpu-speeds: $(GPU_ENV)   ## titan against the bare loop on a GPU of 141 GB: llama1b, 8B and experts, memory modes, saves
	$(RUN) -m tests.measure suite=gpu $(ARGS)
	$(RUN) -m tests.measure suite=modes cluster.device=cuda model=llama1b dataset=synthetic training.seq_len=8192 \
	  training.global_batch=8192 precision=bf16 $(ARGS)
	$(RUN) -m tests.measure suite=checkpoint cluster.device=cuda $(ARGS)

modes: $(ENV)            ## peak memory and time of each way to keep activations, compiled and not
	$(RUN) -m tests.measure suite=modes $(ARGS)

clean:                   ## remove the virtual environment
	rm -rf $(VENV)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "titan needs Python 3.11 or newer, and $(PYTHON) is older: give make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.titan: $(PINS) | $(VENV)/bin/python
	$(PIP) -e '.[show,compare,slurm]'
	@touch $@

$(VENV)/.gpu: $(PINS) | $(VENV)/bin/python
	$(PIP) -e '.[show,compare,slurm,float8]'
	@touch $@ $(VENV)/.titan

$(VENV)/.test: $(PINS) | $(VENV)/bin/python
	$(PIP) -e '.[test]'
	@touch $@ $(VENV)/.titan $(VENV)/.gpu

# by uv, as pip searches for minutes for versions that fit together; torch by pip, which knows where its builds are
$(LOWEST)/.titan: $(PINS)
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m tests.support.lowest_versions > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt torch uv
	$(LOWEST)/bin/uv pip install -q --python $(LOWEST)/bin/python -c $(LOWEST)/constraints.txt \
	  -e '.[show,track,trackio,hf,data,s3,float8,slurm,sweep,compare]' psutil pytest pytest-timeout hypothesis 'moto[server]'
	@touch $@

$(VENV)/.lint: $(PINS) | $(VENV)/bin/python
	$(PIP) -e '.[test,lint]'
	@touch $@ $(VENV)/.test $(VENV)/.titan $(VENV)/.gpu
