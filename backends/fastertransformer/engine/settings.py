"""What a model's config.pbtxt asks of the engine.

Parameters: FasterTransformer's GPT guide, "Fastertransformer-Triton Serving Configuration: config.pbtxt".
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ft_format.families import MODEL_TYPES
from ft_format.location import DRAFT, EAGLE3, MTP, checkpoint_places, first_checkpoint
from ft_format.values import COUNT, INDEX, Values, fraction, one_of, seconds, whole
from ft_format.weight_format import FORMATS, KEY, WeightFormat, find_format
from models.fp8 import FORMS

from .errors import EngineError

_FLAG = one_of({"0": False, "1": True})
_PARAMETERS: dict[str, tuple[str, Callable[[str], Any]]] = {  # by Settings' field: config.pbtxt's key, and its values
    "tensor_para_size": ("tensor_para_size", COUNT),
    "pipeline_para_size": ("pipeline_para_size", COUNT),
    "data_type": ("data_type", str),
    "cpu_threads": ("cpu_threads", INDEX),
    "model_type": ("model_type", one_of({name: name for name in MODEL_TYPES})),
    KEY: (KEY, INDEX),
    "quantization": ("quantization", one_of({name: name for name in FORMS})),
    "has_inflight_batching": ("inflight_batching", _FLAG),
    "kv_cache_fraction": ("kv_cache_fraction", fraction(is_one_legal=True)),
    "kv_cache_bytes": ("kv_cache_bytes", INDEX),
    "has_prefix_cache": ("enable_prefix_cache", _FLAG),
    "prefill_chunk_tokens": ("prefill_chunk_tokens", INDEX),
    "speculation": ("speculation", one_of({name: name for name in ("none", "ngram", DRAFT, MTP, EAGLE3)})),
    "max_speculative_tokens": ("max_speculative_tokens", whole(1, 64)),
    "max_adapters": ("max_adapters", INDEX),
    "max_adapter_rank": ("max_adapter_rank", COUNT),
    "has_process_per_rank": ("process_per_rank", _FLAG),
    "has_expert_parallel": ("enable_expert_parallel", _FLAG),
    "request_timeout_s": ("request_timeout_s", seconds),
    "max_queue_length": ("max_queue_length", INDEX),
    "max_queue_s": ("max_queue_s", seconds),
    "allows_torch_kernels": ("torch_kernels", _FLAG),
    "rounds_activations": ("fp8_activations", _FLAG),
    "has_fp8_cache": ("kv_cache_dtype", one_of({"auto": False, "fp8": True, "fp8_e4m3": True})),
}
_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {  # of the environment, for what config.pbtxt leaves out
    "cpu_threads": ("SLIPWAY_CPU_THREADS", INDEX),
    "allows_torch_kernels": ("SLIPWAY_TORCH_KERNELS", _FLAG),
}


@dataclass(frozen=True)
class Settings:
    """The parameters of one model."""

    checkpoint: Path  # directory of the shards, ``<T>-gpu``, or of Hugging Face's
    tensor_para_size: int  # ranks that the shards were written for; a single process concatenates and runs them all
    pipeline_para_size: int  # stages of layers over several processes; shards do not depend on it
    data_type: str  # fp32, fp16 or bf16 at run time, whatever the shards are
    cpu_threads: int = 0  # of torch; 0: one for each core
    model_type: str = "GPT"  # one of ft_format.families.MODEL_TYPES
    int8_mode: int = 0  # of a ft_format.weight_format
    quantization: str | None = None  # of models.fp8.FORMS, that a directory's matrices become; see ops/fp8.py
    has_inflight_batching: bool = True  # whether a request joins a running batch; else it waits for the next one
    # Part of the memory that the weights leave free which the KV cache may take; 0: 0.9 of a GPU's, 0.5 of a host's.
    kv_cache_fraction: float = 0.0
    kv_cache_bytes: int = 0  # the same in bytes, for each process; 0: by the fraction
    has_prefix_cache: bool = True  # whether rows that begin with the same tokens share their keys and values
    # Of a step in which rows decode and a prompt is run in part; 0: prompts are run whole. On an H200 a pass of 256
    # tokens in fp16 takes about as long as a decode step of a few rows.
    prefill_chunk_tokens: int = 256
    # Where the drafts come from of rows whose requests say nothing: "ngram", their texts; "draft", a small model in
    # the checkpoint's folder of this name; "mtp", the model's own predictor; "eagle3", a head in the folder "draft";
    # "none": they have none. See scheduling/speculation.py.
    speculation: str = "none"
    max_speculative_tokens: int = 8  # of a draft, whoever asks for it
    # LoRA adapters on the device at once; others wait on the host. None: as many as the checkpoint has, 64 at most.
    max_adapters: int | None = None
    max_adapter_rank: int | None = None  # that they have room for; None: the largest of the checkpoint's, or 16
    session_idle_s: float = 60.0  # until an idle session is dropped; config.pbtxt's max_sequence_idle_microseconds
    # Until an unfinished request is cancelled; 0: never. Triton does not notice that an HTTP client has disconnected.
    request_timeout_s: float = 0.0
    max_queue_length: int = 0  # requests that may wait for a place in the batch; 0: any number
    max_queue_s: float = 0.0  # seconds that a request may wait for it; 0: any time
    # Whether the engine starts a process for each rank, unless a launcher has; None: if each can have a GPU of its own.
    # Otherwise this process computes for all ranks.
    has_process_per_rank: bool | None = None
    has_expert_parallel: bool = False  # whether each rank has some experts whole; else a slice of every one's middle
    has_made_up_weights: bool = False  # random ones, and no shard is read: for measurements, not in config.pbtxt
    has_peer_sums: bool = True  # whether the processes of a stage may all-reduce through peer memory
    # Whether a GPU for which this engine's kernels cannot be compiled is used with torch's, which take six times as
    # long.
    allows_torch_kernels: bool = False
    # Whether activations of many rows are rounded to FP8 where weights are FP8, see ops/fp8.py.
    rounds_activations: bool = False
    has_fp8_cache: bool = False  # whether keys and values are kept as FP8, see cache/fp8_entries.py

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.tensor_para_size * self.pipeline_para_size

    @property
    def has_drafts(self) -> bool:
        """Whether rows have drafts whose requests say nothing."""
        return self.speculation != "none"

    @property
    def draft_model(self) -> Path | None:
        """Directory of the draft model, or of the EAGLE-3 head; None: there is none."""
        return self.checkpoint / DRAFT if self.speculation in (DRAFT, EAGLE3) else None

    @property
    def weights(self) -> WeightFormat:
        """Format of the layers' matrices."""
        return find_format(self.int8_mode)

    def to_json(self) -> str:
        """Write them down for another process."""
        return json.dumps(asdict(self) | {"checkpoint": str(self.checkpoint.absolute())})

    @classmethod
    def from_json(cls, text: str | bytes) -> Settings:
        """Read what to_json wrote."""
        values = json.loads(text)
        return cls(**values | {"checkpoint": Path(values["checkpoint"])})


def read_settings(parameters: Mapping[str, str], model_directory: Path, version: str) -> Settings:
    """Check config.pbtxt's parameters, of a model in ``<repository>/<model>`` with its version's directory below.

    enable_custom_all_reduce is accepted as 0 or 1 and has no effect: NCCL chooses its own way. With inflight_batching 0
    batches are static, as FasterTransformer's.

    Raises:
        EngineError: a parameter is missing, malformed or not supported, or the checkpoint is not there.
    """
    pbtxt = Values("config.pbtxt:", parameters, EngineError)
    if "data_type" not in parameters:
        raise EngineError("config.pbtxt has no parameter data_type: fp32, fp16 or bf16")
    given: dict[str, Any] = {"tensor_para_size": 1, "pipeline_para_size": 1}
    for values, fields in ((Values("the environment's", os.environ, EngineError), _VARIABLES), (pbtxt, _PARAMETERS)):
        read = {field: values.find(key, kind) for field, (key, kind) in fields.items()}
        given |= {field: value for field, value in read.items() if value is not None}
    if find_format(mode := given.get(KEY)) not in FORMATS:
        legal = ", ".join(f"{each.mode} ({each.name or 'off'})" for each in FORMATS)
        raise EngineError(f"{KEY} = {mode} is not supported; {legal} are")
    if mode and given.get("quantization"):
        raise EngineError(f"{KEY} = {mode} with quantization = {given['quantization']}: take one of the two")
    pbtxt.find("enable_custom_all_reduce", _FLAG)
    path = pbtxt.get("model_checkpoint_path", str, "")
    given["checkpoint"] = find_checkpoint(path, model_directory, version, given["tensor_para_size"])
    pbtxt.warn_of_near_misses()
    return Settings(**given)


def find_checkpoint(path: str, model_directory: Path, version: str, tensor_para_size: int) -> Path:
    """Find the directory of the weights; see ``ft_format.location`` for the places.

    Raises:
        EngineError: no place holds a model; the message lists them.
    """
    places = checkpoint_places(path, model_directory / version, tensor_para_size)
    if (found := first_checkpoint(places)) is None:
        listed = ", ".join(map(str, places))
        raise EngineError(f"model_checkpoint_path = '{path}': no config.ini or config.json in {listed}")
    return found
