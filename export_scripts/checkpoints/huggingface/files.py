"""The files of a Hugging Face checkpoint: configuration, weights (single or sharded with an index), tokenizer.

Names: transformers, ``utils/__init__.py`` (``SAFE_WEIGHTS_NAME``, ``WEIGHTS_INDEX_NAME``, ...). Every architecture is
read through this module.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.bounded import parse_json
from export_scripts.checkpoints.files.rank_files import tensors_of
from export_scripts.checkpoints.files.safetensors_file import read_safetensors
from export_scripts.checkpoints.files.torch_format import open_torch_file
from export_scripts.checkpoints.huggingface.distributed import holds_parts, missing_config, overrides, read_parts
from export_scripts.checkpoints.huggingface.quantized import joined
from export_scripts.weights.schema import LazyTensor
from handover.errors import CheckpointError
from models.checks import shown
from models.directory import CONFIG_FILE, INDEX_SUFFIX, WEIGHTS_FILE, index_problems, read_index
from models.quantization import (
    MODELOPT_FILE,
    QUANTIZATION,
    TEXT,
    Quantization,
    quantization_said,
    read_quantization,
)

ADAPTER_FILE = "adapter_config.json"
# In transformers' order of preference.
_WEIGHT_FILES = (WEIGHTS_FILE, "pytorch_model.bin")
_WRAPPER = "module."
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".ot")
_BLOB = re.compile(r"models--[^/]+/blobs/[^/]+")


@dataclass(frozen=True)
class Weights:
    """What the weight files hold.

    Attributes:
        tensors: by key.
        other_keys: keys whose values are not tensors.
        remarks: on how they are read, one line each.
        scales: of activations, by key, which no weight is made of.
    """

    tensors: Mapping[str, LazyTensor]
    other_keys: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    scales: Mapping[str, LazyTensor] = field(default_factory=dict)


def written(weights: Weights, used: Iterable[LazyTensor]) -> dict[str, LazyTensor]:
    """Name tensors as the files do."""
    kept = {id(tensor) for tensor in used}
    return {key: tensor for key, tensor in weights.tensors.items() if id(tensor) in kept}


def is_checkpoint(path: Path) -> bool:
    """Whether a directory looks like a Hugging Face checkpoint, by names alone."""
    return (path / CONFIG_FILE).is_file() or (path / ADAPTER_FILE).is_file()


def is_adapter(path: Path) -> bool:
    """Whether a directory holds an adapter of PEFT and no model, by names alone."""
    return (path / ADAPTER_FILE).is_file() and not (path / CONFIG_FILE).is_file()


def read_json(archive: Archive, name: str) -> Mapping[str, Any]:
    """Read a JSON object; an absent file is empty.

    Raises:
        CheckpointError: it is not a JSON object.
    """
    if name not in archive:
        return {}
    content = parse_json(archive.read_bytes(name), f"{archive.path}: {name}")
    if not isinstance(content, dict):
        raise CheckpointError(f"{archive.path}: {name} is not a JSON object")
    return content


def model_type(archive: Archive) -> str:
    """Name the architecture, as transformers does; empty without a configuration that says it."""
    try:
        return str(read_json(archive, CONFIG_FILE).get("model_type") or "")
    except CheckpointError:
        return ""  # the format that takes the directory says what is wrong with it


def read_config(archive: Archive) -> Mapping[str, Any]:
    """Read ``config.json`` of a whole model, without what it says of the numbers that weights are stored in.

    Raises:
        CheckpointError: only an adapter, no configuration, or quantized in a way that is not read.
    """
    refuse_links_out(archive, (name for name in archive.sizes if archive.on_disk(name).is_relative_to(archive.path)))
    if CONFIG_FILE not in archive and ADAPTER_FILE in archive:
        base = read_json(archive, ADAPTER_FILE).get("base_model_name_or_path")
        raise CheckpointError(
            f"{archive.path} holds an adapter of {base}, not a model",
            "give the model as export.model.checkpoint_path and this as export.model.adapter_path",
        )
    if CONFIG_FILE not in archive and holds_parts(archive):
        raise missing_config(archive)
    _quantization(archive)
    config = {**read_json(archive, CONFIG_FILE), **overrides(archive)}
    if isinstance(text := config.get(TEXT), Mapping):
        config[TEXT] = {key: value for key, value in text.items() if key != QUANTIZATION}
    return {key: value for key, value in config.items() if key != QUANTIZATION}


def own_quantization(archive: Archive) -> Mapping[str, Any]:
    """Read what ``config.json`` itself says of it; empty: nothing."""
    found = read_json(archive, CONFIG_FILE).get(QUANTIZATION)
    return found if isinstance(found, Mapping) else {}


def _quantization(archive: Archive) -> Quantization | None:
    """Read how weights are stored, of ``config.json`` or ModelOpt's file beside it; None: neither says so."""
    config, beside = (read_json(archive, name) for name in (CONFIG_FILE, MODELOPT_FILE))
    said = quantization_said(config, beside, str(archive.path), CheckpointError)
    return read_quantization(said, str(archive.path), CheckpointError) if said else None


def refuse_links_out(archive: Archive, names: Iterable[str]) -> None:
    """Refuse a text that is a link to a file elsewhere: what is copied or shown would be no part of the model.

    Links within the directory, and those of the hub's cache to its ``blobs/``, are those that downloads make.

    Args:
        archive: the checkpoint.
        names: of files in it; those that were given from elsewhere have a directory of their own.

    Raises:
        CheckpointError: naming the first one.
    """
    for name in sorted(names):
        path = archive.on_disk(name)
        if name.endswith(_WEIGHTS) or not path.is_symlink():
            continue
        real, root = path.resolve(), archive.path if path.is_relative_to(archive.path) else path.parent
        root = root.resolve()
        if not real.is_relative_to(root) and not _BLOB.fullmatch("/".join(real.parts[-3:])):
            raise CheckpointError(
                f"{path} is a link to {real}, outside of the checkpoint's directory",
                "copy the file into the directory if it belongs to the model, or remove the link",
            )


def open_model_weights(archive: Archive, config: Mapping[str, Any]) -> Weights:
    """List the tensors of a model, of the file that its configuration names if it does; see ``open_weights``.

    What is quantized is one tensor of its numbers and scales.
    """
    files = _named_weights(archive, config)
    tensors, scales, remarks = joined(files.tensors, _quantization(archive))
    return replace(files, tensors=tensors, remarks=remarks, scales=scales)


def _named_weights(archive: Archive, config: Mapping[str, Any]) -> Weights:
    named = config.get("transformers_weights")
    if named is None:
        return open_weights(archive)
    if not isinstance(named, str) or posixpath.normpath(named) not in archive:
        raise CheckpointError(
            f"{archive.path}: transformers_weights of config.json is {shown(named)}, and no such file is there",
            "put it there, or take the key out",
        )
    named = posixpath.normpath(named)
    return _unwrapped(_open_index(archive, named) if named.endswith(INDEX_SUFFIX) else _open_file(archive, named))


def open_weights(archive: Archive, names: Sequence[str] = _WEIGHT_FILES) -> Weights:
    """List the tensors of all weight files, without reading them.

    Args:
        archive: the files.
        names: of the weights' files, the preferred one first.

    Raises:
        CheckpointError: no weights, a shard of the index is missing, or index and shards name different keys.
    """
    for name in names:
        if name in archive:
            return _unwrapped(_open_file(archive, name))
        if name + INDEX_SUFFIX in archive:
            return _unwrapped(_open_index(archive, name + INDEX_SUFFIX))
    if holds_parts(archive):
        return _unwrapped(Weights(*read_parts(archive)))
    others = sorted(n for n in archive.sizes if n.endswith((".h5", ".msgpack", ".gguf", ".ot", ".onnx", ".bin")))
    found = f"; it has {', '.join(others[:4])}" if others else ""
    raise CheckpointError(
        f"{archive.path} has no weights that are read{found}",
        f"these are: {', '.join(names)}, or their shards with a {INDEX_SUFFIX}",
    )


def _unwrapped(weights: Weights) -> Weights:
    """Drop the wrapper's name that torch's DistributedDataParallel puts before every key of a model that it wraps."""
    if not weights.tensors or not all(key.startswith(_WRAPPER) for key in (*weights.tensors, *weights.other_keys)):
        return weights
    tensors = {key.removeprefix(_WRAPPER): tensor for key, tensor in weights.tensors.items()}
    return Weights(tensors, tuple(key.removeprefix(_WRAPPER) for key in weights.other_keys))


def _open_file(archive: Archive, name: str) -> Weights:
    if name.endswith(".safetensors"):
        return Weights(read_safetensors(archive, name))
    file = open_torch_file(archive, name)
    return Weights(*tensors_of(file, file.state))


def _open_index(archive: Archive, index: str) -> Weights:
    weight_map = read_index(read_json(archive, index), f"{archive.path}: {index}", CheckpointError)
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if name not in archive]:
        raise CheckpointError(
            f"{archive.path} lacks {len(missing)} of the {len(names)} shards of {index}\n  " + "\n  ".join(missing),
            "copy or download the checkpoint again",
        )
    tensors: dict[str, LazyTensor] = {}
    other_keys: list[str] = []
    held: dict[str, list[str]] = {}
    for name in names:
        shard = _open_file(archive, name)
        other_keys += shard.other_keys
        held[name] = [*shard.tensors, *shard.other_keys]
        tensors.update(shard.tensors)
    if problems := index_problems(weight_map, held):
        raise CheckpointError(
            f"{archive.path}: {index} and its shards differ in {len(problems)} keys\n  " + "\n  ".join(problems),
            "copy or download the checkpoint again",
        )
    return Weights(tensors, tuple(other_keys))
