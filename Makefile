# make CONSTRAINTS=/dev/null setup   installs the newest versions instead of the pinned ones
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
RESULTS := benchmarks/results
PIP_INSTALL := $(BIN)/python -m pip install --quiet -c $(CONSTRAINTS)

# Declared requirement on torchvision, never imported by what the benchmarks use: installed without dependencies.
BENCH_NO_DEPS := bayesian-torch blitz-bayesian-pytorch laplace-torch asdfghjkl backpack-for-pytorch \
                 curvlinops-for-pytorch einconv einops linear_operator opt_einsum unfoldNd

.PHONY: setup weight test test-slow test-gpu test-oldest test-newest lint reproduce bench docs dist dist-extras release clean

setup: .venv/.installed

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml $(CONSTRAINTS) | .venv/bin/python
	$(PIP_INSTALL) -e ".[dev]"
	touch $@

.venv/.installed-bench: .venv/.installed
	$(PIP_INSTALL) -e ".[bench]"
	$(PIP_INSTALL) --no-deps $(BENCH_NO_DEPS)
	touch $@

.venv/.installed-docs: .venv/.installed
	$(PIP_INSTALL) -e ".[docs]"
	touch $@

# a worker for each core: what tests wait for are processes that compute; bytecode is kept, whatever the environment
# says, for the workers and the processes of tests would each compile everything again
test: setup
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q -n $$(nproc) --dist worksteal -m "not slow"

# statistical laws at length, kills, hostile files, the site, wheels, browsers
test-slow: setup
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q -n $$(nproc) --dist worksteal -m slow

# on a machine with a GPU; STRUCTVI_TEST_DEVICE=cpu for a dry run
test-gpu: setup
	$(BIN)/python -m pytest -q -m gpu -n 4 tests/gpu

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python tools/public_types.py

# how much a person has to hold in mind: lines, modules, options, names
weight: setup
	$(BIN)/python tools/weight.py

reproduce: setup
	$(BIN)/structvi reproduce all --out report

# a quarter of an hour on two cores
bench: .venv/.installed-bench
	$(BIN)/python -m benchmarks.step_cost --net mlp --out $(RESULTS)/step_cost_cpu.json
	$(BIN)/python -m benchmarks.step_cost --net resnet18 transformer unet --batch 8 --ranks 0 4 --draws 1 --repeats 3 \
		--out $(RESULTS)/step_cost_nets_cpu.json

docs: .venv/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# wheel and sdist, checked; the wheel in a bare environment (core alone), README's first example there, in build/bare
dist:
	rm -rf dist build/packing build/bare build/tried
	$(PYTHON) -m venv build/packing
	build/packing/bin/python -m pip install --quiet -c $(CONSTRAINTS) build twine
	build/packing/bin/python -m build --outdir dist .
	build/packing/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/bare
	build/bare/bin/python -m pip install --quiet -c $(CONSTRAINTS) dist/*.whl
	build/bare/bin/python -m pip check
	mkdir build/tried && cd build/tried && OMP_NUM_THREADS=1 ../bare/bin/python ../../tools/try_wheel.py ../../README.md

# each extra alone, on top of build/bare: installed, checked and tried
dist-extras: dist
	$(PYTHON) tools/try_extras.py build/bare --constraints $(CONSTRAINTS)

# the oldest versions that structvi supports and the newest there are, each in an environment of its own; with
# TESTS="tests/families .." for some of the tests, PYTHON_OLDEST=.. and PYTHON_NEWEST=.. for other interpreters
PYTHON_OLDEST ?= python3.11
PYTHON_NEWEST ?= python3.13
TESTS ?= src tests
test-oldest:
	$(PYTHON_OLDEST) -m venv build/oldest
	build/oldest/bin/python -m pip install --quiet -c constraints-oldest.txt -e ".[dev]"
	build/oldest/bin/python tools/versions.py
	build/oldest/bin/python -m pytest -q -p no:cacheprovider -n $$(($$(nproc) + 1)) --dist worksteal $(TESTS)

test-newest:
	$(PYTHON_NEWEST) -m venv build/newest
	build/newest/bin/python -m pip install --quiet --upgrade -e ".[dev]"
	build/newest/bin/python tools/versions.py
	build/newest/bin/python -m pytest -q -p no:cacheprovider -n $$(($$(nproc) + 1)) --dist worksteal $(TESTS)

# make release VERSION=0.2.0   refuses a dirty tree; writes the changelog's section and the version
release:
	$(PYTHON) tools/release.py $(VERSION)

clean:
	rm -rf report site dist build .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
