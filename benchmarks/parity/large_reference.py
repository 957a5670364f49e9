"""Stream a large made-up model as the reference of ``evaluation=divergence``: time and memory.

    python3 -m benchmarks.parity.large_reference --directory=/tmp/large                # Llama 70B, 64 tokens
    python3 -m benchmarks.parity.large_reference --directory=/tmp/large --layers=8     # an estimate of the same

The files are safetensors of the right shapes without content (a sparse file takes no room on the disk), so what is
measured is everything but the disk: each page is read, converted to fp32 and computed with.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from evaluation.divergence.stage import LayeredModel
from evaluation.divergence.streamed import stream
from handover.arguments import ScriptArguments
from handover.errors import exit_status
from models.described import read_directory

_LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BYTES, _FILE_BYTES = 2, 4_000_000_000  # of a number, and of a file


@dataclass(frozen=True)
class LargeArguments(ScriptArguments):
    """What is streamed."""

    directory: Path = field(metadata={"help": "directory to make the files in"})
    layers: int = field(default=80, metadata={"help": "of the network"})
    passages: int = field(default=4, metadata={"help": "of 16 tokens"})


def main(argv: Sequence[str]) -> None:
    """Make the files, stream, and print a line."""
    arguments = LargeArguments.from_argv(argv, description=__doc__)
    total = make(arguments.directory / "model", arguments.layers)
    rng = np.random.default_rng(0)
    passages = [tuple(row) for row in rng.integers(3, 128000, (arguments.passages, 16)).tolist()]
    begin = time.monotonic()
    stream(LayeredModel(arguments.directory / "model", "Llama"), passages, 64, arguments.directory / "work", "large")
    used = resource.getrusage(resource.RUSAGE_SELF)
    taken, worked, peak = time.monotonic() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e6
    said = f"{total / 1e9:.1f} billion numbers, {sum(map(len, passages))} tokens"
    sys.stdout.write(f"{said}: {taken:.0f} s, {worked:.0f} s of a processor, at most {peak:.2f} GB\n")


def make(directory: Path, layers: int) -> int:
    """Write config.json, sparse files of safetensors and their index; returns how many numbers they have."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_LLAMA_70B | {"num_hidden_layers": layers}))
    files: list[dict[str, tuple[int, ...]]] = [{}]
    sizes, total = [0], 0
    for name, tensor in read_directory(directory, RuntimeError).decoder.tensors().items():
        if sizes[-1] > _FILE_BYTES:
            files.append({})
            sizes.append(0)
        files[-1][name] = tensor.shape
        sizes[-1] += _BYTES * prod(tensor.shape)
        total += prod(tensor.shape)
    names = [f"model-{number:05}.safetensors" for number in range(len(files))]
    for file, tensors in zip(names, files, strict=True):
        _write(directory / file, tensors)
    index = {name: file for file, tensors in zip(names, files, strict=True) for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return total


def _write(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    begin, header = 0, {}
    for name, shape in tensors.items():
        end = begin + _BYTES * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + begin)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "large_reference"))
