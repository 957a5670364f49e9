"""Tiny models with random weights under the configurations that NeMo published: sizes are scaled down, nothing else.

A configuration is the section ``model`` of NeMo's YAML as a ``.nemo`` holds it: interpolations are resolved.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from omegaconf import DictConfig, OmegaConf

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.convert import convert
from support.checkpoints.llama_files import TOKENIZER_FILE, chunked, write_nemo1_tree, write_torch_dist
from support.checkpoints.llama_state import State, cut
from support.shards.decoder_forward import forward as gptneox_logits
from support.shards.llama_shards_forward import forward as llama_logits
from support.tiny_models.huggingface_models import filling
from support.tiny_models.llama_forward import forward, rules_of_nemo1
from support.tiny_models.llama_models import HIDDEN, INTER, LAYERS, VOCAB, input_ids, logits

HEADS, WIDE_HEAD, WINDOW = 8, 16, 5
_TOKENIZER = {"library": "sentencepiece", "model": f"nemo:{TOKENIZER_FILE}", "sentencepiece_legacy": False}


def published(path: Path) -> dict[str, Any]:
    """Read a YAML file of NeMo's examples or of its launcher; the keys are those of its section ``model``."""
    OmegaConf.register_new_resolver("multiply", lambda first, second: first * second, replace=True)
    own = OmegaConf.load(path)
    root = OmegaConf.merge({"data_dir": "/data", "base_results_dir": "/results"}, own, {"training": own})
    assert isinstance(root, DictConfig)
    saved = OmegaConf.to_yaml(root.model, resolve=True)
    found: dict[str, Any] = yaml.safe_load(saved)
    return found


def scaled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Scale the sizes down, as many of them as a configuration names; the tokenizer is SentencePiece's of the test."""
    heads, groups = config["num_attention_heads"], config.get("num_query_groups")
    sizes = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": INTER,
        "num_attention_heads": HEADS,
        "num_query_groups": groups and max(1, HEADS * groups // heads),
        "kv_channels": config.get("kv_channels") and WIDE_HEAD,
        "window_size": config.get("window_size") and [WINDOW, 0],
        "override_vocab_size": VOCAB,
    }
    return {**config, **{key: value for key, value in sizes.items() if key in config}, "tokenizer": _TOKENIZER}


def random_state(config: Mapping[str, Any]) -> State:
    """Fill the weights of a scaled configuration, under megatron-core's names; gated ones are [2, inter, hidden]."""
    gate = (2,) if config["activation"].endswith("glu") else ()
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"decoder.layers.{layer}."
        shapes |= {f"{prefix}{key}": shape for key, shape in _layer(config, gate).items()}
    shapes |= _norm("decoder.final_layernorm.", config)
    if not config["share_embeddings_and_output_weights"]:
        shapes["output_layer.weight"] = (VOCAB, HIDDEN)
    return {key: torch.from_numpy(filling(key, shape)) for key, shape in shapes.items()}


def _layer(config: Mapping[str, Any], gate: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    size = config.get("kv_channels") or HIDDEN // HEADS
    groups, has_bias = config.get("num_query_groups") or HEADS, config["bias"]
    qkv = (HEADS + 2 * groups) * size
    made: dict[str, tuple[int, ...]] = {
        "self_attention.linear_qkv.weight": (qkv, HIDDEN),
        "self_attention.linear_proj.weight": (HIDDEN, HEADS * size),
    }
    experts = config.get("num_moe_experts") or 0
    for place in [f"mlp.experts.local_experts.{n}." for n in range(experts)] or ["mlp."]:
        made |= {f"{place}linear_fc1.weight": (*gate, INTER, HIDDEN), f"{place}linear_fc2.weight": (HIDDEN, INTER)}
    if experts:
        made["mlp.router.weight"] = (experts, HIDDEN)
    if has_bias:
        made |= {f"{key.removesuffix('weight')}bias": shape[:-1] for key, shape in made.items()}
    elif config.get("qkv_bias"):
        made["self_attention.linear_qkv.bias"] = (qkv,)
    made |= _norm("self_attention.linear_qkv.layer_norm_", config)
    made |= _norm("pre_mlp_layernorm." if experts else "mlp.linear_fc1.layer_norm_", config)
    if is_gemma2(config):
        for place in ("self_attention.linear_proj.", "mlp.linear_fc2."):
            made |= _norm(f"{place}post_layernorm.", config)
    return made


def is_gemma2(config: Mapping[str, Any]) -> bool:
    """Whether NeMo builds the layers of Gemma 2, which have two norms more and a window in every other one."""
    return "attn_logit_softcapping" in config.get("mcore_customization_config", {})


def _norm(prefix: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    kinds = ("weight",) if config["normalization"] == "rmsnorm" else ("weight", "bias")
    return {f"{prefix}{kind}": (HIDDEN,) for kind in kinds}


def write_model(folder: Path, config: Mapping[str, Any], state: State) -> Path:
    """Write a tree of NeMo 1 with a distributed checkpoint, which any of training's parallelisms gives, VPP too."""
    ranks = 1 if config.get("num_query_groups") == 1 else 2
    write_torch_dist(write_nemo1_tree(folder, config), chunked(state, ranks), "model.")
    return folder


def assert_both_targets_compute_what_nemo_computes(config: dict[str, Any], folder: Path) -> None:
    """Convert a tiny model under a configuration and compare logits, relative to the largest, with NeMo's rules.

    Shards are compared of what FasterTransformer computes.
    """
    from transformers import AutoModelForCausalLM

    config = scaled(config)
    if is_gemma2(config):  # NeMo's importer adds these to the published configuration
        config |= {"window_size": [WINDOW, 0], "name": "megatron_gemma2"}
    state = random_state(config)
    source = write_model(folder / "model", config, state)
    weights = {key: cut(key, value, 1, 0).double().numpy() for key, value in state.items()}
    wanted = forward([weights], rules_of_nemo1(config), input_ids())
    convert(ConvertArguments(source, folder / "hub", weight_data_type="fp32", format="huggingface"))
    model = AutoModelForCausalLM.from_pretrained(folder / "hub", attn_implementation="eager").eval()
    made = [logits(model)]
    opened = open_source(find_archive(source))
    if not opened.family.beyond(opened.dims):
        convert(ConvertArguments(source, folder / "1-gpu", 1, "fp32"))
        is_llama = "[llama]" in (folder / "1-gpu/config.ini").read_text()  # or GPT-NeoX, which StarCoder2 can be
        made.append((llama_logits if is_llama else gptneox_logits)(folder / "1-gpu", input_ids()))
    assert all(np.abs(each - wanted).max() < 1e-5 * np.abs(wanted).max() for each in made)
    assert [line for line in opened.remarks if "not known" in line] == []
