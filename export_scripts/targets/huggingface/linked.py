"""A source that is a Hugging Face directory of the wanted number type already: its files of weights, as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.safetensors_file import SafeTensor
from export_scripts.conversion.write.safetensors_layout import PlannedTensor, WeightsFile
from export_scripts.quantization.record import WORDS
from export_scripts.weights.schema import LazyTensor

_NAMES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
"""Names of files as a conversion gives them."""


def own_files(
    archive: Archive,
    planned: Sequence[PlannedTensor],
    tensors: Sequence[LazyTensor],
    data_type: str,
    largest_bytes: int,
) -> tuple[WeightsFile, ...] | None:
    """Lay the source's own files out, which can be linked.

    Args:
        archive: the source.
        planned: the tensors to write.
        tensors: the source's, in the same order.
        data_type: fp32, fp16 or bf16.
        largest_bytes: of a file's tensors.

    Returns:
        None where a tensor is of another type, or a file is in an archive, has tensors that are not written, a name
        that a conversion does not give, or more bytes than a file may have.
    """
    by_file: dict[str, list[tuple[int, PlannedTensor]]] = {}
    for plan, tensor in zip(planned, tensors, strict=True):
        (output,) = plan.outputs(data_type)
        if not isinstance(tensor, SafeTensor) or WORDS.get(tensor.data_type, tensor.data_type) != output.kind:
            return None
        by_file.setdefault(tensor.file, []).append((tensor.offset, plan))
    files = [
        _own_file(archive, name, sorted(held, key=lambda each: each[0]), data_type)
        for name, held in sorted(by_file.items())
    ]
    whole = tuple(file for file in files if file is not None and file.size_bytes - file.header_bytes <= largest_bytes)
    return whole if len(whole) == len(files) else None


def _own_file(
    archive: Archive, name: str, held: Sequence[tuple[int, PlannedTensor]], data_type: str
) -> WeightsFile | None:
    extent, size_bytes = archive.extent(name), archive.sizes[name]
    with archive.open(name) as stream:
        length = stream.read(8)
        header = length + stream.read(int.from_bytes(length, "little"))
    written = sum(plan.size_bytes(data_type) for _, plan in held)
    is_file = extent.offset == 0 and extent.path.stat().st_size == size_bytes
    if not (_NAMES.fullmatch(name) and is_file and len(header) + written == size_bytes):
        return None
    offsets, plans = zip(*held, strict=True)
    return WeightsFile(name, len(header), plans, offsets, size_bytes, extent.path)
