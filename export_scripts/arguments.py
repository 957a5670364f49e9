"""Arguments of the convert and export scripts: the launcher renders them, the scripts parse them.

They stand apart from the scripts so that the login side never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ft_format.location import DRAFT as DIRECTORY
from ft_format.location import EAGLE3 as HEAD
from ft_format.location import MTP as PREDICTOR
from handover.arguments import option
from handover.errors import ConfigError, nearest
from handover.ranges import (
    ADAPTER_RANK,
    ADAPTERS,
    BATCH,
    CHUNK,
    COUNT,
    DRAFT,
    FILE_BYTES,
    FLAG,
    INSTANCES,
    LIMIT_S,
    PARALLEL,
    PROCESSES,
    RANGE,
    SESSIONS,
    SHARE,
    TEN_MINUTES_US,
    TOKEN_ID,
    TOKENS,
    YEAR_S,
)
from handover.signatures.arguments import SigningArguments
from models.fp8 import FORMS

AUTO, FP8_CACHE = CACHE_TYPES = ("auto", "fp8")
"""Of keys and values, as vLLM calls them."""
NO_DRAFTS, NGRAM, DRAFT_MODEL, MTP, EAGLE3 = SPECULATION = ("none", "ngram", DIRECTORY, PREDICTOR, HEAD)
"""Where drafts of tokens come from, as vLLM calls it."""
FASTERTRANSFORMER, HUGGINGFACE, PEFT = FORMATS = ("fastertransformer", "huggingface", "peft")
"""What a conversion writes."""


@dataclass(frozen=True)
class ConvertArguments(SigningArguments):
    """From a training checkpoint to FasterTransformer shards, or to a directory of Hugging Face."""

    checkpoint: Path = field(metadata={"help": "archive, unpacked directory, or directory that holds one of them"})
    output: Path = field(metadata={"help": "directory to write into"})
    tensor_para_size: int = option(1, "number of shards of each split tensor; Hugging Face has one", PARALLEL)
    weight_data_type: str = option("fp16", "fp32, fp16 or bf16: on disk")
    processes: int = option(1, "parallel workers at most", PROCESSES)
    load_checkpoints_to_cpu: bool = option(
        True, "accepted and without effect: no GPU is used, its detour is not quicker"
    )
    allow_nonfinite: bool = option(False, "convert NaN and infinity as they are")
    random_weights: bool | None = option(
        None, "make weights of the shape that --checkpoint, a model_config.yaml, describes"
    )
    start_id: int | None = option(None, "token that begins an empty prompt; without it the checkpoint's own", TOKEN_ID)
    end_id: int | None = option(None, "token that ends a text; without it the checkpoint's own", TOKEN_ID)
    checkpoint_sha256: str | None = option(
        None, "SHA-256 of the checkpoint, as export_scripts.inspect --sha256 prints it"
    )
    hub_name: str | None = option(None, "name on huggingface.co, fetched into --checkpoint if it is not there yet")
    adapter: Path | None = option(
        None, "LoRA adapter to merge: a .nemo, or a directory of NeMo 2, Megatron-Bridge, PEFT"
    )
    tokenizer: Path | None = option(None, "tokenizer's directory or file, in the place of the checkpoint's own")
    format: str | None = option(
        None, "fastertransformer, huggingface, or peft, the adapter alone: what is written; the first without it"
    )
    base_model: str | None = option(
        None, "format peft: name or path by which the adapter's directory calls its model; without it none"
    )
    largest_file_bytes: int | None = option(
        None, "format huggingface: bytes of tensors in a file of weights, at most; 5 GB without it", FILE_BYTES
    )

    quantization: str | None = option(
        None,
        "format huggingface: fp8, fp8_block, int4 or mxfp4: what the layers' matrices become; they stay without it",
    )

    def __post_init__(self) -> None:
        """Refuse a format that is not written."""
        if self.format not in (None, *FORMATS):
            raise ConfigError(f"--format={self.format} is not written", f"legal: {', '.join(FORMATS)}")
        if self.base_model is not None and self.format != PEFT:
            raise ConfigError(
                f"--base-model={self.base_model} without --format={PEFT}: no directory of an adapter is written",
                "export.adapter.format=peft writes one",
            )
        if self.quantization is not None and self.format != HUGGINGFACE:
            raise ConfigError(
                f"--quantization={self.quantization} without --format={HUGGINGFACE}: nothing else has such numbers",
                "the drop-in engine quantizes shards when it loads them: export.triton_deployment.int8_mode",
            )


@dataclass(frozen=True)
class ExportArguments(SigningArguments):
    """From an FT checkpoint, or a Hugging Face directory, to a Triton model repository."""

    ft_checkpoint: Path = field(metadata={"help": "the <T>-gpu directory, or a conversion's Hugging Face one"})
    output: Path = field(metadata={"help": "directory to write the model repository into"})
    model_name: str = field(metadata={"help": "name under which the model is served beside 'fastertransformer'"})
    tensor_para_size: int = field(metadata={RANGE: PARALLEL, "help": "tensor parallelism of the served model"})
    pipeline_para_size: int = field(metadata={RANGE: PARALLEL, "help": "pipeline parallelism of the served model"})
    data_type: str = field(metadata={"help": "fp32, fp16 or bf16: of the computation"})
    int8_mode: int = field(metadata={RANGE: FLAG, "help": "1: weight-only int8"})
    enable_custom_all_reduce: int = field(metadata={RANGE: FLAG, "help": "1: FasterTransformer's own all-reduce"})
    max_batch_size: int = field(metadata={RANGE: BATCH, "help": "largest batch that Triton forms or accepts"})
    max_queue_delay_us: int = option(0, "microseconds a request may wait to fill a batch", TEN_MINUTES_US)
    decoupled: bool = option(False, "stream each token as it is made")
    interactive_sessions: int = option(
        0, "conversations at a time that keep their state in the server; 0: requests have none", SESSIONS
    )
    session_idle_s: float = option(60.0, "seconds without a request that end a conversation", YEAR_S)
    request_timeout_s: float = option(
        0.0, "seconds after which the drop-in engine gives up a request; 0: it never does", LIMIT_S
    )
    prefill_chunk_tokens: int | None = option(
        None,
        "tokens of a step in which the drop-in engine runs a part of a long prompt while other rows "
        "decode; 0: it runs prompts whole; without it the engine chooses",
        CHUNK,
    )
    adapters: tuple[tuple[str, str], ...] | None = option(
        None, "LoRA adapters that are served beside the model, as JSON: [[name, path], ...]"
    )
    max_adapters: int | None = option(
        None, "adapters on a GPU at once; without it as many as there are, at most 64", ADAPTERS
    )
    max_adapter_rank: int | None = option(
        None, "rank that these have room for; without it the largest of them", ADAPTER_RANK
    )
    speculation: str | None = option(
        None,
        "ngram: the drop-in engine drafts tokens by what the text has had before; draft: by a small model; mtp: by the "
        "model's own predictor; eagle3: by an EAGLE-3 head; none, or without it: by request",
    )
    draft_model: Path | None = option(
        None,
        "speculation draft: Hugging Face directory of a small model of the same vocabulary, which drafts tokens; "
        "eagle3: directory of the head",
    )
    max_speculative_tokens: int | None = option(None, "of a draft at most; without it 8", DRAFT)
    kv_cache_dtype: str | None = option(
        None, "fp8: the drop-in engine keeps keys and values in half of the memory; auto, or without it: in data_type"
    )
    quantization: str | None = option(
        None,
        "fp8 or fp8_block: what the drop-in engine makes of the layers' matrices of a Hugging Face directory when it "
        "loads them: the numbers that a conversion with this --quantization writes",
    )
    fp8_activations: bool = option(
        False, "the drop-in engine rounds activations of many rows to FP8 where weights are FP8, on a GPU that has it"
    )
    tokenizer_instances: int = option(1, "processes that tokenize prompts side by side", INSTANCES)
    text_deltas: bool = option(False, "the ensemble also gives OUTPUT_DELTA, the text that each answer adds")

    def __post_init__(self) -> None:
        """Refuse a type that a cache has not, a way of drafting that there is not, and two formats of weights."""
        choices = ("kv_cache_dtype", CACHE_TYPES), ("speculation", SPECULATION), ("quantization", tuple(FORMS))
        for name, legal in choices:
            if (value := getattr(self, name)) not in (None, *legal):
                raise ConfigError(f"{name}={value} is none of the legal values", nearest(value, legal))
        if self.quantization and self.int8_mode:
            raise ConfigError(f"quantization={self.quantization} with int8_mode=1", "take one of the two")
        if (self.speculation in (DRAFT_MODEL, EAGLE3)) != (self.draft_model is not None):
            raise ConfigError(
                f"speculation={self.speculation} with draft_model={self.draft_model}: one needs the other",
                "take speculation=draft and name the small model's directory in draft_model, or eagle3 and the head's,"
                " or leave both out",
            )


@dataclass(frozen=True)
class ExportVllmArguments(SigningArguments):
    """From a Hugging Face directory to a model repository for Triton's vLLM backend."""

    huggingface: Path = field(metadata={"help": "the directory that the conversion made"})
    output: Path = field(metadata={"help": "directory to write the model repository into"})
    repository: Path = field(metadata={"help": "where the repository will lie: model.json has absolute paths"})
    model_name: str = field(metadata={"help": "name under which Triton serves the model"})
    data_type: str = field(metadata={"help": "fp32, fp16 or bf16: of the computation"})
    tensor_para_size: int = option(1, "GPUs that share a layer", PARALLEL)
    pipeline_para_size: int = option(1, "groups of layers", PARALLEL)
    max_model_len: int | None = option(None, "tokens of prompt and answer; left out: what the model allows", TOKENS)
    max_num_seqs: int | None = option(None, "requests that are computed together; left out: vLLM's choice", COUNT)
    gpu_memory_utilization: float | None = option(
        None, "share of a GPU's memory to use; left out: vLLM's choice", SHARE
    )
