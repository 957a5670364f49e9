"""vLLM itself, its build for CPUs, as jobs of a real Slurm: alone, and over two nodes that join by Slurm's words."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.slurm.cluster import NODES, SlurmCluster, started, wait_until
from support.slurm.launches import PROJECT, Launched, assert_clean, launch, override

from handover.endpoint import Endpoint

START_S = 2400.0
pytestmark = pytest.mark.timeout(3600)
PROMPT = "The old man looked at the sea and"
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # both nodes have the same processors
    "TORCHDYNAMO_DISABLE": "1",  # or the first start compiles what chooses tokens, for minutes
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
SETTINGS = (
    "deployment.engine=vllm",
    override("deployment.command", f"{os.environ['VLLM']} serve"),
    override("export.model.checkpoint_path", PROJECT / "examples" / "llama_demo" / "checkpoints"),
    "export.run.model_train_name=tiny",
    "export.model.weight_data_type=fp32",
    "export.triton_deployment.data_type=fp32",
    "cluster.gpus_per_node=0",
    "deployment.max_model_len=256",
    "deployment.engine_args=[--enforce-eager]",
    f"deployment.start_timeout_s={START_S:.0f}",
    *(f"+env_vars.{name}='{value}'" for name, value in VARIABLES.items()),
)
TWO = ("deployment.nodes=2", "export.model.tensor_model_parallel_size=2")


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with started() as cluster:
        yield cluster


def directory_of(launched: Launched) -> Path:
    return next(launched.results.glob("tiny/export_*")) / "deployment"


def said_by(launched: Launched) -> str:
    job = launched.jobs[-1]
    files = [job.log, job.log.with_suffix(".err"), *launched.results.glob("tiny/export_*/deployment/server*.log")]
    return "\n".join(f"{file}:\n{file.read_text()[-4000:]}" for file in files if file.exists()) or "the job is pending"


def serve(slurm: SlurmCluster, root: Path, *arguments: str) -> tuple[Launched, Endpoint]:
    launched = launch(slurm, root / "results", "stages=[export,deploy]", *SETTINGS, *arguments)
    job = launched.ids[-1]
    wait_until(
        lambda: has_endpoint(launched) or slurm.states(job).get(job) in ("FAILED", "CANCELLED", "TIMEOUT"),
        lambda: said_by(launched),
        1,
        START_S,
    )
    assert has_endpoint(launched), said_by(launched)
    return launched, Endpoint.read(directory_of(launched) / "endpoint.json")


def has_endpoint(launched: Launched) -> bool:
    return bool(list(launched.results.glob("tiny/export_*/deployment/endpoint.json")))


def ask(endpoint: Endpoint) -> dict[str, Any]:
    """A greedy completion: its text, and the tokens that vLLM says it consists of."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 32, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{endpoint.openai_url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        (choice,) = json.load(answer)["choices"]
    return {name: choice[name] for name in ("text", "token_ids", "prompt_token_ids")}


def cancel(slurm: SlurmCluster, launched: Launched) -> None:
    slurm.run("scancel", launched.ids[-1])
    assert list(slurm.wait_for_end(launched.ids[-1]).values()) == ["CANCELLED"]
    assert_nothing_is_left(slurm, launched)


def assert_nothing_is_left(slurm: SlurmCluster, launched: Launched) -> None:
    assert_clean(slurm, *NODES)
    assert not [file for file in directory_of(launched).iterdir() if "endpoint" in file.name]


@pytest.fixture(scope="module")
def alone(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    launched, endpoint = serve(slurm, tmp_path_factory.mktemp("alone"))
    answer = ask(endpoint)
    assert len(answer["token_ids"]) == 32 and len(set(answer["token_ids"])) > 8
    cancel(slurm, launched)
    return answer


def programs_on(slurm: SlurmCluster, node: str) -> dict[int, str]:
    """vLLM's own command lines, below the supervisor's."""
    return {pid: line for pid, line in slurm.processes_on(node).items() if " --node-rank " in line}


def test_two_nodes_answer_with_the_tokens_of_one_and_cancel_ends_both(
    slurm: SlurmCluster, tmp_path: Path, alone: dict[str, Any]
) -> None:
    """A program that is killed on the second is started again, with the first one's."""
    launched, endpoint = serve(slurm, tmp_path, *TWO, "deployment.restart=1")
    assert ask(endpoint) == alone
    assert endpoint.host == "127.0.1.1" and endpoint.job_id == launched.ids[-1]
    first, second = (programs_on(slurm, node) for node in NODES)
    assert first and all("--nnodes 2 --node-rank 0 --master-addr 127.0.1.1" in line for line in first.values())
    assert second and all("--node-rank 1 --master-addr 127.0.1.1" in line for line in second.values())
    assert all(line.endswith("--headless --enforce-eager") for line in second.values())
    os.kill(min(second), signal.SIGKILL)
    log = launched.jobs[-1].log
    wait_until(lambda: "restarting 1 of 1: process 1 of 2, on node2: vLLM was killed by" in log.read_text(), str)
    wait_until(lambda: log.read_text().count("serving") == 2, lambda: said_by(launched), 1, START_S)
    assert ask(Endpoint.read(directory_of(launched) / "endpoint.json")) == alone
    cancel(slurm, launched)


def test_a_task_that_is_killed_on_the_second_node_ends_the_job_with_its_reason(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    launched, _ = serve(slurm, tmp_path, *TWO)
    lines = slurm.processes_on(NODES[1]).items()
    supervisor = next(pid for pid, line in lines if " -m deployment.engines.serve" in line)
    os.kill(supervisor, signal.SIGKILL)
    assert slurm.wait_for_end(launched.ids[-1]) == {launched.ids[-1]: "FAILED"}
    reason = "deploy: process 1 of 2, on node2, is lost: it has hung up"
    assert reason in launched.stages["deploy"]["error"]
    assert reason in slurm.run(sys.executable, "-m", "launcher", "status", str(launched.results), cwd=PROJECT)
    assert_nothing_is_left(slurm, launched)
