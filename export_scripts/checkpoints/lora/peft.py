"""LoRA adapters of PEFT: a directory with ``adapter_config.json`` and ``adapter_model.safetensors`` (or ``.bin``).

What they add: models/peft.py; transposed where the module is transformers' Conv1D, which keeps [in, out].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.huggingface.files import ADAPTER_FILE, model_type, open_weights, read_json
from export_scripts.checkpoints.lora.adapter import Adapter
from export_scripts.checkpoints.lora.update import Update, suffix_in
from export_scripts.checkpoints.tensor_values import read_whole
from export_scripts.tensors.dtypes import Array, recast, widen
from export_scripts.weights.schema import LazyTensor
from handover.errors import CheckpointError
from models.peft import BASE, KEY, WEIGHTS_FILE, absent_targets, beyond_sums, names_in_files, rank_and_scale

_WEIGHT_FILES = (WEIGHTS_FILE, "adapter_model.bin")
# Architectures whose linear layers are transformers' Conv1D.
_WITH_CONV1D = ("gpt2",)


def recognises(archive: Archive) -> bool:
    """Whether the files are a directory of PEFT."""
    return ADAPTER_FILE in archive


def others_in(archive: Archive) -> list[str]:
    """List what an adapter's weights hold beside the matrices of updates: tensors that take the model's place."""
    tensors = open_weights(archive, _WEIGHT_FILES).tensors
    return [key for key in tensors if not (KEY.fullmatch(key) or key.endswith(BASE))]


def read_adapter(name: str, archive: Archive, model: Archive, own: Mapping[str, LazyTensor]) -> Adapter:
    """Open an adapter.

    Args:
        name: of its directory.
        archive: its files.
        model: the files of the model that it is for.
        own: the model's tensors.

    Raises:
        CheckpointError: it is no LoRA, or one that cannot be merged exactly.
    """
    where = f"{archive.path}: {ADAPTER_FILE}"
    config = read_json(archive, ADAPTER_FILE)
    if beyond := beyond_sums(config, where, CheckpointError):
        raise CheckpointError(
            f"{where} describes an adapter that cannot be merged exactly\n  " + "\n  ".join(beyond),
            "merge it with PEFT's merge_and_unload() and convert what save_pretrained() writes",
        )
    weights = open_weights(archive, _WEIGHT_FILES)
    sides: dict[str, dict[str, str]] = {}
    replaced: dict[tuple[str, ...], LazyTensor] = {}
    for key, tensor in weights.tensors.items():
        if found := KEY.fullmatch(key):
            sides.setdefault(found["module"], {})[found["side"]] = key
        elif key.endswith(BASE):
            _check_base(f"{archive.path}: {key}", _names(key.replace(BASE, ".weight")), tensor, own)
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
    times = Counter(name for update in updates for name in update.names)
    if twice := [name for name, count in times.items() if count > 1]:
        raise CheckpointError(f"{archive.path} has the matrices of {twice[0]} twice, by two names", "keep one of them")
    saved = (*sides, *(name.removesuffix(".weight") for names in replaced for name in names))
    _check_targets(config, saved, tuple(key.removesuffix(".weight") for key in own), str(archive.path))
    return Adapter(name, str(archive.path), updates, replaced)


def _check_base(where: str, names: tuple[str, ...], copied: LazyTensor, own: Mapping[str, LazyTensor]) -> None:
    """Make sure that what PEFT has saved of a module before its update is the model's, in the adapter's type."""
    key = next((found for name in names if (found := suffix_in(own, name))), None)
    if key is None:
        return  # and so it has no module of this name either
    if own[key].shape == copied.shape:
        rounded = recast(read_whole(own[key]), "fp32", copied.data_type)
        if np.array_equal(widen(rounded, copied.data_type), read_whole(copied)):
            return
    raise CheckpointError(f"{where} is not the model's own {names[0]}", "give the model that it was trained on")


def _check_targets(config: Mapping[str, Any], saved: tuple[str, ...], modules: tuple[str, ...], where: str) -> None:
    """Make sure that each kind of module that the configuration lists and the model has is in the adapter."""
    if absent := absent_targets(config, saved, modules):
        raise CheckpointError(f"{where} has no matrices for the target_modules {', '.join(absent)}", "copy it again")


def _update(
    module: str,
    keys: Mapping[str, str],
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, Any],
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
    rank, scale = rank_and_scale(config, where, module, CheckpointError)
    shapes = [len(down.shape), len(up.shape), down.shape[:1], up.shape[1:]]
    if shapes != [2, 2, (rank,), (rank,)]:
        raise CheckpointError(
            f"{keys['A']}  {list(down.shape)} and {keys['B']}  {list(up.shape)}  are not matrices of rank {rank}"
        )
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
    name, *others = names_in_files(key)
    return (name, "embed_out.weight") if name == "lm_head.weight" else (name, *others)


def _factors(down: LazyTensor, up: LazyTensor, is_conv1d: bool) -> tuple[Array, Array]:
    left, right = read_whole(up), read_whole(down)
    return (right.T, left.T) if is_conv1d else (left, right)
