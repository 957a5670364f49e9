"""What each engine's program is told of the nodes over which it serves one model, by the flags of its own.

As of vLLM 0.33 (``vllm/engine/arg_utils.py``), SGLang 0.5.23 (``sglang/srt/arg_groups/fields/parallel.py``) and
TensorRT-LLM 1.2 (``tensorrt_llm/llmapi/trtllm-llmapi-launch``). Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deployment.arguments import EngineArguments
from deployment.doors.address import place_of

PORTS = 8
"""Consecutive ports on the first node that a start is given: vLLM takes two, SGLang one and six behind it."""


@dataclass(frozen=True)
class Meeting:
    """Which of the processes this is, and where they find each other.

    Attributes:
        rank, count: of this process and all; one a node, or one a GPU where MPI joins them.
        address: of the first node.
        port: there, the first of ``PORTS``.
    """

    rank: int
    count: int
    address: str
    port: int


@dataclass(frozen=True)
class OverNodes:
    """How a program serves over several nodes.

    Attributes:
        words: flags for one of the processes.
        flags: those that only the deployment gives.
        address_variable: by which a process is told this host's address; empty where it is told none.
        starter: program that starts the engine's, which then is as many processes as GPUs, joined by MPI.
        copies: whether several nodes can have several copies of the model.
        executors: that it can be told to take, see ``ray_nodes.py``; empty: it has one way.
    """

    words: Callable[[EngineArguments, Meeting], tuple[str, ...]]
    flags: frozenset[str]
    address_variable: str = ""
    starter: tuple[str, ...] = ()
    copies: bool = False
    executors: frozenset[str] = frozenset()

    @property
    def is_mpis(self) -> bool:
        """Whether MPI joins a process for each GPU; such processes cannot be started again one by one."""
        return bool(self.starter)


def _of_vllm(arguments: EngineArguments, meeting: Meeting) -> tuple[str, ...]:
    backend = ("--distributed-executor-backend", arguments.distributed_executor or "mp")
    if arguments.distributed_executor == "ray":
        return backend
    words = [*backend, "--nnodes", str(meeting.count), "--node-rank", str(meeting.rank)]
    words += ["--master-addr", meeting.address, "--master-port", str(meeting.port)]
    if (arguments.data_parallel_size or 1) > 1:
        words += ["--data-parallel-address", meeting.address, "--data-parallel-rpc-port", str(meeting.port + 1)]
    return (*words, *(["--headless"] if meeting.rank else []))


def _of_sglang(arguments: EngineArguments, meeting: Meeting) -> tuple[str, ...]:
    place = ("--nnodes", str(meeting.count), "--node-rank", str(meeting.rank))
    return (*place, "--dist-init-addr", place_of(meeting.address, meeting.port))


VLLM_OVER_NODES = OverNodes(
    _of_vllm,
    frozenset(
        {
            *("--distributed-executor-backend", "--nnodes", "-n", "--node-rank", "-r", "--master-addr"),
            *("--master-port", "--data-parallel-address", "-dpa", "--data-parallel-rpc-port", "-dpp", "--headless"),
            *("--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr", "--data-parallel-backend", "-dpb"),
        }
    ),
    address_variable="VLLM_HOST_IP",
    copies=True,
    executors=frozenset({"mp", "ray"}),
)
SGLANG_OVER_NODES = OverNodes(
    _of_sglang,
    frozenset({"--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr", "--use-ray"}),
    address_variable="SGLANG_HOST_IP",
)
TRTLLM_OVER_NODES = OverNodes(lambda arguments, meeting: (), frozenset(), starter=("trtllm-llmapi-launch",))
