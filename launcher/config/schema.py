"""Every configuration key: its type, its meaning and its unit. The YAML files below conf/ are only values.

The largest sections are in modules of their names beside this one. The keys are those of NeMo-Megatron-Launcher where
it has them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from evaluation.arguments import BenchmarkArguments, TrackArguments
from evaluation.speed.load_arguments import LoadArguments
from evaluation.task_table import TASKS
from handover.arguments import same
from handover.ranges import BATCH, DAY_MS, number
from handover.signatures.arguments import SigningArguments
from launcher.config.choices import (
    BenchmarkKind,
    ClusterType,
    Plans,
    Stage,
)
from launcher.config.cluster import ClusterConfig
from launcher.config.deployment import DeploymentConfig, StageRunConfig
from launcher.config.export import ExportConfig
from launcher.config.kubernetes import KubernetesConfig
from launcher.config.options import options_of
from launcher.config.run_names import find_training_dir, name_variant, sweep_directory, work_directory

PROJECT_DIR = Path(__file__).resolve().parents[2]
_OF_THE_RUN = (
    *("endpoint", "endpoint_key_env", "output", "model_digest", "model_repository", "tokenizer", "timeout_s"),
    *("checkpoint", "adapter", "checkpoint_tokenizer", "lora_name", "lora_path"),
)
"""Arguments of evaluations and benchmarks that are no keys of their sections: the run says what they are."""
_OF_BENCHMARKS = "model", "vocab_size", "gpu_hour_price", "gpus", "label", "slos"
"""Arguments of a load that are no keys of its section: both kinds of benchmarks, or a deployment, have them."""


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
