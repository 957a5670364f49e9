"""What a model's config.pbtxt asks of the engine.

Parameters: FasterTransformer's GPT guide, "Fastertransformer-Triton Serving Configuration: config.pbtxt".
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ft_format.config_ini import FILE_NAME
from ft_format.families import MODEL_TYPES
from ft_format.location import checkpoint_places, first_checkpoint
from ft_format.values import COUNT, INDEX, Values, fraction, one_of, seconds

from .errors import EngineError

_THREADS_VARIABLE, _TORCH_KERNELS_VARIABLE = "SLIPWAY_CPU_THREADS", "SLIPWAY_TORCH_KERNELS"
_FLAG = one_of({"0": False, "1": True})


@dataclass(frozen=True)
class Settings:
    """The parameters of one model.

    Attributes:
        checkpoint: directory of the shards, ``<T>-gpu``.
        tensor_para_size: ranks that the shards were written for. A single process concatenates and runs them all.
        pipeline_para_size: stages of layers over several processes; a single process runs all layers. Shards do not
            depend on it.
        data_type: fp32, fp16 or bf16 at run time, whatever the shards are.
        cpu_threads: of torch; 0: one for each core.
        model_type: one of ft_format.families.MODEL_TYPES.
        int8_mode: 1: the layers' matrices are quantized to int8.
        has_inflight_batching: whether a request joins a running batch; else it waits for the next one.
        kv_cache_fraction: part of the memory that the weights leave free which the KV cache may take; 0: 0.9 of a
            GPU's, 0.5 of a host's.
        kv_cache_bytes: the same in bytes, for each process; 0: by the fraction.
        has_process_per_rank: whether the engine starts a process for each rank, unless a launcher has; None: if each
            can have a GPU of its own. Otherwise this process computes for all ranks.
        has_made_up_weights: whether the weights are random and no shard is read: for measurements; config.pbtxt has no
            parameter for it.
        has_peer_sums: whether the processes of a stage may all-reduce through peer memory.
        allows_torch_kernels: whether a GPU for which this engine's kernels cannot be compiled is used with torch's
            kernels, which take about six times as long.
        request_timeout_s: seconds after which an unfinished request is cancelled; 0: never. Triton does not notice
            that an HTTP client has disconnected.
        session_idle_s: seconds after which an idle session is dropped; config.pbtxt's max_sequence_idle_microseconds.
    """

    checkpoint: Path
    tensor_para_size: int
    pipeline_para_size: int
    data_type: str
    cpu_threads: int = 0
    model_type: str = "GPT"
    int8_mode: int = 0
    has_inflight_batching: bool = True
    kv_cache_fraction: float = 0.0
    kv_cache_bytes: int = 0
    session_idle_s: float = 60.0
    request_timeout_s: float = 0.0
    has_process_per_rank: bool | None = None
    has_made_up_weights: bool = False
    has_peer_sums: bool = True
    allows_torch_kernels: bool = False

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.tensor_para_size * self.pipeline_para_size

    def to_json(self) -> str:
        """Write them down for another process."""
        return json.dumps(asdict(self) | {"checkpoint": str(self.checkpoint.absolute())})

    @classmethod
    def from_json(cls, text: str | bytes) -> Settings:
        """Read what to_json wrote."""
        values = json.loads(text)
        return cls(**values | {"checkpoint": Path(values["checkpoint"])})


def read_settings(parameters: Mapping[str, str], model_directory: Path, version: str) -> Settings:
    """Check config.pbtxt's parameters.

    enable_custom_all_reduce is accepted as 0 or 1 and has no effect: NCCL chooses its own way. This engine's own
    parameters, see Settings, are ``cpu_threads`` (by default the environment variable SLIPWAY_CPU_THREADS),
    ``inflight_batching`` (0 is FasterTransformer's static batching), ``kv_cache_fraction``, ``kv_cache_bytes``,
    ``process_per_rank``, ``torch_kernels`` (by default SLIPWAY_TORCH_KERNELS) and ``request_timeout_s``.

    Args:
        parameters: by key.
        model_directory: ``<repository>/<model>``.
        version: directory below it.

    Raises:
        EngineError: a parameter is missing, malformed or not supported, or the checkpoint is not there.
    """
    pbtxt = Values("config.pbtxt:", parameters, EngineError)
    if "data_type" not in parameters:
        raise EngineError("config.pbtxt has no parameter data_type: fp32, fp16 or bf16")
    if (int8_mode := pbtxt.get("int8_mode", INDEX, 0)) > 1:
        raise EngineError(f"int8_mode = {int8_mode} is not supported; 0 (off) and 1 (weights only) are")
    pbtxt.get("enable_custom_all_reduce", _FLAG, False)
    tensor_para_size = pbtxt.get("tensor_para_size", COUNT, 1)
    path = pbtxt.get("model_checkpoint_path", str, "")
    environment = Values("the environment's", os.environ, EngineError)
    threads = environment.get(_THREADS_VARIABLE, INDEX, 0)
    allows_torch_kernels = environment.get(_TORCH_KERNELS_VARIABLE, _FLAG, False)
    settings = Settings(
        checkpoint=find_checkpoint(path, model_directory, version, tensor_para_size),
        tensor_para_size=tensor_para_size,
        pipeline_para_size=pbtxt.get("pipeline_para_size", COUNT, 1),
        data_type=pbtxt.get("data_type", str),
        cpu_threads=pbtxt.get("cpu_threads", INDEX, threads),
        model_type=pbtxt.get("model_type", one_of({name: name for name in MODEL_TYPES}), "GPT"),
        int8_mode=int8_mode,
        has_inflight_batching=pbtxt.get("inflight_batching", _FLAG, True),
        kv_cache_fraction=pbtxt.get("kv_cache_fraction", fraction(is_one_legal=True), 0.0),
        kv_cache_bytes=pbtxt.get("kv_cache_bytes", INDEX, 0),
        has_process_per_rank=pbtxt.find("process_per_rank", _FLAG),
        request_timeout_s=pbtxt.get("request_timeout_s", seconds, 0.0),
        allows_torch_kernels=pbtxt.get("torch_kernels", _FLAG, allows_torch_kernels),
    )
    pbtxt.warn_of_near_misses()
    return settings


def find_checkpoint(path: str, model_directory: Path, version: str, tensor_para_size: int) -> Path:
    """Find the directory of the shards; see ``ft_format.location`` for the places.

    Raises:
        EngineError: no place holds a config.ini; the message lists them.
    """
    places = checkpoint_places(path, model_directory / version, tensor_para_size)
    if (found := first_checkpoint(places)) is None:
        listed = ", ".join(map(str, places))
        raise EngineError(f"model_checkpoint_path = '{path}': no {FILE_NAME} in {listed}")
    return found
