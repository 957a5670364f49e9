"""Work out a conversion to Hugging Face: which architecture, which tensors, which small files. No weight is read.

A source of Hugging Face goes back to its own architecture, key by key. Any other goes through its family's full
tensors to the first architecture that can express it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.formats import open_source
from export_scripts.checkpoints.source import Source
from export_scripts.checkpoints.tensor_values import same_values
from export_scripts.checkpoints.tokenizers.nemo import sentencepiece_additions, vocabulary_size
from export_scripts.conversion.move.assembly import Assembly
from export_scripts.conversion.move.placement import assemble
from export_scripts.conversion.plan.check import check_types
from export_scripts.conversion.plan.nemo_ids import with_nemos_ids
from export_scripts.conversion.plan.special_ids import with_settled_ids
from export_scripts.conversion.write.safetensors_layout import INDEX_FILE, PlannedTensor, WeightsFile, index_of, lay_out
from export_scripts.conversion.write.shards import ShardSettings
from export_scripts.quantization.record import Quantization
from export_scripts.targets.huggingface import TARGETS
from export_scripts.targets.huggingface.linked import own_files
from export_scripts.targets.huggingface.own import own_config, own_quantized, own_tensors, planned_own
from export_scripts.targets.huggingface.quantized import CONFIG_KEY, quantized
from export_scripts.targets.huggingface.table import taken, unfinished
from export_scripts.targets.huggingface.tokenizer import tokenizer_files
from export_scripts.weights.hub_keys import Facts, Target
from export_scripts.weights.hub_tensor import HubTensor
from export_scripts.weights.matching import match, zeros_made
from export_scripts.weights.remarks import DequantizedRemark, ShardRemark
from export_scripts.weights.schema import Assignment, LazyTensor
from export_scripts.weights.sequences import Lazily, Texts
from ft_format.families.family import Family
from handover.errors import CheckpointError
from models.checks import shown
from models.decoder import Decoder
from models.directory import CONFIG_FILE, GENERATION_FILE

_TORCH = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_VOCABULARY = "vocab_size"


@dataclass(frozen=True)
class HuggingFacePlan:
    """A conversion that is known to work out.

    Attributes:
        source: the checkpoint, its ids settled.
        architecture: transformers' class that the directory is for, or the kind of model where none is named.
        files: of weights, laid out.
        small_files: content by name.
        read: tensors of the source that are read.
        settings: the data type, and whether what is not finite may be written.
        remarks: what is to be said, one line each.
    """

    source: Source
    architecture: str
    files: tuple[WeightsFile, ...]
    small_files: Mapping[str, bytes]
    read: tuple[LazyTensor, ...]
    settings: ShardSettings
    remarks: tuple[str, ...]

    def names(self) -> set[str]:
        """Name every file that the conversion writes, and each file of weights by its name until it is whole."""
        return {*self.small_files, *(name for file in self.files for name in (file.name, file.growing))}


@dataclass(frozen=True)
class Wish:
    """What the user asks for beside the checkpoint.

    Attributes:
        data_type: fp32, fp16 or bf16, on disk.
        largest_file_bytes: of a file's tensors.
        allow_nonfinite: NaN and infinity are written as they are.
        start_id, end_id: in place of the checkpoint's own; None: its own.
        asks_nemo: NeMo's own tokenizer, where it is installed, says the ids of a NeMo checkpoint.
        quantization: what the matrices of the layers become; None: they stay as they are.
    """

    data_type: str
    largest_file_bytes: int
    allow_nonfinite: bool = False
    start_id: int | None = None
    end_id: int | None = None
    asks_nemo: bool = False
    quantization: Quantization | None = None


def plan_huggingface(archive: Archive, wish: Wish) -> HuggingFacePlan:
    """Work out a conversion.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete, or transformers cannot express the model; all name
            the checkpoint.
    """
    try:
        return _plan(archive, wish)
    except CheckpointError as error:
        if str(archive.path) in error.problem:
            raise
        raise CheckpointError(f"{archive.path}: {error.problem}", error.hint) from None


def _plan(archive: Archive, wish: Wish) -> HuggingFacePlan:
    read = open_source(archive, for_shards=False)
    opened, nemos_remark = with_nemos_ids(read) if wish.asks_nemo else (read, "")
    assignments = match(opened.schema(), opened.source_map, opened.dims, opened.tensors, opened.other_keys)
    check_types(opened, assignments)
    source = with_settled_ids(opened, wish.start_id, wish.end_id)
    stored = own_quantized(opened.own, wish.quantization) if opened.own else {}
    if opened.own is not None:
        tensors = own_tensors(opened.own, stored)
        planned, used = planned_own(opened, tensors, stored, wish.data_type), tuple(tensors.values())
        given = {"bos_token_id": wish.start_id, "eos_token_id": wish.end_id}
        config = own_config(opened, opened.own, _TORCH[wish.data_type], given)
        remarks: tuple[str, ...] = ()
    else:
        planned, config, remarks = _expressed(opened, source, assignments, wish)
        used = tuple(opened.tensors[key] for key in dict.fromkeys(key for each in assignments for key in each.keys))
        remarks += zeros_made(assignments)
    skipped = (ShardRemark, DequantizedRemark) if stored else ShardRemark
    said = (each for each in source.remarks if not isinstance(each, skipped))
    remarks = (*filter(None, (nemos_remark,)), *said, *remarks)
    layout = wish.data_type, wish.largest_file_bytes
    if stored and opened.own is not None:
        config = {**config, CONFIG_KEY: opened.own.quantization}
        remarks += (f"{len(stored)} tensors of quantized weights are kept as they are",)
    elif wish.quantization:
        planned, config = quantized(planned, config, wish.quantization, wish.data_type)
    is_as_it_is = opened.own is not None and not opened.own.is_renamed and (bool(stored) or not wish.quantization)
    files = (own_files(archive, planned, used, *layout) if is_as_it_is else None) or lay_out(planned, *layout)
    length = config.get("n_positions") or config.get("max_position_embeddings")
    small = {
        CONFIG_FILE: _json(config),
        GENERATION_FILE: _generation(source, config, wish),
        **tokenizer_files(source, {"model_max_length": length} if length else {}),
        **({INDEX_FILE: index_of(files, wish.data_type)} if len(files) > 1 else {}),
    }
    settings = ShardSettings(1, wish.data_type, opened.dims, wish.allow_nonfinite)
    name = str(config.get("model_type"))
    named = config.get("architectures")
    if isinstance(named, list) and named:
        name = shown(named[0])
    return HuggingFacePlan(source, name, files, small, used, settings, remarks)


def _expressed(
    opened: Source, source: Source, assignments: Sequence[Assignment], wish: Wish
) -> tuple[Sequence[PlannedTensor], dict[str, Any], tuple[str, ...]]:
    """Express a model by an architecture of transformers: its tensors, configuration, and what is to be said."""
    if opened.extra_targets:
        some = ", ".join(sorted(opened.extra_targets)[:3])
        raise CheckpointError(
            f"a Hugging Face directory has no place for {len(opened.extra_targets)} tensors beside the model: {some}",
            "take the prompt tables or adapters away, or export.model.format=fastertransformer",
        )
    facts = facts_of(opened, source, assignments)
    target = target_of(opened.family, opened.dims, facts)
    rows, remarks = _rows(opened)
    dims = replace(opened.dims, vocab_size=rows)  # type: ignore[type-var]
    tensors = target.written(opened.dims, facts)
    full_shape = cache(lambda spec: spec.full_shape(opened.dims))
    shapes = {name: full_shape(spec) for name, spec in opened.schema().items()}
    if problems := unfinished(tensors, target.dropped(opened.dims, facts), shapes):
        raise CheckpointError(
            f"{len(problems)} tensors are not those of transformers' {target.class_name}\n  " + "\n  ".join(problems),
            "nothing is dropped silently; export.model.format=fastertransformer takes them",
        )
    by_name = {assignment.name: number for number, assignment in enumerate(assignments)}
    pivots = array("L", (by_name[tensor.pivot or name] for name, tensor in tensors.items()))
    names, described = Texts(tensors), tuple(tensors.values())

    def planned(number: int) -> PlannedTensor:
        return _planned(names[number], described[number], assignments[pivots[number]], opened, rows)

    config = {
        "architectures": [target.class_name],
        "model_type": target.model_type,
        **_ids(source, rows),
        **target.config(dims, facts),
        "torch_dtype": _TORCH[wish.data_type],
    }
    return Lazily(planned, range(len(described))), config, remarks


def facts_of(opened: Source, source: Source, assignments: Sequence[Assignment]) -> Facts:
    """Read what the dimensions do not say."""
    if isinstance(opened.dims, Decoder):
        return Facts("", opened.dims.has_tied_head, source.ids.start_id, source.ids.end_id, source.ids.pad_id)
    keys = {assignment.name: assignment.keys for assignment in assignments}
    embedding = next(name for name in ("model.wte", "model.wte.weight", "shared.weight_T") if name in keys)
    head = keys.get(opened.family.head)
    is_tied = head == keys[embedding] if head else True
    if head and not is_tied and getattr(opened.dims, "has_scaled_logits", False):
        is_tied = same_values(opened.tensors[head[0]], opened.tensors[keys[embedding][0]])
    return Facts(opened.activation, is_tied, source.ids.start_id, source.ids.end_id, source.ids.pad_id)


def target_of(family: Family, dims: Any, facts: Facts) -> Target:
    """Choose the architecture for a model of a family.

    Raises:
        CheckpointError: none can express the model; what is in the way of each.
    """
    reasons = []
    for target in TARGETS.get(family.name, ()):
        problems = target.lacks(dims, facts)
        if not problems:
            return target
        reasons += [f"{target.class_name}: {problem}" for problem in problems]
    raise CheckpointError(
        "no architecture of transformers can express this checkpoint\n  " + "\n  ".join(reasons),
        "" if family.beyond(dims) else "export.model.format=fastertransformer converts it",
    )


def _rows(source: Source) -> tuple[int, tuple[str, ...]]:
    """Count the rows of the vocabulary to write: those that training added beyond the tokenizer's are cut."""
    rows = source.dims.axis_size(_VOCABULARY)
    if not source.is_padded or not source.tokenizer.members:
        return rows, ()
    archive, tokenizer = source.archive, source.tokenizer
    wanted = vocabulary_size(archive, tokenizer)
    if tokenizer.library == "sentencepiece" and tokenizer.is_nemos:
        model = archive.read_bytes(tokenizer.members["tokenizer.model"])
        wanted += len(sentencepiece_additions(model, tokenizer.is_legacy)) + len(source.added_tokens)
    wanted = max(wanted, *(1 + each for each in (source.ids.start_id, source.ids.end_id) if each < rows))
    if wanted >= rows:
        return rows, ()
    return wanted, (f"the tokenizer has {wanted} tokens: {rows - wanted} rows of padding of the {rows} are left out",)


def _planned(name: str, tensor: HubTensor, assignment: Assignment, source: Source, rows: int) -> PlannedTensor:
    """Plan one tensor of an architecture; ``rows`` are those of the vocabulary that are kept."""
    tensors = [source.tensors[key] for key in assignment.keys]
    full = assignment.target.full_shape(source.dims)
    if is_cropped := _VOCABULARY in assignment.target.shape:
        full = (rows, *full[1:])

    def make() -> Assembly:
        pivot = assemble(assignment, tensors, source.dims)
        return taken(tensor, pivot.cropped(0, 0, rows) if is_cropped else pivot)

    is_cut = all(each.unproved for each in tensors)
    fixed = "fp32" if tensor.stays_fp32 else ""
    return PlannedTensor(name, tensor.shape(full), tensor.axes(full), make, is_cut, fixed_type=fixed)


def _ids(source: Source, rows: int) -> dict[str, Any]:
    """List the special ids below ``rows``; one that the checkpoint does not name is left out."""
    ids = source.ids
    end: Any = [ids.end_id, *ids.more_end_ids] if ids.more_end_ids else ids.end_id
    found = {"bos_token_id": ids.start_id, "eos_token_id": end if ids.end_id < rows else None}
    return {**found, "pad_token_id": ids.pad_id if ids.pad_id is not None and ids.pad_id < rows else None}


def _generation(source: Source, config: Mapping[str, Any], wish: Wish) -> bytes:
    """Render ``generation_config.json``; that of a directory of Hugging Face is copied."""
    if source.own is not None and GENERATION_FILE in source.archive and wish.start_id is wish.end_id is None:
        return source.archive.read_bytes(GENERATION_FILE)
    keys = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    return _json({"_from_model_config": True, **{key: config[key] for key in keys if config.get(key) is not None}})


def _json(content: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(content, indent=2)}\n".encode()
