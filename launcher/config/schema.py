"""Every configuration key: its type, its meaning and its unit. The YAML files below conf/ are only values.

The keys are those of NeMo-Megatron-Launcher where it has them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from deployment.arguments import EngineArguments, ReplicasArguments, ServeArguments
from evaluation.arguments import BenchmarkArguments, TrackArguments
from evaluation.speed.load_arguments import LoadArguments
from evaluation.task_table import TASKS
from export_scripts.arguments import ConvertArguments, ExportArguments
from handover.arguments import same
from handover.ranges import BATCH, DAY_MS, DAY_S, GPUS, PARALLEL, PROCESSES, WEEK_S, number
from handover.signatures.arguments import SigningArguments
from launcher.config.choices import (
    AdapterFormat,
    BenchmarkKind,
    ClusterType,
    ContainerRuntime,
    DataType,
    DistributedExecutor,
    Engine,
    Guard,
    Manifest,
    ModelFormat,
    ModelType,
    Plans,
    Quantization,
    Router,
    Stage,
    TritonApi,
)
from launcher.config.kubernetes import KubernetesConfig
from launcher.config.options import options_of
from launcher.config.run_names import find_training_dir, name_variant, sweep_directory, work_directory
from models.checks import Range

PROJECT_DIR = Path(__file__).resolve().parents[2]
_OF_THE_RUN = (
    *("endpoint", "endpoint_key_env", "output", "model_digest", "model_repository", "tokenizer", "timeout_s"),
    *("checkpoint", "adapter", "checkpoint_tokenizer", "lora_name", "lora_path"),
)
"""Arguments of evaluations and benchmarks that are no keys of their sections: the run says what they are."""
_OF_BENCHMARKS = "model", "vocab_size", "gpu_hour_price", "gpus", "label", "slos"
"""Arguments of a load that are no keys of its section: both kinds of benchmarks, or a deployment, have them."""
TAKES_NAMES = "takes_names"
"""Metadata of a key in whose place a mapping may stand, whose names are the user's."""


@dataclass
class ClusterConfig:
    """Where jobs run. Slurm's keys are ignored by the other cluster types."""

    partition: str | None = None
    account: str | None = None
    exclusive: bool = True
    gpus_per_task: int | None = number(None, GPUS)
    gpus_per_node: int | None = number(None, GPUS)  # None: what this machine has
    gpu_type: str | None = None  # of plans=export: what launchers call the GPU, such as H100
    mem: int = number(0, Range(0, 1_000_000_000))  # MB per node; 0: all
    cpus_per_task: int | None = number(None, PROCESSES)  # None: 4 for each task, with exclusive all
    overcommit: bool = False
    job_name_prefix: str = "nemo-megatron-"
    nodes: int | None = number(None, Range(1, 65_536))  # upper limit; None: as many as TP x PP fill
    one_task_per_rank: bool = False  # the drop-in engine gets one task for each rank; False: one process joins them
    setup: list[str] = field(default_factory=list)  # lines of the sbatch file before the command
    srun_args: list[str] = field(default_factory=list)  # more flags for each srun
    container_runtime: ContainerRuntime = ContainerRuntime.pyxis  # none: on the host, whatever container says
    container_args: list[str] = field(default_factory=list)  # more flags for docker run and apptainer exec
    additional_parameters: dict[str, Any] = field(default_factory=dict)  # any other sbatch option


@dataclass
class ExportRunConfig:
    """What the run is called and where its results go."""

    name: str = MISSING
    time_limit: str = "2:00:00"
    dependency: str | None = "singleton"  # of every job; None: it waits for the run's own jobs alone
    model_train_name: str = MISSING
    training_dir: str = MISSING
    config_summary: str = MISSING
    results_dir: str = MISSING
    model_type: ModelType = ModelType.gpt3


@dataclass
class ModelConfig:
    """The training checkpoint and what it becomes."""

    checkpoint_path: str = MISSING
    adapter_path: str | None = None  # LoRA adapter to merge: a .nemo, a directory of NeMo 2, Megatron-Bridge or PEFT
    tokenizer: str | None = None  # tokenizer's directory or file; None: the checkpoint's own
    format: ModelFormat | None = None  # None: shards of what FasterTransformer computes, else Hugging Face's directory
    quantization: Quantization | None = None  # of a Hugging Face directory's weights; None: there is none
    tensor_model_parallel_size: int = number(1, PARALLEL)
    weight_data_type: DataType = DataType.fp16
    processes: int = same(ConvertArguments, "processes", default=16)
    load_checkpoints_to_cpu: bool = False
    allow_nonfinite: bool = same(ConvertArguments, "allow_nonfinite")
    start_id: int | None = same(ConvertArguments, "start_id")
    end_id: int | None = same(ConvertArguments, "end_id")
    checkpoint_sha256: str | None = same(ConvertArguments, "checkpoint_sha256")
    random_weights: bool = False  # make weights of the shape that checkpoint_path, a model_config.yaml, describes


@dataclass
class AdapterConfig:
    """What becomes of the model's LoRA adapter."""

    format: AdapterFormat | None = None  # peft: a directory of its own, without the model; None: it is merged
    base_model: str | None = same(ConvertArguments, "base_model")


@dataclass
class TritonDeploymentConfig:
    """The Triton model repository."""

    triton_model_dir: str = MISSING
    max_batch_size: int = same(ExportArguments, "max_batch_size", default=1)
    pipeline_model_parallel_size: int = number(1, PARALLEL)
    int8_mode: bool = False
    enable_custom_all_reduce: bool = False
    data_type: DataType = DataType.fp16
    max_queue_delay_us: int = same(ExportArguments, "max_queue_delay_us")
    decoupled: bool = same(ExportArguments, "decoupled")
    interactive_sessions: int = same(ExportArguments, "interactive_sessions")
    session_idle_s: float = same(ExportArguments, "session_idle_s")
    request_timeout_s: float = same(ExportArguments, "request_timeout_s")
    prefill_chunk_tokens: int | None = same(ExportArguments, "prefill_chunk_tokens")
    kv_cache_dtype: str | None = same(ExportArguments, "kv_cache_dtype")
    quantization: str | None = same(ExportArguments, "quantization")
    fp8_activations: bool = same(ExportArguments, "fp8_activations")
    speculation: str | None = same(ExportArguments, "speculation")
    draft_model: str | None = None  # Hugging Face directory of a small model of the same vocabulary
    max_speculative_tokens: int | None = same(ExportArguments, "max_speculative_tokens")
    max_adapters: int | None = same(ExportArguments, "max_adapters")
    max_adapter_rank: int | None = same(ExportArguments, "max_adapter_rank")
    tokenizer_instances: int = same(ExportArguments, "tokenizer_instances")
    text_deltas: bool = same(ExportArguments, "text_deltas")


@dataclass
class ExportConfig:
    """conf/export: the convert and export stages."""

    run: ExportRunConfig = field(default_factory=ExportRunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    # LoRA adapters that are served beside the model: {name: path}, or a directory of them
    adapters: Any = field(default=None, metadata={TAKES_NAMES: True})
    manifest: Manifest | None = None  # that is written beside the exported model; see docs/kubernetes.md
    manifest_uri: str | None = None  # where the cluster finds the model; None: its claim in kubernetes.volumes
    triton_deployment: TritonDeploymentConfig = field(default_factory=TritonDeploymentConfig)


@dataclass
class StageRunConfig:
    """Name, time limit and results directory of one stage."""

    name: str = MISSING
    time_limit: str = "2:00:00"
    results_dir: str = MISSING


@dataclass
class EvaluationRunConfig(StageRunConfig):
    """The same for all evaluations; each has a directory of its own in ``results_dir``."""

    name: str = "evaluate_${export.run.model_train_name}"
    results_dir: str = "${export.run.results_dir}/evaluation"
    tasks: Any = None  # NeMo-Megatron-Launcher's: a name or several, which evaluation=[...] must have chosen


@dataclass
class EvaluationModelConfig:
    """NeMo-Megatron-Launcher's key of how the model is asked; which model it is stands below export."""

    eval_batch_size: int | None = number(None, BATCH)  # of every evaluation, in place of its own batch_size


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


@dataclass
class GateConfig:
    """What the run is held against; the last stage says GO, NO-GO or INCONCLUSIVE, and the exit status follows."""

    thresholds: str | None = None  # YAML file of limits, see docs/reports.md; None: there is no gate
    baseline: str | None = None  # results directory of an earlier run, shown beside this one


@dataclass
class TrackingConfig:
    """Who else is told the figures, after the report; tokens are those of the environment."""

    experiment: str = same(TrackArguments, "experiment")
    mlflow: str | None = same(TrackArguments, "mlflow")
    wandb: str | None = same(TrackArguments, "wandb")


def _with_tasks(section: type[Any]) -> type[Any]:
    """Add a section for each evaluation of ``TASKS``; None where it is not chosen."""
    for name, task in TASKS.items():
        section.__annotations__[name] = options_of(task.arguments, leave_out=_OF_THE_RUN)(type(name, (), {})) | None
        setattr(section, name, None)
    return section


@dataclass
@_with_tasks
class EvaluationConfig:
    """conf/evaluation: the evaluate stage; what ``evaluation=[...]`` names has its section, the others are None."""

    run: EvaluationRunConfig = field(default_factory=EvaluationRunConfig)
    model: EvaluationModelConfig = field(default_factory=EvaluationModelConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def tasks(self) -> dict[str, Any]:
        """The sections of the evaluations that were chosen, by name, in the order of ``TASKS``."""
        return {name: section for name in TASKS if (section := getattr(self, name)) is not None}


@dataclass
class SloConfig:
    """Limits of a good request in milliseconds; None: no limit."""

    ttft_ms: float | None = number(None, DAY_MS)
    itl_ms: float | None = number(None, DAY_MS)
    tpot_ms: float | None = number(None, DAY_MS)
    e2e_ms: float | None = number(None, DAY_MS)


@options_of(LoadArguments, (*_OF_THE_RUN, *_OF_BENCHMARKS), parts=("search",))
class LoadConfig:
    """conf/benchmark/load.yaml: a serving load."""

    prompt_file: str | None
    trace: str | None


@dataclass
class BenchmarkConfig:
    """conf/benchmark: the benchmark stage."""

    run: StageRunConfig = field(default_factory=StageRunConfig)
    kind: BenchmarkKind = BenchmarkKind.static
    model: str = same(BenchmarkArguments, "model")
    vocab_size: int | None = same(BenchmarkArguments, "vocab_size")
    batch_sizes: list[int] = same(BenchmarkArguments, "batch_sizes", default=())  # static, as the next three
    lengths: list[list[int]] = same(BenchmarkArguments, "lengths")
    warmup: int = same(BenchmarkArguments, "warmup")
    repeats: int = same(BenchmarkArguments, "repeats")
    gpu_hour_price: float | None = same(BenchmarkArguments, "gpu_hour_price")
    gpus: int | None = same(BenchmarkArguments, "gpus")
    load: LoadConfig = field(default_factory=LoadConfig)
    slos: SloConfig = field(default_factory=SloConfig)


@dataclass
class SigningConfig:
    """Who signs what the stages write, and whose signatures count; see docs/signatures.md."""

    key: str | None = same(SigningArguments, "signing_key")
    password_env: str | None = same(SigningArguments, "signing_password_env")
    certificates: str | None = same(SigningArguments, "signing_certificates")
    trusted: str | None = same(SigningArguments, "signing_trusted")
    require: bool | None = same(SigningArguments, "signing_require")


@dataclass
class Config:
    """conf/config.yaml: the whole run."""

    stages: list[Stage] = field(default_factory=list)
    cluster_type: ClusterType = ClusterType.auto
    launcher_scripts_path: str = MISSING
    data_dir: str = MISSING
    base_results_dir: str = MISSING
    container: str | None = None
    container_mounts: list[str | None] = field(default_factory=list)
    bcp_no_redirect: bool = True
    env_vars: dict[str, Any] = field(default_factory=dict)
    plans: Plans | None = None  # export: jobs are written for other launchers and not started; see docs/cluster.md
    dry_run: bool = False
    force: list[Stage] = field(default_factory=list)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    deployment: DeploymentConfig = field(default_factory=DeploymentConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    signing: SigningConfig = field(default_factory=SigningConfig)


@cache
def register() -> None:
    """Make the schema and the resolvers known to Hydra, once in a process, before composing."""
    ConfigStore.instance().store(name="schema", node=_schema())
    for task in TASKS:
        if not (PROJECT_DIR / "conf" / "evaluation" / f"{task}.yaml").is_file():  # its arguments' defaults are enough
            ConfigStore.instance().store(group="evaluation", name=task, node={task: {}})
    OmegaConf.register_new_resolver("project_dir", lambda: str(PROJECT_DIR), replace=True)
    OmegaConf.register_new_resolver("work_dir", partial(work_directory, PROJECT_DIR), replace=True)
    OmegaConf.register_new_resolver("training_dir", partial(find_training_dir, PROJECT_DIR), replace=True)
    OmegaConf.register_new_resolver("variant", name_variant, replace=True)
    OmegaConf.register_new_resolver("evaluations", lambda: ",".join(TASKS), replace=True)
    OmegaConf.register_new_resolver("sweep_dir", sweep_directory, replace=True, use_cache=True)


@cache
def _schema() -> Any:
    """Return every key with its type and default. It takes 40 ms to make; what is merged into it goes into a copy."""
    schema = OmegaConf.structured(Config)
    given = schema.kubernetes
    named = given.volumes, given.secrets, given.secret_files, given.gpu_node_selector, given.memory
    for free in (schema.cluster.additional_parameters, schema.env_vars, *named):
        OmegaConf.set_struct(free, False)  # their keys are not ours: no '+' is needed to add one
    return schema


def to_typed(cfg: DictConfig) -> Config:
    """Turn Hydra's config into dataclasses; after this no DictConfig exists."""
    known = OmegaConf.merge(_schema(), OmegaConf.to_container(cfg, resolve=False))  # refuses what + smuggled in
    typed = OmegaConf.to_object(known)
    assert isinstance(typed, Config)
    return typed
