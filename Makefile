# SPDX-License-Identifier: Apache-2.0
# make demo   everything it needs, then a real engine with and without speculation
# make test   everything it needs, then lint and all tests
# make kernel-checks   the CUDA kernels alone, without torch or Python (tests/kernels)
# make sanitize        the same under compute-sanitizer
# make delay-checks    the same bits where warps wait at random, 100 seeds
# The first two set up .venv (Python >= 3.11, CPU build of torch) and .sglang/<version> on first use.

PYTHON ?= python3
VENV ?= .venv
GPU ?= $(shell nvidia-smi -L 2>/dev/null | head -1)
SGLANG_VERSIONS = 0.5.17 0.5.23
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check -q
SOURCES := $(shell find csrc cmake specfused -name '*.[ch]*' -o -name '*.cu' -o -name '*.py' \
             -o -name '*.cmake') CMakeLists.txt setup.py pyproject.toml

.PHONY: demo test lint bench install kernel-checks check-programs sanitize delay-checks clean

# On a machine without a GPU the engine needs stand-ins for SGLang's compiled packages.
CPU_ENGINE = CUDA_VISIBLE_DEVICES= SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1 \
  HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 \
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

# Builds build/checks/attn_check and commit_check for SPECFUSED_ARCHS; runs them where a GPU is.
comma := ,
NVCC ?= $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc) \
          $(wildcard /usr/local/cuda/bin/nvcc))
COMPUTE_SANITIZER ?= compute-sanitizer

CHECKS = build/checks

kernel-checks: check-programs
ifneq ($(GPU),)
	build/checks/attn_check
	SPECFUSED_WGMMA=0 build/checks/attn_check
	build/checks/commit_check
endif

check-programs:
	cmake -S . -B $(CHECKS) $(CHECK_OPTIONS) -DSPECFUSED_CHECKS=ON -DSPECFUSED_MODULES=OFF \
	  -DSPECFUSED_ARCHS="$(subst $(comma),;,$(SPECFUSED_ARCHS))" -DCMAKE_CUDA_COMPILER=$(NVCC)
	cmake --build $(CHECKS) --parallel $${MAX_JOBS:-$$(nproc)}

sanitize: check-programs
	for tool in memcheck racecheck initcheck synccheck; do \
	  for check in SPECFUSED_WGMMA=0/attn_check SPECFUSED_WGMMA=1/attn_check /commit_check; do \
	    env $${check%/*} $(COMPUTE_SANITIZER) --tool $$tool --error-exitcode 1 \
	      build/checks/$${check#*/} --sanitize || exit 1; \
	  done; \
	done

delay-checks: CHECKS = build/delays
delay-checks: CHECK_OPTIONS = -DSPECFUSED_RANDOM_DELAY=ON
delay-checks: check-programs
ifneq ($(GPU),)
	build/delays/attn_check --delays 100
	SPECFUSED_WGMMA=0 build/delays/attn_check --delays 100
	build/delays/commit_check --delays 100
endif

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
