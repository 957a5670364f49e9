"""Write a Hugging Face GPT-2 as FasterTransformer shards, without a line of the project's own converter.

GPT-2's Conv1D keeps matrices as [in, out] and its fused QKV as [in, q | k | v], which is FasterTransformer's order, so
a rank's shard is a numpy slice. The layout is FasterTransformer's ``huggingface_gpt_convert.py``'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def random_gpt2(seed: int = 0, **changes: Any) -> GPT2LMHeadModel:
    """Make a tiny GPT-2 whose weights are large enough that its choices are not ties."""
    torch.manual_seed(seed)
    settings = {"vocab_size": 97, "n_positions": 48, "n_embd": 32, "n_layer": 3, "n_head": 4, "initializer_range": 0.3}
    settings |= {"bos_token_id": 0, "eos_token_id": 96, "attn_implementation": "eager"} | changes
    model = GPT2LMHeadModel(GPT2Config(**settings)).eval()
    with torch.no_grad():  # biases and norms are 0 and 1 in a fresh model: make them matter
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if not model.config.tie_word_embeddings and name == "lm_head.weight":
                parameter.copy_(torch.randn_like(parameter))
    return model


def write_shards(model: GPT2LMHeadModel, directory: Path, ranks: int = 1, dtype: str = "fp32", **ini: object) -> Path:
    """Write ``directory/<ranks>-gpu`` and return it; ``ini`` adds or replaces keys of config.ini (None removes one)."""
    directory = directory / f"{ranks}-gpu"
    directory.mkdir(parents=True)
    for file, array in _shards(model, ranks):
        if dtype == "bf16":
            torch.from_numpy(np.ascontiguousarray(array)).bfloat16().view(torch.int16).numpy().tofile(directory / file)
        else:
            np.ascontiguousarray(array, {"fp32": "<f4", "fp16": "<f2"}[dtype]).tofile(directory / file)
    write_config_ini(model, directory, ranks, dtype, ini)
    return directory


def _shards(model: GPT2LMHeadModel, ranks: int) -> Iterator[tuple[str, np.ndarray]]:
    tensors = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    yield "model.wte.bin", tensors["transformer.wte.weight"]
    yield "model.wpe.bin", tensors["transformer.wpe.weight"]
    if not model.config.tie_word_embeddings:
        yield "model.lm_head.weight.bin", tensors["lm_head.weight"]
    for kind in ("weight", "bias"):
        yield f"model.final_layernorm.{kind}.bin", tensors[f"transformer.ln_f.{kind}"]
    for index in range(model.config.n_layer):
        source, target = f"transformer.h.{index}.", f"model.layers.{index}."
        for kind in ("weight", "bias"):
            yield f"{target}input_layernorm.{kind}.bin", tensors[f"{source}ln_1.{kind}"]
            yield f"{target}post_attention_layernorm.{kind}.bin", tensors[f"{source}ln_2.{kind}"]
            qkv = tensors[f"{source}attn.c_attn.{kind}"]
            qkv = qkv.reshape(*qkv.shape[:-1], 3, model.config.n_embd)
            yield from _split(f"{target}attention.query_key_value.{kind}", qkv, ranks, axis=-1)
            yield from _split(f"{target}mlp.dense_h_to_4h.{kind}", tensors[f"{source}mlp.c_fc.{kind}"], ranks, axis=-1)
        for theirs, ours in (("attn.c_proj", "attention.dense"), ("mlp.c_proj", "mlp.dense_4h_to_h")):
            yield f"{target}{ours}.bias.bin", tensors[f"{source}{theirs}.bias"]
            yield from _split(f"{target}{ours}.weight", tensors[f"{source}{theirs}.weight"], ranks, axis=0)


def _split(name: str, array: np.ndarray, ranks: int, axis: int) -> Iterator[tuple[str, np.ndarray]]:
    for rank, part in enumerate(np.split(array, ranks, axis=axis)):
        yield f"{name}.{rank}.bin", part


def write_config_ini(
    model: GPT2LMHeadModel, directory: Path, ranks: int, dtype: str, changes: dict[str, object]
) -> None:
    config = model.config
    keys: dict[str, object] = {
        "model_name": "gpt",
        "tensor_para_size": ranks,
        "head_num": config.n_head,
        "size_per_head": config.n_embd // config.n_head,
        "inter_size": 4 * config.n_embd,
        "num_layer": config.n_layer,
        "max_pos_seq_len": config.n_positions,
        "weight_data_type": dtype,
        "vocab_size": config.vocab_size,
        "start_id": config.bos_token_id,
        "end_id": config.eos_token_id,
        "layernorm_eps": config.layer_norm_epsilon,
    } | changes
    lines = [f"{key} = {value}" for key, value in keys.items() if value is not None]
    (directory / "config.ini").write_text("\n".join(["[gpt]", *lines]) + "\n")
