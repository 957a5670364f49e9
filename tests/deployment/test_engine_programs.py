"""Servers of other projects under supervision: a stand-in that computes with transformers is started as vLLM is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.servers.served import wait_for
from support.servers.served_engines import Served, is_alive

from deployment.arguments import EngineArguments
from deployment.engines.serve import check_program
from deployment.engines.table import PROGRAMS, build_argv, without_secrets
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.endpoint import Endpoint
from handover.errors import ServerError

PROJECT = Path(__file__).resolve().parents[2]
CHECKPOINT = PROJECT / "examples" / "llama_demo" / "checkpoints"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration Llama as a Hugging Face directory."""
    output = tmp_path_factory.mktemp("llama") / "hf_fp32"
    convert(ConvertArguments(CHECKPOINT, output, weight_data_type="fp32", format="huggingface"))
    return output


@pytest.fixture
def served(directory: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    how = getattr(request, "param", "counts")
    deployment = Served(directory, tmp_path / "it's here", how, restart=1, exit_timeout_s=0.5)
    yield deployment
    if deployment.process.poll() is None:
        deployment.process.kill()
        deployment.process.wait()


def complete(url: str, **body: Any) -> Any:
    data = json.dumps({"max_tokens": 8, "temperature": 0, **body}).encode()
    request = urllib.request.Request(f"{url}/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=180) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize("served", ["computes"], indirect=True)
def test_it_serves_the_weights_says_so_and_leaves_nothing(served: Served, directory: Path) -> None:
    endpoint = served.wait()
    manifest = json.loads((directory / "manifest.json").read_text())
    assert endpoint.openai_url == f"http://127.0.0.1:{endpoint.openai_port}/v1"
    assert (endpoint.engine, endpoint.model_digest) == ("vllm", manifest["digest"])
    assert endpoint.model_repository == str(directory)
    settings = endpoint.settings
    assert settings["versions"].endswith(", vllm 0.0.1") and settings["weight_data_type"] == "fp32"
    sizes = "--tensor-parallel-size 1 --pipeline-parallel-size 1"
    assert settings["flags"] == f"vllm serve {directory} --served-model-name llama --dtype float32 {sizes}"
    private = Path(json.loads((served.place / ".endpoint.json.state").read_text())["directory"])
    assert (private / "engine.sock").exists()

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    network = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = tokenizer("Thank you for", return_tensors="pt")["input_ids"]
    expected = network.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    answer = complete(endpoint.openai_url, model=settings["model"], prompt=ids[0].tolist(), return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == expected.tolist()

    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(240) == 0, served.text
    assert "stopping   SIGTERM" in served.text
    assert not private.exists()
    served.assert_nothing_is_left()


def test_a_server_that_dies_is_started_again_and_then_given_up(served: Served) -> None:
    first = served.wait()
    (server,) = parents(served.children)
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: "restarting 1 of 1: vLLM was killed by SIGKILL" in served.text)
    wait_for(lambda: served.text.count("serving") == 2)
    assert not is_alive(served.children[0])
    again = Endpoint.read(served.file)
    assert again.openai_url == first.openai_url
    (server,) = parents(served.children[1:])
    os.kill(server, signal.SIGKILL)
    assert served.process.wait(240) == 1
    assert "vLLM was killed by SIGKILL" in served.text and "last lines of" in served.text
    served.assert_nothing_is_left()


def test_nothing_is_left_of_a_supervisor_that_is_killed(served: Served) -> None:
    served.wait()
    private = Path(json.loads((served.place / ".endpoint.json.state").read_text())["directory"])
    served.process.kill()
    served.process.wait()
    served.assert_nothing_is_left()
    wait_for(lambda: not private.exists())


def parents(pids: list[int]) -> set[int]:
    return {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("dies", "vLLM ended with exit status 1\n  last lines of"),
        ("cannot generate", "the server is up, but a generation failed: 500 "),
    ],
)
def test_a_server_that_cannot_serve_is_refused_with_its_last_words(
    directory: Path, tmp_path: Path, how: str, words: str
) -> None:
    served = Served(directory, tmp_path, how)
    assert served.process.wait(240) == 1
    assert words in served.text and not served.file.exists()
    assert ("no kernel image" if how == "dies" else "EngineCore encountered") in served.text
    assert not list(tmp_path.glob(".endpoint*"))


def test_a_second_deployment_and_other_weights_are_refused(served: Served, directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in directory.iterdir():
        content = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            content[-1] ^= 1
        (copy / file.name).write_bytes(content)
    altered = Served(copy, tmp_path / "altered")
    assert altered.process.wait(240) == 1
    assert "model.safetensors  content is not what was exported" in altered.text
    served.wait()
    second = Served(directory, served.place / ".", http_port=0)
    assert second.process.wait(240) == 1
    assert "is running already" in second.text


def arguments_for(engine: str, **settings: Any) -> EngineArguments:
    given = {"model_repository": Path("/m/hf_fp16"), "model_name": "mine", "endpoint": Path("e"), "log": Path("l")}
    return EngineArguments(engine=engine, **{**given, "data_type": "bf16", "tensor_para_size": 2, **settings})


def test_the_command_lines_are_those_of_each_project() -> None:
    """As their documentation has them; see the module's docstring for the versions."""
    limits = {"max_model_len": 4096, "max_num_seqs": 64, "gpu_memory_utilization": 0.8, "engine_args": ("--seed=1",)}
    lines = {name: " ".join(build_argv(PROGRAMS[name], arguments_for(name, **limits), 8000)) for name in PROGRAMS}
    assert lines == {
        "vllm": "vllm serve /m/hf_fp16 --host 127.0.0.1 --port 8000 --served-model-name mine --dtype bfloat16 "
        "--tensor-parallel-size 2 --pipeline-parallel-size 1 --max-model-len 4096 --max-num-seqs 64 "
        "--gpu-memory-utilization 0.8 --seed=1",
        "sglang": "python3 -m sglang.launch_server --model-path /m/hf_fp16 --host 127.0.0.1 --port 8000 "
        "--served-model-name mine --dtype bfloat16 --tp-size 2 --pp-size 1 --context-length 4096 "
        "--max-running-requests 64 --mem-fraction-static 0.8 --seed=1",
        "trtllm_serve": "trtllm-serve /m/hf_fp16 --host 127.0.0.1 --port 8000 --tp_size 2 --pp_size 1 "
        "--max_seq_len 4096 --max_batch_size 64 --kv_cache_free_gpu_memory_fraction 0.8 --seed=1",
    }


TRTLLM_OPTIONS = frozenset(
    [
        "--tokenizer",
        "--custom_tokenizer",
        "--host",
        "--port",
        "--backend",
        "--custom_module_dirs",
        "--log_level",
        "--max_beam_width",
        "--max_batch_size",
        "--max_num_tokens",
        "--max_seq_len",
        "--tensor_parallel_size",
        "--tp_size",
        "--pipeline_parallel_size",
        "--pp_size",
        "--context_parallel_size",
        "--cp_size",
        "--moe_expert_parallel_size",
        "--ep_size",
        "--gpus_per_node",
        "--free_gpu_memory_fraction",
        "--kv_cache_free_gpu_memory_fraction",
        "--kv_cache_dtype",
        "--num_postprocess_workers",
        "--trust_remote_code",
        "--hf_revision",
        "--revision",
        "--config",
        "--extra_llm_api_options",
        "--reasoning_parser",
    ]
)
"""Options of ``trtllm-serve serve`` as TensorRT-LLM's own sources of 2026 declare them, beside those of other uses."""


def test_trtllm_serve_declares_every_flag_that_it_is_given() -> None:
    program = PROGRAMS["trtllm_serve"]
    written = {*program.flags.values(), *program.spread_experts(arguments_for("trtllm_serve"))[::2]}
    assert written <= TRTLLM_OPTIONS and len(written) == 8


def test_a_command_may_say_where_the_model_stands() -> None:
    command = ("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}")
    argv = build_argv(PROGRAMS["vllm"], arguments_for("vllm", command=command), 1)
    assert argv[:7] == (*command[:4], "/m/hf_fp16", "--host", "127.0.0.1") and argv.count("/m/hf_fp16") == 1


def test_keys_in_a_command_line_are_not_published() -> None:
    argv = ("vllm", "--api-key", "abc", "--hf-token=def", "--port", "1")
    assert without_secrets(argv) == ("vllm", "--api-key", "...", "--hf-token=...", "--port", "1")


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(ServerError, match="SGLang is not here: there is no program 'no-such-program' on PATH"):
        check_program("no-such-program", "SGLang")


def test_what_serves_needs_the_standard_library_alone() -> None:
    """Its container has neither tritonclient nor numpy."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(['numpy', 'tritonclient', 'torch', 'yaml', 'google']))"
    code = f"{blocked}; import deployment.engines.serve"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=PROJECT, check=True)
