"""Directories of torch's distributed checkpointing, saved by torch itself: Megatron-FSDP's, and with the hub's names.

Megatron-FSDP's names follow megatron-core, ``transformer/fsdp_dtensor_checkpoint.py`` (``handle_swiglu_in_state_dict``,
``handle_experts_in_state_dict``), and Megatron-LM, ``training/checkpointing.py`` (``generate_state_dict``); the uneven
cuts ``update_uneven_dtensor_chunk_metadata`` of ``distributed/fsdp/src/megatron_fsdp/uneven_dtensor.py``: a rank that
has no rows writes nothing.
"""

from __future__ import annotations

import io
import multiprocessing
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from support.checkpoints.llama_configs import core_window, megatron_lm, nemo2, padded_vocabulary
from support.checkpoints.llama_files import write_huggingface_tokenizer, write_megatron_lm_tree
from support.checkpoints.llama_state import GATED, State, core_state, partition
from support.tiny_models.llama_models import Saved, tensors

_PROVIDERS = {
    "qwen3": "qwen.qwen_provider.Qwen3ModelProvider",
    "gemma2": "gemma.gemma2_provider.Gemma2ModelProvider",
    "nemotron": "nemotron.nemotron_provider.NemotronModelProvider",
}


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
        name = re.sub(r"local_experts\.(\d+)\.(linear_fc\d)\.(weight|bias)$", r"\2.\3\1", key)
        if partition(key, value) != GATED:
            made[f"module.{name}"] = parted(value, ranks)
        elif splits_gates:
            made |= {f"module.{name}_{which}": parted(part, ranks) for which, part in zip("wv", value, strict=True)}
        else:
            made[f"module.{name}"] = parted(value.flatten(0, 1), ranks)
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


def write_bridge(root: Path, source: Saved, ranks: int, **changes: Any) -> Path:
    """A run of Megatron-Bridge, as ``training/checkpointing.py`` leaves it."""
    name, config = source.config.model_type, source.config
    folder = root / "iter_0000007"
    folder.mkdir(parents=True)
    write_fsdp(folder, state_of(source), ranks, splits_gates=name != "gemma2")
    model = {**nemo2(config, name)["config"], "window_size": core_window(config)}
    model |= {"_target_": f"megatron.bridge.models.{_PROVIDERS[name]}", **changes}
    run = {"model": model, "checkpoint": {"ckpt_format": "fsdp_dtensor"}, "tokenizer": {}, "peft": None}
    (folder / "run_config.yaml").write_text(yaml.safe_dump(run))
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    write_huggingface_tokenizer(folder / "tokenizer")
    return root


def write_lm(root: Path, source: Saved, ranks: int, **changes: Any) -> Path:
    write_fsdp(write_megatron_lm_tree(root), state_of(source), ranks, megatron_lm(source.config, **changes))
    return root


def state_of(source: Saved) -> dict[str, torch.Tensor]:
    return core_state(source.tensors, source.config, padded_vocabulary(source.config, 1))


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch"])
_RANKS = 2


def write_by_ranks(hub: Path, output: Path) -> None:
    """Have two processes save a model's tensors as DTensors, cut by rows, with the hub's names.

    ``nested`` is NeMo-RL's ``{"model": state}``, ``flat`` the state itself, ``safetensors`` the ranks' files of torch's
    ``HuggingFaceStorageWriter``, whose copy AutoModel has.
    """
    ranks = [_FORKS.Process(target=_save_rank, args=(rank, hub, output)) for rank in range(_RANKS)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(240)
    assert [each.exitcode for each in ranks] == [0] * _RANKS


def _save_rank(rank: int, hub: Path, output: Path) -> None:
    output.mkdir(exist_ok=True)
    store = torch.distributed.FileStore(str(output / "store"), _RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS)
    mesh = init_device_mesh("cpu", (_RANKS,))
    state = {key: distribute_tensor(value, mesh, [Shard(0)]) for key, value in tensors(hub).items()}
    extra = {"model.layers.0.self_attn.q_proj._extra_state": io.BytesIO(b"")}
    optimizer = {"state": {key: {"exp_avg": torch.zeros(3)} for key in state}}
    dcp.save({"model": {**state, **extra}, "optim": optimizer}, checkpoint_id=output / "nested")
    dcp.save(state, checkpoint_id=output / "flat")
    writer = dcp.HuggingFaceStorageWriter(str(output / "safetensors"), save_distributed=True)
    dcp.save(state, storage_writer=writer)
    torch.distributed.destroy_process_group()
