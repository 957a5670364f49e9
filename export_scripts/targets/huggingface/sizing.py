"""What a conversion to Hugging Face will take, known before any weight is read."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

from export_scripts.checkpoints.formats import find_archive
from export_scripts.checkpoints.given import NOTHING_GIVEN, GivenFiles
from export_scripts.conversion.description import is_description
from export_scripts.conversion.dtypes import item_bytes
from export_scripts.conversion.safetensors_files import LARGEST_FILE_BYTES
from export_scripts.conversion.sizing import Sizing, measure, measured_rate
from export_scripts.targets.huggingface.plan import Wish, plan_huggingface

# Configuration, generation, tokenizer and its configuration, index and manifest.
_SMALL_FILES = 6


def measure_huggingface(path: Path, data_type: str, processes: int, given: GivenFiles = NOTHING_GIVEN) -> Sizing:
    """Work out the size of a conversion.

    Args:
        path: a checkpoint, or the description of one.
        data_type: fp32, fp16 or bf16, on disk.
        processes: parts of files that are written at a time, at most.
        given: beside the checkpoint.

    Raises:
        CheckpointError: it cannot be converted.
    """
    if is_description(path):
        sizing = measure(path, 1, data_type, processes)
        return replace(sizing, files_written=-(-sizing.written_bytes // LARGEST_FILE_BYTES) + _SMALL_FILES)
    plan = plan_huggingface(find_archive(path, given), Wish(data_type, LARGEST_FILE_BYTES))
    written = {
        tensor.name: prod(tensor.shape) * item_bytes(data_type) for file in plan.files for tensor in file.tensors
    }
    largest = max(written, key=lambda name: written[name])
    source_types = sorted({tensor.data_type for tensor in plan.read})
    return Sizing(
        files_read=len(plan.source.archive.sizes),
        read_bytes=sum(prod(tensor.shape) * item_bytes(tensor.data_type) for tensor in plan.read),
        parameter_count=sum(written.values()) // item_bytes(data_type),
        files_written=len(plan.files) + len(plan.small_files) + 1,
        written_bytes=sum(written.values()),
        largest=(largest, written[largest]),
        processes=processes,
        rate=measured_rate(source_types[0], data_type),
    )
