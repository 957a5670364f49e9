"""Why an architecture of Hugging Face is not read: what of it no model of FasterTransformer has, or a table that lacks.

Facts: transformers, ``models/*/modeling_*.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import models
from handover.errors import CheckpointError
from models.checks import quoted, shown
from models.nearest import nearest

_ENCODERS = ("bert", "roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "xlm-roberta")
_NEIGHBOURS = "it rotates neighbours, and the llama family the halves of a head"
_STATE = "its layers keep a state in the place of keys and values"
_SIDE_BY_SIDE = "attention and feed-forward run side by side, behind one norm without a bias"
_SAME = "computes the same"
"""Of what a reason names as the nearest: nothing is guessed beside it."""
_LIKE_LLAMA = f"the llama family {_SAME}; its tensors have no table"
_REASONS: Mapping[str, str] = {
    "codegen": f"FasterTransformer's gptj {_SAME}; its query, key and value lie in four blocks, in an order "
    "that docs/add_a_model_family.md takes for its example",
    "falcon": "no model of FasterTransformer has its block as it is: one key and value for many heads, beside a "
    "feed-forward that runs side by side with attention or, with ALiBi, behind it",
    "mpt": "no model of FasterTransformer has its block as it is: norms and layers without biases, ALiBi with slopes "
    "of its own where the heads are no power of two, and queries that may be clipped",
    "ministral": "it is what model_type mistral means with layer_types, which is read",
    "phi": "lm_head.bias  (its gptneox, which rotates halves, has a head without)",
    "gpt_neo": "its scores are not divided by the root of the head's size, FasterTransformer's are",
    "bailing_moe_v2": f"glm4_moe {_SAME}; its query, key and value lie in one tensor, which has no table, and "
    "from Megatron-Bridge it becomes glm4_moe",
    **dict.fromkeys(("arcee", "seed_oss", "internlm3"), _LIKE_LLAMA),
    "olmo": "its norms have no weights",
    "olmo3": "it is OLMo 2 with a window in most layers, and has no table",
    **dict.fromkeys(("glm", "glm4", "ernie4_5", "helium"), _NEIGHBOURS),
    **dict.fromkeys(("cohere", "cohere2"), f"{_SIDE_BY_SIDE}; {_NEIGHBOURS}"),
    "vaultgemma": "it has Gemma 2's caps without Gemma 2's norms behind the blocks, and no table",
    "stablelm": "it has layer norms beside a gated feed-forward, and no table",
    "persimmon": "its queries and keys have layer norms with biases",
    "apertus": "its feed-forward's function (xielu) has numbers that are trained",
    "diffllama": "it takes the difference of two softmaxes",
    "bitnet": "norms lie within attention and feed-forward, and its weights are ternary",
    "hunyuan_v1_dense": "its queries and keys are normed behind the rotation",
    "nemotron-nas": "its layers differ (block_configs): some have no attention or no feed-forward, others own widths; "
    "transformers has no class for it, only code that its repository brings along",
    "biogpt": "it is nearly OPT, with scaled embeddings beside a tied head, and has no table",
    "gpt_neox_japanese": "only its last layer's attention has a bias, and it has no table",
    "openai-gpt": "its norms follow attention and feed-forward, with none behind the last layer, and it has no table",
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma", "lfm2"), _STATE),
    **dict.fromkeys(("jamba", "zamba", "zamba2", "bamba"), f"some of {_STATE}"),
}
"""By model_type; some would, or would nearly, be one of FasterTransformer's."""
_FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "logit_scale")
_UNKNOWN = "no table says how its tensors and keys become those of a model that FasterTransformer has"


def refusal(settings: Mapping[str, Any], known: Iterable[str]) -> CheckpointError:
    """Word the refusal of an architecture without a table."""
    name, those = settings.get("model_type"), ", ".join(known)
    if not isinstance(name, str) or name in _ENCODERS or settings.get("is_encoder_decoder"):
        said, hint = "is no architecture that FasterTransformer can express", f"these are: {those}"
    else:
        said = "has no table here"
        hint = f"these have one: {those}; docs/add_a_model_family.md says how another is added"
    reasons = _reasons(settings)
    if not any(_SAME in each for each in reasons) and (near := nearest(settings, models.ARCHITECTURES)):
        reasons.append(near)
    return CheckpointError(f"model_type {quoted(name)} {said}\n  " + "\n  ".join(reasons), hint)


def _reasons(settings: Mapping[str, Any]) -> list[str]:
    """List what of an architecture FasterTransformer has no counterpart for, one line each."""
    name = settings.get("model_type")
    experts = settings.get("num_local_experts") or settings.get("num_experts") or settings.get("n_routed_experts")
    found = ["attention_types  (every layer sees all positions)"] if _is_local(settings) else []
    found += [_REASONS[name]] if isinstance(name, str) and name in _REASONS else []
    if not isinstance(name, str):
        found.append("config.json does not say what it is")
    if experts:
        found.append(
            f"experts: {experts}  (those mixtures are read that are named below, with export.model.format=huggingface)"
        )
    if settings.get("kv_lora_rank"):
        found.append(f"kv_lora_rank: {shown(settings['kv_lora_rank'])}  (keys and values are not made from a latent)")
    found += [f"{key}: {shown(settings[key])}  (it has no such factor)" for key in _FACTORS if settings.get(key)]
    if name in _ENCODERS and not settings.get("is_decoder"):
        found.append("it is an encoder, which generates nothing  (it has decoders, and encoders with one)")
    if settings.get("is_encoder_decoder"):
        found.append("is_encoder_decoder: True  (of encoders with a decoder t5 and mt5 are read)")
    return found or [_UNKNOWN]


def _is_local(settings: Mapping[str, Any]) -> bool:
    """Whether some layers see only what is near; GPT-Neo's do where its configuration is silent."""
    default = "local" if settings.get("model_type") == "gpt_neo" else None
    return "local" in str(settings.get("attention_types", default))
