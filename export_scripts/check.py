"""Look at a checkpoint before anything is written: can it be converted, and into what.

No torch here: the configuration, the keys and the shapes say nearly all of it, in a fraction of a second, on the
login node. Only a weight that may overflow its new type must be read; where the type does not get narrower, none is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from export_scripts.checkpoints.archive import Archive, open_archive
from export_scripts.checkpoints.nemo import JoinedTensor, NemoCheckpoint, find_checkpoint
from export_scripts.checkpoints.nemo_config import check_expressible, read_dims, remarks
from export_scripts.checkpoints.tokenizer import SpecialIds, TokenizerFiles, find_tokenizer, special_ids
from export_scripts.dtypes import STORAGE
from export_scripts.shards import ShardSettings, check_split, check_values
from export_scripts.weights import gpt
from export_scripts.weights.schema import Assignment, ModelDims, SourceMap, match
from handover.errors import CheckpointError, nearest

_NARROWER = {("fp32", "fp16"), ("bf16", "fp16"), ("fp32", "bf16")}  # source and new type, where a value can overflow


@dataclass(frozen=True)
class Conversion:
    """A conversion that is known to work out, and everything it needs.

    Attributes:
        archive: the source's files.
        source_format: name of the table that fits the source.
        tensors: the source's tensors by key, not read yet.
        assignments: every tensor to write and where it comes from.
        settings: how tensors become files.
        tokenizer: the tokenizer's files.
        ids: the tokenizer's special ids.
        remarks: what is expressed only nearly, one line each.
    """

    archive: Archive
    source_format: str
    tensors: Mapping[str, JoinedTensor]
    assignments: tuple[Assignment, ...]
    settings: ShardSettings
    tokenizer: TokenizerFiles
    ids: SpecialIds
    remarks: tuple[str, ...]


def inspect_checkpoint(path: Path, tensor_para_size: int, weight_data_type: str) -> ModelDims:
    """Check that a checkpoint can be converted and return its dimensions.

    Args:
        path: a ``.nemo`` archive, an unpacked directory, or a directory that holds exactly one of them.
        tensor_para_size: ranks to split for.
        weight_data_type: fp32, fp16 or bf16.

    Raises:
        CheckpointError: it is missing, truncated, hostile, ambiguous, incomplete, or not a model that
            FasterTransformer's GPT can express; or a weight overflows its new type.
    """
    archive = open_archive(find_checkpoint(Path(path)))
    conversion = plan_conversion(archive, tensor_para_size, weight_data_type)
    _check_values(conversion)
    return conversion.settings.dims


def _check_values(conversion: Conversion) -> None:
    """Read the tensors whose new type is narrower than theirs; a compressed archive is unpacked for it and removed."""
    settings = conversion.settings
    sources = {a.name: conversion.tensors[a.source_key] for a in conversion.assignments if a.source_key}
    narrowed = {name: source for name, source in sources.items() if (source.data_type, settings.data_type) in _NARROWER}
    if narrowed and conversion.archive.is_compressed:
        with TemporaryDirectory(prefix="slipway-") as directory:
            unpacked = conversion.archive.unpack(Path(directory) / "unpacked")
            _check_values(plan_conversion(unpacked, settings.tensor_para_size, settings.data_type))
        return
    for name, source in narrowed.items():
        check_values(name, source, settings.data_type)


def plan_conversion(archive: Archive, tensor_para_size: int, weight_data_type: str) -> Conversion:
    """Work out a conversion; see ``inspect_checkpoint`` for the errors, which all name the checkpoint."""
    if weight_data_type not in STORAGE:
        raise CheckpointError(f"weight_data_type '{weight_data_type}' is unknown", nearest(weight_data_type, STORAGE))
    try:
        return _plan(archive, tensor_para_size, weight_data_type)
    except CheckpointError as error:
        if str(archive.path) in error.problem:
            raise
        raise CheckpointError(f"{archive.path}: {error.problem}", error.hint) from None


def _plan(archive: Archive, tensor_para_size: int, weight_data_type: str) -> Conversion:
    checkpoint = NemoCheckpoint(archive)
    check_expressible(checkpoint.config)
    source_map = _source_map(checkpoint)
    tensors = checkpoint.tensors(lambda key: _join_axis(source_map, key))
    dims = read_dims(checkpoint.config, _vocab_size(source_map, tensors))
    settings = ShardSettings(tensor_para_size, weight_data_type, dims)
    check_split(settings)
    assignments = match(gpt.schema(dims), source_map, dims, tensors, checkpoint.other_keys())
    _check_types(tensors, assignments)
    tokenizer = find_tokenizer(archive, checkpoint.config)
    return Conversion(
        archive=archive,
        source_format=source_map.name,
        tensors=tensors,
        assignments=assignments,
        settings=settings,
        tokenizer=tokenizer,
        ids=special_ids(archive, tokenizer),
        remarks=remarks(checkpoint.config),
    )


def _source_map(checkpoint: NemoCheckpoint) -> SourceMap:
    """Choose the table by the keys: a configuration may be silent about the format."""
    keys = checkpoint.keys()
    for source_map in gpt.SOURCE_MAPS:
        if any(source_map.rule(key) for key in keys):
            return source_map
    some = ", ".join(keys[:3])
    if any(key.startswith(gpt.MEGATRON_CORE_PREFIXES) for key in keys):
        raise CheckpointError(
            f"{checkpoint.archive.path} has megatron-core keys ({some}, ...)", "only legacy keys are read yet"
        )
    raise CheckpointError(f"{checkpoint.archive.path} has no keys of a GPT ({some or 'it is empty'})")


def _join_axis(source_map: SourceMap, key: str) -> int | None:
    ruled = source_map.rule(key)
    return ruled[0].join_axis if ruled else None


def _vocab_size(source_map: SourceMap, tensors: Mapping[str, JoinedTensor]) -> int:
    """Rows of the embedding; 0 if it is missing, which the completeness check then says."""
    for key, tensor in tensors.items():
        ruled = source_map.rule(key)
        if ruled and ruled[1] == "model.wte":
            return tensor.shape[0]
    return 0


def _check_types(tensors: Mapping[str, JoinedTensor], assignments: tuple[Assignment, ...]) -> None:
    keys = [assignment.source_key for assignment in assignments if assignment.source_key]
    foreign = [f"{key}  {tensors[key].data_type}" for key in keys if tensors[key].data_type not in STORAGE]
    if foreign:
        raise CheckpointError(f"{len(foreign)} tensors are not of fp32, fp16 or bf16\n  " + "\n  ".join(foreign))
