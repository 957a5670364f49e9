"""Tiny Hugging Face models whose weights are the same everywhere: made by integer arithmetic, saved by transformers."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCAB, POSITIONS, HEADS, HIDDEN, LAYERS, INTER = 96, 24, 4, 32, 2, 128
IDS = {"bos_token_id": 5, "eos_token_id": 7}

_GPT2_NAMES = {"n_positions": POSITIONS, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}
_BERT_NAMES = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
# Family: transformers' model and configuration class, and the dimensions in that class's words.
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2_NAMES),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT2_NAMES),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_GPT2_NAMES, "rotary_dim": 4}),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**_GPT2_NAMES, "rotary_dim": 4}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_BERT_NAMES, "ffn_dim": INTER, "max_position_embeddings": POSITIONS, "word_embed_proj_dim": HIDDEN},
    ),
    "xglm": (
        "XGLMForCausalLM",
        "XGLMConfig",
        {
            "d_model": HIDDEN,
            "num_layers": LAYERS,
            "attention_heads": HEADS,
            "ffn_dim": INTER,
            "max_position_embeddings": POSITIONS,
            "activation_function": "gelu_new",
        },
    ),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_BERT_NAMES, "intermediate_size": INTER, "max_position_embeddings": POSITIONS, "rms_norm_eps": 1e-6},
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {
            **_BERT_NAMES,
            "intermediate_size": INTER,
            "max_position_embeddings": POSITIONS,
            "rotary_pct": 0.5,
            "hidden_act": "gelu_fast",
        },
    ),
}


def build(family: str, **changes: Any) -> Any:
    """Build a model in fp32 with every weight filled, as ``AutoModelForCausalLM`` would load it."""
    import transformers

    model_class, config_class, dims = _FAMILIES[family]
    config = getattr(transformers, config_class)(**{"vocab_size": VOCAB, **IDS, **dims, **changes})
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(filling(name, tuple(parameter.shape))))
    return model


def filling(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in [-0.25, 0.25), fp32, that depend on the name alone; a norm's weights are around 1."""
    count = int(np.prod(shape))
    x = np.arange(count, dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()))
    for multiplier in (0x9E3779B1, 0x85EBCA77):
        x = (x * np.uint64(multiplier)) & np.uint64(0xFFFFFFFF)
        x ^= x >> np.uint64(15)
    values = (x >> np.uint64(8)).astype(np.float32) / np.float32(1 << 25) - np.float32(0.25)
    is_norm = name.endswith("weight") and ("ln_" in name or "norm" in name)
    return (values + np.float32(is_norm)).reshape(shape)


def save(family: str, path: Path, tokenizer: bool = True, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Save a model as the hub has it, with a byte-level tokenizer, and return it in fp32."""
    how = {name: changes.pop(name) for name in ("max_shard_size",) if name in changes}
    model = build(family, **changes)
    model.to(dtype).save_pretrained(path, **how)
    if tokenizer:
        write_tokenizer(path)
    return model.float()


def write_tokenizer(path: Path) -> None:
    """Write GPT-2's tokenizer files with letters only."""
    vocabulary = {chr(ord("!") + index): index for index in range(90)}
    (path / "vocab.json").write_text(json.dumps({**vocabulary, "<|endoftext|>": 90}))
    (path / "merges.txt").write_text("#version: 0.2\n")


def logits(model: Any, input_ids: np.ndarray) -> np.ndarray:
    """Compute transformers' logits [batch, length, vocab] in fp32."""
    with torch.no_grad():
        result: np.ndarray = model.float()(torch.from_numpy(input_ids)).logits.numpy()
    return result


def greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Continue a prompt by transformers' logits alone: tokens and their log probabilities."""
    ids, said = list(prompt), []
    for _ in range(count):
        row = torch.from_numpy(logits(model, np.array([ids]))[0, -1]).log_softmax(-1)
        ids.append(int(row.argmax()))
        said.append(float(row.max()))
    return ids[len(prompt) :], said
