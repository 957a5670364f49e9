"""What each engine's program is called, which flags it takes, and how it is asked for its version.

The command lines are those of vLLM 0.26 and 0.32 (``vllm serve --help=all``), SGLang 0.5 (docs.sglang.io, "Server
Arguments") and TensorRT-LLM 1.2 (``tensorrt_llm/commands/serve.py``, and ``tensorrt_llm/_torch/models/_arch_index.py``
for the architectures of its PyTorch backend).
Standard library only: the login node checks with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from deployment.arguments import EngineArguments
from deployment.engines.nodes import SGLANG_OVER_NODES, TRTLLM_OVER_NODES, VLLM_OVER_NODES, Meeting, OverNodes

MODEL_PLACE = "{model}"
"""A word of ``deployment.command`` that stands for the model's directory; without it the engine's own way is taken."""

_ENCODER_DECODERS = frozenset({"T5ForConditionalGeneration", "MT5ForConditionalGeneration"})
_TORCH_NAMES = MappingProxyType({"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"})


@dataclass(frozen=True)
class EngineProgram:
    """How one engine is started and asked.

    Attributes:
        name: value of ``deployment.engine``.
        title: the project's name, for messages.
        command: program and first words, where ``deployment.command`` gives none.
        model_flag: flag of the model's directory; empty: it is an argument without a flag.
        flags: the program's flag for each field of EngineArguments that it can be told.
        spread_experts: flags by which each expert of a mixture is whole, on one GPU of a copy or another.
        over_nodes: how it serves over several nodes.
        health_path: answers 200 once requests are taken; a real generation is asked for only then.
        version_path: answers JSON with the version under the name ``version``.
        architectures: transformers' classes that it serves; None: all decoders, the unknown ones by transformers' code.
    """

    name: str
    title: str
    command: tuple[str, ...]
    flags: Mapping[str, str]
    spread_experts: Callable[[EngineArguments], tuple[str, ...]]
    over_nodes: OverNodes
    model_flag: str = ""
    health_path: str = "/health"
    version_path: str = "/version"
    architectures: frozenset[str] | None = None

    def serves(self, architecture: str) -> bool:
        """Whether it computes a model of this class of transformers through the completions of an OpenAI API."""
        if architecture in _ENCODER_DECODERS:
            return False
        return self.architectures is None or architecture in self.architectures


VLLM = EngineProgram(
    name="vllm",
    title="vLLM",
    command=("vllm", "serve"),
    flags={
        "host": "--host",
        "http_port": "--port",
        "model_name": "--served-model-name",
        "data_type": "--dtype",
        "tensor_para_size": "--tensor-parallel-size",
        "pipeline_para_size": "--pipeline-parallel-size",
        "data_parallel_size": "--data-parallel-size",
        "max_model_len": "--max-model-len",
        "max_num_seqs": "--max-num-seqs",
        "gpu_memory_utilization": "--gpu-memory-utilization",
    },
    spread_experts=lambda arguments: ("--enable-expert-parallel",),
    over_nodes=VLLM_OVER_NODES,
)
SGLANG = EngineProgram(
    name="sglang",
    title="SGLang",
    command=("python3", "-m", "sglang.launch_server"),
    model_flag="--model-path",
    flags={
        "host": "--host",
        "http_port": "--port",
        "model_name": "--served-model-name",
        "data_type": "--dtype",
        "tensor_para_size": "--tp-size",
        "pipeline_para_size": "--pp-size",
        "data_parallel_size": "--dp-size",
        "max_model_len": "--context-length",
        "max_num_seqs": "--max-running-requests",
        "gpu_memory_utilization": "--mem-fraction-static",
    },
    spread_experts=lambda arguments: ("--ep-size", str(arguments.tensor_para_size)),
    over_nodes=SGLANG_OVER_NODES,
    version_path="/get_server_info",
)
TRTLLM_SERVE = EngineProgram(
    name="trtllm_serve",
    title="TensorRT-LLM",
    command=("trtllm-serve",),
    flags={  # no flag for the name: it calls the model by its directory; none for the type: it takes the weights' own
        "host": "--host",
        "http_port": "--port",
        "tensor_para_size": "--tp_size",
        "pipeline_para_size": "--pp_size",
        "max_model_len": "--max_seq_len",
        "max_num_seqs": "--max_batch_size",
        "gpu_memory_utilization": "--kv_cache_free_gpu_memory_fraction",
    },
    spread_experts=lambda arguments: ("--ep_size", str(arguments.tensor_para_size)),
    over_nodes=TRTLLM_OVER_NODES,
    architectures=frozenset(
        f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Mixtral", "Nemotron", "Qwen2", "Qwen3", "Starcoder2")
    ),
)
PROGRAMS = {program.name: program for program in (VLLM, SGLANG, TRTLLM_SERVE)}
"""By the value of ``deployment.engine``."""


def build_argv(
    program: EngineProgram, arguments: EngineArguments, port: int, meeting: Meeting | None = None
) -> tuple[str, ...]:
    """Build the server's command line; pure.

    Args:
        program: of the engine.
        arguments: of the deployment; a person's own flags come last, so that they count.
        port: to listen on.
        meeting: which of several processes this is; None for one that is alone.
    """
    starter = program.over_nodes.starter if (arguments.nodes or 1) > 1 else ()
    command = (*starter, *(arguments.command or program.command))
    model = str(arguments.model_repository.absolute())
    words = [word.replace(MODEL_PLACE, model) for word in command]
    if not any(MODEL_PLACE in word for word in command):
        words += [program.model_flag, model] if program.model_flag else [model]
    for name, flag in program.flags.items():
        value = port if name == "http_port" else getattr(arguments, name)
        if value is not None:
            words += [flag, _TORCH_NAMES[str(value)] if name == "data_type" else str(value)]
    words += program.spread_experts(arguments) if arguments.expert_parallel else ()
    words += program.over_nodes.words(arguments, meeting) if meeting is not None else ()
    return (*words, *arguments.engine_args)


def lasting_argv(program: EngineProgram, arguments: EngineArguments) -> tuple[str, ...]:
    """Build the command line without address and port, which say nothing of what is computed and may differ."""
    told = {name: flag for name, flag in program.flags.items() if name not in ("host", "http_port")}
    return build_argv(replace(program, flags=told), arguments, 0)


def without_secrets(argv: Sequence[str]) -> tuple[str, ...]:
    """Blank what follows a flag whose name says that it is a key or a token: command lines are kept in results."""
    shown, hides = list[str](), False
    for word in argv:
        flag, equals, _ = word.partition("=")
        is_secret = flag.startswith("--") and any(name in flag for name in ("api-key", "api_key", "hf-token"))
        shown.append("..." if hides else f"{flag}=..." if is_secret and equals else word)
        hides = is_secret and not equals
    return tuple(shown)
