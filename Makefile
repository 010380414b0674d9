# SPDX-License-Identifier: Apache-2.0
# make demo   everything it needs, then a real engine with and without speculation
# make test   everything it needs, then lint and all tests
# Both set up .venv (Python >= 3.11, CPU build of torch) and .sglang/<version> on first use.

PYTHON ?= python3
VENV ?= .venv
GPU ?= $(shell nvidia-smi -L 2>/dev/null | head -1)
SGLANG_VERSIONS = 0.5.17 0.5.23
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check -q
SOURCES := $(shell find csrc cmake specfused -name '*.[ch]*' -o -name '*.cu' -o -name '*.py' \
             -o -name '*.cmake') CMakeLists.txt setup.py pyproject.toml

.PHONY: demo test lint bench install clean

# On a machine without a GPU the engine needs stand-ins for SGLang's compiled packages.
CPU_ENGINE = CUDA_VISIBLE_DEVICES= SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1 \
  HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore \
  PYTHONPATH=tests/engine/standins:.sglang/0.5.17

ifeq ($(GPU),)
demo: install
	$(CPU_ENGINE) $(BIN)/python -m specfused demo
else
demo: .venv-gpu/.specfused
	.venv-gpu/bin/python -m specfused demo
endif

test: install lint
	SPECFUSED_REQUIRE_ENGINE=1 $(BIN)/python -m pytest -q tests bench

lint: $(VENV)/.packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

bench: install
	$(BIN)/python bench/run.py

install: $(VENV)/.specfused

$(VENV)/.packages: tests/engine/requirements.txt tests/engine/requirements-nodeps.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -r tests/engine/requirements.txt
	$(PIP) install --no-deps -r tests/engine/requirements-nodeps.txt
	for v in $(SGLANG_VERSIONS); do \
	  test -d .sglang/$$v/sglang || \
	    $(PIP) install --no-deps --target .sglang/$$v sglang==$$v || exit 1; \
	done
	touch $@

$(VENV)/.specfused: $(VENV)/.packages $(SOURCES)
	SPECFUSED_WERROR=ON $(PIP) install -e .
	touch $@

# With a GPU the engine is SGLang as its users install it.
.venv-gpu/.specfused: $(SOURCES)
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip --disable-pip-version-check -q install sglang==0.5.17
	.venv-gpu/bin/python -m pip --disable-pip-version-check -q install -e .
	touch $@

clean:
	rm -rf build dist *.egg-info $(VENV) .venv-gpu .sglang
