"""Prefix prompts: keys and values, learned for a task, that precede those of a row's tokens in every layer.

FasterTransformer has them for GPT-J, GPT-NeoX and void-main's Llama, from the checkpoint only, as prompt_learning_type
= 2. Its GPT reads the same files and never uses them. Each rank's ``model.prefix_prompt.<task_name>.weight.<rank>.bin``
is [layers, 2 (k, v), the rank's heads of keys, prompt_length, size_per_head]; the keys are already rotated. A row's
first token has the position prompt_length of its task and sees the whole prefix, as it sees the earlier tokens of a
session; the length is ``Sequence.start``. A prefix takes entries of the cache and does not count towards input plus
output.
Sources: ``GptJWeight.cc``, ``GptNeoXWeight.cc``, ``GptJ.cc``, ``unfused_attention_kernels.cu``
(``add_fusedQKV_bias_transpose_kernel``), ``DecoderSelfAttentionLayer.cc`` (``timestep``), ``ParallelGpt.cc``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..parallel.partition import Partition
from .config import ModelConfig
from .precision import TORCH_TYPES, Precision
from .shards import map_file

Prefix = Sequence[Tensor]  # of one task: [2 (k, v), H, prompt_length, D] for each of this process's layers


def read_prefixes(
    directory: Path,
    config: ModelConfig,
    tensor_para_size: int,
    precision: Precision,
    device: torch.device,
    partition: Partition,
) -> list[Prefix]:
    """Read this process's part of every task's prefix.

    Returns:
        By the task's number; empty where the model has no prefix prompts.

    Raises:
        WeightsError: a file, of any rank, is missing or has another size.
    """
    if not config.has_prefixes:
        return []
    heads = config.kv_heads // tensor_para_size
    prefixes: list[Prefix] = []
    for name, length in config.prompt_tasks:
        shape = (config.num_layer, 2, heads, length, config.size_per_head)
        files = [directory / f"model.prefix_prompt.{name}.weight.{rank}.bin" for rank in range(tensor_para_size)]
        shards = [map_file(file, shape, TORCH_TYPES[config.weight_data_type]) for file in files]
        mine = shards if partition.rank is None else shards[partition.rank : partition.rank + 1]
        layers = torch.cat([shard[partition.layers.start : partition.layers.stop] for shard in mine], 2)
        prefixes.append(layers.to(precision.rounded).to(device, precision.compute, copy=True).unbind())
    return prefixes
