"""Megatron-Bridge's own tables, run in a process of their own on what the independent writers say a rank holds.

A table is asked for each parameter of Megatron's as Bridge's export does, with tensor parallelism 1; what it gives is
written as ``<model>.pt``, by transformers' names.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.checkpoints import core_delta_rule, hybrid_models
from support.checkpoints.llama_state import State, core_state
from support.tiny_models.llama_models import saved
from with_megatron_core.absent import stand_in

MODELS = {
    "llama": "llama.llama_bridge.LlamaBridge",
    "qwen2": "qwen.qwen2_bridge.Qwen2Bridge",
    "qwen3": "qwen.qwen3_bridge.Qwen3Bridge",
    "gemma": "gemma.gemma_bridge.GemmaBridge",
    "gemma2": "gemma.gemma2_bridge.Gemma2Bridge",
    "nemotron": "nemotron.nemotron_bridge.NemotronBridge",
    "qwen3_moe_alike": "qwen.qwen3_moe_bridge.Qwen3MoEBridge",
    "olmoe": "olmoe.olmoe_bridge.OlMoEBridge",
    "glm4_moe": "glm.glm45_bridge.GLM45Bridge",
    "deepseek_v2": "deepseek.deepseek_v2_bridge.DeepSeekV2Bridge",
    "deepseek_v3": "deepseek.deepseek_v3_bridge.DeepSeekV3Bridge",
    "nemotron_h": "nemotronh.nemotron_h_bridge.NemotronHBridge",
    "qwen3_next": "qwen.qwen3_next_bridge.Qwen3NextBridge",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
HYBRIDS = ("nemotron_h", "qwen3_next")
DENSE = ("model.layers.1.mlp.", "model.layers.1.post_attention_layernorm.")
"""Of Qwen3-Next here: a layer without experts, of which Bridge's table has none."""


def source(name: str) -> Any:
    """Build and save a model once for all tests of a process."""
    return hybrid_models.hybrid(name) if name in HYBRIDS else saved(name)


def state_of(name: str) -> State:
    """Return a rank's parameters where it is alone, as Transformer Engine's modules have them."""
    model = source(name)
    rows = len(model.tensors["backbone.embeddings.weight" if name == "nemotron_h" else "model.embed_tokens.weight"])
    if name == "nemotron_h":
        named = hybrid_models.module_state(model, rows).items()
        state = {key.replace("conv1d_", "conv1d."): value for key, value in named}  # as it was before mid-2026
    elif name == "qwen3_next":
        state = core_delta_rule.module_state(model, rows)
    else:
        state = core_state(model.tensors, model.config, rows)
    grouped = re.compile(r"local_experts\.(\d+)\.(linear_fc\d)\.(weight|bias)$")
    is_gated = {key for key, value in state.items() if ".linear_fc1.weight" in key and value.ndim == 3}
    return {
        grouped.sub(r"\2.\3\1", key): value.flatten(0, 1) if key in is_gated else value for key, value in state.items()
    }


def _config(config: Any) -> SimpleNamespace:
    """Return what the tables read of megatron-core's configuration."""
    heads = config.num_attention_heads
    said = {
        "num_attention_heads": heads,
        "num_query_groups": getattr(config, "num_key_value_heads", heads),
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_size": config.hidden_size,
        "num_moe_experts": next((getattr(config, key) for key in _EXPERTS if hasattr(config, key)), None),
        "attention_output_gate": config.model_type == "qwen3_next",
        "gated_linear_unit": True,
    }
    if config.model_type == "nemotron_h":
        said |= {"mamba_num_heads": config.mamba_num_heads, "mamba_head_dim": config.mamba_head_dim}
        said |= {"mamba_num_groups": config.n_groups, "mamba_state_dim": config.ssm_state_size}
    keys = {key: getattr(config, key) for key in dir(config) if key.startswith("linear_")}
    return SimpleNamespace(**said, **keys)


def of_bridge(name: str) -> State:
    """Return what Bridge's table makes of a model's parameters."""
    place, _, kind = MODELS[name].rpartition(".")
    registry = getattr(importlib.import_module(f"megatron.bridge.models.{place}"), kind)().mapping_registry()
    module = type("RMSNorm", (torch.nn.Module,), {})()  # with one rank all kinds of layers are alike
    module.config = _config(source(name).config)
    found: State = {}
    for key, value in state_of(name).items():
        if name == "qwen3_next" and key.startswith("decoder.layers.1.mlp."):
            continue
        mapping = registry.megatron_to_hf_lookup(key)
        assert mapping is not None, f"{name}: Bridge knows no {key}"
        found |= {theirs: made.contiguous() for theirs, made in mapping.megatron_to_hf(value, module).items()}
    return found


if __name__ == "__main__":
    for each in MODELS:
        source(each)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    stand_in()
    import megatron.bridge  # noqa: F401

    for each in MODELS:
        torch.save(of_bridge(each), Path(sys.argv[1]) / f"{each}.pt")
