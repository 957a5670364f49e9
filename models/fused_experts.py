"""The experts of a layer in one array, [experts, out, in]: taken apart where they lie, with their scales.

transformers 5 holds them so in memory, ``<experts>.gate_up_proj`` with the gate's rows before those of up, and so do
files of Qwen3.6 and GLM, with ``.weight`` or without. Scales lie in an array beside it (``FP8Experts`` of transformers'
``integrations/finegrained_fp8.py``): for each expert as for a matrix, or one for its gate and one for up; those of its
inputs in one with a number for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from models.decoder import Decoder
from models.fp8 import ENDS, FP8_NUMBERS, SCALE_TYPES, Place, Scales, fits, grid_of
from models.quantization import Block
from models.safetensors import StoredTensor

_INPUT_END = "_activation_scale"
_ROLES = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",), "down_proj": ("down",)}
Found = Mapping[str, tuple[str, StoredTensor]]


def with_experts_apart(
    decoder: Decoder, found: Found, blocks: Sequence[Block], has_inputs: bool
) -> tuple[dict[str, Place], Found]:
    """Find the experts that lie in arrays -> the place of each, and all other tensors; what does not fit stays there.

    Args:
        decoder: whose experts have tensors of their own.
        found: tensors of files.
        blocks: that scales may be for, as ``config.json`` says.
        has_inputs: whether it says that inputs have scales.
    """
    mixture, apart, rest = decoder.mixture, dict[str, Place](), dict(found)
    if not mixture or mixture.is_in_arrays or mixture.has_bias:
        return apart, rest
    inside = decoder.names["expert.up"].partition("{expert}")[0]
    for name, (_, stored) in found.items():
        before, is_there, kind = name.removesuffix(".weight").rpartition(inside)
        roles = _ROLES.get(kind, ())
        if not (is_there and roles) or len(stored.shape) != 3 or not all(stored.shape):
            continue
        count, both, columns = stored.shape
        rows = both // len(roles)
        if count != mixture.expert_num or both % len(roles):
            continue
        used, wholes = _of_each(name, found, rows, blocks, has_inputs)
        for each in used:
            del rest[each]
        for number, whole in enumerate(wholes):
            for index, role in enumerate(roles):
                own = decoder.names[f"expert.{role}"].format(expert=number)
                apart[f"{before}{own}.weight"] = whole.rows(index * rows, (rows, columns))
    return apart, rest


def _of_each(
    name: str, found: Found, rows: int, blocks: Sequence[Block], has_inputs: bool
) -> tuple[list[str], Iterator[Place]]:
    """Find each expert's part of an array, scales included -> the tensors that are used, and the parts."""
    file, stored = found[name]
    shape, half = (stored.shape[1], stored.shape[2]), (rows, 0)
    used, scales, inputs, block = [name], None, None, (0, 0)
    beside = [name + end for end in ENDS if name + end in found] if stored.data_type == FP8_NUMBERS else []
    if len(beside) == 1 and (fitting := _block(found[beside[0]][1], stored.shape[0], shape, (*blocks, half))):
        used.append(beside[0])
        scales, block = found[beside[0]], fitting
        inputs = found.get(name + _INPUT_END) if has_inputs else None
        if inputs and inputs[1].data_type in SCALE_TYPES and prod(inputs[1].shape) == stored.shape[0]:
            used.append(name + _INPUT_END)
        else:
            inputs = None

    def parts() -> Iterator[Place]:
        for number in range(stored.shape[0]):
            own = _one(stored, number, shape)
            if scales is None:
                yield Place(file, own)
                continue
            grid = grid_of(shape, block)
            whole = block[0] or shape[0], block[1] or shape[1]
            place = Scales(scales[0], _one(scales[1], number, grid), shape, whole)
            yield Place(file, own, place, inputs and (inputs[0], _one(inputs[1], number, ())))

    return used, parts()


def _block(scales: StoredTensor, count: int, shape: tuple[int, int], blocks: Sequence[Block]) -> Block | None:
    """Return the block that scales are for; None: for none."""
    if scales.data_type not in SCALE_TYPES:
        return None
    return next((block for block in blocks if fits(scales.shape, (count, *grid_of(shape, block)))), None)


def _one(array: StoredTensor, number: int, shape: tuple[int, ...]) -> StoredTensor:
    size_bytes = array.size_bytes // array.shape[0]
    return array._replace(shape=shape, offset=array.offset + number * size_bytes, size_bytes=size_bytes)
