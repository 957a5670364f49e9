"""The GGUF file of benchmarks.peers.compare_cpu, read back byte by byte as the format's description says."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers.gguf_file import FORMATS, write_gguf

CONFIG = {
    **{"vocab_size": 6, "max_position_embeddings": 16, "hidden_size": 64, "num_hidden_layers": 1},
    **{"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6},
}


class Reading:
    """A file, and how far it was read."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def take(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self.content, self.at)
        self.at += struct.calcsize(f"<{form}")
        return value

    def text(self) -> str:
        size = self.take("Q")
        self.at += size
        return self.content[self.at - size : self.at].decode()


def read_back(file: Path) -> tuple[dict[str, Any], dict[str, tuple[list[int], int, int]], bytes]:
    """Return the metadata, each tensor's dimensions, type and offset, and the data."""
    reading = Reading(file.read_bytes())
    assert (reading.take("4s"), reading.take("I")) == (b"GGUF", 3)
    tensors, entries = reading.take("Q"), reading.take("Q")
    known = {}
    for _ in range(entries):
        key, kind = reading.text(), reading.take("I")
        known[key] = reading.text() if kind == 8 else reading.take({4: "I", 6: "f"}[kind])
    infos = {}
    for _ in range(tensors):
        name = reading.text()
        infos[name] = [reading.take("Q") for _ in range(reading.take("I"))], reading.take("I"), reading.take("Q")
    return known, infos, reading.content[-(-reading.at // 32) * 32 :]


@pytest.mark.parametrize("number_format", FORMATS)
def test_a_file_is_what_its_format_says(number_format: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    q, norm, head = (draw.standard_normal(shape).astype(np.float32) for shape in ((64, 64), 64, (6, 64)))
    names = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"
    write_gguf(CONFIG, dict(zip(names, (q, norm, head), strict=True)), number_format, tmp_path / "model.gguf")
    known, infos, data = read_back(tmp_path / "model.gguf")
    assert known["general.architecture"] == "llama" and known["llama.attention.head_count_kv"] == 1
    assert list(infos) == ["blk.0.attn_q.weight", "output_norm.weight", "output.weight"]
    kind = {"fp32": 0, "fp16": 1, "int8": 8, "bf16": 30}[number_format]
    assert [(infos[name][:2]) for name in infos] == [([64, 64], kind), ([64], 0), ([64, 6], kind)]
    assert all(offset % 32 == 0 for *_, offset in infos.values())
    found = numbers(data[infos["output.weight"][2] :], number_format, head.size).reshape(head.shape)
    expected = head if number_format == "int8" else torch.from_numpy(head).to(TYPES[number_format]).float().numpy()
    assert np.abs(found - expected).max() <= (0.02 if number_format == "int8" else 0)
    assert np.array_equal(np.frombuffer(data, "<f4", 64, infos["output_norm.weight"][2]), norm)
    pairs = numbers(data[infos["blk.0.attn_q.weight"][2] :], number_format, q.size).reshape(2, 16, 2, 64)
    assert np.abs(pairs[1, 3] - q.reshape(2, 2, 16, 64)[1, :, 3]).max() < 0.02  # the halves of a head take turns


TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def numbers(data: bytes, number_format: str, count: int) -> Any:
    """Read numbers as ggml does."""
    if number_format == "int8":
        blocks = np.frombuffer(data, [("scale", "<f2"), ("values", "i1", 32)], count // 32)
        return blocks["scale"].astype(np.float32)[:, None] * blocks["values"]
    size = count * TYPES[number_format].itemsize
    return torch.frombuffer(bytearray(data[:size]), dtype=TYPES[number_format]).float().numpy()
