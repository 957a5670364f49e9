"""Random configurations of the architectures of models/, in the words of transformers' classes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

_PARTIAL = ("nemotron", "phi3", "glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
_ROPES = ["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


def scaled_rope(rng: random.Random, kind: str, width: int) -> dict[str, Any]:
    """A mapping ``rope_scaling`` of a kind, of a head whose first ``width`` elements are rotated."""
    said: dict[str, Any] = {"rope_type": kind, "factor": rng.choice([2.0, 4.0, 32.0])}
    if kind == "linear":
        said["type"] = kind
    if kind in ("llama3", "yarn", "longrope"):
        said["original_max_position_embeddings"] = rng.choice([16, 64, 4096])
    if kind == "llama3":
        said |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([1.0, 4.0])}
    if kind == "longrope":
        said |= {f"{name}_factor": [rng.uniform(1, 9) for _ in range(width // 2)] for name in ("short", "long")}
        said["factor"] = rng.choice([None, 1.0, 8.0])
    if kind == "yarn":
        said["factor"] = rng.choice([None, 0.5, 4.0, 40.0])
        betas = {"beta_fast": rng.choice([None, 0, 16, 64.0]), "beta_slow": rng.choice([None, 2, 4.0])}
        said |= rng.choice([{}, betas])
        said |= rng.choice([{}, {"mscale": rng.choice([0.707, 1.0]), "mscale_all_dim": rng.choice([0, 0.5, 1.0])}])
        said |= rng.choice([{}, {"truncate": rng.choice([None, False, True])}])
    if kind in ("yarn", "longrope"):
        said |= rng.choice([{}, {"attention_factor": rng.choice([None, 1.0, 1.3])}])
    return said


def _rope(rng: random.Random, kinds: Sequence[str], width: int) -> dict[str, Any]:
    kind = rng.choice(kinds)
    said = {} if kind == "default" else {"rope_scaling": scaled_rope(rng, kind, width)}
    return said | rng.choice([{}, {"rope_theta": rng.choice([500.0, 1e6])}])


def drawn(model_type: str, seed: int) -> dict[str, Any]:
    """A random configuration of an architecture, in the words of its class."""
    rng = random.Random(f"{model_type} {seed}")
    layers, groups, size = rng.randint(1, 4), rng.choice([1, 2, 3]), rng.choice([4, 8, 12])
    part = rng.choice([0.5, 1.0]) if model_type in _PARTIAL else 1.0
    size *= 2 if part < 1 else 1
    heads = groups * rng.choice([1, 2, 4])
    config: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": rng.randint(20, 90),
        "hidden_size": heads * size,
        "intermediate_size": rng.randint(5, 60),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "max_position_embeddings": rng.randint(30, 90),
        **dict.fromkeys(("rms_norm_eps", "norm_eps", "norm_epsilon"), rng.choice([1e-5, 1e-6, 3e-4])),
        "tie_word_embeddings": rng.choice([True, False]),
        "pad_token_id": None,
        **_rope(rng, ["default", "longrope"] if model_type == "phi3" else _ROPES, int(part * size)),
    }
    if model_type not in ("starcoder2", "olmoe", "deepseek_v2", "phi3"):
        config["hidden_size"] = rng.choice([config["hidden_size"], 2 * heads * rng.randint(1, 6)])
    names = rng.choice(["silu", "relu", "gelu", "gelu_pytorch_tanh", "relu2"])
    config |= {"hidden_act": names, "hidden_activation": names}
    config |= {key: rng.choice([True, False]) for key in ("attention_bias", "mlp_bias", "use_bias")}
    if model_type == "gemma3_text":
        config.get("rope_scaling", {}).pop("truncate", None)  # which its class passes over
    if model_type == "minimax_m2":
        config["rotary_dim"] = int(part * size)
    if model_type in _PARTIAL and (model_type != "minimax_m2" or rng.random() < 0.5):
        config["partial_rotary_factor"] = part
    if model_type == "nemotron_h":
        config.pop("rope_scaling", None)
    own = _OWN.get(model_type)
    config |= own(rng, layers) if own else {}
    return config | (_latent(rng, config) if model_type in _LATENT else {})


def _kinds(rng: random.Random, layers: int) -> list[str]:
    return [rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]


def _qwen(rng: random.Random, layers: int) -> dict[str, Any]:
    is_on = rng.choice([True, False])
    said = {"layer_types": _kinds(rng, layers)} if is_on and rng.random() < 0.5 else {}
    return {**said, "use_sliding_window": is_on, "sliding_window": 5, "max_window_layers": rng.randint(0, layers)}


def _gemma2(rng: random.Random, layers: int) -> dict[str, Any]:
    said = {"layer_types": _kinds(rng, layers)} if rng.random() < 0.5 else {}
    caps = {key: rng.choice([None, 2.0, 30.0]) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return {**said, "sliding_window": 7, "query_pre_attn_scalar": rng.choice([4, 8, 12, 24]), **caps}


def _gemma3(rng: random.Random, layers: int) -> dict[str, Any]:
    said = _gemma2(rng, layers) | {"rope_local_base_freq": rng.choice([10000.0, 777.0])}
    return said | rng.choice([{}, {"sliding_window_pattern": rng.randint(1, 3)}])


def _smollm3(rng: random.Random, layers: int) -> dict[str, Any]:
    is_on = rng.choice([True, False])
    said: dict[str, Any] = {"use_sliding_window": is_on, "sliding_window": 5 if is_on else rng.choice([None, 5])}
    said |= {"layer_types": _kinds(rng, layers)} if is_on and rng.random() < 0.5 else {}
    listed = [rng.choice([0, 1]) for _ in range(layers + rng.choice([0, 2]))]
    return said | rng.choice([{}, {"no_rope_layers": listed}, {"no_rope_layer_interval": rng.randint(1, 3)}])


def _exaone4(rng: random.Random, layers: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    said = {"layer_types": _kinds(rng, layers)} if rng.random() < 0.5 else {}
    return {**said, "sliding_window": 6, "sliding_window_pattern": rng.choice([1, 2, 4])}


def _experts(rng: random.Random, count: str) -> dict[str, Any]:
    experts = rng.randint(2, 5)
    return {count: experts, "num_experts_per_tok": rng.randint(1, experts)}


def _qwen3_moe(rng: random.Random, layers: int) -> dict[str, Any]:
    steps = {"decoder_sparse_step": rng.randint(1, 2), "mlp_only_layers": rng.choice([[], [0], [layers - 1]])}
    windows = {"use_sliding_window": rng.choice([True, False]), "sliding_window": 5, "max_window_layers": 1}
    own = {"moe_intermediate_size": rng.randint(3, 30), "norm_topk_prob": rng.choice([True, False])}
    return {**_experts(rng, "num_experts"), **steps, **windows, **own}


def _grouped(rng: random.Random, count: str) -> dict[str, Any]:
    """Experts in groups of two at least, and as many for a token as the groups that it uses have."""
    groups, each = rng.randint(1, 4), rng.randint(2, 4)
    used = rng.randint(1, groups)
    own = {"n_group": groups, "topk_group": used, "routed_scaling_factor": rng.choice([0.5, 1.0, 2.5])}
    own |= {count: groups * each, "num_experts_per_tok": rng.randint(1, used * each)}
    return own | {"moe_intermediate_size": rng.randint(3, 30), "norm_topk_prob": rng.choice([True, False])}


def _glm4_moe(rng: random.Random, layers: int) -> dict[str, Any]:
    own = {"use_qk_norm": rng.choice([True, False]), "first_k_dense_replace": rng.randint(0, layers)}
    own |= {"n_shared_experts": rng.randint(1, 3), "num_nextn_predict_layers": 0}
    return {**_grouped(rng, "n_routed_experts"), **own}


def _minimax_m2(rng: random.Random, layers: int) -> dict[str, Any]:
    return _experts(rng, "num_local_experts") | {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
    }


def _ernie4_5_moe(rng: random.Random, layers: int) -> dict[str, Any]:
    experts = rng.randint(2, 5)
    own = {"moe_num_experts": experts, "moe_k": rng.randint(1, experts), "moe_intermediate_size": rng.randint(3, 30)}
    own |= {"moe_num_shared_experts": rng.randint(0, 2), "moe_layer_start_index": rng.randint(0, layers)}
    own |= {"moe_layer_end_index": rng.choice([-1, rng.randint(0, layers)]), "moe_layer_interval": rng.randint(1, 2)}
    return {**own, "use_bias": False}


_KINDS, _DENSE = "mlp_layer_types", "first_k_dense_replace"


def _exaone_moe(rng: random.Random, layers: int) -> dict[str, Any]:
    kinds = [rng.choice(["dense", "sparse"]) for _ in range(layers)]
    own: dict[str, Any] = rng.choice([{_KINDS: kinds}, {_DENSE: rng.randint(0, layers)}])
    sparse = [each == "sparse" for each in kinds] if _KINDS in own else [n >= own[_DENSE] for n in range(layers)]
    shared = {"num_shared_experts": rng.randint(1, 3), "is_moe_layer": sparse}
    windows = _exaone4(rng, layers) | {"sliding_window": 6}  # which its class must have
    return {**windows, **_grouped(rng, "num_experts"), **own, **shared}


def _latent(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """Sizes of latent attention; V2's class takes even ones, and all of them a factor of YaRN that is said."""
    ranks = {"q_lora_rank": rng.choice([None, 6, 10]), "kv_lora_rank": rng.choice([4, 8])}
    sizes = {"qk_nope_head_dim": rng.choice([2, 4, 10]), "v_head_dim": rng.randint(2, 9)}
    heads = {"num_key_value_heads": config["num_attention_heads"], "mlp_bias": False}
    rope = config.get("rope_scaling", {})
    if rope.get("rope_type") == "yarn" and rope["factor"] is None:
        rope["factor"] = 3.0
    return {**ranks, **sizes, **heads, "qk_rope_head_dim": config["head_dim"]}


def _deepseek(rng: random.Random, layers: int) -> dict[str, Any]:
    groups, each = rng.choice([1, 2, 3]), rng.randint(2, 3)
    chosen = rng.randint(1, groups)
    return {
        **{"n_routed_experts": groups * each, "n_group": groups, "topk_group": chosen},
        **{"num_experts_per_tok": rng.randint(1, chosen * each), "first_k_dense_replace": rng.randint(0, layers)},
        **{"n_shared_experts": rng.randint(1, 2), "moe_intermediate_size": rng.randint(3, 30)},
        **{"routed_scaling_factor": rng.choice([1.0, 2.5]), "moe_layer_freq": 1},
    }


def _deepseek_v2(rng: random.Random, layers: int) -> dict[str, Any]:
    said = _deepseek(rng, layers)
    method = "greedy" if said["n_group"] == 1 else "group_limited_greedy"
    return {**said, "topk_method": method, "norm_topk_prob": False, "scoring_func": "softmax"}


def _deepseek_v3(rng: random.Random, layers: int) -> dict[str, Any]:
    switches = {key: rng.choice([True, False]) for key in ("norm_topk_prob", "rope_interleave")}
    hub = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0}
    return {**_deepseek(rng, layers), **switches, **hub}


def _glm4_moe_lite(rng: random.Random, layers: int) -> dict[str, Any]:
    said = _deepseek_v3(rng, layers)
    first = said["first_k_dense_replace"] = rng.randint(0, layers)
    kinds = ["dense"] * first + ["sparse"] * (layers - first)
    return {**said, "mlp_layer_types": None if first == 1 and rng.random() < 0.5 else kinds}


def _gpt_oss(rng: random.Random, layers: int) -> dict[str, Any]:
    own = rng.choice([{}, {"layer_types": _kinds(rng, layers)}, {"rope_parameters": {"rope_type": "default"}}])
    own |= rng.choice([{}, {"swiglu_alpha": 1.5, "swiglu_limit": rng.choice([0.1, 3.0])}])
    return {**_experts(rng, "num_local_experts"), **own, "sliding_window": 6, "hidden_act": "silu"}


def _nemotron_h(rng: random.Random, layers: int) -> dict[str, Any]:
    """One block a layer, by letters or by words."""
    pattern = "".join(rng.choice("M*-E") for _ in range(layers))
    words = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    said = rng.choice([{"hybrid_override_pattern": pattern}, {"layers_block_type": [words[each] for each in pattern]}])
    groups, flags = rng.choice([1, 2, 3]), (True, False)
    own = {"mamba_num_heads": groups * rng.choice([1, 2]), "mamba_head_dim": rng.choice([2, 4]), "n_groups": groups}
    own |= {"ssm_state_size": rng.randint(2, 7), "conv_kernel": rng.choice([2, 4]), "use_conv_bias": rng.choice(flags)}
    own |= {"chunk_size": rng.choice([4, 128]), "time_step_min": rng.choice([1e-30, 0.001, 0.3])}
    own |= {"moe_latent_size": rng.choice([None, 6]), "moe_shared_expert_intermediate_size": rng.randint(3, 30)}
    own |= {"layer_norm_epsilon": rng.choice([1e-5, 1e-3]), "mlp_hidden_act": rng.choice(["relu2", "silu", "gelu"])}
    own |= {"mlp_bias": rng.choice(flags) and "E" not in pattern, "attention_bias": False, "tie_word_embeddings": False}
    return {**said, **own, **_grouped(rng, "n_routed_experts")}


def _falcon_h1(rng: random.Random, layers: int) -> dict[str, Any]:
    """Mamba's heads by themselves or by the width of all; a number for everything that is multiplied."""
    groups, flags, numbers = rng.choice([1, 2, 3]), (True, False), [0.1, 0.25, 1.0, 3.5]
    heads, size, bias = groups * rng.choice([1, 2]), rng.choice([2, 4]), rng.choice(flags)
    own: dict[str, Any] = {"mamba_n_heads": heads, "mamba_d_ssm": heads * size, "mamba_n_groups": groups}
    own |= {"mamba_d_head": rng.choice(["auto", size]), "mamba_d_state": rng.randint(2, 7)}
    own |= {"mamba_d_conv": rng.choice([2, 4]), "mamba_chunk_size": rng.choice([4, 128]), "hidden_act": "silu"}
    own |= {key: rng.choice(flags) for key in ("mamba_conv_bias", "mamba_rms_norm", "mamba_norm_before_gate")}
    own |= {"mamba_proj_bias": bias, "projectors_bias": bias}
    names = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    own |= {f"{name}_multiplier": rng.choice(numbers) for name in names}
    lists = {f"{name}_multipliers": rng.choices(numbers, k=count) for name, count in (("ssm", 5), ("mlp", 2))}
    return own | rng.choice([lists, {}])


def _delta(rng: random.Random, layers: int) -> dict[str, Any]:
    kinds = [rng.choice(["linear_attention", "full_attention"]) for _ in range(layers)]
    said = rng.choice([{}, {"full_attention_interval": rng.randint(1, 3)}, {"layer_types": kinds}])
    keys = rng.choice([1, 2, 3])
    own = {"linear_num_key_heads": keys, "linear_num_value_heads": keys * rng.choice([1, 2, 3])}
    own |= {f"linear_{name}_head_dim": rng.randint(2, 6) for name in ("key", "value")}
    return {**said, **own, "linear_conv_kernel_dim": rng.randint(2, 4), "attn_output_gate": True, "hidden_act": "silu"}


def _qwen3_5_moe(rng: random.Random, layers: int) -> dict[str, Any]:
    widths = {f"{name}_intermediate_size": rng.randint(3, 30) for name in ("moe", "shared_expert")}
    return {**_delta(rng, layers), **_experts(rng, "num_experts"), **widths, "norm_topk_prob": True}


def _qwen3_next(rng: random.Random, layers: int) -> dict[str, Any]:
    steps = {"decoder_sparse_step": rng.randint(1, 2), "mlp_only_layers": rng.choice([[], [0], [layers - 1]])}
    return {**_qwen3_5_moe(rng, layers), **steps, "norm_topk_prob": rng.choice([True, False])}


def _llama4(rng: random.Random, layers: int) -> dict[str, Any]:
    """Layers with and without rotation, chunks and experts, as they are listed or by steps."""
    kinds = [rng.choice(["chunked_attention", "full_attention"]) for _ in range(layers)]
    listed = [rng.choice([0, 1]) for _ in range(layers)]
    said = rng.choice([{}, {"layer_types": kinds}]) | {"attention_chunk_size": rng.choice([3, 5])}
    said |= rng.choice([{}, {"no_rope_layers": []}, {"no_rope_layers": listed}, {"no_rope_layer_interval": 2}])
    experts = [layer for layer in range(layers) if rng.random() < 0.5]
    said |= rng.choice([{"moe_layers": experts}, {"interleave_moe_layer_step": rng.randint(1, 3)}])
    said |= {"use_qk_norm": rng.choice([True, False]), "intermediate_size_mlp": rng.randint(5, 60)}
    said |= rng.choice([{}, {"attn_temperature_tuning": False}, {"attn_scale": 0.5, "floor_scale": rng.choice([3, 9])}])
    return {**_experts(rng, "num_local_experts"), **said}


_OWN: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    **dict.fromkeys(("qwen2", "qwen3"), _qwen),
    **dict.fromkeys(("mistral", "starcoder2"), lambda rng, layers: {"sliding_window": rng.choice([None, 6])}),
    "phi3": lambda rng, layers: {
        "sliding_window": rng.choice([None, 6]),
        **rng.choice([{}, {"original_max_position_embeddings": 40}]),
    },
    "mixtral": lambda rng, layers: {
        "sliding_window": rng.choice([None, 6]),
        "num_local_experts": rng.randint(2, 5),
        "num_experts_per_tok": 2,
    },
    "granite": lambda rng, layers: {
        key: rng.choice([0.25, 1.0, 3.0, 12.5])
        for key in ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    },
    "smollm3": _smollm3,
    "exaone4": _exaone4,
    "qwen3_moe": _qwen3_moe,
    **{"qwen3_next": _qwen3_next, "qwen3_5_text": _delta, "qwen3_5_moe_text": _qwen3_5_moe},
    "glm4_moe": _glm4_moe,
    "minimax_m2": _minimax_m2,
    "ernie4_5_moe": _ernie4_5_moe,
    "exaone_moe": _exaone_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "olmoe": lambda rng, layers: {**_experts(rng, "num_experts"), "norm_topk_prob": rng.choice([True, False])},
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "llama4_text": _llama4,
}


def config_of(values: dict[str, Any]) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(values))


def saved_shapes(config: Any, class_name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes that transformers saves, from the class itself; no number is computed."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = getattr(transformers, class_name)(config)
    state = dict(model.state_dict())
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    saved = revert_weight_conversion(model, state)
    return {name: tuple(value.shape) for name, value in saved.items()}
