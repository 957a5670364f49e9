"""What a model's config.pbtxt asks of the engine.

Parameters: FasterTransformer's GPT guide, "Fastertransformer-Triton Serving Configuration: config.pbtxt".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .config import FILE_NAME, MODEL_TYPES
from .errors import EngineError

THREADS_PARAMETER = "cpu_threads"
BYTES_PARAMETER = "kv_cache_bytes"
FRACTION_PARAMETER = "kv_cache_fraction"
BATCHING_PARAMETER = "inflight_batching"
PROCESSES_PARAMETER = "process_per_rank"
THREADS_VARIABLE = "SLIPWAY_CPU_THREADS"


@dataclass(frozen=True)
class Settings:
    """The parameters of one model.

    Attributes:
        checkpoint: directory of the shards, ``<T>-gpu``.
        tensor_para_size: ranks that the shards were written for. A process that is alone joins and runs them all.
        pipeline_para_size: stages of layers, where there are several processes; a process that is alone runs all
            layers. Shards do not depend on it.
        data_type: fp32, fp16 or bf16 at run time, whatever the shards are.
        cpu_threads: of torch; 0 for one a core.
        model_type: one of config.MODEL_TYPES.
        int8_mode: 1: the layers' matrices are kept as int8.
        has_inflight_batching: whether a request joins those that are under way; else it waits until they are done.
        kv_cache_fraction: part of the memory that is free behind the weights which the KV cache may take; 0: 0.9 of a
            GPU's, 0.5 of a host's.
        kv_cache_bytes: the same as a number, in each process; 0: by the fraction.
        has_process_per_rank: whether the engine starts a process for each rank, where nobody else has; None: where each
            can have a GPU of its own. Else this one process does all ranks' work.
        has_made_up_weights: whether the weights are random and no shard is read: for measuring, config.pbtxt has no
            parameter for it.
        session_idle_s: seconds after which a conversation is forgotten; config.pbtxt's max_sequence_idle_microseconds.
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
    has_process_per_rank: bool | None = None
    has_made_up_weights: bool = False


def read_settings(parameters: Mapping[str, str], model_directory: Path, version: str) -> Settings:
    """Check config.pbtxt's parameters.

    enable_custom_all_reduce is accepted as 0 or 1 and has no effect: NCCL chooses its own way. int8_mode is 0 or
    1. This engine's own parameters are ``cpu_threads`` (the environment variable SLIPWAY_CPU_THREADS stands in
    for it), ``inflight_batching`` (1, or 0 for FasterTransformer's static batching), ``kv_cache_fraction``,
    ``kv_cache_bytes`` and ``process_per_rank`` (0 or 1; without it 1 where each rank can have a GPU of its own).

    Args:
        parameters: by key.
        model_directory: ``<repository>/<model>``.
        version: directory below it.

    Raises:
        EngineError: a parameter is missing, malformed or not supported, or the checkpoint is not there.
    """
    told = parameters.get("model_type", "GPT")
    model_type = {name.lower(): name for name in MODEL_TYPES}.get(told.lower())
    if model_type is None:
        raise EngineError(f"model_type = {told} is none of {', '.join(MODEL_TYPES)}")
    int8_mode = _integer(parameters, "int8_mode", "0", least=0)
    if int8_mode > 1:
        raise EngineError(f"int8_mode = {int8_mode} is not supported; 0 (off) and 1 (weights only) are")
    _flag(parameters, "enable_custom_all_reduce", "0")
    if "data_type" not in parameters:
        raise EngineError("config.pbtxt has no parameter data_type: fp32, fp16 or bf16")
    tensor_para_size = _integer(parameters, "tensor_para_size", "1", least=1)
    threads = {THREADS_PARAMETER: parameters.get(THREADS_PARAMETER, os.environ.get(THREADS_VARIABLE, "0"))}
    return Settings(
        checkpoint=find_checkpoint(
            parameters.get("model_checkpoint_path", ""), model_directory, version, tensor_para_size
        ),
        tensor_para_size=tensor_para_size,
        pipeline_para_size=_integer(parameters, "pipeline_para_size", "1", least=1),
        data_type=parameters["data_type"],
        cpu_threads=_integer(threads, THREADS_PARAMETER, "0", least=0),
        model_type=model_type,
        int8_mode=int8_mode,
        has_inflight_batching=_flag(parameters, BATCHING_PARAMETER, "1"),
        kv_cache_fraction=_fraction(parameters, FRACTION_PARAMETER) if FRACTION_PARAMETER in parameters else 0.0,
        kv_cache_bytes=_integer(parameters, BYTES_PARAMETER, "0", least=0),
        has_process_per_rank=(
            _flag(parameters, PROCESSES_PARAMETER, "0") if PROCESSES_PARAMETER in parameters else None
        ),
    )


def find_checkpoint(path: str, model_directory: Path, version: str, tensor_para_size: int) -> Path:
    """Find the directory of the shards.

    A relative model_checkpoint_path is looked for below ``<repository>/<model>/<version>``, then below
    ``<repository>/<model>``; an empty one means ``<T>-gpu``. An absolute one that is gone, because the repository was
    moved, falls back to ``<repository>/<model>/<version>/<T>-gpu``.

    Raises:
        EngineError: no candidate holds a config.ini; the message lists them.
    """
    usual = model_directory / version / f"{tensor_para_size}-gpu"
    if not path:
        candidates = [usual]
    elif Path(path).is_absolute():
        candidates = [Path(path), usual]
    else:
        candidates = [model_directory / version / path, model_directory / path]
    for candidate in candidates:
        if (candidate / FILE_NAME).is_file():
            return candidate
    places = ", ".join(str(candidate) for candidate in candidates)
    raise EngineError(f"model_checkpoint_path = '{path}': no {FILE_NAME} in {places}")


def _integer(parameters: Mapping[str, str], key: str, default: str, least: int) -> int:
    text = parameters.get(key, default).strip()
    if not text.isdigit() or int(text) < least:
        raise EngineError(f"{key} = {text} is not a whole number of at least {least}")
    return int(text)


def _flag(parameters: Mapping[str, str], key: str, default: str) -> bool:
    text = parameters.get(key, default).strip()
    if text not in ("0", "1"):
        raise EngineError(f"{key} = {text} is neither 0 nor 1")
    return text == "1"


def _fraction(parameters: Mapping[str, str], key: str) -> float:
    text = parameters[key].strip()
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise EngineError(f"{key} = {text} is not a number above 0 and at most 1")
    return value
