"""LoRA adapters of PEFT: a directory with ``adapter_config.json`` and ``adapter_model.safetensors`` (or ``.bin``).

Keys and scaling: PEFT, ``utils/save_and_load.py`` and ``tuners/lora/layer.py``: ``W + s B A`` with ``s`` alpha / r, or
alpha / sqrt(r) with ``use_rslora``; transposed where the module is transformers' Conv1D, which keeps [in, out]. Fields
of ``LoraConfig`` that change anything else are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from math import sqrt
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.huggingface.files import ADAPTER_FILE, model_type, open_weights, read_json
from export_scripts.checkpoints.lora.adapter import Adapter
from export_scripts.checkpoints.lora.update import Update
from export_scripts.checkpoints.tensor_values import read_whole
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.schema import LazyTensor
from export_scripts.weights.values import Fields, number, positive
from handover.errors import CheckpointError
from models.checks import quoted

_WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_NAME = re.compile(r"[\w.]+")
# What the merged weights do not depend on, or what is read below. The keys of the weights say which modules there are.
_HARMLESS = (
    *(
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "task_type",
        "inference_mode",
        "peft_type",
        "peft_version",
    ),
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_dropout"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    *("runtime_config", "megatron_core", "qalora_group_size", "init_lora_weights", "bias", "ensure_weight_tying"),
    "eva_config",
)
_REASONS = {
    "use_dora": "its weights are also scaled by a vector",
    "alora_invocation_tokens": "it is at work only behind these tokens",
    "layer_replication": "it makes layers of its own",
    "trainable_token_indices": "single rows of the embedding are trained",
    "target_parameters": "parameters beside linear layers are trained",
    "lora_bias": "the second matrix has a bias",
}
# Others, such as pissa and olora, change the model before training: the adapter fits what is left of its weights.
_UNCHANGED_BASE = ("gaussian", "eva", "orthogonal")
# Architectures whose linear layers are transformers' Conv1D.
_WITH_CONV1D = ("gpt2",)


def recognises(archive: Archive) -> bool:
    """Whether the files are a directory of PEFT."""
    return ADAPTER_FILE in archive


def read_adapter(name: str, archive: Archive, model: Archive, keys: Iterable[str]) -> Adapter:
    """Open an adapter.

    Args:
        name: of its directory.
        archive: its files.
        model: the files of the model that it is for.
        keys: names of the model's tensors.

    Raises:
        CheckpointError: it is no LoRA, or one that cannot be merged exactly.
    """
    where = f"{archive.path}: {ADAPTER_FILE}"
    config = Fields(read_json(archive, ADAPTER_FILE), where)
    _check(config, where)
    weights = open_weights(archive, _WEIGHT_FILES)
    sides: dict[str, dict[str, str]] = {}
    replaced: dict[tuple[str, ...], LazyTensor] = {}
    for key, tensor in weights.tensors.items():
        if found := _KEY.fullmatch(key):
            sides.setdefault(found["module"], {})[found["side"]] = key
        elif ".lora_" in key:
            raise CheckpointError(f"{archive.path}: {key} is no matrix of a linear layer's update", "it is not merged")
        else:
            replaced[_names(key.replace(".modules_to_save.", "."))] = tensor
    if weights.other_keys or not sides:
        raise CheckpointError(f"{archive.path} holds {', '.join(weights.other_keys[:3]) or 'no weights'} and no LoRA")
    is_conv1d = model_type(model) in _WITH_CONV1D
    updates = tuple(
        _update(module, found, weights.tensors, config, where, is_conv1d) for module, found in sides.items()
    )
    saved = (*sides, *(name.removesuffix(".weight") for names in replaced for name in names))
    _check_targets(config, saved, tuple(key.removesuffix(".weight") for key in keys), str(archive.path))
    return Adapter(name, str(archive.path), updates, replaced)


def _check(config: Fields, where: str) -> None:
    """Refuse what is not a sum of a weight and a product.

    Raises:
        CheckpointError: naming each field and its value.
    """
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type is {quoted(config.get('peft_type'))}", "adapters of type LORA merge")
    found = [
        f"{key}: {quoted(value)}  ({_REASONS.get(key, 'it is not known here')})"
        for key, value in config.items()
        if key not in _HARMLESS and value not in (None, False, "", {}, [])
    ]
    if config.get("bias", "none") != "none":
        found.append(f"bias: {quoted(config['bias'])}  (the model's biases are trained with it)")
    started = config.get("init_lora_weights", True)
    if isinstance(started, str) and started not in _UNCHANGED_BASE:
        found.append(f"init_lora_weights: {quoted(started)}  (it belongs to weights that were changed before training)")
    if found:
        raise CheckpointError(
            f"{where} describes an adapter that cannot be merged exactly\n  " + "\n  ".join(found),
            "merge it with PEFT's merge_and_unload() and convert what save_pretrained() writes",
        )


def _check_targets(config: Fields, saved: tuple[str, ...], modules: tuple[str, ...], where: str) -> None:
    """Make sure that each kind of module that the configuration lists and the model has is in the adapter.

    PEFT passes over names that nothing in the model has, as long as another name has something.
    """
    targets = config.get("target_modules")
    listed = [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []
    left_out = config.get("exclude_modules")
    left_out = left_out if isinstance(left_out, list) else listed if left_out else []
    absent = [
        target
        for target in listed
        if target not in left_out and not _any_is(target, saved) and _any_is(target, modules)
    ]
    if absent:
        raise CheckpointError(f"{where} has no matrices for the target_modules {', '.join(absent)}", "copy it again")


def _any_is(target: str, modules: Iterable[str]) -> bool:
    return any(module == target or module.endswith(f".{target}") for module in modules)


def _update(
    module: str,
    keys: Mapping[str, str],
    tensors: Mapping[str, LazyTensor],
    config: Fields,
    where: str,
    is_conv1d: bool,
) -> Update:
    """Describe one module's update.

    Raises:
        CheckpointError: one of its two matrices is missing, or they do not fit together.
    """
    absent = [side for side in "AB" if side not in keys]
    if absent:
        raise CheckpointError(f"{module}.lora_{absent[0]}.weight is missing beside {', '.join(keys.values())}")
    down, up = tensors[keys["A"]], tensors[keys["B"]]
    rank = positive(_of_module(config, where, "rank_pattern", module, config.get("r", 8)), f"{where}: r")
    shapes = [len(down.shape), len(up.shape), down.shape[:1], up.shape[1:]]
    if shapes != [2, 2, (rank,), (rank,)]:
        raise CheckpointError(
            f"{keys['A']}  {list(down.shape)} and {keys['B']}  {list(up.shape)}  are not matrices of rank {rank}"
        )
    alpha = number(
        _of_module(config, where, "alpha_pattern", module, config.get("lora_alpha", 8)), f"{where}: lora_alpha"
    )
    scale = alpha / (sqrt(rank) if config.get("use_rslora") else rank)
    shape = (up.shape[0], down.shape[1])
    return Update(
        names=_names(f"{module}.weight"),
        shape=shape[::-1] if is_conv1d else shape,
        factors=(down, up),
        read=partial(_factors, down, up, is_conv1d),
        scale=scale,
        keys=tuple(keys.values()),
    )


def _names(key: str) -> tuple[str, ...]:
    """Return the names of a weight: GPT-NeoX's head has another one in earlier versions of transformers."""
    name = key.removeprefix(_PREFIX)
    return (name, "embed_out.weight") if name == "lm_head.weight" else (name,)


def _factors(down: LazyTensor, up: LazyTensor, is_conv1d: bool) -> tuple[Array, Array]:
    left, right = read_whole(up), read_whole(down)
    return (right.T, left.T) if is_conv1d else (left, right)


def _of_module(config: Fields, where: str, key: str, module: str, default: Any) -> Any:
    """Take a module's own value out of a pattern, whose names are ends of modules' names.

    Raises:
        CheckpointError: a name is a regular expression of more than letters, digits and dots.
    """
    pattern = config.fields(key, {})
    for name in pattern:
        if not _NAME.fullmatch(name):
            raise CheckpointError(f"{where}: {key} holds {quoted(name)}", "names of modules are read")
        if f".{module}".endswith(f".{name}"):
            return pattern[name]
    return default
