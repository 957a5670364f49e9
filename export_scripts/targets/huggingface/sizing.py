"""What a conversion to Hugging Face will take, known before any weight is read: from its own plan, not the shards'."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np

from export_scripts.checkpoints.formats import find_archive
from export_scripts.checkpoints.huggingface.quantized import QuantizedTensor, stored_bytes
from export_scripts.checkpoints.user_files import NOTHING_GIVEN, GivenFiles
from export_scripts.conversion.move.assembly import Assembly
from export_scripts.conversion.plan.description import Description, is_description, read_description
from export_scripts.conversion.plan.sizing import Sizing, measured_rate
from export_scripts.conversion.write.safetensors_layout import LARGEST_FILE_BYTES, PlannedTensor, WeightsFile, lay_out
from export_scripts.conversion.write.shards import READ_BYTES
from export_scripts.quantization.record import WORDS, Quantization
from export_scripts.targets.huggingface.plan import HuggingFacePlan, Wish, plan_huggingface, target_of
from export_scripts.targets.huggingface.quantized import find_quantization, quantized
from export_scripts.tensors.dtypes import STORAGE, is_finite, item_bytes
from export_scripts.tensors.mapped import RUN_BYTES
from export_scripts.weights.hub_keys import Facts
from handover.digests import BlockSums

# Configuration, generation, tokenizer and its configuration, manifest; several files of weights have an index too.
_SMALL_FILES = 5
_TIMES = 64


def measure_huggingface(
    path: Path, data_type: str, processes: int, given: GivenFiles = NOTHING_GIVEN, quantization: str | None = None
) -> Sizing:
    """Work out the size of a conversion.

    Args:
        path: a checkpoint, or the description of one.
        data_type: fp32, fp16 or bf16, on disk.
        processes: parts of files that are written at a time, at most.
        given: beside the checkpoint.
        quantization: what the matrices of the layers become; None: they are as the other weights.

    Raises:
        CheckpointError: it cannot be converted.
    """
    becomes = find_quantization(quantization)
    if is_description(path):
        return _of_description(read_description(path), path, data_type, processes, becomes)
    plan = plan_huggingface(find_archive(path, given), Wish(data_type, LARGEST_FILE_BYTES, quantization=becomes))
    source_types = sorted({tensor.data_type for tensor in plan.read} & STORAGE.keys())
    return _sizing(
        plan.files,
        data_type,
        processes,
        files_read=len(plan.source.archive.sizes),
        read_bytes=sum(map(stored_bytes, plan.read)),
        small_files=len(plan.small_files) + 1,
        source_type=source_types[0] if source_types else data_type,
        is_copied=_is_copied(plan, given),
    )


def _is_copied(plan: HuggingFacePlan, given: GivenFiles) -> bool:
    """Whether it is known that no tensor is cast, rearranged or computed: a directory of Hugging Face keeps its own."""
    is_own = plan.source.own is not None and given.adapter is None
    data_type = plan.settings.data_type
    is_stored = not any(isinstance(tensor, QuantizedTensor) for tensor in plan.read)
    planned = [output.kind for file in plan.files for tensor in file.tensors for output in tensor.outputs(data_type)]
    read = [WORDS.get(tensor.data_type, tensor.data_type) for tensor in plan.read]
    return is_own and is_stored and sorted(planned) == sorted(read)


def _of_description(
    described: Description, path: Path, data_type: str, processes: int, becomes: Quantization | None
) -> Sizing:
    dims = described.dims
    facts = Facts(is_head_tied=not getattr(dims, "has_untied_head", True))
    target = target_of(described.family, dims, facts)
    shapes = {name: spec.full_shape(dims) for name, spec in described.family.tensors(dims).items()}
    planned: Sequence[PlannedTensor] = [
        PlannedTensor(
            name,
            taken.shape(shape),
            taken.axes(shape),
            _not_made,
            fixed_type="fp32" if taken.stays_fp32 else "",
        )
        for name, taken in target.written(dims, facts).items()
        for shape in (shapes[taken.pivot or name],)
    ]
    if becomes:
        planned, _ = quantized(planned, {"model_type": target.model_type}, becomes, data_type)
    files = lay_out(planned, data_type, LARGEST_FILE_BYTES)
    return _sizing(
        files,
        data_type,
        processes,
        files_read=described.files,
        read_bytes=described.stored_bytes(tensor.shape for tensor in planned),
        small_files=_SMALL_FILES + (len(files) > 1),
        source_type=described.data_type,
        is_copied=path.suffix == ".json"
        and described.data_type == data_type
        and not described.quantization
        and becomes is None,
    )


def _not_made() -> Assembly:
    raise AssertionError("a description has no weights")


def _sizing(
    files: Sequence[WeightsFile],
    data_type: str,
    processes: int,
    *,
    files_read: int,
    read_bytes: int,
    small_files: int,
    source_type: str,
    is_copied: bool,
) -> Sizing:
    written = {tensor.name: tensor.size_bytes(data_type) for file in files for tensor in file.tensors}
    largest = max(written, key=lambda name: written[name])
    linked = sum(written[tensor.name] for file in files if file.origin for tensor in file.tensors)
    return Sizing(
        files_read=files_read,
        read_bytes=read_bytes,
        parameter_count=sum(prod(tensor.shape) for file in files for tensor in file.tensors),
        files_written=len(files) + small_files,
        written_bytes=sum(written.values()) - linked,
        largest=(largest, written[largest]),
        processes=processes,
        rate=_copy_rate(data_type) if is_copied else measured_rate(source_type, data_type),
        buffer_bytes=RUN_BYTES if is_copied else READ_BYTES,
    )


def _copy_rate(data_type: str) -> float:
    """Measure how many bytes one processor checks and digests in a second, reading and writing left out."""
    run = np.zeros(RUN_BYTES, np.uint8)
    sums, started = BlockSums(), time.perf_counter()
    for _ in range(_TIMES):
        is_finite(run.view(f"u{item_bytes(data_type)}"), data_type)
        sums.update(run.data)
    return _TIMES * RUN_BYTES / (time.perf_counter() - started)
