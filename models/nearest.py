"""Which of the architectures that are known a configuration is nearest to, and what of it that one has not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from models.architecture import Architecture
from models.checks import shown
from models.errors import ModelError

_SHOWN = 8
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_WITHOUT_EFFECT = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "use_cache", "initializer_range"),
        *("attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout", "pretraining_tp", "id2label", "label2id"),
        *(
            "residual_dropout",
            "embedding_dropout",
            "router_aux_loss_coef",
            "router_jitter_noise",
            "output_router_logits",
        ),
        *(
            "output_router_logits",
            "output_attentions",
            "output_hidden_states",
            "return_dict",
            "rope_parameters",
            "rope_scaling",
            "rope_theta",
        ),
        *("original_max_position_embeddings", "head_dim", "is_encoder_decoder", "quantization_config"),
    }
)


def nearest(config: Mapping[str, Any], architectures: Iterable[Architecture]) -> str:
    """Name the architecture that is nearest, and what it has not; empty: none reads such keys.

    Near is what reads most of the keys and needs the fewest others. It is a guess for whoever adds the model: a key
    that has its name may mean something else.
    """
    if any(config.get(key) is None for key in _NEEDED):
        return ""
    found: list[tuple[int, str, list[str]]] = []
    for each in architectures:
        problems = {problem.partition(":")[0]: problem for problem in _problems(each, config)}
        rest = {key: value for key, value in config.items() if key not in problems}
        try:
            written = each.write(each.read(rest)).keys()
        except ModelError:
            continue
        unread = rest.keys() - {*written, *each.defaults, *each.aliases, *each.limits, *_WITHOUT_EFFECT}
        differing = [*problems.values(), *(f"{key}: {shown(rest[key])}" for key in sorted(unread) if rest[key])]
        found.append((len(differing) + len(written - config.keys() - _WITHOUT_EFFECT), each.model_type, differing))
    if not found:
        return ""
    _, name, differing = min(found, key=lambda each: each[0])
    more = f", and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    lacking = f", which has not {', '.join(differing[:_SHOWN])}{more}" if differing else ", by its keys"
    return f"{name} is nearest{lacking}"


def _problems(architecture: Architecture, config: Mapping[str, Any]) -> list[str]:
    try:
        return architecture.problems(config)
    except ModelError:
        return []
