"""Keys of ``export``: what is converted, into what, and the repository that is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from export_scripts.arguments import ConvertArguments, ExportArguments
from handover.arguments import same
from handover.ranges import PARALLEL, number
from launcher.config.choices import AdapterFormat, DataType, Manifest, ModelFormat, ModelType, Quantization

TAKES_NAMES = "takes_names"
"""Metadata of a key in whose place a mapping may stand, whose names are the user's."""


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
    draft_model: str | None = None  # Hugging Face directory of a small model of the same vocabulary, or an EAGLE-3 head
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
