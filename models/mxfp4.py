"""Experts of MXFP4 in a directory of Hugging Face's: numbers of 4 bits (E2M1), and a power of two for each 32."""

from __future__ import annotations

from collections.abc import Mapping

from models.fp8 import Place, Scales
from models.safetensors import StoredTensor

MXFP4_NUMBERS = "MXFP4"
GROUP = 32  # numbers along the input that share a power of two
_BYTE, _BLOCKS, _SCALES = "U8", "_blocks", "_scales"


def with_powers(found: Mapping[str, tuple[str, StoredTensor]]) -> dict[str, Place]:
    """Join numbers and powers of two of arrays [experts, in, out]; what does not fit stays as it is.

    They lie as [experts, out, in / 32, 16], two numbers a byte, and [experts, out, in / 32].
    """
    places = {name: Place(*each) for name, each in found.items()}
    for name in [each.removesuffix(_BLOCKS) for each in found if each.endswith(_BLOCKS)]:
        (file, numbers), beside = found[name + _BLOCKS], found.get(name + _SCALES)
        if name in found or not beside or not _fit(numbers, beside[1]):
            continue
        experts, outputs, groups, _ = numbers.shape
        shape = (experts, groups * GROUP, outputs)
        stored = numbers._replace(data_type=MXFP4_NUMBERS, shape=shape)
        places[name] = Place(file, stored, Scales(*beside, shape, (1, GROUP)))
        del places[name + _BLOCKS], places[name + _SCALES]
    return places


def made_up(shape: tuple[int, ...]) -> Place:
    """Return the place, in a file without a name, of an array's random numbers."""
    experts, inputs, outputs = shape
    scales = StoredTensor(_BYTE, (experts, outputs, inputs // GROUP), 0, 0)
    return Place("", StoredTensor(MXFP4_NUMBERS, shape, 0, 0), Scales("", scales, shape, (1, GROUP)))


def _fit(numbers: StoredTensor, scales: StoredTensor) -> bool:
    are_bytes = numbers.data_type == scales.data_type == _BYTE
    return are_bytes and numbers.shape == (*scales.shape, GROUP // 2) and len(scales.shape) == 3
