"""Random settings of NeMo's models become a model of Hugging Face that computes what NeMo computes, or are refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.huggingface_models import filling
from support.llama_configs import nemo1
from support.llama_files import write_archive
from support.llama_forward import forward, rules_of_nemo1
from support.llama_models import HEADS, HIDDEN, INTER, LAYERS, VOCAB, input_ids, logits, saved
from support.llama_state import State

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.errors import CheckpointError

_TIED = {"share_embeddings_and_output_weights": True}
SETTINGS: dict[str, list[Any]] = {
    "normalization": ["rmsnorm", "layernorm", "layernorm1p"],
    "layernorm_zero_centered_gamma": [False, True],
    "activation": ["fast-swiglu", "swiglu", "geglu", "fast-geglu", "gelu", "squared-relu", "fast-reglu"],
    "openai_gelu": [False, True],
    "bias_activation_fusion": [False, True],
    "bias": [False, True],
    "qkv_bias": [False, True],
    "qk_layernorm": [False, True],
    "rotary_percentage": [1.0, 0.5],
    "rotary_base": [10000, 1e6],
    "seq_len_interpolation_factor": [None, 4.0],
    "scale_positional_embedding": [False, True],
    "scale_factor": [8, 32],
    "window_size": [None, [5, 0]],
    "kv_channels": [None, 16],
    "num_query_groups": [None, 2, 4],
    "share_embeddings_and_output_weights": [False, True],
    "apply_embedding_scaling": [False, True],
}
"""Keys of model_config.yaml that change the function, with values that occur; the first is the default here."""
FAMILIES: list[dict[str, Any]] = [
    {},
    {"normalization": "layernorm1p", "activation": "squared-relu", "rotary_percentage": 0.5},
    {"normalization": "layernorm", "activation": "gelu", "bias": True, "bias_activation_fusion": True},
    {"activation": "geglu", "openai_gelu": True, "apply_embedding_scaling": True, **_TIED},
    {"qkv_bias": True},
    {"qk_layernorm": True, "kv_channels": 16},
]
"""What a family sets; three random settings are changed besides."""


def drawn(seed: int) -> dict[str, Any]:
    """Draw settings that megatron-core itself accepts."""
    rng = random.Random(seed)
    made = {key: values[0] for key, values in SETTINGS.items()} | FAMILIES[seed % len(FAMILIES)]
    made |= {key: rng.choice(SETTINGS[key]) for key in rng.sample(sorted(SETTINGS), 3)}
    kind = made["activation"].removeprefix("fast-")
    if kind in ("reglu", "squared-relu") or (kind == "gelu" and not made["bias"]):
        made["bias_activation_fusion"] = False  # TransformerConfig refuses to fuse them
    return made


def state_of(config: dict[str, Any]) -> State:
    """Random weights under megatron-core's names in the shapes that a configuration gives."""
    size = config["kv_channels"] or HIDDEN // HEADS
    groups = config["num_query_groups"] or HEADS
    fused = INTER * (2 if config["activation"].endswith("glu") else 1)
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN)}
    norms = ["decoder.final_layernorm."]
    for layer in range(LAYERS):
        name = f"decoder.layers.{layer}."
        linear = {
            "self_attention.linear_qkv": ((HEADS + 2 * groups) * size, HIDDEN),
            "self_attention.linear_proj": (HIDDEN, HEADS * size),
            "mlp.linear_fc1": (fused, HIDDEN),
            "mlp.linear_fc2": (HIDDEN, INTER),
        }
        for key, shape in linear.items():
            shapes[f"{name}{key}.weight"] = shape
            if config["bias"] or (config["qkv_bias"] and "qkv" in key):
                shapes[f"{name}{key}.bias"] = shape[:1]
        norms += [f"{name}self_attention.linear_qkv.layer_norm_", f"{name}mlp.linear_fc1.layer_norm_"]
        if config["qk_layernorm"]:
            for letter in "qk":
                shapes |= _norm(f"{name}self_attention.{letter}_layernorm.", size, config)
    for prefix in norms:
        shapes |= _norm(prefix, HIDDEN, config)
    if not config["share_embeddings_and_output_weights"]:
        shapes["output_layer.weight"] = (VOCAB, HIDDEN)
    return {key: torch.from_numpy(filling(key, shape)) for key, shape in shapes.items()}


def _norm(prefix: str, size: int, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    kinds = ("weight",) if config["normalization"] == "rmsnorm" else ("weight", "bias")
    return {f"{prefix}{kind}": (size,) for kind in kinds}


def outcome(seed: int, folder: Path) -> float | None:
    """Convert one draw; the largest difference of logits, or None where it is refused."""
    from transformers import AutoModelForCausalLM

    config = nemo1(saved("llama").config, **drawn(seed))
    state = state_of(config)
    path = write_archive(folder / "model.nemo", config, state)
    try:
        convert(ConvertArguments(path, folder / "out", weight_data_type="fp32", format="huggingface"))
    except CheckpointError:
        return None
    model = AutoModelForCausalLM.from_pretrained(folder / "out", attn_implementation="eager").eval()
    weights = {key: value.double().numpy() for key, value in state.items()}
    expected = forward([weights], rules_of_nemo1(config), input_ids())
    return float(np.abs(logits(model) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("first", [0, 20, 40])
def test_what_comes_out_computes_what_nemo_computes(first: int, tmp_path: Path) -> None:
    found: dict[int, float | None] = {}
    for seed in range(first, first + 20):
        (tmp_path / str(seed)).mkdir()
        found[seed] = outcome(seed, tmp_path / str(seed))
    wrong = {seed: drawn(seed) for seed, value in found.items() if value is not None and value > 1e-5}
    assert not wrong, wrong
    assert sum(value is not None for value in found.values()) > 8, "not everything is refused"
