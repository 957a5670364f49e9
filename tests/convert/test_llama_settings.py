"""Random settings of NeMo's models: what is converted computes what NeMo computes, and the rest is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints.llama_configs import nemo1
from support.checkpoints.llama_files import write_archive
from support.checkpoints.llama_state import State
from support.shards.llama_shards_forward import forward as shards_logits
from support.tiny_models.huggingface_models import filling
from support.tiny_models.llama_forward import forward, rules_of_nemo1
from support.tiny_models.llama_models import HEADS, HIDDEN, INTER, LAYERS, VOCAB, input_ids, logits, saved

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


def differences(folder: Path, first: int, compute: Callable[[Path], Any], **arguments: Any) -> dict[int, float]:
    """Convert twenty draws; the largest difference of logits of each one that is not refused."""
    found = {}
    for seed in range(first, first + 20):
        config = nemo1(saved("llama").config, **drawn(seed))
        state, output = state_of(config), folder / f"{seed}/2-gpu"
        output.parent.mkdir()
        path = write_archive(output.parent / "model.nemo", config, state)
        try:
            convert(ConvertArguments(path, output, weight_data_type="fp32", **arguments))
        except CheckpointError:
            continue
        weights = {key: value.double().numpy() for key, value in state.items()}
        expected = forward([weights], rules_of_nemo1(config), input_ids())
        found[seed] = float(np.abs(compute(output) - expected).max() / np.abs(expected).max())
    return found


# Twenty draws of sixty.
@pytest.mark.in_ci(when=lambda at: at.first == 0)
@pytest.mark.parametrize("first", [0, 20, 40])
def test_a_model_of_hugging_face_computes_what_nemo_computes(first: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    def compute(output: Path) -> Any:
        return logits(AutoModelForCausalLM.from_pretrained(output, attn_implementation="eager").eval())

    found = differences(tmp_path, first, compute, format="huggingface")
    assert {seed: drawn(seed) for seed, value in found.items() if value > 1e-5} == {}
    assert len(found) > 8, "not everything is refused"


def test_shards_and_their_configuration_compute_what_nemo_computes(tmp_path: Path) -> None:
    """Of what FasterTransformer computes; the rest is refused, which is most."""

    def compute(output: Path) -> Any:
        return shards_logits(output, input_ids())

    found = differences(tmp_path, 0, compute, tensor_para_size=2)
    assert {seed: drawn(seed) for seed, value in found.items() if value > 1e-5} == {}
    assert len(found) > 2, "not everything is refused"
