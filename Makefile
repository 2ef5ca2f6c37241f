# Everything a new checkout needs: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: demo test test-slow test-arm lint docs bench clean

# Remade when the build file, the C sources or the constraints change.
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard src/v4tool/quant/*.[ch])

$(VENV)/installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable .
	touch $@

$(VENV)/installed-dev: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@ $(VENV)/installed

demo: $(VENV)/installed
	$(BIN)/v4tool dump --case baseline6 --force

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow

# On emulated 64-bit ARM; ARM_TESTS chooses others
ARM_TESTS ?= tests/test_golden.py -k len6

test-arm:
	tests/arm.sh $(ARM_TESTS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# docs/commands.md and README's list of modules, written anew from the code
docs: $(VENV)/installed-dev
	$(BIN)/python docs/generate.py

bench: $(VENV)/installed
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) .arm build dist src/*.egg-info
