"""Keys of ``deployment``: the server that runs, and what it is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from deployment.arguments import EngineArguments, ReplicasArguments, ServeArguments
from handover.arguments import same
from handover.ranges import DAY_S, WEEK_S, number
from launcher.config.choices import DistributedExecutor, Engine, Guard, Router, TritonApi


@dataclass
class StageRunConfig:
    """Name, time limit and results directory of one stage."""

    name: str = MISSING
    time_limit: str = "2:00:00"
    results_dir: str = MISSING


@dataclass
class DeploymentConfig:
    """conf/deployment: the running server."""

    run: StageRunConfig = field(default_factory=StageRunConfig)
    engine: Engine = Engine.slipway
    container: str | None = None  # image for the server alone, such as FasterTransformer's; None: container
    host: str | None = None  # None: loopback; the node's address where the server runs alone as a Slurm job
    http_port: int = same(ServeArguments, "http_port")
    grpc_port: int = same(ServeArguments, "grpc_port")
    metrics_port: int = same(ServeArguments, "metrics_port")
    openai_port: int | None = same(ServeArguments, "openai_port")  # see docs/openai.md
    openai_processes: int | None = same(ServeArguments, "openai_processes")
    api_keys_file: str | None = same(ServeArguments, "api_keys_file")
    openai_adapter_keys_file: str | None = same(ServeArguments, "openai_adapter_keys_file")
    openai_access_log: str | None = same(ServeArguments, "openai_access_log")
    openai_sample_log: str | None = same(ServeArguments, "openai_sample_log")
    openai_sample_share: float | None = same(ServeArguments, "openai_sample_share")
    openai_sample_bytes: int | None = same(ServeArguments, "openai_sample_bytes")
    openai_chat_template: str | None = same(ServeArguments, "openai_chat_template")
    openai_tool_dialect: str | None = same(ServeArguments, "openai_tool_dialect")
    openai_max_requests: int | None = same(ServeArguments, "openai_max_requests")
    openai_max_sequences: int | None = same(ServeArguments, "openai_max_sequences")
    openai_max_body_bytes: int | None = same(ServeArguments, "openai_max_body_bytes")
    start_timeout_s: int = number(300, WEEK_S)  # until a real generation has come back
    torch_kernels: bool = False  # serve on a GPU although no C compiler is there for its kernels: six times slower
    gemm_autotune: bool = False  # engine=fastertransformer: find the fastest matrix products before serving
    gemm_binary: str = "/workspace/build/fastertransformer_backend/build/bin/gpt_gemm"  # in the container
    nodes: int | None = same(EngineArguments, "nodes")  # None: as many as TP x PP x data_parallel_size fill
    distributed_executor: DistributedExecutor | None = None  # of vllm over several nodes; None: mp
    data_parallel_size: int | None = same(EngineArguments, "data_parallel_size")
    expert_parallel: bool | None = same(EngineArguments, "expert_parallel")
    command: Any = None  # of an engine with a program of its own: text or a list; None: vllm serve and the like
    max_model_len: int | None = same(EngineArguments, "max_model_len")
    max_num_seqs: int | None = same(EngineArguments, "max_num_seqs")
    gpu_memory_utilization: float | None = same(EngineArguments, "gpu_memory_utilization")
    engine_args: list[str] = same(EngineArguments, "engine_args")
    exit_timeout_s: int = number(10, DAY_S)  # for requests in flight when the server is stopped
    restart: int = same(ServeArguments, "restart")
    replicas: int = same(ReplicasArguments, "replicas", default=1)
    replica_jobs: bool = True  # on Slurm each of several replicas is a job; False: all share one job of one node
    router: Router = Router.haproxy  # before several replicas
    router_command: Any = None  # text or a list: the router's program and first words; None: its own
    affinity_header: str | None = same(ReplicasArguments, "affinity_header")
    drain_timeout_s: int = number(600, DAY_S)  # for requests in flight before a replica is restarted
    endpoint: str | None = None  # evaluate and benchmark attach to this one instead of their own
    endpoint_key_env: str | None = (
        None  # environment variable with the bearer key of an OpenAI API, see docs/endpoints.md
    )
    endpoint_tokenizer: str | None = None  # directory of an OpenAI API's tokenizer; None: that of this run's checkpoint
    adapter: Any = None  # LoRA adapters of the served model that evaluate asks, one or some; None: the model alone
    label: str | None = None  # name of the deployment in tables and reports; None: the served model's name
    open_apis: list[TritonApi] = field(default_factory=list)  # those that clients may use without the secret header
    guard: Guard = Guard.auto  # in front of Triton's ports: auto: where others than the server's host reach them
    guard_max_body_bytes: int | None = same(ServeArguments, "guard_max_body_bytes")
    tritonserver: str | None = same(ServeArguments, "tritonserver")
    edited_files: list[str] = same(ServeArguments, "edited_files")
    server_args: list[str] = same(ServeArguments, "server_args")
