"""Tiny Falcon-H1 models of transformers, in the names and layouts that Megatron-Bridge saves.

Written from Megatron-Bridge 0.6, ``models/falcon_h1``: ``falconh1_layer.py`` (one norm before Mamba and attention,
whose linear layers therefore have none; ``sharded_state_dict``), ``falconh1_block.py`` (layers keep their number),
``falconh1_provider.py``; and megatron-core, ``ssm/mamba_mixer.py`` (sections, of which each rank has its rows).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.checkpoints.llama_configs import architecture
from support.checkpoints.llama_files import ChunkedArray, chunked, write_bridge_tree, write_torch_dist
from support.checkpoints.llama_state import State, merged_qkv
from support.tiny_models.llama_models import Saved

_PACKAGE = "megatron.bridge.models.falcon_h1.falconh1_provider"
_SAME = {
    **{"input_layernorm.weight": "norm.weight", "pre_ff_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"},
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "feed_forward.down_proj.weight": "mlp.linear_fc2.weight",
}
_OUTSIDE = {
    **{"model.embed_tokens.weight": "embedding.word_embeddings.weight", "lm_head.weight": "output_layer.weight"},
    "model.final_layernorm.weight": "decoder.final_norm.weight",
}


def write_falcon(root: Path, source: Saved, ranks: int, **changes: Any) -> Path:
    """Write what Megatron-Bridge saves of its ``FalconH1ModelProvider``."""
    model = {**provider(source.config), **changes}
    folder = write_bridge_tree(root, model)
    arrays = _arrays(source, ranks, less=1 if model["layernorm_zero_centered_gamma"] else 0)
    write_torch_dist(folder, arrays, prefix="", common={"iteration": 7, "checkpoint_version": 3.0})
    return root


def provider(config: Any) -> dict[str, Any]:
    """The section ``model`` of ``run_config.yaml``: the importer's words for those of the hub."""
    names = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return {
        **architecture(config),
        "_target_": f"{_PACKAGE}.FalconH1ModelProvider",
        "falconh1_stack_spec": {"_target_": f"{_PACKAGE}.get_default_falconh1_stack_spec", "_call_": False},
        **{"falconh1_ratio": 1.0, "hybrid_attention_ratio": 0.0, "hybrid_mlp_ratio": 0.0},
        **{"hybrid_override_pattern": None, "use_mamba": True, "use_attention": True, "use_mlp": True},
        **{"position_embedding_type": "rope", "rotary_percent": 1.0},
        "rotary_base": int(config.rope_parameters["rope_theta"]),
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
        "seq_length": config.max_position_embeddings,
        **{"mamba_state_dim": config.mamba_d_state, "mamba_head_dim": config.mamba_d_head},
        **{"mamba_num_groups": config.mamba_n_groups, "mamba_num_heads": config.mamba_n_heads},
        **{"expand": config.mamba_expand, "d_conv": config.mamba_d_conv, "conv_bias": config.mamba_conv_bias},
        **{"chunk_size": config.mamba_chunk_size, "rmsnorm": config.mamba_rms_norm, "D_has_hdim": False},
        **{"norm_before_gate": config.mamba_norm_before_gate, "dt_min": 0.001, "dt_max": 0.1, "dt_init": "random"},
        **{f"{name}_multiplier": getattr(config, f"{name}_multiplier") for name in names},
        **{f"{name}_multipliers": list(getattr(config, f"{name}_multipliers")) for name in ("ssm", "mlp")},
    }


def _arrays(source: Saved, ranks: int, less: int) -> dict[str, ChunkedArray]:
    """The arrays of a distributed checkpoint; ``less`` is what the norms of the residual stream are stored less."""
    config, kept = source.config, source.tensors
    state: State = {ours: kept[theirs] for theirs, ours in _OUTSIDE.items() if theirs in kept}
    found: dict[str, ChunkedArray] = {}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        own = {key.removeprefix(prefix): value for key, value in kept.items() if key.startswith(prefix)}
        q, k, v = (own[f"self_attn.{letter}_proj.weight"] for letter in "qkv")
        made = {ours: own[theirs] for theirs, ours in _SAME.items()}
        made["self_attention.linear_qkv.weight"] = merged_qkv(q, k, v, config.num_key_value_heads, config.head_dim)
        made["mlp.linear_fc1.weight"] = torch.stack(
            [own[f"feed_forward.{name}_proj.weight"] for name in ("gate", "up")]
        )
        state |= {f"decoder.layers.{layer}.{key}": value for key, value in made.items()}
        for key, value in own.items():
            if key.startswith("mamba."):
                found |= _mamba(f"decoder.layers.{layer}.mamba_mixer.{key[6:]}", value, config, ranks)
    norms = ("decoder.final_norm.weight", "norm_weight", ".norm.weight")
    return found | chunked(
        {key: value - less if key.endswith(norms) else value for key, value in state.items()}, ranks, is_stacked=False
    )


def _mamba(key: str, value: torch.Tensor, config: Any, ranks: int) -> dict[str, ChunkedArray]:
    """A parameter of the mixer: fused ones section by section, ``out_proj`` cut by columns, the others by rows."""
    inner, shared = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    rows = {"z": inner, "x": inner, "B": shared, "C": shared, "dt": config.mamba_n_heads}
    names = list(rows) if ".in_proj." in key else ["x", "B", "C"] if ".conv1d." in key else []
    parts = value.split([rows[name] for name in names]) if names else [value]
    axis, found = int(".out_proj." in key), dict[str, ChunkedArray]()
    for suffix, part in zip([f".{name}" for name in names] or [""], parts, strict=True):
        array = found.setdefault(f"{key}{suffix}", ChunkedArray(tuple(part.shape)))
        for rank, piece in enumerate(part.chunk(ranks, axis)):
            offset = tuple(rank * piece.shape[axis] if n == axis else 0 for n in range(part.ndim))
            array.chunks.append((offset, piece.contiguous()))
    return found
