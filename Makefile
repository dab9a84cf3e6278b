# `make demo` and `make test` are all that a new checkout needs: they make their own environment in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

.PHONY: demo docs compiled test test-quick test-long test-bounds mutants mutants-all fuzz inject soak-moves coverage lint format bench soak gpu peers engines real-engines clean

$(READY): pyproject.toml constraints.txt
	@echo "installing into $(VENV), once: a minute or two, 2.2 GB ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: $(READY)
	$(BIN)/python -m eplb_core demo

# Compiles first, in one process: else each process that a test starts would.
compiled: $(READY)
	$(BIN)/python -c "import eplb_core; eplb_core.warm_up()"

# On two processes, file by file: many tests wait for processes of their own.
test: compiled
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-quick: $(READY)
	$(BIN)/python -m pytest -m "not slow and not mutation and not long"

# What takes too long for every run: benchmarks that start many processes, long schedules.
test-long: $(READY)
	$(BIN)/python -m pytest -m long

# The disk cache of compiled kernels ignores the bounds-check flag: an own cache makes it take effect.
test-bounds: $(READY)
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$$(mktemp -d) $(BIN)/python -m pytest

# Breaks each rule in a copy of the code and expects its test to fail; names the rule.
mutants: $(READY)
	$(BIN)/python -m pytest -v -m mutation tests/mutation

# Breaks everything in one module, in a copy, with kernels as plain Python; prints which changes its tests do not notice.
MODULE ?= eplb_core/topology.py
TESTS ?= $(dir $(MODULE:eplb_core/%=tests/%))test_$(patsubst _%,%,$(notdir $(MODULE)))
mutants-all: $(READY)
	$(BIN)/python -m pip install --quiet "cosmic-ray>=8.4"
	rm -rf .mutants && mkdir .mutants && cp -r eplb_core tests benchmarks docs pyproject.toml README.md Makefile .mutants
	sed 's|MODULE|$(MODULE)|; s|TESTS|$(TESTS)|' tests/mutation/cosmic-ray.toml > .mutants/cosmic-ray.toml
	cd .mutants && export PATH="$(abspath $(BIN)):$$PATH" PYTHONPATH=. NUMBA_DISABLE_JIT=1 && cosmic-ray init cosmic-ray.toml session && cr-filter-operators session cosmic-ray.toml && cosmic-ray baseline cosmic-ray.toml && cosmic-ray exec cosmic-ray.toml session && cr-report --surviving-only --show-diff session

# Every bad argument of every public name, thousands of broken files and command lines, 100,000 messages of Hypothesis to the server of layout
# records, and 10,000 schedules of engines and crashes.
fuzz: compiled
	FUZZ=500 $(BIN)/python -m pytest tests/fuzz
	$(BIN)/python -m benchmarks.fuzz_record
	$(BIN)/python -m benchmarks.schedules

# System calls of a record's keeper and engines fail at random, in 100,000 schedules: an hour of one core.
INJECT_PROCESSES ?= 2
inject: $(READY)
	mkdir -p benchmark_results
	$(BIN)/python -m benchmarks.record_faults -n $(INJECT_PROCESSES) --json benchmark_results/record_faults.json

# 1,000 migrations of 8 real processes over every transport that is installed; a rank killed and stopped in each phase.
soak-moves: $(READY)
	$(BIN)/python -m benchmarks.soak_moves --json benchmark_results/soak_moves.json

# A static site of docs/, notebooks/ and the docstrings; fails if a link is dead.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/python -m sphinx --quiet --fail-on-warning -b html -c docs/site . build/site

# All tests, then the quick ones once more with kernels as plain Python, whose lines count too; overflow is meant there.
coverage: compiled
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest
	NUMBA_DISABLE_JIT=1 $(BIN)/coverage run -m pytest -m "not slow and not mutation and not long" -W "ignore:overflow encountered:RuntimeWarning"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --show-missing

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# The reference engine under traffic and faults: 10 minutes, 8 ranks on the CPU. Then all at once, 5 minutes: a Balancer's moves of weights
# that outlive their engines, told to their records, every engine killed in the middle. Fails if a token is wrong.
soak: $(READY)
	$(BIN)/python -m benchmarks.engine --soak 600 --ranks 8 --seed 1
	$(BIN)/python -m benchmarks.engine --soak 300 --ranks 4 --seed 1 --shared

# What needs GPUs: tests, then the reference engine and moves, each with a limit on its time; one that fails keeps no other from running.
GPU_ENGINE = timeout 150 $(BIN)/python -m benchmarks.engine --preset h200 --passes 120
gpu: $(READY)
	mkdir -p benchmark_results
	-timeout 330 $(BIN)/python -m pytest -m cuda tests
	-$(GPU_ENGINE) --device cuda:0 --threads --json benchmark_results/engine_threads.json
	-$(GPU_ENGINE) --device cuda:0 --threads --modes async --check
	-$(GPU_ENGINE) --device cuda:0 --json benchmark_results/engine_processes.json
	-$(GPU_ENGINE) --device cuda --ranks 2 --always --json benchmark_results/engine_two_gpus.json
	-$(BIN)/python -m benchmarks.multi_gpu --limit 170 --json benchmark_results/multi_gpu.json
	-$(BIN)/python -m benchmarks.multi_gpu --transport nccl --limit 110 --json benchmark_results/multi_gpu_nccl.json

# Placement policies of other projects, for the benchmarks to compare with: a few files of each wheel.
peers: $(READY)
	$(BIN)/python -m benchmarks.peers --into .peers

# Environments in which engines import on a machine without a GPU, some gigabytes, and the tests marked `engines`.
engines: $(READY) .engines/sglang/.installed .engines/vllm/.installed
	$(BIN)/python -m pytest -m engines tests/engines

# The servers themselves under load, on two GPUs: in environments that have an engine and eplb_core; half an hour each.
REAL_ENGINE_PYTHON ?= python3
real-engines:
	mkdir -p benchmark_results
	-PYTHONPATH=. $(REAL_ENGINE_PYTHON) -m benchmarks.real_vllm --json benchmark_results/real_vllm.json
	-PYTHONPATH=. $(REAL_ENGINE_PYTHON) -m benchmarks.real_sglang --json benchmark_results/real_sglang.json

.engines/sglang/.installed: tests/engines/sglang.txt tests/engines/sglang-constraints.txt tests/engines/sglang-alone.txt pyproject.toml
	@echo "SGLang 0.5.23 into .engines/sglang, once, step 1 of 2: what it imports; each package is named as it comes ..."
	$(PYTHON) -m venv .engines/sglang
	.engines/sglang/bin/python -m pip install --constraint tests/engines/sglang-constraints.txt --requirement tests/engines/sglang.txt
	@echo "SGLang 0.5.23, step 2 of 2: the engine itself, hundreds of megabytes ..."
	.engines/sglang/bin/python -m pip install --no-deps --requirement tests/engines/sglang-alone.txt
	.engines/sglang/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

# vLLM's own tests are in its source distribution alone.
.engines/vllm/.installed: tests/engines/vllm.txt tests/engines/vllm-constraints.txt tests/engines/vllm-alone.txt pyproject.toml
	@echo "vLLM 0.33.0 into .engines/vllm, once, step 1 of 2: what it imports; each package is named as it comes ..."
	$(PYTHON) -m venv .engines/vllm
	.engines/vllm/bin/python -m pip install --constraint tests/engines/vllm-constraints.txt --requirement tests/engines/vllm.txt
	@echo "vLLM 0.33.0, step 2 of 2: the engine itself, hundreds of megabytes ..."
	.engines/vllm/bin/python -m pip install --no-deps --requirement tests/engines/vllm-alone.txt
	VLLM_VERSION_OVERRIDE=0.33.0 VLLM_TARGET_DEVICE=empty .engines/vllm/bin/python -m pip download --no-build-isolation --no-binary vllm --no-deps --dest .engines/vllm --requirement tests/engines/vllm-alone.txt
	tar -xzf .engines/vllm/vllm-0.33.0.tar.gz -C .engines/vllm vllm-0.33.0/tests
	.engines/vllm/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) build .peers .mutants benchmark_results .engines .pytest_cache .mypy_cache .ruff_cache
