"""Megatron-LM's training arguments in the words of NeMo's ``model_config.yaml``.

Names and defaults: Megatron-LM, ``megatron/arguments.py`` and ``megatron/training/arguments.py`` of 2019 to 2026. Since
0.16 an argument that sets a field of megatron-core's TransformerConfig is kept under the field's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.megatron.gpt import State
from export_scripts.checkpoints.nemo.core_fields import CARRIED
from export_scripts.checkpoints.nemo.latent import with_original_length
from export_scripts.checkpoints.nemo.windows import AS_CORE
from export_scripts.weights.schema import split_layer
from handover.errors import CheckpointError
from models.checks import shown

_SAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "max_position_embeddings"),
    *("position_embedding_type", "openai_gelu", "onnx_safe", "qk_layernorm", "window_size", "bias_gelu_fusion"),
    *("rotary_base", "rotary_interleaved", "use_rope_scaling", "add_bias_linear", "add_qkv_bias"),
    *("apply_residual_connection_post_layernorm", "virtual_pipeline_model_parallel_size", *CARRIED),
)
_CORE_SPECS = "megatron.core.models.gpt.gpt_layer_specs"
_HYBRID_SPECS = [
    [f"megatron.core.models.{name}.{name}_layer_specs", f"{name}_stack_spec"] for name in ("hybrid", "mamba")
]
_ACTIVATIONS = ("swiglu", "squared_relu", "geglu", "quick_geglu")
READ = frozenset(
    {*_SAME, *_ACTIVATIONS, "norm_epsilon", "layernorm_epsilon", "group_query_attention", "num_query_groups"}
    | {"layernorm_zero_centered_gamma", "activation_func"}
    | {"use_rotary_position_embeddings", "add_position_embedding", "rope_scaling_factor", "rotary_percent"}
    | {"rotary_seq_len_interpolation_factor", "normalization", "apply_layernorm_1p", "num_experts", "spec"}
    | {"untie_embeddings_and_output_weights", "kitchen_config_file", "kitchen_recipe_number", "retro_add_retriever"}
)
"""Arguments that the readers honour or refuse; the others are of training, of data, or of models that are no GPT."""
# Heads of the models that were published without their arguments, by layers and hidden size: GPT-2's sizes.
_HEADS = {(12, 768): 12, (24, 1024): 16, (36, 1280): 20, (48, 1600): 25}


def in_nemo_words(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Translate; what an older Megatron-LM does not know has the meaning that it had there."""
    words = {name: arguments[name] for name in _SAME if name in arguments} | {AS_CORE: True}
    words["layernorm_epsilon"] = arguments.get("norm_epsilon", arguments.get("layernorm_epsilon", 1e-5))
    if arguments.get("group_query_attention"):
        words["num_query_groups"] = arguments.get("num_query_groups")
    if arguments.get("use_rotary_position_embeddings"):
        words["position_embedding_type"] = "rope"
    if arguments.get("add_position_embedding") is False:
        words["position_embedding_type"] = "none"
    if arguments.get("use_rope_scaling"):
        words["scale_factor"] = arguments.get("rope_scaling_factor")
    words["rotary_percentage"] = arguments.get("rotary_percent", 1.0)
    words["seq_len_interpolation_factor"] = arguments.get("rotary_seq_len_interpolation_factor")
    norm = str(arguments.get("normalization", "LayerNorm")).lower()
    is_less_one = any(arguments.get(name) for name in ("apply_layernorm_1p", "layernorm_zero_centered_gamma"))
    words["normalization"] = f"{norm}1p" if is_less_one else norm
    named = str(arguments.get("activation_func") or "gelu").replace("squaredrelu", "squared_relu")  # of --yaml-cfg
    words["activation"] = next((name for name in _ACTIVATIONS if arguments.get(name)), named)
    words["share_embeddings_and_output_weights"] = not arguments.get("untie_embeddings_and_output_weights", False)
    words["num_moe_experts"] = arguments.get("num_experts")
    words["retro"] = arguments.get("retro_add_retriever")
    for name in ("kitchen_config_file", "kitchen_recipe_number"):
        words["use_kitchen"] = words.get("use_kitchen") or arguments.get(name)
    if (spec := arguments.get("spec")) and spec != ["local"] and _CORE_SPECS not in spec and spec not in _HYBRID_SPECS:
        words["layer_spec"] = spec
    return with_original_length(words, arguments)


def remarks(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """List the arguments that Megatron-LM itself did not always honour, one line each."""
    said = []
    factor = arguments.get("rope_scaling_factor")
    if arguments.get("use_rope_scaling") and factor not in (None, 8):
        said.append(f"rope_scaling_factor: {shown(factor)}  is honoured; Megatron-LM before 0.19 trained with 8")
    factor = arguments.get("rotary_seq_len_interpolation_factor")
    if factor not in (None, 1) and not arguments.get("use_legacy_models"):
        said.append(
            f"rotary_seq_len_interpolation_factor: {shown(factor)}  is honoured; of models of megatron-core, "
            "Megatron-LM before 0.19 trained without it"
        )
    return tuple(said)


def without_arguments(path: Path, state: State, said: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read a model's dimensions off its tensors: Megatron-LM's first checkpoints were saved without arguments.

    Args:
        path: of the checkpoint, for the error.
        state: of the model.
        said: arguments that the user knows; they come first.

    Returns:
        The configuration, and what had to be assumed, one line each.

    Raises:
        CheckpointError: nothing says how many heads there are.
    """
    tensors = state.tensors(lambda _: None)
    positions = [t.shape for key, t in tensors.items() if key.endswith("position_embeddings.weight")]
    if not positions or len(positions[0]) != 2:
        raise CheckpointError(f"{path} has no position embeddings", "is it a GPT of Megatron-LM?")
    layers = 1 + max((split_layer(key)[1] or 0 for key in tensors), default=0)
    length, hidden = positions[0]
    config = in_nemo_words({"num_layers": layers, "hidden_size": hidden, "max_position_embeddings": length, **said})
    if "num_attention_heads" in said:
        return config, ()
    heads = _HEADS.get((layers, hidden))
    if heads is None:
        raise CheckpointError(
            f"{path} was saved without its arguments, and nothing says how many heads it has",
            'put a file args.json beside its folder: {"num_attention_heads": ...}',
        )
    config["num_attention_heads"] = heads
    return config, (f"saved without its arguments: {heads} heads are taken from GPT-2 of {layers} x {hidden}",)
