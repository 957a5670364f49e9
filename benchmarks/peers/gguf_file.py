"""Write a Llama's weights as a GGUF file, as llama.cpp reads it: fp32, fp16, bf16 or Q8_0 matrices, no vocabulary."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_MAGIC, _VERSION, _ALIGNMENT = b"GGUF", 3, 32
_UINT32, _FLOAT32, _STRING = 4, 6, 8
_BLOCK = 32  # numbers of Q8_0 that share a scale
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(config: Mapping[str, Any], tensors: Mapping[str, Array], number_format: str, file: Path) -> None:
    """Write a file.

    Args:
        config: Hugging Face's.
        tensors: fp32, by Hugging Face's names.
        number_format: of the matrices, a key of FORMATS; vectors are fp32.
        file: to write.
    """
    kind, pack = FORMATS[number_format]
    infos, places, data = [], 0, list[bytes]()
    for name, values in tensors.items():
        is_matrix = values.ndim == 2
        packed = (pack if is_matrix else _fp32)(_rotated_by_pairs(name, values, config))
        dimensions = struct.pack(f"<{values.ndim}Q", *reversed(values.shape))
        own = _string(_gguf_name(name)) + struct.pack("<I", values.ndim) + dimensions
        infos.append(own + struct.pack("<IQ", kind if is_matrix else 0, places))
        data.append(packed + bytes(-len(packed) % _ALIGNMENT))
        places += len(data[-1])
    values_of = _metadata(config)
    head = _MAGIC + struct.pack("<IQQ", _VERSION, len(infos), len(values_of)) + b"".join(values_of) + b"".join(infos)
    with file.open("wb") as out:
        out.write(head + bytes(-len(head) % _ALIGNMENT))
        out.writelines(data)


def _metadata(config: Mapping[str, Any]) -> list[bytes]:
    whole = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
    }
    real = {"attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.freq_base": 10000.0}
    texts = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
    return [
        *(_string(key) + struct.pack("<I", _STRING) + _string(value) for key, value in texts.items()),
        *(_string(f"llama.{key}") + struct.pack("<II", _UINT32, value) for key, value in whole.items()),
        *(_string(f"llama.{key}") + struct.pack("<If", _FLOAT32, value) for key, value in real.items()),
    ]


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if name in _ENDS:
        return f"{_ENDS[name]}.weight"
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_PARTS[part]}.weight"


def _rotated_by_pairs(name: str, values: Array, config: Mapping[str, Any]) -> Array:
    """Order a head's rows so that neighbours are rotated with each other, where Hugging Face rotates its halves."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for part, count in heads.items():
        if part in name:
            return values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    return values


def _fp32(values: Array) -> bytes:
    return values.astype("<f4").tobytes()


def _fp16(values: Array) -> bytes:
    return values.astype("<f2").tobytes()


def _bf16(values: Array) -> bytes:
    """Round to even."""
    bits = values.astype("<f4").view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


def _q8_0(values: Array) -> bytes:
    """Quantize blocks of 32 numbers: an fp16 scale, their largest / 127, and int8 multiples of it."""
    blocks = values.reshape(-1, _BLOCK).astype(np.float32)
    scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
    rounded = np.rint(blocks / np.where(scales == 0, 1, scales)).astype(np.int8)
    return np.concatenate((scales.astype("<f2").view(np.int8), rounded), axis=1).tobytes()


FORMATS: dict[str, tuple[int, Callable[[Array], bytes]]] = {
    "fp32": (0, _fp32),
    "fp16": (1, _fp16),
    "bf16": (30, _bf16),
    "int8": (8, _q8_0),
}
"""ggml's number of each format, and what packs it; int8 is Q8_0."""
