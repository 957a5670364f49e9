"""A Llama-like model of transformers in the names and layouts of NeMo, whole and cut by training ranks.

Written from NeMo's importers (scripts/checkpoint_converters/convert_*_hf_to_nemo.py, nemo/collections/llm/gpt/model,
nemo/lightning/io/state.py: merge_qkv, merge_fc1) and Megatron-LM's parallel layers, not from this project's tables.

Gated projections are held as [2, inter, hidden], gate first, so that a rank's part is its rows of either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from support.checkpoints import core_gpt_oss, core_latent, core_llama4
from support.checkpoints.core_mixtures import mixture_state

State = dict[str, torch.Tensor]

_ATTENTION = {"o_proj": "linear_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
_UNGATED = {
    "mlp.up_proj": "mlp.linear_fc1",
    "mlp.c_fc": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
    "mlp.c_proj": "mlp.linear_fc2",
    "mlp.router": "mlp.router",
}
GATED, WHOLE, ROWS, COLUMNS = "gated", "whole", "rows", "columns"
HEADS_WIDTH = 16
"""The widest head of the tiny models."""


def merged_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int, size: int) -> torch.Tensor:
    """Join rows as NeMo's importers do: for each group its queries, then its key, then its value."""
    rest = q.shape[1:]
    by_group = [part.reshape(groups, -1, size, *rest) for part in (q, k, v)]
    return torch.cat(by_group, 1).reshape(-1, *rest)


def core_state(tensors: State, config: Any, padded: int, stores_one_more: bool = False) -> State:
    """Name the tensors of a saved model as megatron-core with Transformer Engine does, layers from 0 to the last.

    Args:
        tensors: what transformers wrote, under the hub's names.
        config: transformers' configuration.
        padded: rows of the vocabulary with padding; the added rows are 0.5, so that an error with them shows.
        stores_one_more: NeMo 1 adds 1 to every norm of Gemma.
    """
    state: State = {}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        made = _layer(_taken_apart(own, config), config)
        state |= {f"decoder.layers.{layer}.{key}": value for key, value in made.items()}
    for number in range(core_latent.predictors(tensors, config)):
        prefix = f"model.layers.{config.num_hidden_layers + number}."
        own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        inner = _layer(own, config).items()
        made = core_latent.predictor(own) | {f"transformer_layer.{key}": value for key, value in inner}
        state |= {f"mtp.layers.{number}.{key}": value for key, value in made.items()}
    state["embedding.word_embeddings.weight"] = _padded(tensors["model.embed_tokens.weight"], padded)
    for name in ("weight", "bias"):
        if f"model.norm.{name}" in tensors:
            state[f"decoder.final_layernorm.{name}"] = tensors[f"model.norm.{name}"]
    if not config.tie_word_embeddings:
        state["output_layer.weight"] = _padded(tensors["lm_head.weight"], padded)
    if stores_one_more:
        state = {key: value + 1 if "norm" in key else value for key, value in state.items()}
    return state


def _layer(own: State, config: Any) -> State:
    own, is_latent = core_llama4.renamed(own), core_latent.is_latent(own)
    made = core_latent.layer(own) if is_latent else {**_attention(own, config), **_norms(own, config)}
    return made | _feed_forward(own)


def _taken_apart(own: State, config: Any) -> State:
    """Phi-3's tensors of query, key and value, and of gate and up, as NeMo's importer takes them apart."""
    if "self_attn.qkv_proj.weight" not in own:
        return own
    size = config.hidden_size // config.num_attention_heads
    rows = [size * count for count in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
    parts = own["self_attn.qkv_proj.weight"].split(rows)
    gate, up = own["mlp.gate_up_proj.weight"].chunk(2)
    made = {f"self_attn.{letter}_proj.weight": part for letter, part in zip("qkv", parts, strict=True)}
    return {**own, **made, "mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}


def _padded(weight: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([weight, torch.full((rows - weight.shape[0], weight.shape[1]), 0.5, dtype=weight.dtype)])


def _attention(own: State, config: Any) -> State:
    groups = config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    made = {}
    for name in ("weight", "bias"):
        if f"self_attn.q_proj.{name}" in own:
            parts = [own[f"self_attn.{letter}_proj.{name}"] for letter in "qkv"]
            made[f"self_attention.linear_qkv.{name}"] = merged_qkv(*parts, groups=groups, size=size)  # type: ignore[misc]
        for theirs, ours in _ATTENTION.items():
            if f"self_attn.{theirs}.{name}" in own:
                made[f"self_attention.{ours}.{name}"] = own[f"self_attn.{theirs}.{name}"]
    if "self_attn.sinks" in own:
        made["self_attention.core_attention.softmax_offset"] = own["self_attn.sinks"]
    return made


def _norms(own: State, config: Any) -> State:
    names = {
        "input_layernorm": "self_attention.linear_qkv.layer_norm",
        "post_attention_layernorm": "mlp.linear_fc1.layer_norm",
    }
    if config.model_type in ("exaone4", "olmo2"):
        names = {
            "post_attention_layernorm": "self_attention.linear_proj.post_layernorm.",
            "post_feedforward_layernorm": "mlp.linear_fc2.post_layernorm.",
        }
    if config.model_type in ("gemma2", "gemma3_text"):
        names = {
            "input_layernorm": "self_attention.linear_qkv.layer_norm",
            "pre_feedforward_layernorm": "mlp.linear_fc1.layer_norm",
            "post_attention_layernorm": "self_attention.linear_proj.post_layernorm.",
            "post_feedforward_layernorm": "mlp.linear_fc2.post_layernorm.",
        }
    if any(".experts." in key for key in own):
        names["post_attention_layernorm"] = "pre_mlp_layernorm."
    made = {}
    for theirs, ours in names.items():
        for name in ("weight", "bias"):
            if f"{theirs}.{name}" in own:
                made[f"{ours}{name}" if ours.endswith(".") else f"{ours}_{name}"] = own[f"{theirs}.{name}"]
    return made


def _feed_forward(own: State) -> State:
    made, gated = {}, "mlp.gate_proj.weight" in own
    for theirs, ours in _UNGATED.items():
        for name in ("weight", "bias"):
            if f"{theirs}.{name}" in own and not (gated and theirs == "mlp.up_proj"):
                made[f"{ours}.{name}"] = own[f"{theirs}.{name}"]
    if gated:
        made["mlp.linear_fc1.weight"] = torch.stack([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]])
    return made | mixture_state(own) | core_gpt_oss.experts(own)


def partition(key: str, value: torch.Tensor) -> str:
    """How Megatron's tensor parallelism cuts a tensor (ColumnParallelLinear cuts rows of the weight)."""
    if key.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return COLUMNS
    if key.endswith(("q_layernorm.weight", "k_layernorm.weight")) and value.numel() > HEADS_WIDTH:
        return ROWS  # of all heads: MiniMax M2's, of which each rank has its heads'
    if key.endswith(core_latent.ROWS):
        return ROWS
    if "word_embeddings" in key or "output_layer" in key or ".linear_qkv." in key or ".linear_fc1" in key:
        is_norm = "layer_norm" in key
        is_gated = value.ndim == (2 if key.endswith(".bias") else 3)
        return WHOLE if is_norm else GATED if is_gated else ROWS
    return ROWS if key.endswith("softmax_offset") else WHOLE


def cut(key: str, value: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """One rank's part; the gated projections of a rank lie in one matrix, its gate above its up projection."""
    how = partition(key, value)
    if key.endswith("linear_qkv_down_proj.weight"):
        return core_latent.fused_part(value, ranks, rank)
    if how == WHOLE:
        return value
    if how == GATED:
        return value.chunk(ranks, 1)[rank].flatten(0, 1)
    return value.chunk(ranks, 1 if how == COLUMNS else 0)[rank].contiguous()


def legacy_name(key: str) -> str:
    """NeMo's and Megatron-LM's name of before megatron-core, below ``language_model``."""
    for new, old in (
        ("decoder.", "encoder."),
        ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
        ("mlp.linear_fc1.layer_norm_", "post_attention_layernorm."),
        ("linear_qkv", "query_key_value"),
        ("linear_proj", "dense"),
        ("linear_fc1", "dense_h_to_4h"),
        ("linear_fc2", "dense_4h_to_h"),
    ):
        key = key.replace(new, old)
    return key


def two_matrices(state: State) -> State:
    """What NeMo's "swiglu" and "geglu" (not "fast-") hold before megatron-core: a second matrix projects up."""
    made = {}
    for key, value in state.items():
        if value.ndim == 3:
            made |= {key: value[0], key.replace("linear_fc1", "linear_fc1_2"): value[1]}
        else:
            made[key] = value
    return made


def local_norms(state: State) -> State:
    """The names of megatron-core's local specification, which has no fused norms."""
    names = {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }
    made = {}
    for key, value in state.items():
        for fused, alone in names.items():
            key = key.replace(fused, alone)
        made[key] = value
    return made


def layer_of(key: str) -> int | None:
    """The number of a key's layer; None outside the layers."""
    _, found, rest = key.partition(".layers.")
    return int(rest.split(".")[0]) if found else None


def stages(
    state: State, tensor: int, pipeline: int, name: Callable[[str], str] = str
) -> Iterator[tuple[int, int, State]]:
    """What every training rank holds: (tensor rank, stage, its state), layers counted from 0 on each stage.

    A tied head's copy on the last stage is ``output_layer.weight``, as megatron-core has it.
    """
    layers = 1 + max(layer_of(key) or 0 for key in state)
    per_stage = layers // pipeline
    for stage in range(pipeline):
        kept = {}
        for key, value in state.items():
            layer = layer_of(key)
            home = layer // per_stage if layer is not None else 0 if key.startswith("embedding.") else pipeline - 1
            if home == stage:
                kept[key if layer is None else key.replace(f".{layer}.", f".{layer % per_stage}.", 1)] = value
        if pipeline > 1 and stage == pipeline - 1 and "output_layer.weight" not in state:
            kept["output_layer.weight"] = state["embedding.word_embeddings.weight"]
        for rank in range(tensor):
            yield rank, stage, {name(key): cut(key, value, tensor, rank) for key, value in kept.items()}
