"""Arguments of the server script: the launcher renders them, the script parses them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

from handover.arguments import ScriptArguments, option
from handover.ranges import (
    BEAMS,
    BODY_BYTES,
    COUNT,
    DAY_S,
    IN_FLIGHT,
    INSTANCES,
    LOG_BYTES,
    PARALLEL,
    PORT,
    REPLICAS,
    SHARE,
    TOKENS,
    UNCOUNTED,
    WEEK_S,
)
from handover.signatures.arguments import TrustArguments

NODE = "node"
"""As host: the address of the node, where Slurm starts the server for clients on other nodes."""


@dataclass(frozen=True)
class GemmAutotuneArguments(ScriptArguments):
    """Find the fastest matrix products for a model by FasterTransformer's gpt_gemm."""

    model_repository: Path = field(metadata={"help": "Triton model repository"})
    binary: Path = field(metadata={"help": "gpt_gemm of the container"})
    input_length: int = option(32, "longest prompt in tokens to tune for", TOKENS)
    beam_width: int = option(1, "beams to tune for", BEAMS)


@dataclass(frozen=True)
class ServeArguments(TrustArguments):
    """Start tritonserver on a model repository, prove that it generates, supervise it."""

    model_repository: Path = field(metadata={"help": "Triton model repository"})
    endpoint: Path = field(metadata={"help": "file to publish once a real generation has come back"})
    log: Path = field(metadata={"help": "file for what the server prints"})
    http_port: int = option(0, "0: a free one", PORT)
    grpc_port: int = option(0, "0: a free one", PORT)
    metrics_port: int = option(0, "0: a free one", PORT)
    openai_port: int | None = option(None, "of the OpenAI API; 0: a free one; left out: it is off", PORT)
    openai_processes: int | None = option(None, "that share the OpenAI API's port; left out: one", INSTANCES)
    api_keys_file: Path | None = option(
        None, "file with a bearer key a line for the OpenAI API; left out: it needs none"
    )
    openai_adapter_keys_file: Path | None = option(
        None, "file with a bearer key a line of those who load adapters by the OpenAI API; left out: it is off"
    )
    openai_access_log: Path | None = option(None, "file that gets a JSON line a request to the OpenAI API")
    openai_sample_log: Path | None = option(
        None, "file that gets tokens and log probabilities of some requests, for evaluation=monitor; left out: none"
    )
    openai_sample_share: float | None = option(None, "of the requests that it gets; left out: 0.01", SHARE)
    openai_sample_bytes: int | None = option(
        None, "of it and the older file beside it, at most; left out: 64 MiB", LOG_BYTES
    )
    openai_chat_template: Path | None = option(None, "Jinja template of conversations; left out: the tokenizer's own")
    openai_tool_dialect: str | None = option(
        None, "how the model writes tool calls; left out: as its chat template does"
    )
    openai_max_requests: int | None = option(None, "to the OpenAI API at a time; left out: 1024", IN_FLIGHT)
    openai_max_sequences: int | None = option(
        None, "answers of one request to the OpenAI API; left out: 512", IN_FLIGHT
    )
    openai_max_body_bytes: int | None = option(None, "of a request to the OpenAI API; left out: 8 MiB", BODY_BYTES)
    host: str = option("127.0.0.1", f"address to listen on; {NODE}: the node's under Slurm, POD_IP in a pod")
    engine: str = option("slipway", "slipway (our drop-in) or fastertransformer")
    cuda_devices: str = option("", "positions among the GPUs that the task sees, such as 0,1; empty: all of them")
    start_timeout_s: float = option(300, "seconds until a generation must have come back", WEEK_S)
    exit_timeout_s: float = option(10, "seconds for requests in flight at the end", DAY_S)
    restart: int = option(0, "times that a server which has died is started again, at most", UNCOUNTED)
    open_apis: tuple[str, ...] = option((), "JSON list of Triton's APIs to leave open")
    guard: str = option("auto", "auto (where others than this host reach the server), always or never")
    guard_max_body_bytes: int | None = option(None, "of a request through the guard; left out: 128 MiB", BODY_BYTES)
    tritonserver: Path | None = option(None, "program to start; left out: that of nvidia-pytriton, or of the container")
    edited_files: tuple[str, ...] = option(
        (), "JSON list of patterns: files that may differ from the repository's manifest"
    )
    server_args: tuple[str, ...] = option((), "JSON list of more tritonserver flags")


OF_OPENAI = tuple(each.name for each in fields(ServeArguments) if each.name.startswith(("api_keys_", "openai_")))
"""Arguments of the OpenAI API."""


@dataclass(frozen=True)
class EngineArguments(TrustArguments):
    """Start another project's server on a Hugging Face directory, prove that it generates, supervise it."""

    engine: str = field(metadata={"help": "vllm, sglang or trtllm_serve"})
    model_repository: Path = field(metadata={"help": "the Hugging Face directory"})
    model_name: str = field(metadata={"help": "name that clients ask for, where the engine can be told one"})
    endpoint: Path = field(metadata={"help": "file to publish once a real generation has come back"})
    log: Path = field(metadata={"help": "file for what the server prints"})
    data_type: str = field(metadata={"help": "fp32, fp16 or bf16: of the computation"})
    command: tuple[str, ...] = option((), "JSON list: program and first words; empty: the engine's own")
    http_port: int = option(0, "of the OpenAI API; 0: a free one", PORT)
    host: str = option("127.0.0.1", f"address to listen on; {NODE}: the node's under Slurm, POD_IP in a pod")
    tensor_para_size: int = option(1, "GPUs that share a layer", PARALLEL)
    pipeline_para_size: int = option(1, "groups of layers", PARALLEL)
    data_parallel_size: int | None = option(None, "copies of the model behind one API; left out: one", PARALLEL)
    expert_parallel: bool | None = option(None, "true: a mixture's experts are spread over the GPUs; left out: split")
    nodes: int | None = option(None, "that serve one model together; left out: one", PARALLEL)
    distributed_executor: str | None = option(None, "of vllm over several nodes: mp or ray; left out: mp")
    max_model_len: int | None = option(None, "tokens of prompt and answer; left out: what the model allows", TOKENS)
    max_num_seqs: int | None = option(None, "requests that are computed together; left out: its own choice", COUNT)
    gpu_memory_utilization: float | None = option(
        None, "share of a GPU's memory to use; left out: its own choice", SHARE
    )
    engine_args: tuple[str, ...] = option((), "JSON list of more flags for the program")
    cuda_devices: str = option("", "positions among the GPUs that the task sees, such as 0,1; empty: all of them")
    start_timeout_s: float = option(300, "seconds until a generation must have come back", WEEK_S)
    exit_timeout_s: float = option(10, "seconds for requests in flight at the end", DAY_S)
    restart: int = option(0, "times that a server which has died is started again, at most", UNCOUNTED)
    edited_files: tuple[str, ...] = option(
        (), "JSON list of patterns: files that may differ from the directory's manifest"
    )


@dataclass(frozen=True)
class ReplicasArguments(ScriptArguments):
    """Start several servers of one model behind a router, prove that they generate, supervise them."""

    program: str = field(metadata={"help": "module that serves: deployment.serve or deployment.engines.serve"})
    server: tuple[str, ...] = field(metadata={"help": "JSON list: its arguments; host and ports are the router's"})
    replicas: int = option(2, "servers", REPLICAS)
    gpus: int = option(0, "that each of them takes; 0: there are none, and each gets its part of the cores", UNCOUNTED)
    router: str = option("haproxy", "haproxy, sglang or vllm")
    router_command: tuple[str, ...] = option((), "JSON list: program and first words; empty: the router's own")
    affinity_header: str | None = option(None, "requests with the same value of it go to the same server")
    drain_timeout_s: float = option(600, "seconds for requests in flight before a server is restarted", DAY_S)
    job_logs: Path | None = option(None, "directory of the logs of servers that are Slurm jobs; left out: children")
    lasting: bool = option(False, "true: a server that is out of restarts is left out; false: all end with it")


AnyServer = TypeVar("AnyServer", ServeArguments, EngineArguments)
"""Arguments of either kind of server."""
