"""Directories of torch's distributed checkpointing, saved by torch itself: Megatron-FSDP's, and with the hub's names.

Megatron-FSDP's names follow megatron-core, ``transformer/fsdp_dtensor_checkpoint.py`` (``handle_swiglu_in_state_dict``,
``handle_experts_in_state_dict``), and Megatron-LM, ``training/checkpointing.py`` (``generate_state_dict``); the uneven
cuts ``update_uneven_dtensor_chunk_metadata`` of ``distributed/fsdp/src/megatron_fsdp/uneven_dtensor.py``: a rank that
has no rows writes nothing.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from support.llama_state import GATED, State, partition


class Parted(torch.Tensor):
    """A tensor that ranks hold rows of, as many as each happens to have: DCP asks it for its chunks by these names."""

    rows: list[int]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        items, properties = [], TensorProperties.create_from_tensor(torch.empty(0, dtype=self.dtype))
        for first, count in zip(self._firsts(), self.rows, strict=True):
            if count:
                offset = torch.Size((first, *[0] * (self.ndim - 1)))
                chunk = ChunkStorageMetadata(offset, torch.Size((count, *self.shape[1:])))
                data = TensorWriteData(chunk, properties, self.shape)
                items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        first = index.offset[0]
        count = dict(zip(self._firsts(), self.rows, strict=True))[first]
        return self.as_subclass(torch.Tensor)[first : first + count].clone()

    def _firsts(self) -> list[int]:
        return [sum(self.rows[:place]) for place in range(len(self.rows))]


def parted(value: torch.Tensor, ranks: int) -> torch.Tensor:
    """Cut rows unevenly: the first rank has most of them, the last none."""
    made: Parted = value.contiguous().as_subclass(Parted)  # type: ignore[assignment]
    rows, left = [], value.shape[0]
    for rank in range(ranks - 1):
        rows.append(left if rank == ranks - 2 else -(-left * 2 // 3))
        left -= rows[-1]
    made.rows = [*rows, left] if ranks > 1 else [value.shape[0]]
    return made


def fsdp_state(state: State, ranks: int, splits_gates: bool = True) -> dict[str, torch.Tensor]:
    """Name and cut the tensors of ``llama_state.core_state`` as Megatron-FSDP does; experts are TEGroupedMLP's."""
    made: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        name = re.sub(r"local_experts\.(\d+)\.(linear_fc\d)\.weight$", r"\2.weight\1", key)
        if partition(key, value) != GATED:
            made[f"module.{name}"] = parted(value, ranks)
        elif splits_gates:
            made |= {f"module.{name}_{which}": parted(part, ranks) for which, part in zip("wv", value, strict=True)}
        else:
            made[f"module.{name}"] = parted(value.reshape(-1, value.shape[-1]), ranks)
    return made


def write_fsdp(
    folder: Path,
    state: State,
    ranks: int,
    arguments: Mapping[str, Any] | None = None,
    splits_gates: bool = True,
) -> None:
    """Write what Megatron-FSDP saves; Megatron-LM has its arguments among it, Megatron-Bridge a ``run_config.yaml``."""
    model = fsdp_state(state, ranks, splits_gates)
    moments = {key: {name: torch.zeros(3) for name in ("exp_avg", "exp_avg_sq")} for key in model}
    content = {
        "model": model,
        "checkpoint_version": 3.0,
        "iteration": 500,
        "optimizer": {"state": moments, "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95)}]},
        "opt_param_scheduler": {"max_lr": 1e-4, "num_steps": 500},
        "rng_state": {"(0, 0)": [{"torch_rng_state": torch.zeros(8, dtype=torch.uint8)}]},
        **({} if arguments is None else {"args": Namespace(**arguments)}),
    }
    dcp.save(content, storage_writer=dcp.FileSystemWriter(folder, thread_count=2), no_dist=True)
