"""Arguments of the server script: the launcher renders them, the script parses them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from handover.arguments import ScriptArguments
from handover.ranges import (
    BEAMS,
    BODY_BYTES,
    COUNT,
    DAY_S,
    IN_FLIGHT,
    INSTANCES,
    PARALLEL,
    PORT,
    RANGE,
    SHARE,
    TOKENS,
    UNCOUNTED,
    WEEK_S,
)

NODE = "node"
"""As host: the address of the node, where Slurm starts the server for clients on other nodes."""


@dataclass(frozen=True)
class GemmAutotuneArguments(ScriptArguments):
    """Let FasterTransformer's gpt_gemm find the fastest matrix products for a model."""

    model_repository: Path = field(metadata={"help": "Triton model repository"})
    binary: Path = field(metadata={"help": "gpt_gemm of the container"})
    input_length: int = field(default=32, metadata={RANGE: TOKENS, "help": "longest prompt in tokens to tune for"})
    beam_width: int = field(default=1, metadata={RANGE: BEAMS, "help": "beams to tune for"})


@dataclass(frozen=True)
class ServeArguments(ScriptArguments):
    """Start tritonserver on a model repository, prove that it generates, supervise it."""

    model_repository: Path = field(metadata={"help": "Triton model repository"})
    endpoint: Path = field(metadata={"help": "file to publish once a real generation has come back"})
    log: Path = field(metadata={"help": "file for what the server prints"})
    http_port: int = field(default=0, metadata={RANGE: PORT, "help": "0: a free one"})
    grpc_port: int = field(default=0, metadata={RANGE: PORT, "help": "0: a free one"})
    metrics_port: int = field(default=0, metadata={RANGE: PORT, "help": "0: a free one"})
    openai_port: int | None = field(
        default=None, metadata={RANGE: PORT, "help": "of the OpenAI API; 0: a free one; left out: it is off"}
    )
    openai_processes: int | None = field(
        default=None, metadata={RANGE: INSTANCES, "help": "that share the OpenAI API's port; left out: one"}
    )
    api_keys_file: Path | None = field(
        default=None, metadata={"help": "file with a bearer key a line for the OpenAI API; left out: it needs none"}
    )
    openai_access_log: Path | None = field(
        default=None, metadata={"help": "file that gets a JSON line a request to the OpenAI API"}
    )
    openai_chat_template: Path | None = field(
        default=None, metadata={"help": "Jinja template of conversations; left out: the tokenizer's own"}
    )
    openai_max_requests: int | None = field(
        default=None, metadata={RANGE: IN_FLIGHT, "help": "to the OpenAI API at a time; left out: 1024"}
    )
    openai_max_sequences: int | None = field(
        default=None, metadata={RANGE: IN_FLIGHT, "help": "answers of one request to the OpenAI API; left out: 512"}
    )
    openai_max_body_bytes: int | None = field(
        default=None, metadata={RANGE: BODY_BYTES, "help": "of a request to the OpenAI API; left out: 8 MiB"}
    )
    host: str = field(default="127.0.0.1", metadata={"help": f"address to listen on; {NODE}: the node's under Slurm"})
    engine: str = field(default="slipway", metadata={"help": "slipway (our drop-in) or fastertransformer"})
    cuda_devices: str = field(
        default="", metadata={"help": "positions among the GPUs that the task sees, such as 0,1; empty: all of them"}
    )
    start_timeout_s: float = field(
        default=300, metadata={RANGE: WEEK_S, "help": "seconds until a generation must have come back"}
    )
    exit_timeout_s: float = field(
        default=10, metadata={RANGE: DAY_S, "help": "seconds for requests in flight at the end"}
    )
    restart: int = field(
        default=0, metadata={RANGE: UNCOUNTED, "help": "times that a server which has died is started again, at most"}
    )
    open_apis: tuple[str, ...] = field(default=(), metadata={"help": "JSON list of Triton's APIs to leave open"})
    guard: str = field(
        default="auto", metadata={"help": "auto (where others than this host reach the server), always or never"}
    )
    guard_max_body_bytes: int | None = field(
        default=None, metadata={RANGE: BODY_BYTES, "help": "of a request through the guard; left out: 128 MiB"}
    )
    tritonserver: Path | None = field(
        default=None, metadata={"help": "program to start; left out: that of nvidia-pytriton, or of the container"}
    )
    edited_files: tuple[str, ...] = field(
        default=(),
        metadata={"help": "JSON list of patterns: files that may differ from the repository's manifest"},
    )
    server_args: tuple[str, ...] = field(default=(), metadata={"help": "JSON list of more tritonserver flags"})


@dataclass(frozen=True)
class EngineArguments(ScriptArguments):
    """Start another project's server on a Hugging Face directory, prove that it generates, supervise it."""

    engine: str = field(metadata={"help": "vllm, sglang or trtllm_serve"})
    model_repository: Path = field(metadata={"help": "the Hugging Face directory"})
    model_name: str = field(metadata={"help": "name that clients ask for, where the engine can be told one"})
    endpoint: Path = field(metadata={"help": "file to publish once a real generation has come back"})
    log: Path = field(metadata={"help": "file for what the server prints"})
    data_type: str = field(metadata={"help": "fp32, fp16 or bf16: of the computation"})
    command: tuple[str, ...] = field(
        default=(), metadata={"help": "JSON list: program and first words; empty: the engine's own"}
    )
    http_port: int = field(default=0, metadata={RANGE: PORT, "help": "of the OpenAI API; 0: a free one"})
    host: str = field(default="127.0.0.1", metadata={"help": f"address to listen on; {NODE}: the node's under Slurm"})
    tensor_para_size: int = field(default=1, metadata={RANGE: PARALLEL, "help": "GPUs that share a layer"})
    pipeline_para_size: int = field(default=1, metadata={RANGE: PARALLEL, "help": "groups of layers"})
    max_model_len: int | None = field(
        default=None, metadata={RANGE: TOKENS, "help": "tokens of prompt and answer; left out: what the model allows"}
    )
    max_num_seqs: int | None = field(
        default=None, metadata={RANGE: COUNT, "help": "requests that are computed together; left out: its own choice"}
    )
    gpu_memory_utilization: float | None = field(
        default=None, metadata={RANGE: SHARE, "help": "share of a GPU's memory to use; left out: its own choice"}
    )
    engine_args: tuple[str, ...] = field(default=(), metadata={"help": "JSON list of more flags for the program"})
    cuda_devices: str = field(
        default="", metadata={"help": "positions among the GPUs that the task sees, such as 0,1; empty: all of them"}
    )
    start_timeout_s: float = field(
        default=300, metadata={RANGE: WEEK_S, "help": "seconds until a generation must have come back"}
    )
    exit_timeout_s: float = field(
        default=10, metadata={RANGE: DAY_S, "help": "seconds for requests in flight at the end"}
    )
    restart: int = field(
        default=0, metadata={RANGE: UNCOUNTED, "help": "times that a server which has died is started again, at most"}
    )
    edited_files: tuple[str, ...] = field(
        default=(),
        metadata={"help": "JSON list of patterns: files that may differ from the directory's manifest"},
    )


AnyServer = TypeVar("AnyServer", ServeArguments, EngineArguments)
"""Arguments of either kind of server."""
