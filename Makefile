# Every target does its own set-up in .venv: python3, make and a network to PyPI are all that is needed.
PYTHON ?= python3
WORKERS ?= 2
# The tests that make test runs, as pytest's -m takes them; MARKS= means all.
MARKS ?= not slow
# Threads that wait give their core away: on a shared machine, spinning ones make everything several times slower.
export OMP_WAIT_POLICY ?= PASSIVE
# What is imported is compiled once and kept: to compile all that is installed takes longer, and a quarter of it is used.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
UV := $(BIN)/uv
INSTALL := $(UV) pip install --python $(BIN)/python
COMPILE := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--custom-compile-command "make lock" $(UPGRADE)
# loadfile: what a test file prepares once is prepared in one worker only. In the order of tests/conftest.py: by itself
# pytest-xdist begins with the files of many tests, and the longest test is one of a few.
PYTEST := $(BIN)/python -m pytest -rs -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=5

.PHONY: help venv demo test test-slow test-oldest test-newest test-integrations test-extras lint format docs lock clean

help:
	@echo "make demo       explain example pictures; results in demo/"
	@echo "make test       the default test suite; with MARKS= all tests"
	@echo "make test-slow  the tests marked slow"
	@echo "make test-oldest, test-newest  the default suite with the lowest and the newest versions that are allowed"
	@echo "make test-integrations  tests with Weights & Biases, MLflow, FiftyOne and Gradio themselves"
	@echo "make test-extras  the wheel with each extra alone, and how fast it starts"
	@echo "make lint       ruff and mypy"
	@echo "make format     let ruff rewrite the code"
	@echo "make docs       build the documentation into site/"
	@echo "make lock       write requirements/ from pyproject.toml; UPGRADE=--upgrade takes newer versions"
	@echo "make venv       set up .venv and do nothing with it"
	@echo "make clean      remove .venv and all that was built"

venv: .venv/dev.stamp .venv/package.stamp

demo: .venv/core.stamp .venv/package.stamp
	$(BIN)/dave demo --out demo

test: venv
	$(PYTEST) -m "$(MARKS)"

# pytest exits with 5 where no test is marked slow.
test-slow: venv
	$(PYTEST) -m slow || test $$? -eq 5

# Versions that no lock holds, in environments of their own; all extras, since tests of a missing one skip themselves.
test-oldest: RESOLUTION = lowest-direct
test-newest: RESOLUTION = highest
test-oldest test-newest: test-%: $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-$*
	$(UV) pip install --python .venv-$*/bin/python --resolution $(RESOLUTION) -r pyproject.toml --all-extras --group dev --editable .
	.venv-$*/bin/python -m pytest -rs -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(MARKS)"

# In an environment of its own: Gradio asks for an older Pillow than the lock has.
test-integrations: $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-$@
	$(UV) pip install --python .venv-$@/bin/python -r pyproject.toml --extra hf --group dev --group integrations --editable .
	.venv-$@/bin/python -m pytest -rs -m "" tests/integrations

# Not among the tests of CI, since it makes an environment for each extra: without -n, so that there is one at a time.
test-extras: venv
	$(BIN)/python -m pytest -rs -s tests/docs/check_extras.py

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: venv
	$(BIN)/mkdocs build --strict

# The smaller files keep to the versions of the largest one, so that all three fit into one environment.
lock: $(UV)
	$(COMPILE) pyproject.toml --all-extras --group dev --output-file requirements/dev.txt
	$(COMPILE) pyproject.toml --constraints requirements/dev.txt --output-file requirements/core.txt
	$(COMPILE) --group build --constraints requirements/dev.txt --output-file requirements/build.txt

clean:
	rm -rf .venv .venv-* build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis

# What is wrong with $(PYTHON), in one line; empty where it will do.
fault = $(shell $(PYTHON) -c 'import importlib.util, sys; print( \
	"Python 3.11 or newer is needed and $(PYTHON) is older; name another: make PYTHON=python3.12" \
	if sys.version_info < (3, 11) else \
	"$(PYTHON) has no venv module; on Debian and Ubuntu run: apt-get install python3-venv" \
	if importlib.util.find_spec("ensurepip") is None else "")' 2>/dev/null \
	|| echo "$(PYTHON) does not run; install Python 3.11 or newer, or name one: make PYTHON=python3.12")

$(UV): requirements/build.txt
	$(if $(fault),$(error $(fault)))
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/build.txt
	@touch $@

.venv/core.stamp .venv/dev.stamp: .venv/%.stamp: requirements/%.txt $(UV)
	@echo "installing $<; the first time this downloads several gigabytes"
	$(INSTALL) --require-hashes -r $<
	@touch $@

# hatchling comes from requirements/build.txt, so nothing unlocked is fetched here.
.venv/package.stamp: pyproject.toml src/dave_vit/_version.py $(UV)
	$(INSTALL) --quiet --no-deps --no-build-isolation --editable .
	@touch $@
