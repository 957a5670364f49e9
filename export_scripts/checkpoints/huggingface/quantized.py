"""Quantized weights of a Hugging Face directory: numbers and their scales become one tensor under the weight's name.

A weight of FP8 has its scales beside it (``weight_scale``, ``weight_scale_inv``: both are multiplied with). GPT-OSS's
MXFP4 has ``<weight>_blocks`` [experts, out, groups, 16] and ``<weight>_scales`` for a weight [experts, in, out].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from export_scripts.tensors.array_of_pieces import array_of_pieces
from export_scripts.tensors.dtypes import STORAGE, Array, item_bytes
from export_scripts.tensors.scaled import Scaled
from export_scripts.tensors.small_floats import BYTE, BYTES, E4M3, E5M2, E8M0, FP4
from export_scripts.weights.remarks import DequantizedRemark
from export_scripts.weights.schema import Computed, LazyTensor, Shape
from handover.errors import CheckpointError
from models.fp8 import without_ones
from models.quantization import FP8, MXFP4, QUANTIZATION, Block, Quantization
from models.tensor import Tensor

_SCALES = ("_scale_inv", "_scale")
_SCALE_OF = {FP8: re.compile(r"(_scale_inv|(^|\.)weight_scale)$"), MXFP4: re.compile(r"_proj_scales$")}
_OF_ACTIVATIONS = re.compile(r"(^|[._])(input|output|activation|prob|kv|[qkv])_scale(_ub)?$")
_BLOCKS, _BLOCK_SCALES, _GROUP, _GROUP_BYTES = "_blocks", "_scales", 32, 16
_MXFP4_SHAPES = f"expected are [experts, out, groups, {_GROUP_BYTES}] and [experts, out, groups]"
_MOST_LISTED = 20


@dataclass(frozen=True)
class QuantizedTensor(Computed):
    """A weight whose numbers and scales are stored apart; each number is multiplied by its scale where it is read.

    Attributes:
        numbers, scales: as the files have them.
        keys: of the two in the files.
        method: of the quantization, as config.json calls it.
        kind: of the numbers, see ``small_floats``.
        block: rows and columns of a scale.
        is_transposed: the weight has the last two axes the other way round.
    """

    numbers: LazyTensor
    scales: LazyTensor
    keys: tuple[str, str]
    method: str
    kind: str
    block: Block
    laid_out: Shape
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, per axis."""
        *lead, rows, columns = self.laid_out
        return (*lead, columns, rows) if self.is_transposed else self.laid_out

    @property
    def data_type(self) -> str:
        """Type of the products: fp32, or bf16 where it holds every one of them."""
        return "bf16" if self.kind == FP4 else "fp32"

    @property
    def sources(self) -> tuple[LazyTensor, ...]:
        """Numbers and scales."""
        return self.numbers, self.scales

    def parts(self) -> tuple[Array, ...]:
        """Describe the products by numbers and scales; nothing is read."""
        (numbers,), (scales,) = self.numbers.parts(), self.scales.parts()
        shape, data_type = self.laid_out, self.scales.data_type
        held = numbers.reshape(*shape[:-1], prod(self.numbers.shape[len(shape) - 1 :]))
        grid = scales.reshape(_grid(shape, self.block))
        scale_type = data_type if data_type in STORAGE else E8M0
        whole = Scaled(held, self.kind, grid, scale_type, _whole(self.block, shape), shape)
        made = array_of_pieces(shape, STORAGE[self.data_type], [((0,) * len(shape), whole)])
        return (made.swapaxes(-1, -2) if self.is_transposed else made,)


def stored_bytes(tensor: LazyTensor) -> int:
    """Return the bytes that a tensor has in its files."""
    if isinstance(tensor, QuantizedTensor):
        return stored_bytes(tensor.numbers) + stored_bytes(tensor.scales)
    return prod(tensor.shape) * (1 if tensor.data_type in BYTES else item_bytes(tensor.data_type))


def stored_type(tensor: LazyTensor) -> str:
    """Return the type of the numbers that a tensor has in its files."""
    return tensor.kind if isinstance(tensor, QuantizedTensor) else tensor.data_type


def described_bytes(said: Quantization, tensor: Tensor, data_type: str) -> int:
    """Return the bytes of a tensor of a described model: matrices but for embedding and head are quantized.

    Of GPT-OSS those of experts are, which have three axes.
    """
    shape = tensor.shape
    if len(shape) < (3 if said.kind == MXFP4 else 2) or "vocab_size" in tensor.axes:
        return prod(shape) * item_bytes(data_type)
    if said.kind == MXFP4:
        return prod(shape) * (_GROUP_BYTES + 1) // _GROUP
    return prod(shape) + prod(_grid(shape, said.blocks[0])) * item_bytes("fp32")


def joined(
    tensors: Mapping[str, LazyTensor], said: Quantization | None
) -> tuple[Mapping[str, LazyTensor], Mapping[str, LazyTensor], tuple[str, ...]]:
    """Join numbers and scales; also returns the scales of activations, apart, and what is to be said of it.

    Args:
        tensors: of the files, by key.
        said: how the configuration says that weights are stored; None: it does not.

    Raises:
        CheckpointError: numbers without scales or scales without numbers, or they do not fit together.
    """
    if said is None:
        alone = [f"{key}  {each.data_type}" for key, each in tensors.items() if each.data_type in (E4M3, E5M2)]
        _refuse(alone, f"{len(alone)} tensors are FP8, and config.json has no {QUANTIZATION}", "copy its own to it")
        return tensors, {}, ()
    work = _Joining(tensors, said)
    for key, tensor in tensors.items():
        if said.kind == MXFP4 and key.endswith(_BLOCKS) and tensor.data_type == BYTE:
            work.join_mxfp4(key.removesuffix(_BLOCKS), key)
        elif said.kind == FP8 and tensor.data_type in (E4M3, E5M2):
            work.join_fp8(key)
    dropped = [key for key in tensors if key not in work.used and _OF_ACTIVATIONS.search(key)]
    consumed = work.used.union(dropped)
    found = {key: tensor for key, tensor in tensors.items() if key not in consumed}
    work.problems += [f"{key}: a scale of no {said.kind} weight" for key in found if _SCALE_OF[said.kind].search(key)]
    _refuse(work.problems, f"{len(work.problems)} quantized weights are unusable", "copy the checkpoint again")
    found |= work.made
    in_order = (key if key in found else key.removesuffix(_BLOCKS) for key in tensors)
    joined_ones = {key: found[key] for key in in_order if key in found}
    return joined_ones, {key: tensors[key] for key in dropped}, tuple(map(DequantizedRemark, _remarks(work, dropped)))


def _remarks(work: _Joining, dropped: Sequence[str]) -> Iterator[str]:
    if work.made:
        yield f"{len(work.made)} weights of {work.said.kind} are dequantized: numbers times scales, in fp32"
    if dropped:
        yield f"{len(dropped)} scales of activations are left out, such as {dropped[0]}: what is written rounds none"


@dataclass
class _Joining:
    """The work on one checkpoint.

    Attributes:
        said: how they are stored.
        made: weights by key.
        used: keys that have become a part of one.
        problems: what does not fit, one line each.
    """

    tensors: Mapping[str, LazyTensor]
    said: Quantization
    made: dict[str, LazyTensor] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def join_fp8(self, key: str) -> None:
        """Find the scales of a weight of FP8: one, one for each row, or one for each block."""
        numbers, beside = self.tensors[key], [key + end for end in _SCALES if key + end in self.tensors]
        self.used.update((key, *beside))
        if len(beside) != 1:
            names = ", ".join(beside) or f"neither {' nor '.join(key + end for end in _SCALES)} is there"
            self.problems.append(f"{key}: {numbers.data_type} {list(numbers.shape)} with one scale is read  ({names})")
            return
        scales = self.tensors[beside[0]]
        blocks = self.said.blocks if len(numbers.shape) > 1 else ()
        for block in blocks:
            if without_ones(scales.shape) == without_ones(_grid(numbers.shape, block)):
                self._add(key, (key, beside[0]), numbers.data_type, block, numbers.shape)
                return
        legal = " or ".join(str(list(_grid(numbers.shape, block))) for block in blocks) or "those of a matrix"
        self.problems.append(f"{beside[0]}: {list(scales.shape)} for {key} {list(numbers.shape)}, expected {legal}")

    def join_mxfp4(self, key: str, blocks: str) -> None:
        """Find the scales of a weight of MXFP4."""
        numbers, name = self.tensors[blocks], key + _BLOCK_SCALES
        self.used.update((blocks, name))
        scales = self.tensors.get(name)
        *lead, size = numbers.shape
        if scales is None:
            self.problems.append(f"{blocks}: {name} is not there")
        elif len(lead) != 3 or size != _GROUP_BYTES or scales.shape != tuple(lead):
            self.problems.append(f"{blocks}: {list(numbers.shape)} with {name} {list(scales.shape)}  ({_MXFP4_SHAPES})")
        elif key in self.tensors:
            self.problems.append(f"{key}: it is there beside {blocks}")
        else:
            shape = (*lead[:-1], lead[-1] * _GROUP)
            self._add(key, (blocks, name), FP4, self.said.blocks[0], shape)

    def _add(self, key: str, keys: tuple[str, str], kind: str, block: Block, laid_out: Shape) -> None:
        numbers, scales = (self.tensors[each] for each in keys)
        of_scale = scales.data_type
        if of_scale not in (*STORAGE, E8M0, BYTE) or (kind == FP4 and of_scale not in (E8M0, BYTE)):
            self.problems.append(f"{key}: its scales are {of_scale}")
        method, is_transposed = self.said.method, kind == FP4
        self.made[key] = QuantizedTensor(numbers, scales, keys, method, kind, block, laid_out, is_transposed)


def _refuse(problems: Sequence[str], what: str, hint: str) -> None:
    if problems:
        more = [f"... and {len(problems) - _MOST_LISTED} more"] if len(problems) > _MOST_LISTED else []
        raise CheckpointError(f"{what}\n  " + "\n  ".join([*problems[:_MOST_LISTED], *more]), hint)


def _whole(block: Block, shape: Shape) -> Block:
    """Return a block's rows and columns, where 0 stands for all of them."""
    return block[0] or max(1, shape[-2]), block[1] or max(1, shape[-1])


def _grid(shape: Shape, block: Block) -> Shape:
    """Return the shape of a weight's scales."""
    counts = (-(-size // each) for size, each in zip(shape[-2:], _whole(block, shape), strict=True))
    return (*shape[:-2], *counts)
