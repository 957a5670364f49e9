"""DeepSeek-V3 and Kimi K2 as Megatron-Bridge saves them, with every name and shape, and holes for the weights.

Names, arrays and chunks are megatron-core's: layers numbered, the experts of a layer in one array, a chunk for each
expert's gate, up and down projection. Each chunk is a whole file of torch.save, its checksum that of its zeros.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed.checkpoint import filesystem, metadata

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.checkpoints.llama_configs import bridge
from support.checkpoints.llama_files import write_bridge_tree, write_huggingface_tokenizer

_ROPE = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0}
_ROPE |= {"beta_slow": 1.0, "original_max_position_embeddings": 4096}
_KIMI = {"n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "first_k_dense_replace": 1}
_KIMI |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "vocab_size": 163840}
_KIMI |= {"max_position_embeddings": 131072, "num_nextn_predict_layers": 0}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "max_position_embeddings": 163840,
        "rope_parameters": {**_ROPE, "rope_theta": 10000.0, "factor": 40.0},
    },
    "kimi_k2": {**_KIMI, "rope_parameters": {**_ROPE, "rope_theta": 50000.0, "factor": 32.0, "beta_fast": 1.0}},
}
"""What their published configurations say otherwise than transformers' DeepseekV3Config."""
_CUT_BYTES = 256 << 20
_FILES = 64


@dataclass(frozen=True)
class _Array:
    """A tensor of the checkpoint: its shape, that of its chunks, and its type."""

    key: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    data_type: torch.dtype = torch.bfloat16

    def places(self) -> Iterator[tuple[int, ...]]:
        """Yield where each chunk begins."""
        steps = zip(self.shape, self.chunk, strict=True)
        return product(*(range(0, full, part) for full, part in steps))


def write_largest(name: str, layers: int, path: Path) -> None:
    """Write a checkpoint of holes.

    Args:
        name: of MODELS.
        layers: how many it has; 0: as many as published.
        path: of the run's directory.
    """
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(**MODELS[name], **({"num_hidden_layers": layers} if layers else {}))
    folder = write_bridge_tree(path, bridge(config))
    write_huggingface_tokenizer(folder / "tokenizer", config.vocab_size)
    about = yaml.safe_load((folder / "run_config.yaml").read_text())
    about["model"]["vocab_size"] = config.vocab_size
    (folder / "run_config.yaml").write_text(yaml.safe_dump(about))
    torch.save({"iteration": 7, "checkpoint_version": 3.0}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    tensors: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for number, array in enumerate(_arrays(config)):
        chunks = []
        file_name = f"__{number % _FILES}_0.distcp"
        with (folder / file_name).open("ab") as file:
            for place in array.places():
                offsets, begin = torch.Size(place), file.tell()
                _write_hole(file, array.chunk, array.data_type)
                stored[metadata.MetadataIndex(array.key, offsets)] = filesystem._StorageInfo(
                    file_name, begin, file.tell() - begin
                )
                chunks.append(metadata.ChunkStorageMetadata(offsets, torch.Size(array.chunk)))
        properties = metadata.TensorProperties(array.data_type)
        tensors[array.key] = metadata.TensorStorageMetadata(properties, torch.Size(array.shape), chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata.Metadata(tensors, storage_data=stored)))


def _write_hole(file: io.BufferedWriter, shape: tuple[int, ...], data_type: torch.dtype) -> None:
    """Write what torch.save writes of zeros, without the zeros."""
    head, size_bytes, tail = _saved_zeros(shape, data_type)
    file.write(head)
    file.truncate(file.tell() + size_bytes)
    file.seek(0, io.SEEK_END)
    file.write(tail)


@cache
def _saved_zeros(shape: tuple[int, ...], data_type: torch.dtype) -> tuple[bytes, int, bytes]:
    """Save zeros, and return the bytes before them, their number, and the bytes behind them."""
    zeros = torch.zeros(shape, dtype=data_type)
    stream = io.BytesIO()
    torch.save(zeros, stream)
    content, size_bytes = stream.getbuffer(), zeros.numel() * zeros.element_size()
    reader = torch._C.PyTorchFileReader(io.BytesIO(content))
    begin = reader.get_record_offset("data/0")  # type: ignore[attr-defined]
    return bytes(content[:begin]), size_bytes, bytes(content[begin + size_bytes :])


def _arrays(config: Any) -> Iterator[_Array]:
    """List every array of a model with latent attention and experts, under megatron-core's names."""
    width, vocabulary = config.hidden_size, config.vocab_size
    yield _whole("embedding.word_embeddings.weight", vocabulary, width)
    yield _whole("output_layer.weight", vocabulary, width)
    yield _whole("decoder.final_layernorm.weight", width)
    for layer in range(config.num_hidden_layers):
        yield from _layer(f"decoder.layers.{layer}.", config, layer < config.first_k_dense_replace)
    for number in range(config.num_nextn_predict_layers):
        prefix = f"mtp.layers.{number}."
        yield from _layer(f"{prefix}transformer_layer.", config, is_dense=False)
        for name in ("enorm", "hnorm", "final_layernorm"):
            yield _whole(f"{prefix}{name}.weight", width)
        yield _whole(f"{prefix}eh_proj.weight", width, 2 * width)


def _layer(prefix: str, config: Any, is_dense: bool) -> Iterator[_Array]:
    width, heads, attention = config.hidden_size, config.num_attention_heads, f"{prefix}self_attention."
    queries, keys = config.q_lora_rank, config.kv_lora_rank
    plain, rotated = config.qk_nope_head_dim, config.qk_rope_head_dim
    yield _whole(f"{prefix}input_layernorm.weight", width)
    yield _whole(f"{attention}linear_q_down_proj.weight", queries, width)
    yield _whole(f"{attention}linear_q_up_proj.layer_norm_weight", queries)
    yield _whole(f"{attention}linear_q_up_proj.weight", heads * (plain + rotated), queries)
    yield _whole(f"{attention}linear_kv_down_proj.weight", keys + rotated, width)
    yield _whole(f"{attention}linear_kv_up_proj.layer_norm_weight", keys)
    yield _whole(f"{attention}linear_kv_up_proj.weight", heads * (plain + config.v_head_dim), keys)
    yield _whole(f"{attention}linear_proj.weight", width, heads * config.v_head_dim)
    if is_dense:
        yield _whole(f"{prefix}mlp.linear_fc1.layer_norm_weight", width)
        yield from _feed_forward(f"{prefix}mlp.", config.intermediate_size, width)
        return
    experts, inner = config.n_routed_experts, config.moe_intermediate_size
    yield _whole(f"{prefix}pre_mlp_layernorm.weight", width)
    yield _whole(f"{prefix}mlp.router.weight", experts, width)
    yield _Array(f"{prefix}mlp.router.expert_bias", (experts,), (experts,), torch.float32)
    yield from _feed_forward(f"{prefix}mlp.shared_experts.", config.n_shared_experts * inner, width)
    name = f"{prefix}mlp.experts.experts.linear_fc"
    yield _Array(f"{name}1.weight", (experts, 2 * inner, width), (1, inner, width))
    yield _Array(f"{name}2.weight", (experts, width, inner), (1, width, inner))


def _feed_forward(prefix: str, inner: int, width: int) -> Iterator[_Array]:
    yield _Array(f"{prefix}linear_fc1.weight", (2 * inner, width), (inner, width))
    yield _whole(f"{prefix}linear_fc2.weight", width, inner)


def _whole(key: str, *shape: int) -> _Array:
    """Describe an array that eight ranks cut by rows where it is large."""
    rows = shape[0] // 8 if shape[0] * (shape[1:] or (1,))[0] * 2 > _CUT_BYTES else shape[0]
    return _Array(key, shape, (rows, *shape[1:]))
