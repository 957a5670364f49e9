"""Tiny Nemotron-H models of transformers, in the names and layouts that megatron-core's hybrids have.

Written from megatron-core 0.20: ``ssm/mamba_mixer.py`` (what a rank has of each section; ``sharded_state_dict``, which
takes them apart), ``models/hybrid/hybrid_block.py`` (layers keep their number), ``models/hybrid/hybrid_layer_specs.py``
(fused norms), ``transformer/moe`` (experts, latent projections); and from Megatron-Bridge's providers.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from support.checkpoints.dcp_checkpoints import write_fsdp
from support.checkpoints.llama_files import ChunkedArray, write_bridge_tree, write_megatron_lm_tree, write_torch_dist
from support.checkpoints.llama_state import State, merged_qkv
from support.tiny_models.huggingface_models import filling
from support.tiny_models.llama_models import Saved, build, logits, tensors

LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
_ROWS = ("embedding.", "output_layer.", "linear_qkv.weight", "linear_fc1.weight", "mixer.norm.weight", "eh_proj.weight")
_BY_HEAD = ("A_log", "D", "dt_bias")
_ALWAYS_FP32 = (*_BY_HEAD, "e_score_correction_bias")


@cache
def hybrid(name: str, dtype: torch.dtype = torch.float32) -> Saved:
    """Build and save a model of llama_models.MODELS; what each head has of its own is fp32, as training keeps it."""
    from transformers import AutoModelForCausalLM

    model = build(name)
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.from_numpy(filling(key, tuple(buffer.shape))))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        kept = tensors(Path(folder))
        rounded = {key: value if key.endswith(_ALWAYS_FP32) else value.to(dtype).float() for key, value in kept.items()}
        from safetensors.torch import save_file

        save_file(rounded, Path(folder) / "model.safetensors", {"format": "pt"})
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        typed = {key: value if key.endswith(_ALWAYS_FP32) else value.to(dtype) for key, value in rounded.items()}
        return Saved(again.config, typed, logits(again))


def pattern(config: Any) -> str:
    """A letter a layer."""
    return "".join(LETTERS[kind] for kind in config.layers_block_type)


def sections(config: Any, which: str) -> dict[str, int]:
    """Rows of what lies one after another in ``in_proj`` and in the convolution."""
    inner, shared = config.mamba_num_heads * config.mamba_head_dim, config.n_groups * config.ssm_state_size
    conv = {"x": inner, "B": shared, "C": shared}
    return conv if which == "conv1d" else {"z": inner, **conv, "dt": config.mamba_num_heads}


def module_state(source: Saved, padded: int) -> State:
    """What one rank that is alone has: names of megatron-core's modules, layers from 0."""
    config, kept = source.config, source.tensors
    state: State = {}
    for layer, letter in enumerate(pattern(config)):
        prefix = f"backbone.layers.{layer}."
        own = {key.removeprefix(prefix): value for key, value in kept.items() if key.startswith(prefix)}
        made = {"M": _mamba, "*": _attention, "-": _mlp, "E": _experts}[letter](own, config)
        state |= {f"decoder.layers.{layer}.{key}": value for key, value in made.items()}
    state |= _predictor_state(kept, config)
    for name, key in (("embedding.word_embeddings", "backbone.embeddings"), ("output_layer", "lm_head")):
        weight = kept[f"{key}.weight"]
        more = torch.full((padded - weight.shape[0], weight.shape[1]), 0.5, dtype=weight.dtype)
        state[f"{name}.weight"] = torch.cat([weight, more])
    return {**state, "decoder.final_norm.weight": kept["backbone.norm_f.weight"]}


def with_predictor(source: Saved, letters: str) -> State:
    """Add a predictor as the hub's files have it: layers as the model's, changed, and what leads in and out."""
    width, norm = source.config.hidden_size, source.tensors["backbone.norm_f.weight"]
    made: State = {}
    for number, letter in enumerate(letters):
        prefix = f"backbone.layers.{pattern(source.config).index(letter)}."
        for key, value in source.tensors.items():
            if key.startswith(prefix):
                made[f"mtp.layers.{number}.{key.removeprefix(prefix)}"] = value.flip(0).contiguous()
    rows = torch.arange(width * 2 * width, dtype=norm.dtype).reshape(width, -1)
    made["mtp.layers.0.eh_proj.weight"] = rows / rows.numel()
    made |= {f"mtp.layers.0.{name}.weight": norm.roll(place) for place, name in enumerate(("enorm", "hnorm"), 1)}
    made[f"mtp.layers.{len(letters) - 1}.final_layernorm.weight"] = norm.flip(0).contiguous()
    return {**source.tensors, **made}


def _predictor_state(kept: State, config: Any) -> State:
    """What megatron-core has of it: its layers are a stack of their own, and the rest is beside that."""
    state: State = {}
    own: dict[str, State] = {}
    for key, value in kept.items():
        if key.startswith("mtp.layers."):
            number, _, name = key.removeprefix("mtp.layers.").partition(".")
            own.setdefault(number, {})[name] = value
    for number, layer in own.items():
        kinds = {"mixer.A_log": _mamba, "mixer.q_proj.weight": _attention, "mixer.gate.weight": _experts}
        make = next((each for mark, each in kinds.items() if mark in layer), _mlp)
        outer = {f"{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "final_layernorm")}
        inner = {key: each for key, each in layer.items() if key not in outer}
        state |= {f"mtp.layers.0.{key}": layer[key] for key in outer & layer.keys()}
        place = f"mtp.layers.0.mtp_model_layer.layers.{number}"
        state |= {f"{place}.{key}": each for key, each in make(inner, config).items()}
    return state


def _mamba(own: State, config: Any) -> State:
    names = {"conv1d.weight": "conv1d_weight", "conv1d.bias": "conv1d_bias"}
    made = {f"mixer.{names.get(key[6:], key[6:])}": value for key, value in own.items() if key.startswith("mixer.")}
    return {**made, "mixer.in_proj.layer_norm_weight": own["norm.weight"]}


def _attention(own: State, config: Any) -> State:
    q, k, v = (own[f"mixer.{letter}_proj.weight"] for letter in "qkv")
    groups, size = config.num_key_value_heads, config.head_dim
    return {
        "self_attention.linear_qkv.weight": merged_qkv(q, k, v, groups, size),
        "self_attention.linear_qkv.layer_norm_weight": own["norm.weight"],
        "self_attention.linear_proj.weight": own["mixer.o_proj.weight"],
    }


def _mlp(own: State, config: Any) -> State:
    return {
        "mlp.linear_fc1.weight": own["mixer.up_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": own["norm.weight"],
        "mlp.linear_fc2.weight": own["mixer.down_proj.weight"],
    }


def _experts(own: State, config: Any) -> State:
    made = {
        "pre_mlp_layernorm.weight": own["norm.weight"],
        "mlp.router.weight": own["mixer.gate.weight"],
        "mlp.router.expert_bias": own["mixer.gate.e_score_correction_bias"],
        "mlp.shared_experts.linear_fc1.weight": own["mixer.shared_experts.up_proj.weight"],
        "mlp.shared_experts.linear_fc2.weight": own["mixer.shared_experts.down_proj.weight"],
    }
    for name in ("fc1_latent_proj.weight", "fc2_latent_proj.weight"):
        if f"mixer.{name}" in own:
            made[f"mlp.{name}"] = own[f"mixer.{name}"]
    for expert in range(config.n_routed_experts):
        for ours, theirs in (("linear_fc1", "up_proj"), ("linear_fc2", "down_proj")):
            made[f"mlp.experts.{ours}.weight{expert}"] = own[f"mixer.experts.{expert}.{theirs}.weight"]
    return made


def of_rank(key: str, value: torch.Tensor, config: Any, ranks: int, rank: int) -> torch.Tensor:
    """A rank's part of a parameter: of fused ones its rows of every section."""
    for which in ("in_proj", "conv1d"):
        if f".mixer.{which}" in key and "layer_norm" not in key:
            parts = value.split(list(sections(config, which).values()))
            return torch.cat([part.chunk(ranks)[rank] for part in parts])
    if key.endswith(("linear_proj.weight", "out_proj.weight")) or ".linear_fc2.weight" in key:
        return value.chunk(ranks, 1)[rank].contiguous()
    is_expert = ".experts.linear_fc1.weight" in key
    if is_expert or key.endswith((*_ROWS, *(f"mixer.{name}" for name in _BY_HEAD))) or key.startswith(_ROWS[:2]):
        return value.chunk(ranks)[rank].contiguous()
    return value


def write_ranks(
    root: Path, source: Saved, ranks: int, stages: int = 1, experts: int = 1, is_old: bool = False, **changes: Any
) -> Path:
    """Write each rank's file, by tensor, stage and expert; before mid-2026 the convolution was a module."""
    config, folder = source.config, write_megatron_lm_tree(root)
    said = {**arguments(config, ranks, stages), "expert_model_parallel_size": experts, **changes}
    for stage, rank, expert in product(range(stages), range(ranks), range(experts)):
        kept = {
            name.replace("conv1d_", "conv1d.") if is_old else name: of_rank(key, value, config, ranks, rank)
            for key, value in module_state(source, 128).items()
            if (name := _name_of_rank(key, config, (stages, stage), (experts, expert)))
        }
        numbers = [rank, *([stage] if stages > 1 else []), *([expert] if experts > 1 else [])]
        place = folder / "_".join(["mp_rank", f"{rank:02d}", *(f"{each:03d}" for each in numbers[1:])])
        place.mkdir(parents=True)
        content = {"args": Namespace(**said), "checkpoint_version": 3.0, "iteration": 500, "model": kept}
        torch.save(content, place / "model_optim_rng.pt")
    return root


def _name_of_rank(key: str, config: Any, stage: tuple[int, int], expert: tuple[int, int]) -> str:
    """Return what a rank calls a parameter; its stage and place among experts come with their counts."""
    layers, own = len(pattern(config)) // stage[0], config.n_routed_experts // expert[0]
    layer = int(key.split(".")[2]) if ".layers." in key else None
    home = layer // layers if layer is not None else 0 if key.startswith("embedding") else stage[0] - 1
    name = key if layer is None else key.replace(f".{layer}.", f".{layer % layers}.", 1)
    before, found, number = name.rpartition(".weight")
    if ".mlp.experts." in key and found and number:
        name = f"{before}.weight{int(number) % own}" if int(number) // own == expert[1] else ""
    return name if home == stage[1] else ""


def arrays(source: Saved, ranks: int) -> dict[str, ChunkedArray]:
    """The arrays of a distributed checkpoint, each rank's parts its chunks."""
    config, found = source.config, dict[str, ChunkedArray]()

    def add(key: str, whole: tuple[int, ...], offset: tuple[int, ...], part: torch.Tensor) -> None:
        chunks = found.setdefault(key, ChunkedArray(whole)).chunks
        if offset not in [place for place, _ in chunks]:
            chunks.append((offset, part))

    for key, value in module_state(source, 128).items():
        for rank in range(ranks):
            part = of_rank(key, value, config, ranks, rank)
            axis = next((n for n, size in enumerate(part.shape) if size != value.shape[n]), 0)
            which = next((each for each in ("in_proj", "conv1d") if f".mixer.{each}" in key), "")
            if which and "layer_norm" not in key:
                sizes = sections(config, which)
                for name, own in zip(sizes, part.split([size // ranks for size in sizes.values()]), strict=True):
                    whole = (sizes[name], *value.shape[1:])
                    offset = (rank * own.shape[0], *(0 for _ in own.shape[1:]))
                    add(f"{key.replace('conv1d_', 'conv1d.')}.{name}", whole, offset, own.contiguous())
                continue
            offset = tuple(rank * part.shape[n] if n == axis and part is not value else 0 for n in range(value.ndim))
            before, is_expert, number = key.rpartition(".weight")
            if ".mlp.experts." in key and is_expert and number:
                name = before.replace("mlp.experts.", "mlp.experts.experts.") + ".weight"
                add(name, (config.n_routed_experts, *value.shape), (int(number), *offset), part[None].contiguous())
            else:
                add(key, tuple(value.shape), offset, part)
    return found


def transformer(config: Any) -> dict[str, Any]:
    """megatron-core's fields, as Megatron-Bridge's provider of a hybrid has them."""
    letters = pattern(config)
    made = {
        "num_layers": len(letters),
        "hybrid_layer_pattern": letters,
        "is_hybrid_model": True,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "layernorm_zero_centered_gamma": False,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "gated_linear_unit": False,
        "window_size": None,
        "mamba_num_heads": config.mamba_num_heads,
        "mamba_head_dim": config.mamba_head_dim,
        "mamba_num_groups": config.n_groups,
        "mamba_state_dim": config.ssm_state_size,
        "mamba_chunk_size": config.chunk_size,
        "position_embedding_type": "none",
        "mtp_num_layers": 0,
        "num_moe_experts": None,
        "seq_length": config.max_position_embeddings,
    }
    if "E" in letters:
        made |= {
            "num_moe_experts": config.n_routed_experts,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
            "moe_router_num_groups": None,
            "moe_router_group_topk": None,
            "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
            "moe_latent_size": config.moe_latent_size,
        }
    return made


def arguments(config: Any, ranks: int, stages: int = 1) -> dict[str, Any]:
    """The saved arguments of Megatron-LM's pretrain_hybrid.py."""
    made = transformer(config)
    made["num_experts"] = made.pop("num_moe_experts")
    del made["gated_linear_unit"], made["layernorm_zero_centered_gamma"]
    return {
        **made,
        **{"squared_relu": True, "swiglu": False, "group_query_attention": True, "add_position_embedding": True},
        **{"norm_epsilon": config.layer_norm_epsilon, "untie_embeddings_and_output_weights": True},
        **{"max_position_embeddings": config.max_position_embeddings, "tokenizer_model": "tokenizer.model"},
        **{"tensor_model_parallel_size": ranks, "pipeline_model_parallel_size": stages},
        "spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
    }


def predictor(source: Saved) -> dict[str, ChunkedArray]:
    """Some arrays of a block that predicts one more token: what leads into it, and of its first layer."""
    width = source.config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"eh_proj.weight": (width, 2 * width)}
    shapes["mtp_model_layer.layers.0.mixer.in_proj.layer_norm_weight"] = (width,)
    return {
        f"mtp.layers.0.{name}": ChunkedArray(shape, [((0,) * len(shape), torch.ones(shape))])
        for name, shape in shapes.items()
    }


def write_bridge(
    root: Path,
    source: Saved,
    ranks: int,
    is_fsdp: bool = False,
    more: Mapping[str, ChunkedArray] | None = None,
    **changes: Any,
) -> Path:
    """Write what Megatron-Bridge saves of its ``HybridModelProvider``; Megatron-FSDP leaves Mamba's sections fused."""
    place = "megatron.bridge.models.hybrid.hybrid_provider"
    model = {
        "_target_": f"{place}.HybridModelProvider",
        **transformer(source.config),
        "activation_func": {"_target_": "megatron.core.activations.squared_relu", "_call_": False},
        "hybrid_stack_spec": {"_target_": f"{place}.get_default_hybrid_stack_spec", "_call_": False},
        "share_embeddings_and_output_weights": False,
        **changes,
    }
    folder = write_bridge_tree(root, _plain(model))
    if is_fsdp:
        write_fsdp(folder, module_state(source, 128), ranks)
    else:
        made = {**arrays(source, ranks), **(more or {})}
        write_torch_dist(folder, made, prefix="", common={"iteration": 7, "checkpoint_version": 3.0})
    return root


def write_megatron_lm_fsdp(root: Path, source: Saved, ranks: int, **changes: Any) -> Path:
    """Write what Megatron-LM saves with Megatron-FSDP."""
    said = {**arguments(source.config, 1), **changes}
    write_fsdp(write_megatron_lm_tree(root), module_state(source, 128), ranks, said)
    return root


def write_hub(root: Path, source: Saved) -> Path:
    """Write ``config.json``; the weights are written beside it."""
    root.mkdir(parents=True)
    source.config.save_pretrained(root)
    return root


def _plain(value: Any) -> Any:
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value
