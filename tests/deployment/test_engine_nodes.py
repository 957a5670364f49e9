"""One engine over several nodes: processes of this host with a stand-in for vLLM's program, everything else real."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.servers.served import wait_for
from support.servers.served_engines import Served, is_alive

from backends.fastertransformer.engine.parallel.rank import Ranks
from deployment.arguments import EngineArguments
from deployment.engines.leading import check_count
from deployment.engines.nodes import Meeting
from deployment.engines.ray_nodes import check_ray
from deployment.engines.table import PROGRAMS, build_argv
from deployment.processes.linux import list_processes
from deployment.ranks.gathered import Gathered, join
from deployment.ranks.launchers import find_rank
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.errors import ServerError
from launcher.run.on_this_host import variables_of

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "llama_demo" / "checkpoints"
TWO: dict[str, Any] = {"nodes": 2, "tensor_para_size": 2, "exit_timeout_s": 0.5}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration Llama as a Hugging Face directory."""
    output = tmp_path_factory.mktemp("llama") / "hf_fp32"
    convert(ConvertArguments(CHECKPOINT, output, weight_data_type="fp32", format="huggingface"))
    return output


@pytest.fixture
def served(directory: Path, tmp_path: Path) -> Iterator[Served]:
    deployment = Served(directory, tmp_path / "it's here", "counts", restart=1, **TWO)
    yield deployment
    if deployment.process.poll() is None:
        deployment.process.kill()
        deployment.process.wait()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def supervisors(served: Served) -> dict[int, int]:
    """The processes of ``deployment.engines.serve`` by their rank."""
    found = [process.pid for process in list_processes() if process.parent == served.process.pid]
    return {int(re.findall(rb"PMI_RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())[0]): pid for pid in found}


def second_program(served: Served) -> int:
    """Pid of the program on the second node, which started last."""
    log = served.log.with_name("server.rank1.log").read_text()
    return parent_of(int(re.findall(r"^child (\d+) region", log, re.MULTILINE)[-1]))


def test_a_program_that_dies_on_the_second_node_restarts_both_and_then_ends_both(served: Served) -> None:
    endpoint = served.wait()
    assert endpoint.settings["nodes"] == "2" and "--tensor-parallel-size 2" in endpoint.settings["flags"]
    assert "node-rank" not in endpoint.settings["flags"]
    first = served.children
    os.kill(second_program(served), signal.SIGKILL)
    wait_for(lambda: re.search(r"restarting 1 of 1: process 1 of 2, on \S+: vLLM was killed by", served.text))
    wait_for(lambda: served.text.count("serving") == 2)
    assert not any(map(is_alive, first))
    lines = re.findall(r"--node-rank (\d) --master-addr 127.0.0.1 --master-port (\d+)( --headless)?", served.printed)
    assert [(rank, headless.strip()) for rank, _, headless in lines] == [*[("0", "")] * 2, *[("1", "--headless")] * 2]
    ports = [port for _, port, _ in lines]
    assert ports[:2] == ports[2:] and len(set(ports)) == 2  # new ones for each start
    os.kill(second_program(served), signal.SIGKILL)
    assert served.process.wait(240) == 1
    last = served.text.splitlines()
    assert any(re.fullmatch(r"deploy: process 1 of 2, on \S+: vLLM was killed by SIGKILL", line) for line in last)
    served.assert_nothing_is_left()


def test_ray_runs_on_both_before_the_engine_starts_and_both_are_restarted_with_one_of_them(
    directory: Path, tmp_path: Path
) -> None:
    served = Served(directory, tmp_path, "counts", restart=1, distributed_executor="ray", **TWO)
    served.wait()
    assert served.text.index("Ray runs on all nodes") < served.text.index("serving")
    assert served.log.read_text().count("GPUs 2") == 1
    first = served.children
    assert len(first) == 3  # Ray of both nodes, and the engine
    os.kill(second_program(served), signal.SIGKILL)
    wait_for(lambda: re.search(r"restarting 1 of 1: process 1 of 2, on \S+: Ray was killed by", served.text))
    wait_for(lambda: served.text.count("serving") == 2)
    assert not any(map(is_alive, first))
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(240) == 0, served.text
    served.assert_nothing_is_left()
    for log, words in {"server.ray.log": "--head --port ", "server.rank1.log": "--address 127.0.0.2:"}.items():
        line = served.log.with_name(log).read_text().splitlines()[0]
        assert words in line and "--min-worker-port 0 --max-worker-port 0" in line


@pytest.fixture
def launched(directory: Path, tmp_path: Path) -> Iterator[Served]:
    """TensorRT-LLM's program, which a launcher starts beside what joins MPI's ranks."""
    served = Served(directory, tmp_path, "counts", engine="trtllm_serve", **{**TWO, "exit_timeout_s": 20})
    yield served
    if served.process.poll() is None:
        served.process.kill()
        served.process.wait()


def launched_program(served: Served) -> int:
    return parent_of(served.children[0])


def test_a_program_beside_its_launcher_finishes_what_is_in_flight_at_a_stop(launched: Served) -> None:
    endpoint = launched.wait()
    assert "rank 0 of 2" in launched.log.read_text()
    body = {"model": "llama", "prompt": "Hello", "max_tokens": 40, "stream": True}
    request = urllib.request.Request(
        f"{endpoint.openai_url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        first = answer.readline()
        launched.process.send_signal(signal.SIGTERM)
        events = [first, *(line for line in answer if line.strip())]
    assert len(events) == 41 and events[-1].strip() == b"data: [DONE]"
    assert launched.process.wait(15) == 0, launched.text  # not only after the time for requests in flight
    launched.assert_nothing_is_left()


def test_a_program_that_dies_beside_its_launcher_ends_the_server(launched: Served) -> None:
    launched.wait()
    os.kill(launched_program(launched), signal.SIGKILL)
    assert launched.process.wait(240) == 1
    assert "deploy: TensorRT-LLM has ended, and trtllm-llmapi-launch has not" in launched.text
    launched.assert_nothing_is_left()


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_supervisor_that_is_killed_takes_the_others_server_with_it(served: Served, rank: int) -> None:
    served.wait()
    os.kill(supervisors(served)[rank], signal.SIGKILL)
    assert served.process.wait(240) == 128 + signal.SIGKILL
    said = "process 1 of 2, on .*, is lost: it has hung up" if rank else "rank 0 is lost: it has hung up"
    assert re.search(f"^deploy: {said}$", served.text, re.MULTILINE), served.text
    served.assert_nothing_is_left()


def test_a_stop_that_a_launcher_asks_for_because_a_supervisor_was_killed_is_no_good_end(served: Served) -> None:
    """As srun does at once: the request to stop is there when the loss is noticed."""
    served.wait()
    first, second = (supervisors(served)[rank] for rank in range(2))
    for pid, number in ((first, signal.SIGSTOP), (second, signal.SIGKILL), (first, signal.SIGTERM)):
        os.kill(pid, number)
    os.kill(first, signal.SIGCONT)
    assert served.process.wait(240)
    assert re.search(r"^deploy: process 1 of 2, on .*, is lost: it has hung up$", served.text, re.MULTILINE), (
        served.text
    )
    served.assert_nothing_is_left()


def test_a_program_that_stands_still_is_started_again_and_a_stop_ends_both_in_good_order(served: Served) -> None:
    served.wait()
    os.kill(second_program(served), signal.SIGSTOP)
    wait_for(lambda: re.search(r"restarting 1 of 1: .*a process of vLLM .*stopped for 20 s", served.text))
    wait_for(lambda: served.text.count("serving") == 2)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(240) == 0, served.text
    assert "stopping   SIGTERM" in served.text and "lost" not in served.text
    served.assert_nothing_is_left()


@pytest.mark.long
def test_a_supervisor_that_stands_still_ends_the_server(served: Served) -> None:
    """It cannot be told to start anything again; once it goes on it finds the first one gone, and ends its server."""
    served.wait()
    second = supervisors(served)[1]
    os.kill(second, signal.SIGSTOP)
    wait_for(lambda: "process 1 of 2, on" in served.text and "no heartbeat for 20 s" in served.text)
    os.kill(second, signal.SIGCONT)
    assert served.process.wait(240) == 1
    served.assert_nothing_is_left()


def test_a_changed_file_on_the_second_node_is_refused_by_name(directory: Path, tmp_path: Path) -> None:
    """Each node has its own directory at one path: the second process has another file mounted over one."""
    changed = tmp_path / "changed.safetensors"
    shutil.copy(directory / "model.safetensors", changed)
    with changed.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x7f")
    mount = f"mount --bind {changed} {directory}/model.safetensors"
    python = tmp_path / "python3"
    python.write_text(
        f'#!/bin/sh\n[ "$PMI_RANK" = 0 ] && exec {sys.executable} "$@"\n'
        f"""exec unshare --mount sh -c '{mount} && exec {sys.executable} "$@"' - "$@"\n"""
    )
    python.chmod(0o755)
    served = Served(directory, tmp_path / "place", "counts", python=str(python), **TWO)
    assert served.process.wait(240) == 1
    reason = r"process 1 of 2, on \S+: 1 files of .* are not as its manifest records them"
    assert re.search(f"^deploy: {reason}", served.text, re.MULTILINE), served.text
    assert "model.safetensors  content is not what was exported" in served.text and not served.file.exists()
    assert not list(served.place.glob("server*.log"))  # no program was started on any node


def over_nodes(engine: str, rank: int, **settings: Any) -> str:
    """A command line without what is the same on one node."""
    given: dict[str, Any] = {"nodes": 2, "tensor_para_size": 8, "data_type": "bf16", **settings}
    arguments = EngineArguments(engine, Path("/m"), "mine", Path("e"), Path("l"), **given)
    line = " ".join(build_argv(PROGRAMS[engine], arguments, 8000, Meeting(rank, given["nodes"], "10.0.0.1", 20000)))
    return re.sub(r"--host 127.0.0.1 --port 8000 (--served-model-name mine --dtype bfloat16 )?", "", line)


def test_the_command_lines_over_nodes_are_those_of_each_project() -> None:
    """As the argument parsers of vLLM 0.33 and SGLang 0.5.23 have them, and TensorRT-LLM's trtllm-llmapi-launch."""
    mp = "--distributed-executor-backend mp --nnodes 2 --node-rank {} --master-addr 10.0.0.1 --master-port 20000"
    sizes = "vllm serve /m --tensor-parallel-size 8 --pipeline-parallel-size"
    assert over_nodes("vllm", 0, pipeline_para_size=2) == f"{sizes} 2 {mp.format(0)}"
    assert over_nodes("vllm", 1, pipeline_para_size=2) == f"{sizes} 2 {mp.format(1)} --headless"
    assert over_nodes("vllm", 0, distributed_executor="ray") == f"{sizes} 1 --distributed-executor-backend ray"
    copies = "--data-parallel-address 10.0.0.1 --data-parallel-rpc-port 20001"
    assert over_nodes("vllm", 1, data_parallel_size=2, expert_parallel=True) == (
        f"{sizes} 1 --data-parallel-size 2 --enable-expert-parallel {mp.format(1)} {copies} --headless"
    )
    assert over_nodes("sglang", 1, expert_parallel=True) == (
        "python3 -m sglang.launch_server --model-path /m --tp-size 8 --pp-size 1 --ep-size 8 "
        "--nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:20000"
    )
    assert over_nodes("trtllm_serve", 9, tensor_para_size=16, expert_parallel=True) == (
        "trtllm-llmapi-launch trtllm-serve /m --tp_size 16 --pp_size 1 --ep_size 16"
    )


def test_ray_that_lets_anybody_in_or_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the engine's program, whatever PATH has."""
    arguments = EngineArguments(
        "vllm", Path("/m"), "mine", Path("e"), Path("l"), data_type="bf16", command=(str(tmp_path / "vllm"), "serve")
    )
    ray = tmp_path / "ray"
    ray.write_text("#!/bin/sh\necho ray, version 2.51.1\n")
    ray.chmod(0o755)
    with pytest.raises(
        ServerError, match=r"ray --version says 'ray, version 2.51.1': before 2.52 Ray runs what anybody"
    ):
        check_ray(arguments)
    ray.write_text("#!/bin/sh\necho ray, version 2.52.0\n")
    check_ray(arguments)
    ray.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerError, match="there is no program 'ray' beside .*/vllm or on PATH"):
        check_ray(arguments)


@pytest.mark.parametrize(
    ("engine", "environment", "said"),
    [
        ("vllm", {}, "vLLM over 2 nodes takes 2 processes, one a node; of this one no variable says which it is"),
        ("vllm", {"PMI_RANK": "1", "PMI_SIZE": "4"}, "one a node; of this one PMI_RANK and PMI_SIZE say 1 of 4"),
        ("trtllm_serve", {"PMI_RANK": "1", "PMI_SIZE": "2"}, "over 2 nodes takes 8 processes, one a GPU"),
        ("trtllm_serve", {"RANK": "1", "WORLD_SIZE": "8"}, "through MPI alone, and RANK and WORLD_SIZE are not MPI's"),
    ],
)
def test_processes_that_cannot_be_told_apart_are_never_whole_servers(
    engine: str, environment: dict[str, str], said: str
) -> None:
    arguments = EngineArguments(
        engine, Path("/m"), "mine", Path("e"), Path("l"), data_type="bf16", nodes=2, tensor_para_size=8
    )
    with pytest.raises(ServerError, match=said) as refused:
        check_count(find_rank(environment), arguments)
    assert "srun --mpi=pmix" in refused.value.hint


def test_the_processes_of_one_host_have_its_gpus_divided_among_them() -> None:
    outer = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "RANK": "3", "WORLD_SIZE": "9", "SLURM_PROCID": "1", "HOME": "/h"}
    told = variables_of(1, 2, 2, outer)
    assert told["CUDA_VISIBLE_DEVICES"] == "6,7" and told["HOME"] == "/h" and "RANK" not in told
    assert (find_rank(told).rank, find_rank(told).world_size, find_rank(told).local_size) == (1, 2, 2)
    assert variables_of(1, 2, 2, {})["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in variables_of(1, 2, 0, {})


def sleep(wait_s: float) -> bool:
    """Wait, and be asked for no stop."""
    time.sleep(wait_s)
    return False


def test_a_process_that_does_not_come_is_named(tmp_path: Path) -> None:
    ranks = Ranks(0, 3, 0, 3, str(tmp_path / "ranks"), "run", timeout_s=0.5)
    gathered = Gathered(ranks, {}, "digest")
    try:
        assert stat.S_IMODE((tmp_path / "ranks").stat().st_mode) == 0o600
        channel = join(replace(ranks, rank=1), sleep)
        assert channel is not None
        with closing(channel), pytest.raises(ServerError, match="of 3 processes these have not come within 0.5 s: 2"):
            gathered.wait_until_ready(sleep)
        with pytest.raises(ServerError, match="rank 0 is lost: it has not come within 0.5 s"):
            join(replace(ranks, rank=2, run="another"), sleep)
    finally:
        gathered.end()
    assert not (tmp_path / "ranks").exists()
