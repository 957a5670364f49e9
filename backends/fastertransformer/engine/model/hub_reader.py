"""Read tensors of a Hugging Face directory onto a device: of each the rank's slice, out of the file of safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from models.fp8 import FP8_NUMBERS, Place, Scales
from models.fused import taken_apart
from models.mxfp4 import GROUP, MXFP4_NUMBERS

from ..ops import mxfp4
from ..ops.experts import ExpertMatrices
from ..ops.fp8 import Fp8Linear, ScaledNumbers, quantized
from ..ops.linear import Linear
from .adapters import Matrix
from .config import ModelConfig
from .precision import TORCH_TYPES
from .reader import Reader
from .sections import sections_of
from .shards import Piece

_EXPERTS = ".experts."  # in the names of the tensors of experts, and of no other ones
_TYPES = {**TORCH_TYPES, FP8_NUMBERS: torch.float8_e4m3fn}


class HubReader(Reader):
    """Reads tensors as transformers saves them: one rank's slices, or whole ones (rank None).

    Args:
        located: where they are; those in files without a name are made up.
        config: of the whole model.
        others: see Reader.
    """

    def __init__(self, located: Mapping[str, Place], config: ModelConfig, *others: Any) -> None:
        super().__init__(config, *others)
        assert config.decoder, "config.json was not read"
        of_files = replace(taken_apart(config.decoder), has_tied_head=False).tensors()
        self._located, self._file_shapes = located, {name: tensor.shape for name, tensor in of_files.items()}
        self._file_sections = sections_of(config.decoder)
        self._has_whole_experts = config.has_expert_parallel and self.ranks > 1
        if self._has_whole_experts:
            self._tensors = {
                name: each._replace(split_axis=None, parts=()) if _EXPERTS in name else each
                for name, each in self._tensors.items()
            }

    def column_parallel(self, *names: str) -> Linear:
        """See Reader."""
        return self._placed(super().column_parallel(*names), *names)

    def row_parallel(self, name: str, *biases: str) -> Linear:
        """See Reader."""
        return self._placed(super().row_parallel(name, *biases), name)

    def _placed(self, linear: Linear, *names: str) -> Linear:
        """Note where the matrices of a linear layer are, for adapters."""
        first = 0
        for name in names:
            key = f"{name}.weight"
            shape, axis = self._here(key), self._tensors[key].split_axis
            cut = [part for part in self._parts(key) if part is not None]
            self.matrices[name] = Matrix(linear, first, shape[0], axis if cut else None, cut)
            first += shape[0]
        return linear

    def _copy(self, name: str, target: Tensor) -> None:
        parts, scales = self._parts(name), self._scales_of(name)
        targets = torch.split(target, [len(part) for part in parts if part]) if len(parts) > 1 else (target,)
        for part, into in zip(parts, targets, strict=True):
            if scales:
                self._scaled(name, scales, part).write(into, self._precision.rounded)
            else:
                into.copy_(self._bring(self._piece(name, part), into.dtype))

    def _parts(self, name: str) -> list[range | None]:
        """Return what of a tensor's split axis this rank has, of each of its sections; None: all of it."""
        sections = self._tensors[name].parts
        if self._rank is None or not sections:
            return [self._part(name)]
        begin, found = 0, list[range | None]()
        for width, in_file in zip(sections, self._file_sections[name], strict=True):
            own = width // self._tensor_para_size
            first = begin + self._rank // (width // in_file) * own
            found.append(range(first, first + own))
            begin += in_file
        return found

    def _scales_of(self, name: str) -> Scales | None:
        return self._located[name].scales if name in self._located else None

    def _scaled(self, name: str, place: Scales, part: range | None) -> ScaledNumbers:
        """Read a part of a matrix of FP8, or one that becomes so, see ``_piece``, and the scales of its rows."""
        axis, begin, (height, width) = self._tensors[name].split_axis, part.start if part else 0, place.block
        first_row, first_column = (place.first_row, begin) if axis else (place.first_row + begin, 0)
        if place.stored:
            numbers = self._shards(self._piece(name, part))
            dtype = _TYPES[place.stored.data_type]
            piece = Piece(f"{name}.scales", place.stored.shape, dtype, place.file, place.stored.offset)
            grid = self._shards(piece).float().view(place.grid)[first_row // height :, first_column // width :]
        else:
            numbers, grid = self._quantized(name, place, self._piece(name, part).shape, (first_row, first_column))
        rows = (first_row % height + torch.arange(len(numbers), device=grid.device)) // height
        columns = slice(0, -(-(first_column % width + numbers.shape[1]) // width))
        return ScaledNumbers(numbers, grid[rows][:, columns].contiguous(), width, first_column % width)

    def _quantized(self, name: str, place: Scales, shape: Sequence[int], first: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Quantize a part of a matrix -> its numbers, and the scales of the blocks that it is in, which are read whole.

        Args:
            name: of the tensor, which may be some rows of the matrix.
            place: how the matrix is quantized.
            shape: of the part.
            first: its first row and column in the matrix.
        """
        stored, file = self._located[name].stored, self._located[name].file
        inner = [begin % unit for begin, unit in zip(first, place.block, strict=True)]
        rows, columns = (
            range(begin - skipped, min(-(-(begin + size) // unit) * unit, whole))
            for begin, skipped, size, unit, whole in zip(first, inner, shape, place.block, place.shape, strict=True)
        )
        dtype = _TYPES[stored.data_type]
        row_bytes = place.shape[1] * dtype.itemsize
        offset = stored.offset + (rows.start - place.first_row) * row_bytes + columns.start * dtype.itemsize
        stride_bytes = row_bytes if len(columns) < place.shape[1] else 0
        where = f"{name}.{rows.start}.{columns.start}"
        piece = Piece(where, (len(rows), len(columns)), dtype, file, offset, stride_bytes)
        numbers, grid = quantized(self._shards(piece), self._precision.rounded, place.block)
        self.largest_bytes = max(self.largest_bytes, piece.size_bytes + numbers.nbytes)
        return numbers[inner[0] :, inner[1] :][: shape[0], : shape[1]], grid

    def _part(self, name: str) -> range | None:
        """Return what of a tensor's split axis this rank has; None: all of it."""
        axis = self._tensors[name].split_axis
        if axis is None or self._rank is None:
            return None
        width = self._here(name)[axis]
        copies = self._tensors[name].shape[axis] // self._file_shapes[name][axis]  # of a head of keys or values
        first = self._rank // copies * width
        return range(first, first + width)

    def _piece(self, name: str, part: range | None, expert: int | None = None) -> Piece:
        """Return where rows of a tensor, or columns if it is split by these, lie; None: all of it.

        Of an array of experts, those of one expert.
        """
        found = self._located.get(name)
        file, offset = (found.file, found.stored.offset) if found else ("", 0)
        shape, dtype = self._file_shapes[name], _TYPES[found.stored.data_type] if found else self._dtype
        axis = self._tensors[name].split_axis or 0
        if expert is not None:
            name, shape, axis = f"{name}.{expert}", shape[1:], axis - 1
            offset += expert * torch.Size(shape).numel() * dtype.itemsize
        if part is None or len(part) == shape[axis]:
            return Piece(name, shape, dtype, file, offset)
        if axis:
            place, stride = offset + part.start * dtype.itemsize, shape[1] * dtype.itemsize
            return Piece(f"{name}.{part.start}", (shape[0], len(part)), dtype, file, place, stride)
        place = offset + part.start * torch.Size(shape[1:]).numel() * dtype.itemsize
        return Piece(f"{name}.{part.start}", (len(part), *shape[1:]), dtype, file, place)

    def _head_rows(self, name: str, part: range, is_packed: bool) -> tuple[Tensor, bool]:
        shape = (len(part), *self._file_shapes[name][1:])
        rows = self._scratch(shape, self._precision.kept) if is_packed else self.empty(shape, self.head_type)
        rows.copy_(self._bring(self._piece(name, part), rows.dtype))
        if not is_packed:
            self._count(rows.nbytes)
        return rows, False

    def _matrix(self, names: Sequence[str]) -> tuple[Tensor, bool]:
        is_lent = self._is_cpu or bool(self._precision.weights)  # what is packed or quantized is another tensor
        return self._side_by_side(names, first=int(is_lent)), is_lent

    def _side_by_side(self, names: Sequence[str], first: int = 0) -> Tensor:
        """Read tensors behind each other along their first axis; ``first`` 1: in memory that the next one reuses."""
        shapes = [self._here(name) for name in names]
        shape = (sum(each[0] for each in shapes), *shapes[0][1:])
        target = self._scratch(shape, self._precision.kept) if first else self.empty(shape)
        for name, part in zip(names, torch.split(target, [each[0] for each in shapes]), strict=True):
            self._copy(name, part)
        return target

    def _keeps_fp8(self, names: Sequence[str]) -> bool:
        """Return whether matrices are FP8 and stay so: their scales are for as many columns."""
        widths = {scales.block[1] if (scales := self._scales_of(name)) else 0 for name in names}
        return self._precision.keeps_fp8 and len(widths) == 1 and 0 not in widths

    def _kept(self, names: Sequence[str]) -> ScaledNumbers:
        """Read matrices of FP8 behind each other."""
        found = [(name, scales) for name in names if (scales := self._scales_of(name))]
        parts = [self._scaled(name, scales, part) for name, scales in found for part in self._parts(name)]
        return ScaledNumbers.joined(parts)

    def _linear(self, names: Sequence[str], bias: Tensor | None) -> Linear:
        if not self._keeps_fp8(names):
            return super()._linear(names, bias)
        joined = self._kept(names)
        linear = Fp8Linear(joined, bias, self._precision.rounds_activations)
        self._count(linear.size_bytes)
        self.largest_bytes = max(self.largest_bytes, joined.numbers.numel() * self._precision.compute.itemsize)
        return linear

    def exact(self, name: str) -> Tensor:
        """Read a tensor in fp32, whatever type is computed in."""
        target = self.empty(self._here(name), torch.float32)
        assert not self._scales_of(name), "it is no matrix"
        target.copy_(self._shards(self._piece(name, self._part(name))).to(self._precision.exact))
        self._count(target.nbytes)
        return target

    def own_experts(self, count: int) -> range:
        """Return the experts of a layer that this process reads."""
        if not self._has_whole_experts:
            return range(count)
        share = count // self.ranks
        first = (self._rank or 0) * share
        return range(first, first + share)

    def experts(self, names: Sequence[Sequence[str]]) -> ExpertMatrices:
        """Read the matrices of experts that are tensors of their own: several of one expert lie behind each other."""
        weights = [[f"{name}.weight" for name in own] for own in names]
        if not self._is_cpu and self._keeps_fp8([name for own in weights for name in own]):
            return self._kept_experts(weights)

        def fill(expert: int, target: Tensor) -> None:
            for name, part in zip(weights[expert], target.chunk(len(weights[expert])), strict=True):
                self._copy(name, part)

        rows, columns = self._here(weights[0][0])
        return self._expert_matrices(len(names), (len(names[0]) * rows, columns), fill, None)

    def _kept_experts(self, weights: Sequence[Sequence[str]]) -> ExpertMatrices:
        """Read the matrices of experts as FP8; all have scales for as many columns."""
        first = self._kept(weights[0])
        numbers, scales = (each.new_empty((len(weights), *each.shape)) for each in first[:2])
        for expert, own in enumerate(weights):
            numbers[expert], scales[expert] = (self._kept(own) if expert else first)[:2]
        size_bytes = numbers.nbytes + scales.nbytes
        self.size_bytes += size_bytes
        self.largest_bytes = max(self.largest_bytes, size_bytes // len(weights))
        return ExpertMatrices(size_bytes, (), numbers, None, scales, first.blocks)

    def expert_arrays(self, name: str, bias: str, taking_turns: int) -> ExpertMatrices:
        """Read the matrices of experts that are one tensor, [experts, in, out].

        Args:
            name: of the tensor.
            bias: of the tensor of their biases; empty: there is none.
            taking_turns: matrices whose outputs take turns along ``out``; they lie behind each other then.
        """
        count, inputs, outputs = self._here(name)
        own = self.own_experts(count)

        is_packed = name in self._located and self._located[name].stored.data_type == MXFP4_NUMBERS

        def packed(expert: int) -> tuple[Tensor, Tensor]:
            found = [self._packed(name, part, own[expert]) for part in self._parts(name)]
            numbers, powers = (_in_turn(torch.cat(each), taking_turns) for each in zip(*found, strict=True))
            return numbers, powers

        def fill(expert: int, target: Tensor) -> None:
            if is_packed:
                numbers, powers = (each.flatten(0, 1) for each in packed(expert))
                target.copy_(mxfp4.dequantize(numbers, powers, self._precision.rounded))
                return
            pieces = [self._piece(name, part, own[expert]) for part in self._parts(name)]
            values = torch.cat([self._bring(piece, target.dtype) for piece in pieces], 1)
            parts = _in_turn(values.T, taking_turns)
            target.view(parts.shape).copy_(parts)

        biases = None
        is_added_here = self._has_whole_experts or self._rank in (None, 0)
        if bias and (is_added_here or self._tensors[bias].split_axis is not None):
            biases = self.tensor(bias)[own.start : own.stop]
            biases = biases.view(len(biases), -1, taking_turns).transpose(1, 2).flatten(1)
        if is_packed and not self._is_cpu and self._precision.keeps_fp8:
            return self._packed_experts(len(own), (outputs, inputs), packed, biases)
        return self._expert_matrices(len(own), (outputs, inputs), fill, biases)

    def _packed(self, name: str, part: range | None, expert: int) -> tuple[Tensor, Tensor]:
        """Read the numbers and powers of two of a matrix of MXFP4, uint8 [out, in / 2] and [out, in / 32]."""
        place, (_, inputs, outputs) = self._located[name], self._file_shapes[name]
        assert place.scales and place.scales.stored, "it is MXFP4"
        is_by_rows, found = self._tensors[name].split_axis == 2, list[Tensor]()  # an array has rows last
        rows = part if part is not None and is_by_rows else range(outputs)
        columns = part if part is not None and not is_by_rows else range(inputs)
        for kind, file, first, each in (
            ("", place.file, place.stored.offset, 2),
            (".scales", place.scales.file, place.scales.stored.offset, GROUP),
        ):
            width, own = inputs // each, len(columns) // each
            offset = first + (expert * outputs + rows.start) * width + columns.start // each
            label, stride = f"{name}.{expert}.{rows.start}.{columns.start}{kind}", width if own < width else 0
            found.append(self._shards(Piece(label, (len(rows), own), torch.uint8, file, offset, stride)))
        return found[0], found[1]

    def _packed_experts(
        self,
        count: int,
        shape: tuple[int, int],
        read: Callable[[int], tuple[Tensor, Tensor]],
        biases: Tensor | None,
    ) -> ExpertMatrices:
        """Put the experts' matrices of MXFP4, of a shape [out, in], into one tensor as they are."""
        outputs, inputs = shape
        numbers = self.empty((count, outputs, inputs // 2), torch.uint8)
        powers = self.empty((count, outputs, inputs // GROUP), torch.uint8)
        for expert in range(count):
            for target, part in zip((numbers, powers), read(expert), strict=True):
                target[expert].view(part.shape).copy_(part)
        size_bytes = numbers.nbytes + powers.nbytes
        self.size_bytes += size_bytes
        self.largest_bytes = max(self.largest_bytes, size_bytes // count)
        return ExpertMatrices(size_bytes + (0 if biases is None else biases.nbytes), (), numbers, biases, powers)

    def _expert_matrices(
        self, count: int, shape: tuple[int, int], fill: Callable[[int, Tensor], None], biases: Tensor | None
    ) -> ExpertMatrices:
        """Put the experts' matrices, [out, in], into one tensor, or on a CPU each into a packed one."""
        one_bytes = torch.Size(shape).numel() * self._precision.kept.itemsize
        self.size_bytes += count * one_bytes
        self.largest_bytes = max(self.largest_bytes, one_bytes)
        size_bytes = count * one_bytes + (0 if biases is None else biases.nbytes)
        if not self._is_cpu:
            weight = self.empty((count, *shape))
            for expert, target in enumerate(weight):
                fill(expert, target)
            return ExpertMatrices(size_bytes, (), weight, biases)
        packed, target = list[Linear](), self._scratch(shape, self._precision.kept)
        for expert in range(count):
            fill(expert, target)
            packed.append(Linear(target, None if biases is None else biases[expert], is_lent=True))
        return ExpertMatrices(size_bytes, tuple(packed))


def _in_turn(rows: Tensor, turns: int) -> Tensor:
    """View rows that take turns behind each other: all first ones, then all second ones, [turns, rows / turns, ...]."""
    return rows.view(-1, turns, rows.shape[1]).transpose(0, 1)
