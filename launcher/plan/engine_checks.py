"""What can be known of an engine that reads a Hugging Face directory before anything is submitted."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from deployment.arguments import OF_OPENAI
from ft_format.layout import KV_HEADS, Dims
from ft_format.weight_format import KEY
from handover.errors import ConfigError
from launcher.clusters.table import cluster_of
from launcher.config.choices import ContainerRuntime, Engine, Guard
from launcher.config.schema import Config
from launcher.plan.node_checks import check_nodes
from launcher.plan.programs import command_of, program_of
from models.directory import CONFIG_FILE

if TYPE_CHECKING:
    from export_scripts.targets.huggingface.plan import HuggingFacePlan

_TRITONS = "it is a setting of the Triton model repository or its engine"
_MOST_LISTED = 10
_API = "the engine has an OpenAI API itself, at deployment.http_port"


def check_engine(config: Config) -> None:
    """Refuse keys that the engine has no use for, a program that is not here, and nodes that it cannot be spread over.

    Raises:
        ConfigError: naming the key, and what to do.
    """
    _check_keys(config)
    check_nodes(config)
    data_type, weights = config.export.triton_deployment.data_type, config.export.model.weight_data_type
    if config.deployment.engine is Engine.trtllm_serve and data_type is not weights:
        raise ConfigError(
            f"export.triton_deployment.data_type={data_type} with weights in {weights}: trtllm-serve computes in the "
            "type of the weights",
            f"take the same for both: export.model.weight_data_type={data_type}",
        )
    if config.deployment.engine.is_program:
        _check_command(config)
    elif config.deployment.engine_args:
        raise ConfigError(
            f"deployment.engine_args is given with deployment.engine={config.deployment.engine}: model.json has "
            "settings of vLLM, and no flags",
            "leave it out, edit model.json after the export, or take deployment.engine=vllm",
        )


def _check_keys(config: Config) -> None:
    deployment, triton, engine = config.deployment, config.export.triton_deployment, config.deployment.engine
    of_guard = "tritonserver", "guard_max_body_bytes"
    others = "grpc_port", "metrics_port", "open_apis", "gemm_autotune", "torch_kernels", "server_args", *of_guard
    reasons = {
        **{f"deployment.{name}": (getattr(deployment, name) is not None, _API) for name in OF_OPENAI},
        **{
            f"deployment.{name}": (bool(getattr(deployment, name)), "it is a setting of tritonserver")
            for name in others
        },
        "deployment.guard": (deployment.guard is Guard.always, "it stands in front of tritonserver"),
        f"export.triton_deployment.{KEY}": (bool(getattr(triton, KEY)), f"{_TRITONS}; its own quantization is a flag"),
        **{
            f"export.triton_deployment.{name}": (bool(getattr(triton, name)), _TRITONS)
            for name in (
                *("interactive_sessions", "request_timeout_s", "text_deltas", "enable_custom_all_reduce"),
                *("kv_cache_dtype", "quantization", "fp8_activations", "speculation", "draft_model"),
            )
        },
        **{
            f"export.triton_deployment.{name}": (getattr(triton, name) is not None, _TRITONS)
            for name in ("prefill_chunk_tokens", "max_speculative_tokens", "max_adapters", "max_adapter_rank")
        },
    }
    for key, (is_given, reason) in reasons.items():
        if is_given:
            raise ConfigError(
                f"{key} is given with deployment.engine={engine}: {reason}",
                "leave it out; more flags for the engine's program go to deployment.engine_args",
            )


def _check_command(config: Config) -> None:
    """Look for the program where the stage runs on this very host."""
    command = command_of(config) or program_of(config).command
    is_contained = config.container or config.deployment.container
    runs_here = cluster_of(config).runs_here and not config.dry_run
    if runs_here and not (is_contained and config.cluster.container_runtime is not ContainerRuntime.none):
        program = str(Path(command[0]).expanduser()) if command[0].startswith("~") else command[0]
        if shutil.which(program) is None:
            raise ConfigError(
                f"deployment.engine={config.deployment.engine}: there is no program '{command[0]}' on this host",
                f"give it in deployment.command, such as '/path/to/venv/bin/{shlex.join(program_of(config).command)}'",
            )


def check_served(config: Config, checkpoint: str, architecture: str, dims: Dims) -> None:
    """Refuse a model that the engine does not serve, or cannot split over the GPUs that are asked for.

    Args:
        config: of the run.
        checkpoint: for the error.
        architecture: transformers' class of the Hugging Face directory.
        dims: of the model.

    Raises:
        ConfigError: naming the engine and why.
    """
    program, engine = program_of(config), config.deployment.engine
    if not program.serves(architecture):
        legal = sorted(program.architectures or ())
        raise ConfigError(
            f"deployment.engine={engine}: {program.title} does not serve {architecture}, which {checkpoint} is"
            + (f"; it serves {', '.join(legal)}" if legal else "; it serves decoders"),
            "take deployment.engine=slipway, or stages=[convert] with export.model.format=huggingface for another one",
        )
    size = config.export.model.tensor_model_parallel_size
    heads, kv_heads = dims.axis_size("head_num"), getattr(dims, KV_HEADS, 0)
    if heads % size:
        raise ConfigError(
            f"export.model.tensor_model_parallel_size={size} does not divide the {heads} attention heads of "
            f"{checkpoint}, which {program.title} demands",
            "take a divisor of the number of heads",
        )
    if kv_heads and kv_heads % size and size % kv_heads:
        raise ConfigError(
            f"export.model.tensor_model_parallel_size={size} neither divides the {kv_heads} key and value heads of "
            f"{checkpoint} nor is a multiple of them, which {program.title} demands",
            "take a divisor or a multiple of the number of key and value heads",
        )


def check_ranks(config: Config, checkpoint: str, planned: HuggingFacePlan) -> None:
    """Refuse tensor parallelism that would divide groups or blocks of quantized weights.

    Raises:
        ConfigError: naming them.
    """
    from export_scripts.targets.huggingface.quantized import find_quantization, rank_problems

    model = config.export.model
    quantization = find_quantization(model.quantization)
    if quantization is None:
        return
    tensors = (tensor for file in planned.files for tensor in file.tensors)
    said = json.loads(planned.small_files[CONFIG_FILE])
    if problems := rank_problems(tensors, said, model.tensor_model_parallel_size, quantization):
        listed = "\n  ".join(problems[:_MOST_LISTED])
        raise ConfigError(
            f"export.model.tensor_model_parallel_size={model.tensor_model_parallel_size} divides what "
            f"export.model.quantization={model.quantization} has in common, in {len(problems)} tensors of {checkpoint}"
            f"\n  {listed}",
            "take fewer ranks, or another quantization",
        )
