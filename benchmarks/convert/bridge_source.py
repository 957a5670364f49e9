"""A Llama as Megatron-Bridge saves it, with real bytes: fused tensors to take apart, and ranks to put together."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.checkpoints.llama_configs import bridge, padded_vocabulary
from support.checkpoints.llama_files import chunked, write_bridge_tree, write_huggingface_tokenizer, write_torch_dist
from support.checkpoints.llama_state import core_state

_RANKS, _VOCABULARY = 2, 32000


def write_bridge(layers: int, width: int, random: Callable[..., torch.Tensor], path: Path) -> None:
    """Write query, key and value in one array, gate above up, every matrix in two ranks' parts.

    Args:
        layers: of the Llama.
        width: of it; four heads of queries go with one of keys.
        random: makes weights of a shape.
        path: of the run's directory.
    """
    from transformers import LlamaConfig

    middle, keys = 128 * (width * 8 // 3 // 128), width // 4
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": middle, "vocab_size": _VOCABULARY}
    config = LlamaConfig(**sizes, num_attention_heads=width // 64, num_key_value_heads=keys // 64)
    shapes = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width)}
    shapes |= {"self_attn.o_proj": (width, width), "mlp.gate_proj": (middle, width), "mlp.up_proj": (middle, width)}
    shapes |= {"mlp.down_proj": (width, middle), "input_layernorm": (width,), "post_attention_layernorm": (width,)}
    state = {f"{name}.weight": random(_VOCABULARY, width) for name in ("model.embed_tokens", "lm_head")}
    state["model.norm.weight"] = random(width)
    for layer in range(layers):
        state |= {f"model.layers.{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()}
    arrays = chunked(core_state(state, config, padded_vocabulary(config, _RANKS)), _RANKS)
    del state  # what is fused is there twice
    folder = write_bridge_tree(path, bridge(config, (_RANKS, 1)))
    write_huggingface_tokenizer(folder / "tokenizer", _VOCABULARY)
    with warnings.catch_warnings(action="ignore"):
        write_torch_dist(folder, arrays, "", {"iteration": 7, "checkpoint_version": 3.0, "content_metadata": {}})
