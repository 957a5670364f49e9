"""Which class built a model of NeMo 2 or of Megatron-Bridge: some compute more than their fields say.

Classes of Gemma, Gemma 2 and Gemma 3 multiply embeddings by the root of the width, and no field says so: NeMo 2.0 to
2.4, ``gpt/model/gemma*.py`` (the model's class); Megatron-Bridge 0.1 to 0.6, ``models/gemma`` (the provider). A
``transformer_layer_spec`` may build other layers than a GPT's, as one whose attention sees all tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from handover.errors import CheckpointError
from models.architectures.qwen3_5_moe_text import QWEN3_5_MOE_TEXT
from models.checks import shown

_NEMO, _BRIDGE = "nemo.collections.llm.gpt.model.", "megatron.bridge.models."
_SCALED = re.compile(
    rf"{re.escape(_NEMO)}gemma[23]?\.\w+"
    rf"|{re.escape(_BRIDGE)}gemma\.(gemma[23]?_provider\.)?(Code)?Gemma[23]?ModelProvider\w*"
    rf"|{re.escape(_BRIDGE)}gemma_vl\.(gemma3_vl_provider\.)?Gemma3VLModelProvider"
)
_PLAIN = re.compile(
    rf"{re.escape(_NEMO)}(base|llama|mistral|mixtral|nemotron|qwen2|qwen3|starcoder2?|baichuan|chatglm|phi3mini"
    r"|deepseek|gpt_oss)\.\w+"
    rf"|{re.escape(_BRIDGE)}(gpt_provider|gpt|mla_provider|llama|mistral|mixtral|nemotron|qwen|starcoder|deepseek|olmoe"
    r"|minimax_m2|glm|exaone\.exaone_moe|gpt_oss|nemotronh|falcon_h1|hybrid|mamba)\.[\w.]+|megatron\.(core|training)\.[\w.]+"
    rf"|{re.escape(_BRIDGE)}qwen_vl\.(qwen(25|3|35)_vl_provider\.)?Qwen(25VL|3VL|3VLMoE|35VL|35VLMoE)ModelProvider"
)
_EXAONE4, _EXAONE_MOE, _LLAMA4 = "exaone4_layer_spec", "build_exaone_moe_layer_spec", "get_llama4_layer_spec"
_QWEN35_MOE = "Qwen35VLMoEModelProvider"
_OF_IMAGES = ("Gemma3VLModelProvider", *(f"Qwen{each}ModelProvider" for each in ("25VL", "3VL", "3VLMoE", "35VL")))
_OF_IMAGES += (_QWEN35_MOE,)
OWN_TYPE = "model_type_of_the_class"
"""The readers' own word: transformers' name of a model whose fields alone are another's, which computes the same."""
BEHIND_ALONE = "norms_stand_behind_alone"
"""The readers' own word: norms follow attention and feed-forward, and none precedes them."""
_OWN_PACKAGES = ("nemo.collections.", "megatron.")
_SPECS = (
    *("default_layer_spec", "transformer_engine_layer_spec", "transformer_engine_full_layer_spec", "local_layer_spec"),
    *("modelopt_transformer_layer_spec", "quantization_layer_spec", "gemma2_layer_spec", "get_gpt_decoder_block_spec"),
    *("get_gpt_layer_with_transformer_engine_spec", "get_gpt_layer_local_spec", "get_gpt_modelopt_spec"),
    *("get_gpt_layer_modelopt_spec", "get_gpt_full_te_layer_autocast_spec", "gemma3_layer_spec", _EXAONE4),
    *(_LLAMA4, "olmoe_layer_spec", "minimax_m2_layer_spec", "_ernie45_decoder_block_spec", _EXAONE_MOE),
    "get_transformer_block_with_experimental_attention_variant_spec",
    *(
        f"{which}{kind}_stack_spec"
        for which in ("", "get_default_", "transformer_engine_", "modelopt_")
        for kind in ("hybrid", "mamba")
    ),
    *("falconh1_stack_spec", "get_default_falconh1_stack_spec"),
)
_SPEC_KEYS = ("transformer_layer_spec", "hybrid_stack_spec", "mamba_stack_spec", "falconh1_stack_spec")
_CAPS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")


def scales_embeddings(model: Mapping[str, Any], config: Mapping[str, Any], file: str) -> bool:
    """Whether the class that built a model multiplies embeddings by the root of the width.

    Args:
        model: names the class by ``_target_``, and its builder, if it has one, by ``_builder_``.
        config: its fields, and the class of theirs.
        file: where they stand, for the error.

    Raises:
        CheckpointError: the class or the layers are of another architecture, or the class is not known and the fields
            are those of a Gemma.
    """
    named, builder = (str(model.get(key) or "") for key in ("_target_", "_builder_"))
    foreign = [name for name in _unknown(model, config) if _is_foreign(name)]
    if foreign:
        raise CheckpointError(
            f"{file} names {', '.join(foreign)}, which is not known to build a GPT, a Llama or a relative",
            "docs/sources.md lists the models that are read",
        )
    if _SCALED.fullmatch(named):
        return True
    unknown = next((name for name in (named, builder or named) if not _PLAIN.fullmatch(name)), None)
    if unknown is not None and _looks_like_gemma(config):
        raise CheckpointError(
            f"{file}: the model's class {shown(unknown) or '(none)'} is not known here, and its fields are a Gemma's, "
            "whose class scales embeddings; no field says whether this one does",
            f"write in its place as _target_ the class that computes the same: {_BRIDGE}gemma.gemma_provider."
            f"GemmaModelProvider or {_NEMO}gemma.GemmaModel scales them by the root of the width, "
            f"{_BRIDGE}gpt_provider.GPTModelProvider or {_NEMO}base.GPTModel does not",
        )
    return False


def sees_images(model: Mapping[str, Any]) -> bool:
    """Whether the class is one of Megatron-Bridge whose text model stands below ``language_model.``."""
    return _class_name(model) in _OF_IMAGES


def own_type(model: Mapping[str, Any]) -> dict[str, str]:
    """Name transformers' class where the training's says it: the fields of Qwen3.5's mixture are Qwen3-Next's."""
    return {OWN_TYPE: QWEN3_5_MOE_TEXT.model_type} if _class_name(model) == _QWEN35_MOE else {}


def _class_name(model: Mapping[str, Any]) -> str:
    return str(model.get("_target_") or "").rpartition(".")[2]


def builds_exaone4(config: Mapping[str, Any]) -> bool:
    """Whether the specification is that of EXAONE 4's layers."""
    return _builds(config, _EXAONE4)


def builds_llama4(config: Mapping[str, Any]) -> bool:
    """Whether the specification is that of Llama 4's layers."""
    return _builds(config, _LLAMA4)


def with_windows_of_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Write by megatron-core's own fields which layers have a window, where EXAONE's layers with experts list them.

    Megatron-Bridge, ``exaone_moe_provider.py``, ``_layer_specific_config``: the list goes before the fields.
    """
    listed = config.get("sliding_windows")
    sizes = {each for each in listed if each} if isinstance(listed, (list, tuple)) else set()
    if not listed or len(sizes) > 1 or not _builds(config, _EXAONE_MOE):
        return dict(config)
    own = {"window_size": [max(sizes) - 1, 0] if sizes else None, "window_attn_skip_freq": [bool(n) for n in listed]}
    return {key: value for key, value in config.items() if key not in ("layer_types", "sliding_windows")} | own


def _builds(config: Mapping[str, Any], spec: str) -> bool:
    return any(name.rpartition(".")[2] == spec for name in _names(config.get("transformer_layer_spec")))


def class_remarks(model: Mapping[str, Any], config: Mapping[str, Any], file: str) -> tuple[str, ...]:
    """Name the classes of the user's own, in one line: what they compute beside their fields cannot be seen."""
    unknown = [name for name in _unknown(model, config) if not _is_foreign(name)]
    if not unknown:
        return ()
    return (
        f"{file} names {', '.join(map(shown, unknown))}, which is not known here: it is read as a GPT of these fields; "
        "evaluation=parity compares the served model with the checkpoint where it can",
    )


def _unknown(model: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """List what builds the model or its layers and is not known."""
    places = ((model, "_target_"), (model, "_builder_"), (config, "_target_"))
    classes = dict.fromkeys(str(mapping.get(key) or "") for mapping, key in places)
    found = [name for name in classes if name and not (_PLAIN.fullmatch(name) or _SCALED.fullmatch(name))]
    specs = [name for key in _SPEC_KEYS for name in _names(config.get(key))]
    return found + [
        name for name in specs if name.rpartition(".")[2] not in _SPECS or not name.startswith(_OWN_PACKAGES)
    ]


def _is_foreign(name: str) -> bool:
    """Whether NVIDIA's packages have a class or function for other models; a specification spelled out may be any."""
    return name.startswith(_OWN_PACKAGES) and not name.endswith(".ModuleSpec")


def _names(value: Any) -> list[str]:
    """Name the function of a layer's specification, or the one that ``functools.partial`` binds."""
    if isinstance(value, Mapping) and str(value.get("_target_")).endswith("functools.partial"):
        arguments = value.get("_args_")
        value = arguments[0] if isinstance(arguments, (list, tuple)) and arguments else None
    name = value.get("_target_") if isinstance(value, Mapping) else value
    return [name] if isinstance(name, str) and name else []


def _looks_like_gemma(config: Mapping[str, Any]) -> bool:
    """Whether norms are those of a Gemma, which no other model of these classes has, or scores and logits are."""
    is_rms = str(config.get("normalization", "")).lower() == "rmsnorm"
    return (is_rms and bool(config.get("layernorm_zero_centered_gamma"))) or any(config.get(key) for key in _CAPS)
