"""Make small NeMo archives with torch.save and tarfile: the formats' own writers."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

DATA = Path(__file__).parents[2] / "data"
NEMO = DATA / "nemo"

HEADS, HEAD_SIZE, LAYERS, VOCAB, POSITIONS = 4, 2, 2, 10, 6
HIDDEN, INTER = HEADS * HEAD_SIZE, 12

TOKENIZER = {"vocab.json": b'{"<|endoftext|>": 3, "a": 0}', "merges.txt": b"#version: 0.2\n"}


def gpt_config(**changes: Any) -> dict[str, Any]:
    """The keys of a tiny GPT that the converter reads."""
    config = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": INTER,
        "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS,
        "layernorm_epsilon": 1e-5,
        "tokenizer": {
            "library": "megatron",
            "type": "GPT2BPETokenizer",
            "vocab_file": "nemo:vocab.json",
            "merge_file": "nemo:merges.txt",
        },
    }
    return {**config, **changes}


def gpt_state(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Weights of that GPT; each element is different."""
    counter = iter(range(1, 1_000_000))

    def fresh(*shape: int) -> torch.Tensor:
        size = int(torch.tensor(shape).prod())
        return (torch.tensor([next(counter) for _ in range(size)]) / 64).reshape(shape).to(dtype)

    state = {
        "model.language_model.embedding.word_embeddings.weight": fresh(VOCAB, HIDDEN),
        "model.language_model.embedding.position_embeddings.weight": fresh(POSITIONS, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.language_model.encoder.layers.{layer}."
        for name, rows, columns in (
            ("self_attention.query_key_value", 3 * HIDDEN, HIDDEN),
            ("self_attention.dense", HIDDEN, HIDDEN),
            ("mlp.dense_h_to_4h", INTER, HIDDEN),
            ("mlp.dense_4h_to_h", HIDDEN, INTER),
        ):
            state[f"{prefix}{name}.weight"] = fresh(rows, columns)
            state[f"{prefix}{name}.bias"] = fresh(rows)
            state[f"{prefix}{name}._extra_state"] = None
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{prefix}{name}.weight"] = fresh(HIDDEN)
            state[f"{prefix}{name}.bias"] = fresh(HIDDEN)
    state["model.language_model.encoder.final_layernorm.weight"] = fresh(HIDDEN)
    state["model.language_model.encoder.final_layernorm.bias"] = fresh(HIDDEN)
    return state


def torch_bytes(content: Any) -> bytes:
    """What torch.save writes."""
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def write_nemo(
    path: Path,
    config: Mapping[str, Any],
    states: Mapping[str, Any],
    mode: str = "w",
    files: Mapping[str, bytes] = TOKENIZER,
) -> Path:
    """Write an archive: configuration, tokenizer files, and one torch file a training rank."""
    contents = {"model_config.yaml": yaml.safe_dump(dict(config)).encode(), **files}
    contents |= {name: torch_bytes(state) for name, state in states.items()}
    with tarfile.open(path, mode) as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_gpt(path: Path, state: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """Write a whole tiny GPT, on one training rank."""
    return write_nemo(path, gpt_config(**changes), {"model_weights.ckpt": gpt_state() if state is None else state})


def load_file(archive: Path, suffix: str) -> bytes:
    """Read the one file of an archive whose name ends so."""
    with tarfile.open(archive) as tar:
        (member,) = (member for member in tar if member.name.endswith(suffix))
        content = tar.extractfile(member)
        assert content is not None
        return content.read()
