"""Megatron-LM's training arguments in the words of NeMo's ``model_config.yaml``.

Names and defaults: Megatron-LM, ``megatron/arguments.py`` of 2019 to 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.megatron.gpt import State
from export_scripts.checkpoints.nemo.known_keys import CORE_LIMITS
from export_scripts.weights.schema import split_layer
from handover.errors import CheckpointError

_SAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "max_position_embeddings"),
    *("position_embedding_type", "openai_gelu", "onnx_safe", "qk_layernorm", "window_size", "bias_gelu_fusion"),
    *("rotary_base", "rotary_interleaved", "use_rope_scaling", "add_bias_linear", "add_qkv_bias"),
    *("apply_residual_connection_post_layernorm", "virtual_pipeline_model_parallel_size", "window_attn_skip_freq"),
    *("moe_router_topk", "moe_router_pre_softmax", "moe_shared_expert_intermediate_size", "moe_layer_freq"),
    *("moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor"),
    *("moe_ffn_hidden_size", "moe_expert_capacity_factor"),
)
# Heads of the models that were published without their arguments, by layers and hidden size: GPT-2's sizes.
_HEADS = {(12, 768): 12, (24, 1024): 16, (36, 1280): 20, (48, 1600): 25}


def in_nemo_words(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Translate; what an older Megatron-LM does not know has the meaning that it had there."""
    words = {name: arguments[name] for name in (*_SAME, *CORE_LIMITS) if name in arguments}
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
    words["normalization"] = f"{norm}1p" if arguments.get("apply_layernorm_1p") else norm
    words["activation"] = next((name for name in ("swiglu", "squared_relu", "geglu") if arguments.get(name)), "gelu")
    words["share_embeddings_and_output_weights"] = not arguments.get("untie_embeddings_and_output_weights", False)
    words["num_moe_experts"] = arguments.get("num_experts")
    if arguments.get("multi_latent_attention"):
        words["attention_type"] = "multi_latent"
    return words


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
