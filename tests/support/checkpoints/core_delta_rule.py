"""Tiny Qwen3-Next and Qwen3.5 models of transformers, in the names and layouts that megatron-core has for them.

Written from megatron-core 0.20: ``ssm/gated_delta_net`` (the order within ``in_proj``, what a rank has of each section,
``sharded_state_dict``, which takes them apart), ``transformer/attention.py`` (a group's queries, their gates, key and
value), ``moe/shared_experts.py``; and from Megatron-Bridge's ``qwen3_next_bridge.py`` and ``qwen35_bridge.py``.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from support.checkpoints.dcp_checkpoints import write_fsdp
from support.checkpoints.llama_files import ChunkedArray, write_bridge_tree, write_megatron_lm_tree, write_torch_dist
from support.checkpoints.llama_state import State
from support.tiny_models.llama_models import Saved

_ROWS = ("linear_qkv.weight", "A_log", "dt_bias", "eh_proj.weight")
_COLUMNS = ("linear_proj.weight", "out_proj.weight", "linear_fc2.weight")


def sections(config: Any) -> dict[str, int]:
    """Rows of what lies one after another in ``in_proj``; the convolution has the first three."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    heads = config.linear_num_value_heads
    return {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "alpha": heads}


def module_state(source: Saved, padded: int = 128) -> State:
    """What one rank that is alone has; gate and up of a feed-forward are [2, inter, hidden]."""
    config, kept = source.config, source.tensors
    state: State = _predictor(kept, config)
    for layer, kind in enumerate(config.layer_types):
        prefix = f"model.layers.{layer}."
        own = {key.removeprefix(prefix): value for key, value in kept.items() if key.startswith(prefix)}
        made = (_delta if kind == "linear_attention" else _attention)(own, config) | _feed_forward(own, config)
        state |= {f"decoder.layers.{layer}.{key}": value for key, value in made.items()}
    outer = (("embedding.word_embeddings", "model.embed_tokens"), ("output_layer", "lm_head"))
    for name, key in outer[: 1 if config.tie_word_embeddings else 2]:
        weight = kept[f"{key}.weight"]
        more = torch.full((padded - weight.shape[0], weight.shape[1]), 0.5, dtype=weight.dtype)
        state[f"{name}.weight"] = torch.cat([weight, more])
    return {**state, "decoder.final_layernorm.weight": kept["model.norm.weight"]}


def _predictor(kept: State, config: Any) -> State:
    """A layer with attention that predicts one more token, and what leads into and out of it."""
    if "mtp.fc.weight" not in kept:
        return {}
    prefix = "mtp.layers.0."
    own = {key.removeprefix(prefix): value for key, value in kept.items() if key.startswith(prefix)}
    inner = _attention(own, config) | _feed_forward(own, config)
    names = {
        "eh_proj": "fc",
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "final_layernorm": "norm",
    }
    made = {f"{prefix}{ours}.weight": kept[f"mtp.{theirs}.weight"] for ours, theirs in names.items()}
    return made | {f"{prefix}transformer_layer.{key}": value for key, value in inner.items()}


def with_predictor(found: State, layer: int) -> State:
    """Add a predictor as the hub's files have it: a layer's tensors, changed, and what leads in and out."""
    prefix, norm = f"model.layers.{layer}.", found["model.norm.weight"]
    copied = {f"mtp.layers.0.{key.removeprefix(prefix)}": each for key, each in found.items() if key.startswith(prefix)}
    made = {key: value.flip(0).contiguous() for key, value in copied.items()}
    for number, name in enumerate(("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")):
        made[f"mtp.{name}.weight"] = norm.roll(number + 1)
    rows = torch.arange(norm.numel() * 2 * norm.numel(), dtype=norm.dtype).reshape(norm.numel(), -1)
    return {**found, **made, "mtp.fc.weight": rows / rows.numel()}


def _delta(own: State, config: Any) -> State:
    return {
        "self_attention.in_proj.weight": torch.cat(_by_key_head(own, config) or _by_kind(own)),
        "self_attention.in_proj.layer_norm_weight": own["input_layernorm.weight"],
        "self_attention.conv1d.weight": own["linear_attn.conv1d.weight"],
        "self_attention.out_norm.weight": own["linear_attn.norm.weight"] - 1,
        "self_attention.out_proj.weight": own["linear_attn.out_proj.weight"],
        **{f"self_attention.{name}": own[f"linear_attn.{name}"] for name in ("A_log", "dt_bias")},
    }


def _by_kind(own: State) -> list[torch.Tensor]:
    """Qwen3.5's: queries, keys and values lie one after another as megatron-core has them."""
    return [own[f"linear_attn.in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a")]


def _by_key_head(own: State, config: Any) -> list[torch.Tensor]:
    """Take Qwen3-Next's rows out of each head of the keys, as ``fix_query_key_value_ordering`` of transformers does."""
    if "linear_attn.in_proj_qkvz.weight" not in own:
        return []
    heads, per = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    by_head = own["linear_attn.in_proj_qkvz.weight"].unflatten(0, (heads, -1))
    parts = list(by_head.split([key, key, per * value, per * value], 1))
    parts += own["linear_attn.in_proj_ba.weight"].unflatten(0, (heads, -1)).split([per, per], 1)
    return [part.flatten(0, 1) for part in parts]


def _attention(own: State, config: Any) -> State:
    groups, size = config.num_key_value_heads, config.head_dim
    query, gate = own["self_attn.q_proj.weight"].unflatten(0, (groups, -1, 2, size)).unbind(2)
    key, value = (own[f"self_attn.{letter}_proj.weight"].unflatten(0, (groups, 1, size)) for letter in "kv")
    return {
        "self_attention.linear_qkv.weight": torch.cat([query, gate, key, value], 1).flatten(0, 2),
        "self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
        "self_attention.linear_proj.weight": own["self_attn.o_proj.weight"],
        **{f"self_attention.{letter}_layernorm.weight": own[f"self_attn.{letter}_norm.weight"] for letter in "qk"},
    }


def _feed_forward(own: State, config: Any) -> State:
    if "mlp.gate.weight" not in own:
        return {"mlp.linear_fc1.layer_norm_weight": own["post_attention_layernorm.weight"], **_gated(own, "mlp", "mlp")}
    made = {
        "pre_mlp_layernorm.weight": own["post_attention_layernorm.weight"],
        "mlp.router.weight": own["mlp.gate.weight"],
        "mlp.shared_experts.gate_weight": own["mlp.shared_expert_gate.weight"],
        **_gated(own, "mlp.shared_expert", "mlp.shared_experts"),
    }
    for expert in range(config.num_experts):
        made |= _gated(own, f"mlp.experts.{expert}", f"mlp.experts.local_experts.{expert}")
    return made


def _gated(own: State, theirs: str, ours: str) -> State:
    gate, up, down = (own[f"{theirs}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return {f"{ours}.linear_fc1.weight": torch.stack([gate, up]), f"{ours}.linear_fc2.weight": down}


def of_rank(key: str, value: torch.Tensor, config: Any, ranks: int, rank: int) -> torch.Tensor:
    """A rank's part of a parameter: of fused ones its rows of every section."""
    if (sizes := _sizes(key, config)) or value.ndim == 3 and ".linear_fc1." in key:
        parts = value.split(list(sizes.values())) if sizes else value
        return torch.cat([part.chunk(ranks)[rank] for part in parts])
    if key.endswith(_COLUMNS):
        return value.chunk(ranks, 1)[rank].contiguous()
    is_outer = key.startswith(("embedding.", "output_layer."))
    return value.chunk(ranks)[rank].contiguous() if is_outer or key.endswith(_ROWS) else value


def _sizes(key: str, config: Any) -> dict[str, int]:
    found = sections(config)
    if key.endswith("conv1d.weight"):
        return {name: found[name] for name in ("query", "key", "value")}
    return found if key.endswith("in_proj.weight") else {}


def arrays(source: Saved, ranks: int) -> dict[str, ChunkedArray]:
    """The arrays of a distributed checkpoint, each rank's parts its chunks; layers keep their number."""
    config, found = source.config, dict[str, ChunkedArray]()

    def add(key: str, whole: tuple[int, ...], offset: tuple[int, ...], part: torch.Tensor) -> None:
        name, expert, before = key, "", whole
        if ".local_experts." in key:
            place, _, rest = key.partition("local_experts.")
            expert, _, end = rest.partition(".")
            name, before = f"{place}experts.{end}", (config.num_experts, *whole)
            offset, part = (int(expert), *offset), part[None]
        chunks = found.setdefault(name, ChunkedArray(before)).chunks
        if offset not in [place for place, _ in chunks]:
            chunks.append((offset, part.contiguous()))

    for key, value in module_state(source).items():
        for rank in range(ranks):
            part = of_rank(key, value, config, ranks, rank)
            if sizes := _sizes(key, config):
                for name, own in zip(sizes, part.split([size // ranks for size in sizes.values()]), strict=True):
                    offset = (rank * own.shape[0], *(0 for _ in own.shape[1:]))
                    add(f"{key}.{name}", (sizes[name], *value.shape[1:]), offset, own)
            elif value.ndim == 3:
                for which, own in enumerate(part.chunk(2)):
                    whole = (2 * value.shape[1], value.shape[2])
                    add(key, whole, (which * value.shape[1] + rank * own.shape[0], 0), own)
            else:
                cut = next((axis for axis, size in enumerate(part.shape) if size != value.shape[axis]), None)
                offset = tuple(rank * size if axis == cut else 0 for axis, size in enumerate(part.shape))
                add(key, tuple(value.shape), offset, part)
    return found


def fields(config: Any) -> dict[str, Any]:
    """megatron-core's fields, as Megatron-Bridge's importer sets them."""
    same = ("hidden_size", "num_attention_heads", "linear_conv_kernel_dim", "linear_key_head_dim")
    same += ("linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads")
    return {
        **{name: getattr(config, name) for name in same},
        "num_layers": config.num_hidden_layers,
        "ffn_hidden_size": getattr(config, "intermediate_size", 999),
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "layernorm_epsilon": config.rms_norm_eps,
        "layernorm_zero_centered_gamma": True,
        "normalization": "RMSNorm",
        **dict.fromkeys(("add_bias_linear", "add_qkv_bias"), False),
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "window_size": None,
        "position_embedding_type": "rope",
        "rotary_base": config.rope_parameters["rope_theta"],
        "rotary_percent": config.rope_parameters["partial_rotary_factor"],
        "seq_length": config.max_position_embeddings,
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == "linear_attention") for kind in config.layer_types],
        **(_of_experts(config) if hasattr(config, "num_experts") else {"num_moe_experts": None}),
    }


def _of_experts(config: Any) -> dict[str, Any]:
    dense = getattr(config, "mlp_only_layers", ())
    sparse = [int(layer not in dense) for layer in range(config.num_hidden_layers)]
    return {
        "num_moe_experts": config.num_experts,
        "moe_layer_freq": sparse,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_pre_softmax": False,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def arguments(config: Any, ranks: int) -> dict[str, Any]:
    """The saved arguments of Megatron-LM."""
    made = fields(config)
    made["num_experts"] = made.pop("num_moe_experts")
    del made["gated_linear_unit"], made["layernorm_zero_centered_gamma"]
    return {
        **made,
        **{"swiglu": True, "group_query_attention": True, "apply_layernorm_1p": True},
        **{"norm_epsilon": config.rms_norm_eps, "untie_embeddings_and_output_weights": not config.tie_word_embeddings},
        **{"max_position_embeddings": config.max_position_embeddings, "tokenizer_model": "tokenizer.model"},
        **{"tensor_model_parallel_size": ranks, "pipeline_model_parallel_size": 1},
    }


def write_ranks(root: Path, source: Saved, ranks: int, **changes: Any) -> Path:
    """Write ``mp_rank_*`` files."""
    folder = write_megatron_lm_tree(root)
    for rank in range(ranks):
        state = {
            key.replace("transformer_layer", "mtp_model_layer"): of_rank(key, each, source.config, ranks, rank)
            for key, each in module_state(source).items()
        }
        (folder / f"mp_rank_{rank:02d}").mkdir(parents=True)
        content = {"args": Namespace(**{**arguments(source.config, ranks), **changes}), "checkpoint_version": 3.0}
        torch.save({**content, "iteration": 500, "model": state}, folder / f"mp_rank_{rank:02d}/model_optim_rng.pt")
    return root


def write_megatron_lm_fsdp(root: Path, source: Saved, ranks: int, **changes: Any) -> Path:
    """Write what Megatron-LM saves with Megatron-FSDP: sections stay fused."""
    said = {**arguments(source.config, 1), **changes}
    write_fsdp(write_megatron_lm_tree(root), module_state(source), ranks, said)
    return root


def write_bridge_of_images(root: Path, source: Saved, ranks: int, **changes: Any) -> Path:
    """Write what Megatron-Bridge saves of its provider of Qwen3.5 that sees images."""
    kind = "Qwen35VLMoEModelProvider" if hasattr(source.config, "num_experts") else "Qwen35VLModelProvider"
    own = {"position_embedding_type": "mrope", "mrope_section": [1, 1, 0], "vision_config": {"depth": 3}}
    target = f"megatron.bridge.models.qwen_vl.qwen35_vl_provider.{kind}"
    return write_bridge(root, source, ranks, "language_model.", _target_=target, image_token_id=3, **own, **changes)


def _with_sections(state: State, config: Any) -> State:
    """Take fused tensors apart (``handle_gdn_in_state_dict``)."""
    made: State = {}
    for key, value in state.items():
        sizes = _sizes(key, config)
        parts = zip(sizes, value.split(list(sizes.values())), strict=True) if sizes else ()
        made |= {f"{key}.{name}": part for name, part in parts} or {key: value}
    return made


def write_bridge(
    root: Path, source: Saved, ranks: int, prefix: str = "", is_fsdp: bool = False, **changes: Any
) -> Path:
    """Write what Megatron-Bridge saves of its provider; with Megatron-FSDP it takes sections apart itself."""
    specs = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
    spec = f"{specs}.get_transformer_block_with_experimental_attention_variant_spec"
    model = {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        **fields(source.config),
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "transformer_layer_spec": {"_target_": spec, "_call_": False},
        "share_embeddings_and_output_weights": source.config.tie_word_embeddings,
        "hetereogenous_dist_checkpoint": True,
        **changes,
    }
    folder = write_bridge_tree(root, model)
    if is_fsdp:
        write_fsdp(folder, _with_sections(module_state(source), source.config), ranks)
        return root
    images = {"vision_model.patch_embed.proj.weight": ChunkedArray((2, 2), [((0, 0), torch.ones(2, 2))])}
    made = {f"{prefix}{key}": each for key, each in arrays(source, ranks).items()} | (images if prefix else {})
    write_torch_dist(folder, made, prefix="", common={"iteration": 7, "checkpoint_version": 3.0})
    return root
