"""What a NeMo configuration says of a model of the Llama family: what it has not, and the dimensions.

Keys and defaults: NeMo 1.23 to 2.2, ``MegatronGPTModel`` and ``megatron_{llama,gemma,...}_config.yaml``; the words of
NeMo 2 and of Megatron-LM are put into NeMo 1's by their readers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import models
from export_scripts.checkpoints.nemo.config_file import CONFIG_FILE, size_of
from export_scripts.checkpoints.nemo.core_fields import CAPACITY, CORE_LIMITS
from export_scripts.checkpoints.nemo.delta_rule import OF_DELTA, delta_fields, delta_problems, is_delta
from export_scripts.checkpoints.nemo.falcon_h1 import (
    MULTIPLIERS,
    falcon_h1_fields,
    falcon_h1_problems,
    is_falcon_h1,
)
from export_scripts.checkpoints.nemo.gpt_config import (
    CUSTOMIZATION,
    YARN,
    customization,
    has_zero_centred_norms,
    overruled_problems,
)
from export_scripts.checkpoints.nemo.hybrid import (
    HYBRID_KEYS,
    hybrid_fields,
    hybrid_problems,
    is_hybrid,
    pattern_of,
)
from export_scripts.checkpoints.nemo.known_keys import NEMO1_LIMITS
from export_scripts.checkpoints.nemo.latent import is_latent, latent_fields, latent_problems, latent_remarks
from export_scripts.checkpoints.nemo.limits import Limit, is_off, is_on, is_one_of, problems
from export_scripts.checkpoints.nemo.llama4 import OF_LLAMA4, llama4_fields, llama4_problems, llama4_remarks
from export_scripts.checkpoints.nemo.mixture import (
    PREDICTORS,
    experts_of,
    is_leaving_out,
    mixture_fields,
    mixture_problems,
)
from export_scripts.checkpoints.nemo.model_class import BEHIND_ALONE, OWN_TYPE
from export_scripts.checkpoints.nemo.rotations import read_rotaries, rotation_problems
from export_scripts.checkpoints.nemo.windows import AS_CORE, AS_SAID, read_windows, window_remarks
from export_scripts.weights import megatron_decoder
from export_scripts.weights.values import bounded, epsilon, number
from ft_format.layout import MOST_LAYERS
from handover.errors import CheckpointError
from models.blocks.attention import BY_HEAD, NO_NORM, WHOLE
from models.blocks.norms import LAYER_NORM, RMS_NORM
from models.checks import shown
from models.decoder import Decoder

_IS_IT_GPT = "is it a GPT checkpoint?"
_size = partial(size_of, hint=_IS_IT_GPT)
_QUICK_GELU = ("quick_geglu", "gated quick_gelu")
_QUICK_FACTOR = 1.702
"""What its sigmoid is taken of: megatron-core, ``fused_bias_geglu.py``."""
# Function of the feed-forward, and whether a gate is multiplied in; "gated" is how NeMo 2's words are put together.
_ACTIVATIONS = {
    **dict.fromkeys(("swiglu", "fast-swiglu", "gated silu"), ("silu", True)),
    **dict.fromkeys(("geglu", "fast-geglu", "gated gelu"), ("gelu", True)),
    **dict.fromkeys(("reglu", "fast-reglu", "gated relu"), ("relu", True)),
    **dict.fromkeys(("squared-relu", "squared_relu"), ("squared_relu", False)),
    **{name: (name, False) for name in ("gelu", "relu", "silu")},
    **dict.fromkeys(_QUICK_GELU, ("silu", True)),
}
_NORMS = {
    "rmsnorm": RMS_NORM,
    "rmsnorm1p": RMS_NORM,
    **dict.fromkeys(("layernorm", "low_precision_layernorm", "layernorm1p"), LAYER_NORM),
}
_SCALAR = "query_pre_attn_scalar"
_SOFTMAX, _OFFSET, _CLAMP = "softmax_type", "glu_linear_offset", "activation_func_clamp_value"
_SINKS = {_SOFTMAX: Limit(is_one_of(None, "vanilla", "learnable"), "its sinks are trained, or it has none")}
_YARN = {key: limit for key, limit in CORE_LIMITS.items() if key.startswith("yarn_")}
_INTERLEAVED = "rotary_interleaved"
QK_WIDTH = "width_of_query_norms"
"""The readers' own word: the size of the weights that queries are normalised with."""
_HONOURED = (
    *(_SCALAR, "attn_logit_softcapping", "final_logit_softcapping", "scale_factor", "softmax_scale", "no_rope_freq"),
    *(*_YARN, *HYBRID_KEYS, _SOFTMAX, _OFFSET, _CLAMP),
)
_OF_LATENT = ("multi_latent_attention", PREDICTORS, "rotary_scaling_factor")
"""Keys that are honoured with latent attention alone."""
_OF_FALCON = ("parallel_attention", "new_decoder_architecture")
"""Keys that Falcon's layers alone read; NeMo's configuration of Mistral sets one of them."""
_CORE: dict[str, Limit] = {key: limit for key, limit in CORE_LIMITS.items() if key not in _HONOURED} | _SINKS
_LIMITS: dict[str, Limit] = {
    **{key: limit for key, limit in NEMO1_LIMITS.items() if key not in _HONOURED},
    **_SINKS,
    "apply_embedding_scaling": Limit(lambda value: True, ""),
    "scale_positional_embedding": Limit(lambda value: True, ""),
    "activation": Limit(is_one_of(*_ACTIVATIONS), f"its feed-forward has {', '.join(_ACTIVATIONS)}"),
    "normalization": Limit(is_one_of(*_NORMS), f"it has {', '.join(_NORMS)}"),
    "transformer_block_type": Limit(is_one_of("pre_ln"), "it has a norm before each block"),
    "attention_type": Limit(is_one_of("multihead"), "it has plain attention"),
    "headscale": Limit(is_off, "it does not scale heads"),
    "normalize_attention_scores": Limit(is_on, "it divides scores by a root"),
    "apply_residual_connection_post_layernorm": Limit(is_off, "its residual is taken before the norm"),
    _INTERLEAVED: Limit(is_off, "it rotates halves, not pairs"),
    "virtual_pipeline_model_parallel_size": Limit(is_one_of(None, 1), "interleaved pipeline stages are not read"),
    "megatron_legacy": Limit(is_off, "the fused query, key and value of today's order are read"),
    "checkpoint_version": Limit(is_one_of(None, 2, 3), "the fused query, key and value of today's order are read"),
}


def problems_of(config: Mapping[str, Any]) -> list[str]:
    """List the keys in the way, one line each."""
    passed_over = OF_LLAMA4 if config.get("normalization") != "rmsnorm" else (*_OF_FALCON, *OF_LLAMA4)
    if is_latent(config):
        passed_over = (*passed_over, *_OF_LATENT)
    elif experts_of(config):  # Ernie 4.5 rotates neighbours, GLM 4.5 has predictors
        passed_over = (*passed_over, _INTERLEAVED, PREDICTORS)
    if is_hybrid(config):
        passed_over = (*passed_over, PREDICTORS)
    if is_delta({**config, **customization(config)}):
        passed_over = (*passed_over, *OF_DELTA)
    if is_falcon_h1(config):
        passed_over = (*passed_over, *MULTIPLIERS)
    found = problems({key: config[key] for key in config if key not in passed_over}, _LIMITS)
    custom = {key: value for key, value in customization(config).items() if key not in passed_over}
    found += problems(custom, _CORE, f"{CUSTOMIZATION}.") + overruled_problems(config) + _router_problems(config)
    found += latent_problems({**config, **custom}) if is_latent(config) else []
    window = config.get("window_size")
    if window and not (isinstance(window, (list, tuple)) and len(window) == 2 and window[1] in (0, None)):
        found.append(f"window_size: {shown(window)}  (a token sees those before it: [number, 0])")
    if custom.get("softmax_scale", config.get("softmax_scale")) and _number({**config, **custom}, _SCALAR):
        found.append(f"softmax_scale: {shown({**config, **custom}['softmax_scale'])}  (beside {_SCALAR})")
    if config.get("position_embedding_type") != YARN:
        found += problems(config, _YARN) + problems(custom, _YARN, f"{CUSTOMIZATION}.")
    whole = {**config, **customization(config)}
    found += hybrid_problems(whole) + delta_problems(whole) + falcon_h1_problems(config) + llama4_problems(whole)
    return found + rotation_problems(whole)


def _router_problems(config: Mapping[str, Any]) -> list[str]:
    """List what a mixture of experts has that none here has, one line each."""
    if not experts_of(config):
        return []
    found = mixture_problems(config) + mixture_problems(customization(config), f"{CUSTOMIZATION}.")
    capacity = is_leaving_out(config)
    return [*found, capacity] if capacity and config.get(AS_CORE) else found


def check_expressible(config: Mapping[str, Any]) -> None:
    """Refuse what the family has not.

    Raises:
        CheckpointError: naming every key in the way, its value and the reason.
    """
    if found := problems_of(config):
        raise CheckpointError(
            "the Llama family cannot express this checkpoint\n  " + "\n  ".join(found),
            f"the keys are those of {CONFIG_FILE}",
        )


def read_dims(config: Mapping[str, Any], vocab_size: int, keys: Collection[str] = ()) -> Decoder:
    """Read the dimensions.

    Args:
        config: of the checkpoint.
        vocab_size: rows of the embedding.
        keys: of the checkpoint, which say what a configuration is silent about; none: nothing but it is known.

    Raises:
        CheckpointError: a key is missing or not what it must be.
    """
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    groups = _size(config, "num_query_groups", heads)
    if heads % groups:
        raise CheckpointError(f"num_query_groups {groups} does not divide num_attention_heads {heads}")
    custom = {**config, **customization(config)}
    if config.get("kv_channels") is None and hidden % heads and not is_latent(custom):
        raise CheckpointError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    size = _size(config, "kv_channels", hidden // heads)
    said = len(pattern_of(custom)) if config.get("num_layers") is None else config["num_layers"]
    layers = bounded(said, f"{CONFIG_FILE}: num_layers", MOST_LAYERS, _IS_IT_GPT)
    is_after = _has_norms_behind(config, keys)
    windows = read_windows(config, layers, is_after and not config.get(AS_SAID))
    linear = _says_bias(config, keys, "dense.bias", "linear_proj.bias")
    function, is_gated = _activation(config)
    scalar, multiplier = _number(custom, _SCALAR), _number(custom, "softmax_scale")
    fields: dict[str, Any] = {
        "attention.head_num": heads,
        "attention.kv_head_num": groups,
        "attention.size_per_head": size,
        "attention.has_qkv_bias": linear or bool(config.get("add_qkv_bias") or config.get("qkv_bias")),
        "attention.has_output_bias": linear,
        "attention.qk_norm": _qk_norm(config, size),
        "attention.rotates_neighbours": bool(config.get(_INTERLEAVED)),
        "attention.scalar": 0.0 if scalar == size else scalar,
        "attention.multiplier": 0.0 if multiplier == size**-0.5 else multiplier,
        "attention.softcap": _number(custom, "attn_logit_softcapping"),
        "attention.has_sinks": custom.get(_SOFTMAX) == "learnable",
        "feed_forward.inter_size": _size(config, "ffn_hidden_size", 4 * hidden),
        "feed_forward.is_gated": is_gated,
        "feed_forward.activation": function,
        "feed_forward.has_bias": linear,
        "feed_forward.gate_factor": _QUICK_FACTOR if config.get("activation") in _QUICK_GELU else 1.0,
        "feed_forward.up_offset": _number(custom, _OFFSET),
        "feed_forward.clamp": _number(custom, _CLAMP),
        "norms.eps": epsilon(config.get("layernorm_epsilon", 1e-5), f"{CONFIG_FILE}: layernorm_epsilon"),
        "norms.kind": _NORMS[str(config.get("normalization", "layernorm"))],
        "norms.is_zero_centred": has_zero_centred_norms(config) or config.get("normalization") == "rmsnorm1p",
        "norms.is_before": megatron_decoder.has_input_norms(keys) if is_after and keys else BEHIND_ALONE not in config,
        "norms.is_after": is_after,
        "hidden_units": hidden,
        "vocab_size": vocab_size,
        "num_layer": layers,
        "max_positions": _size(config, "max_position_embeddings", config.get("encoder_seq_length")),
        "embedding_scale": hidden**0.5 if config.get("apply_embedding_scaling") else 1.0,
        "final_softcap": _number(custom, "final_logit_softcapping"),
        "has_tied_head": bool(config.get("share_embeddings_and_output_weights", True)),
        "model_type": config.get(OWN_TYPE, ""),
        "layers.rotary": read_rotaries(custom, size, windows),
        "layers.window": windows,
        **mixture_fields(custom, layers, is_gated, linear),
        **hybrid_fields(custom),
        **falcon_h1_fields(config, layers),
    }
    fields |= delta_fields(custom, fields)
    fields |= llama4_fields(custom, fields)
    if fields.get("layers.blocks") and not any("mixture" in blocks for blocks in fields["layers.blocks"]):
        fields = {name: value for name, value in fields.items() if not name.startswith("mixture.")}
    return models.with_names(_with_written_predictors(Decoder.of({**fields, **latent_fields(custom, fields)})))


def _with_written_predictors(decoder: Decoder) -> Decoder:
    """Leave predictors of further tokens out that no class of transformers has, and has the model without them."""
    alone = replace(decoder, predictor_num=0, predictor_blocks=())

    def is_written(model: Decoder) -> bool:
        return any(not each.lacks(model) for each in models.ARCHITECTURES)

    return alone if decoder.predictor_num and not is_written(decoder) and is_written(alone) else decoder


def _qk_norm(config: Mapping[str, Any], size: int) -> str:
    """Read how queries and keys are normalised: by megatron-core head by head, by some of Bridge's modules together.

    Megatron-Bridge: ``olmoe_provider.py``, ``minimax_m2_provider.py``; the width of the weights says it.
    """
    if not config.get("qk_layernorm"):
        return NO_NORM
    return BY_HEAD if config.get(QK_WIDTH) in (None, size) else WHOLE


def _activation(config: Mapping[str, Any]) -> tuple[str, bool]:
    """Read the feed-forward's function, and whether it has a gate; GELU is its tanh form where NeMo fuses it."""
    name, is_gated = _ACTIVATIONS[str(config.get("activation", "gelu"))]
    is_fused = config.get("bias_activation_fusion", config.get("bias_gelu_fusion", True)) and not config.get(
        "onnx_safe"
    )
    return "exact_gelu" if name == "gelu" and not (is_fused or config.get("openai_gelu")) else name, is_gated


def _has_norms_behind(config: Mapping[str, Any], keys: Collection[str]) -> bool:
    """Whether norms follow the blocks, as in Gemma 2: by the keys or, without, by its caps."""
    if keys:
        return megatron_decoder.has_output_norms(keys)
    return bool(config.get(AS_SAID) or {**config, **customization(config)}.get("attn_logit_softcapping"))


def remarks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """List what the configuration means for training alone, one line each."""
    of_class = (*latent_remarks(config), *llama4_remarks(config))
    return (*_capacity_remark(config), *window_remarks(config), *of_class)


def _capacity_remark(config: Mapping[str, Any]) -> tuple[str, ...]:
    if not experts_of(config) or not is_leaving_out(config):
        return ()
    return (
        f"{CAPACITY}: {shown(config[CAPACITY])}  is not carried over: training left out tokens beyond what an "
        "expert takes, and transformers leaves out none, as after NeMo's own exporters",
    )


def _says_bias(config: Mapping[str, Any], keys: Collection[str], *places: str) -> bool:
    """Whether linear layers have biases; a configuration that is silent leaves it to the keys."""
    said = config.get("add_bias_linear", config.get("bias"))
    return megatron_decoder.has_key(keys, *places) if said is None else bool(said)


def _number(config: Mapping[str, Any], key: str) -> float:
    return number(config.get(key) or 0, f"{CONFIG_FILE}: {key}")
