# The two commands of the README: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
OLDEST := .venv-oldest
# With the oldest Python that is here, too.
OLDEST_PYTHON ?= $(shell for python in python3.10 $(PYTHON); do if $$python --version >/dev/null 2>&1; then echo $$python; break; fi; done)
SOURCES := slurmgpu tests docs/conf.py docs/examples
MAKEFLAGS += --jobs
# The tests start thousands of processes that import the package: none but the first is to compile it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-tracin demo-train test test-gpu test-oldest test-vllm nightly check packages lint types bench chaos docs dist clean

demo: $(VENV)/demo
	$(BIN)/python docs/examples/embed/demo.py

demo-tracin: $(VENV)/demo
	$(BIN)/python docs/examples/tracin/demo.py

demo-train: $(VENV)/demo
	$(BIN)/python -m pip install --quiet --constraint tests/constraints.txt --requirement docs/examples/digits/requirements.txt
	$(BIN)/python docs/examples/digits/demo.py

test: packages lint types $(VENV)/compiled
	$(BIN)/python -m pytest -n 5 --durations=25 --durations-min=10

# On a machine with a GPU, in the Python that has torch with CUDA, which .venv may lack: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/test)
	$(GPU_PYTHON) -m tests.gpu

test-vllm: packages $(VLLM)/test
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -n 2 --timeout=900 tests/vllm

# Where old versions differ: files of HDF5 and Arrow, the run file's tables, what Python's own library has become.
test-oldest: packages $(OLDEST)/test
	$(OLDEST)/bin/python -m pytest -n 2 tests/unit/test_events.py tests/unit/test_mapped_functions.py \
	  tests/unit/test_overrides.py tests/unit/test_sweeps.py tests/unit/test_variables.py tests/files/test_compare.py \
	  tests/files/test_inputs*.py tests/files/test_json_column.py tests/files/test_repack.py tests/files/test_results.py \
	  tests/files/test_selection.py tests/files/test_shards.py tests/files/test_show.py \
	  tests/local/test_map.py::test_a_row_of_a_table_is_an_item \
	  --deselect tests/files/test_selection.py::test_hugging_face_datasets_loads_the_folder

nightly: packages lint types $(VENV)/compiled
	SLOTS=programs $(BIN)/python -m pytest -n 5 -m '' --hypothesis-profile=nightly --timeout=900

check: lint types $(VENV)/compiled
	$(BIN)/python -m pytest -n 3 tests/unit tests/files

packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then bash tests/cluster/install.sh && bash tests/install_browser.sh; fi

lint: $(VENV)/test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(VENV)/test
	$(BIN)/mypy

bench: $(VENV)/test
	$(BIN)/python -m tests.benchmarks

chaos: $(VENV)/test
	SINGLE_FAILURES=all $(BIN)/python -m pytest --timeout=3600 tests/local/test_single_failures.py
	$(BIN)/python -m tests.chaos --write

docs: $(VENV)/docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs -d build/doctrees . build/site
	@echo "the site is in build/site/index.html"

dist: $(VENV)/release
	rm -rf dist
	$(BIN)/python -m build --no-isolation

# The pip that comes with Python 3.11 takes 35 s of a processor to choose the packages of the tests, and that of the
# constraints takes 13 s. It installs into the other environments as well, which have none: to make one takes 7 s.
pip = $(BIN)/python -m pip --python $(1)/bin/python

$(VENV)/pip: tests/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint tests/constraints.txt pip
	touch $@

# Python compiles a module when it is first imported: to compile all of PyTorch's would take a minute more. The tests'
# modules are collected once, beside mypy, so that not each of several processes compiles the same.
$(VENV)/demo $(VENV)/test $(VENV)/docs $(VENV)/release: $(VENV)/%: pyproject.toml tests/constraints.txt | $(VENV)/pip
	$(BIN)/python -m pip install --quiet --no-compile --constraint tests/constraints.txt --editable '.[$*]'
	touch $@

$(VENV)/compiled: $(VENV)/test
	-$(BIN)/python -m pytest --collect-only --quiet >/dev/null
	touch $@

# Three packages that vLLM asks for, and does not need for text, may be built for another PyTorch: then it cannot be
# imported.
$(VLLM)/test: pyproject.toml tests/vllm/constraints.txt | $(VENV)/pip
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv --without-pip $(VLLM)
	$(call pip,$(VLLM)) install --quiet --no-compile --constraint tests/vllm/constraints.txt --editable '.[test-vllm]'
	$(call pip,$(VLLM)) uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(OLDEST)/test: pyproject.toml tests/oldest.txt | $(VENV)/pip
	test -x $(OLDEST)/bin/python || $(OLDEST_PYTHON) -m venv --without-pip $(OLDEST)
	$(call pip,$(OLDEST)) install --quiet --no-compile --constraint tests/oldest.txt --editable '.[test-oldest]'
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) $(OLDEST) build dist .mypy_cache .pytest_cache .ruff_cache docs/examples/*/runs
