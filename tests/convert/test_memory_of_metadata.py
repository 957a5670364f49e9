"""What the description of a distributed checkpoint takes in memory: real ones have hundreds of thousands of chunks."""

from __future__ import annotations

import pickle
import tracemalloc
from pathlib import Path

import torch
from torch.distributed.checkpoint import filesystem, metadata

from export_scripts.checkpoints.files.archive import open_archive
from export_scripts.checkpoints.files.distributed_torch import read_torch_dist

_ARRAYS, _EXPERTS = 8, 512
_KEPT_BYTES, _PEAK_BYTES = 200, 1000
"""A chunk takes that much at most; it took 3,000 and 4,000 bytes as objects of Python."""


def write_metadata(folder: Path) -> None:
    """Write what torch pickles of arrays of experts in a chunk each, as megatron-core saves them."""
    described, stored = {}, {}
    size = torch.Size((_EXPERTS, 64, 32))
    for number in range(_ARRAYS):
        key, chunks = f"decoder.layers.{number}.mlp.experts.experts.linear_fc1.weight", []
        for expert in range(_EXPERTS):
            offsets, begin = torch.Size((expert, 0, 0)), 5000 * (number * _EXPERTS + expert)
            stored[metadata.MetadataIndex(key, offsets)] = filesystem._StorageInfo("__0_0.distcp", begin, 5000)
            chunks.append(metadata.ChunkStorageMetadata(offsets, torch.Size((1, 64, 32))))
        described[key] = metadata.TensorStorageMetadata(metadata.TensorProperties(torch.bfloat16), size, chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata.Metadata(described, storage_data=stored)))
    with (folder / "__0_0.distcp").open("wb") as file:
        file.truncate(5000 * _ARRAYS * _EXPERTS)


def test_a_chunk_is_a_few_numbers(tmp_path: Path) -> None:
    write_metadata(tmp_path)
    archive, count = open_archive(tmp_path), _ARRAYS * _EXPERTS
    tracemalloc.start()
    found = read_torch_dist(archive, "")
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < _KEPT_BYTES * count
    assert peak < _PEAK_BYTES * count
    tensor = found.tensors["decoder.layers.3.mlp.experts.experts.linear_fc1.weight"]
    tensor.check()
    assert (tensor.shape, tensor.data_type, len(tensor.chunks)) == ((_EXPERTS, 64, 32), "bf16", _EXPERTS)
    assert [chunk.offsets for chunk in tensor.chunks[:3]] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert tensor.chunks[_EXPERTS - 1].sizes == (1, 64, 32)
