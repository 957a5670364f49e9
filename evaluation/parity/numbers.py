"""The numbers of a served model's configuration, compared with its source's directly.

An epsilon that is a tenth of training's, or a rotation whose base is 1% off, changes log probabilities by less than
rounding in 16 bits does: no passage shows it. Two accounts are compared with the served ``config.ini``: what this
project's reader makes of the source, every key of it, and what transformers' own model of the source computes with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from evaluation.parity.distances import PassageFindings
from export_scripts.checkpoints.source import Source
from export_scripts.targets.fastertransformer.convert import with_exact_gelu
from ft_format.config_ini import FILE_NAME, ConfigIni, ConfigIniError
from ft_format.families.family import ConfigValues
from models.directory import CONFIG_FILE

_NOT_THE_MODELS = {"model_name", "weight_data_type", "tensor_para_size"}
"""Keys that, as the ids of start and end, say nothing of what is computed from given tokens."""
_EXACTNESS = 1e-6
_NAMES_OF_HUGGING_FACE = (
    *("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon", "rope_theta", "rotary_dim"),
    *(
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
    ),
    *("hidden_act", "activation_function", "hidden_activation", "sliding_window", "num_experts_per_tok"),
    *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "num_local_experts"),
)
_HEADS = "num_attention_heads"
_FROM_CONFIG = {"head_num": _HEADS, "num_heads": _HEADS, "kv_head_num": "num_key_value_heads"}


def compare_numbers(source: Source, served: Path | None, model: Any = None) -> PassageFindings:
    """Compare the configuration of served shards with its source's.

    Args:
        source: the training checkpoint.
        served: directory of the shards; None where it is not on this machine.
        model: transformers' model of the source; None where there is none.
    """
    if served is not None and model is not None and (served / CONFIG_FILE).is_file():
        return _compare_huggingface(served, model)
    if served is None or not (served / FILE_NAME).is_file():
        why = "the served model's files are not on this machine" if served is None else f"{served} has no {FILE_NAME}"
        return PassageFindings(notes=(f"the configuration's numbers were not compared: {why}",))
    try:
        found = {name: section.texts for name, section in ConfigIni.read(served).items()}
    except ConfigIniError as error:
        return PassageFindings((error.problem,))
    broken = [*_against_reader(found, source), *_against_model(found, model)]
    count = sum(len(keys) for keys in found.values())
    by = "the source's by this project's reader" + ("" if model is None else " and by transformers")
    return PassageFindings(tuple(broken), shown=(f"{count} numbers of {FILE_NAME} are {by}",))


def _compare_huggingface(served: Path, model: Any) -> PassageFindings:
    """Compare what transformers makes of a served directory of Hugging Face's with its model of the source."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(served, local_files_only=True)
    if type(config) is not type(model.config):
        return PassageFindings(notes=("the configuration's numbers were not compared: its class is another",))
    pairs = {name: (getattr(config, name, None), getattr(model.config, name, None)) for name in _NAMES_OF_HUGGING_FACE}
    ropes = [getattr(each, "rope_parameters", None) or {} for each in (config, model.config)]
    pairs |= {f"rope_parameters.{name}": (ropes[0][name], ropes[1][name]) for name in ropes[0].keys() & ropes[1].keys()}
    known = {name: pair for name, pair in pairs.items() if None not in pair}
    broken = [
        f"{name} is {said} in the served {CONFIG_FILE}, its source has {expected}"
        for name, (said, expected) in sorted(known.items())
        if not _are_equal(said, expected)
    ]
    return PassageFindings(tuple(broken), shown=(f"{len(known)} numbers of {CONFIG_FILE} are the source's",))


def _against_reader(found: Mapping[str, Mapping[str, str]], source: Source) -> Iterator[str]:
    """Yield the keys that differ from those that a conversion of the source for as many ranks writes."""
    texts = next(iter(found.values()), {})
    ranks = int(_number(texts.get("tensor_para_size", "1")) or 1)
    dims, extra = source.dims, with_exact_gelu(source)
    for name, keys in source.family.config(ConfigValues(dims, ranks, "", 0, 0)).items():
        own = {key.lower(): value for key, value in {**keys, **extra.get(name, {})}.items()}
        served, defaults = found.get(name.lower(), {}), source.family.defaults
        known = [key for key in served if key in own or key in defaults or hasattr(dims, key)]  # others are of no model
        for key in sorted({*own, *known} - _NOT_THE_MODELS - set(source.family.id_keys)):
            usual = defaults.get(key, getattr(type(dims), key, None))  # of a configuration that leaves the key out
            said, expected = served.get(key, usual), own.get(key, usual)
            if said is not None and expected is not None and not _are_equal(said, expected):
                yield _difference(key, said, expected)


def _against_model(found: Mapping[str, Mapping[str, str]], model: Any) -> Iterator[str]:
    """Yield what transformers' model of the source computes with and the configuration does not say."""
    if model is None:
        return
    for served in found.values():
        for key, expected in _numbers_of(model).items():
            said = served.get(key)
            if key == "kv_head_num" and said is not None:
                said = f"{(_number(said) or 0) / (_number(served.get('kv_head_copies', '1')) or 1):g}"
            if said is not None and not any(_are_equal(said, each) for each in expected):
                yield _difference(key, said, " or ".join(f"{each:g}" for each in expected)) + " (transformers)"


def _numbers_of(model: Any) -> dict[str, set[float]]:
    """Return what a model of transformers computes with, by the keys of ``config.ini``, from its modules if it can."""
    numbers = {key: getattr(model.config, name, None) for key, name in _FROM_CONFIG.items()}
    found = {key: {float(value)} for key, value in numbers.items() if value is not None}
    norms = [getattr(each, "variance_epsilon", getattr(each, "eps", None)) for each in model.modules()]
    if epsilons := {float(epsilon) for epsilon in norms if epsilon is not None}:
        found |= {"layernorm_eps": epsilons, "layer_norm_epsilon": epsilons}
    rope = getattr(model.config, "rope_parameters", None)
    if isinstance(rope, Mapping) and isinstance(rope.get("rope_theta"), (int, float)):
        found["rope_theta"] = {float(rope["rope_theta"])}
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _are_equal(served: object, expected: object) -> bool:
    """Compare two values as numbers if both are, else as words."""
    number, value = (_number(str(int(each) if isinstance(each, bool) else each)) for each in (served, expected))
    if value is None or number is None:
        return str(served).strip().lower() == str(expected).strip().lower()
    return math.isclose(number, value, rel_tol=_EXACTNESS)


def _difference(key: str, served: object, expected: object) -> str:
    return f"{key} is {served} in the served {FILE_NAME}, its source has {expected}"
