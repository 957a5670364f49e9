"""One GPT of random weights in several forms of a checkpoint, to measure conversions with."""

from __future__ import annotations

import json
import pickle
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import filesystem, metadata

_TORCH_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_ZARR_TYPES = {"fp32": "<f4", "fp16": "<f2", "bf16": "bfloat16"}
# Of a layer: name in NeMo's legacy keys, in megatron-core's, rows and columns in widths, axis that training cuts.
_MATRICES = (
    ("self_attention.query_key_value", "self_attention.linear_qkv", 3, 1, 0),
    ("self_attention.dense", "self_attention.linear_proj", 1, 1, 1),
    ("mlp.dense_h_to_4h", "mlp.linear_fc1", 4, 1, 0),
    ("mlp.dense_4h_to_h", "mlp.linear_fc2", 1, 4, 1),
)
_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("post_attention_layernorm.", "mlp.linear_fc1.layer_norm_"),
)


@dataclass(frozen=True)
class Model:
    """What the weights are like.

    Attributes:
        layers, hidden: of the GPT; heads are 64 wide.
        vocab: rows of the embedding.
        data_type: fp32, fp16 or bf16.
    """

    layers: int
    hidden: int
    vocab: int
    data_type: str

    def random(self, *shape: int) -> torch.Tensor:
        """Make values between -0.5 and 0.5."""
        return (torch.rand(shape) - 0.5).to(_TORCH_TYPES[self.data_type])

    def layer_tensors(self) -> Iterator[tuple[str, str, tuple[int, ...], int | None]]:
        """Give both names, shape and cut axis of each tensor of a layer."""
        for ours, core, rows, columns, axis in _MATRICES:
            yield f"{ours}.weight", f"{core}.weight", (rows * self.hidden, columns * self.hidden), axis
            yield f"{ours}.bias", f"{core}.bias", (rows * self.hidden,), None if axis else 0
        for ours, core in _NORMS:
            for part in ("weight", "bias"):
                yield f"{ours}{part}", f"{core}{part}", (self.hidden,), None


def write_checkpoint(source: str, model: Model, path: Path) -> None:
    """Write a checkpoint.

    Args:
        source: one of SOURCES.
        model: what it holds.
        path: of the archive or directory.
    """
    SOURCES[source](model, path)


def _write_archive(model: Model, path: Path, is_rotary: bool = False) -> None:
    """NeMo's legacy keys in one file, in a tar."""
    prefix = "model.language_model."
    table = {} if is_rotary else {f"{prefix}embedding.position_embeddings.weight": model.random(2048, model.hidden)}
    state = {
        f"{prefix}embedding.word_embeddings.weight": model.random(model.vocab, model.hidden),
        **table,
        f"{prefix}encoder.final_layernorm.weight": model.random(model.hidden),
        f"{prefix}encoder.final_layernorm.bias": model.random(model.hidden),
    }
    for layer in range(model.layers):
        for name, _, shape, _ in model.layer_tensors():
            state[f"{prefix}encoder.layers.{layer}.{name}"] = model.random(*shape)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        root = Path(folder)
        torch.save(state, root / "model_weights.ckpt")
        _write_configuration(model, root)
        if is_rotary:
            with (root / "model_config.yaml").open("a") as file:
                file.write("position_embedding_type: rope\n")
        with tarfile.open(path, "w") as tar:
            tar.add(root, arcname=".")


def _write_gzipped(model: Model, path: Path) -> None:
    _write_archive(model, path)
    with path.with_name("compressed").open("wb") as compressed:
        subprocess.run(["gzip", "-1", "--stdout", str(path)], stdout=compressed, check=True)
    path.with_name("compressed").replace(path)


def _write_configuration(model: Model, root: Path) -> None:
    (root / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, **{f"t{n}": n for n in range(1, model.vocab)}}))
    (root / "merges.txt").write_text("#version: 0.2\n")
    (root / "model_config.yaml").write_text(
        f"num_layers: {model.layers}\nhidden_size: {model.hidden}\nffn_hidden_size: {4 * model.hidden}\n"
        f"num_attention_heads: {model.hidden // 64}\nmax_position_embeddings: 2048\n"
        "tokenizer: {library: megatron, type: GPT2BPETokenizer, model: null, vocab_file: 'nemo:vocab.json', "
        "merge_file: 'nemo:merges.txt'}\n"
    )


@dataclass(frozen=True)
class _Array:
    """A tensor of a distributed checkpoint: of all layers [layers, ...], or of none."""

    key: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]

    def places(self) -> Iterator[tuple[int, ...]]:
        """Number its chunks along each axis."""
        return product(*(range(-(-full // part)) for full, part in zip(self.shape, self.chunk, strict=True)))


def _arrays(model: Model, is_grid: bool) -> Iterator[_Array]:
    """List megatron-core's tensors, cut as two tensor-parallel ranks do it, or in a grid that no rank has."""

    def chunk(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
        if is_grid:
            return tuple(-(-size // parts) for size, parts in zip(shape, (3, 2), strict=False))
        return tuple(size // 2 if i == axis else size for i, size in enumerate(shape))

    single = (
        ("embedding.word_embeddings.weight", (model.vocab, model.hidden), 0),
        ("embedding.position_embeddings.weight", (2048, model.hidden), None),
        ("decoder.final_layernorm.weight", (model.hidden,), None),
        ("decoder.final_layernorm.bias", (model.hidden,), None),
    )
    for key, shape, axis in single:
        yield _Array(f"model.{key}", shape, chunk(shape, axis))
    for _, name, shape, axis in model.layer_tensors():
        yield _Array(f"model.decoder.layers.{name}", (model.layers, *shape), (1, *chunk(shape, axis)))


def _write_zarr(model: Model, path: Path, is_grid: bool = False) -> None:
    """A folder for each tensor, a file for each chunk."""
    weights = _new_tree(model, path, {"sharded_backend": "zarr", "sharded_backend_version": 1})
    for array in _arrays(model, is_grid):
        folder = weights / array.key
        folder.mkdir()
        header: dict[str, Any] = {"chunks": array.chunk, "shape": array.shape, "dtype": _ZARR_TYPES[model.data_type]}
        header |= {"compressor": None, "fill_value": None, "filters": None, "order": "C", "zarr_format": 2}
        (folder / ".zarray").write_text(json.dumps(header))
        for place in array.places():
            values = model.random(*array.chunk).view(torch.uint8).numpy()
            values.tofile(folder / ".".join(map(str, place)))


def _write_torch_dist(model: Model, path: Path) -> None:
    """One file with a file of torch.save for each chunk, and metadata that say where each lies."""
    weights = _new_tree(model, path, {"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    tensors: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    name = "__0_0.distcp"
    with (weights / name).open("wb") as file:
        for array in _arrays(model, is_grid=False):
            chunks = []
            for place in array.places():
                offsets = torch.Size(np.multiply(place, array.chunk).tolist())
                begin = file.tell()
                torch.save(model.random(*array.chunk), file)
                stored[metadata.MetadataIndex(array.key, offsets)] = filesystem._StorageInfo(
                    name, begin, file.tell() - begin
                )
                chunks.append(metadata.ChunkStorageMetadata(offsets, torch.Size(array.chunk)))
            properties = metadata.TensorProperties(_TORCH_TYPES[model.data_type])
            tensors[array.key] = metadata.TensorStorageMetadata(properties, torch.Size(array.shape), chunks)
    (weights / ".metadata").write_bytes(pickle.dumps(metadata.Metadata(tensors, storage_data=stored)))


def _write_huggingface(model: Model, path: Path) -> None:
    """Write GPT-2 as transformers saves it, in one file; its linear layers are [in, out]."""
    names = {
        "input_layernorm.": "ln_1.",
        "post_attention_layernorm.": "ln_2.",
        "self_attention.query_key_value.": "attn.c_attn.",
        "self_attention.dense.": "attn.c_proj.",
        "mlp.dense_h_to_4h.": "mlp.c_fc.",
        "mlp.dense_4h_to_h.": "mlp.c_proj.",
    }
    state = {
        "transformer.wte.weight": model.random(model.vocab, model.hidden),
        "transformer.wpe.weight": model.random(2048, model.hidden),
        "transformer.ln_f.weight": model.random(model.hidden),
        "transformer.ln_f.bias": model.random(model.hidden),
    }
    for layer in range(model.layers):
        for name, _, shape, _ in model.layer_tensors():
            place, part = name.rpartition(".")[::2]
            state[f"transformer.h.{layer}.{names[place + '.']}{part}"] = model.random(*shape[::-1])
    path.mkdir()
    save_file(state, path / "model.safetensors", {"format": "pt"})
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": model.layers}
    config |= {"n_embd": model.hidden, "n_head": model.hidden // 64, "n_positions": 2048, "vocab_size": model.vocab}
    (path / "config.json").write_text(json.dumps({**config, "layer_norm_epsilon": 1e-5}))


def _write_llama(model: Model, path: Path) -> None:
    """Write a Llama as transformers saves it, in one file: its linear layers are [out, in]."""
    width, middle = model.hidden, 128 * (model.hidden * 8 // 3 // 128)
    matrices = {f"self_attn.{name}_proj": (width, width) for name in "qkvo"}
    matrices |= {"mlp.gate_proj": (middle, width), "mlp.up_proj": (middle, width), "mlp.down_proj": (width, middle)}
    state = {"model.embed_tokens.weight": model.random(model.vocab, width), "model.norm.weight": model.random(width)}
    for layer in range(model.layers):
        for name, shape in matrices.items():
            state[f"model.layers.{layer}.{name}.weight"] = model.random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"model.layers.{layer}.{name}.weight"] = model.random(width)
    path.mkdir()
    save_file(state, path / "model.safetensors", {"format": "pt"})
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": model.layers}
    config |= {"hidden_size": width, "intermediate_size": middle, "num_attention_heads": width // 64}
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": model.vocab, "tie_word_embeddings": True}))


def _write_bridge(model: Model, path: Path) -> None:
    from benchmarks.convert.bridge_source import write_bridge

    write_bridge(model.layers, model.hidden, model.random, path)


def _new_tree(model: Model, path: Path, backend: dict[str, Any]) -> Path:
    """Make a NeMo directory without its weights; returns their folder."""
    weights = path / "model_weights"
    weights.mkdir(parents=True)
    _write_configuration(model, path)
    (weights / "metadata.json").write_text(json.dumps(backend))
    return weights


SOURCES: dict[str, Callable[[Model, Path], None]] = {
    "nemo": _write_archive,
    "gzip": _write_gzipped,
    "zarr": _write_zarr,
    "zarr_grid": lambda model, path: _write_zarr(model, path, is_grid=True),
    "torch_dist": _write_torch_dist,
    "nemo_rotary": lambda model, path: _write_archive(model, path, is_rotary=True),
    "huggingface": _write_huggingface,
    "llama": _write_llama,
    "bridge": _write_bridge,
}
"""Writers by name: a plain archive, a gzipped one, distributed ones, one of a GPT with rotation, GPT-2 and Llama of
Hugging Face, a Llama of Megatron-Bridge; zarr_grid is cut as no training rank cuts."""
