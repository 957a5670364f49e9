"""Read tensors of a Hugging Face directory onto a device: of each the rank's slice, out of the file of safetensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from models.fp8 import FP8_NUMBERS, Place, Scales
from models.fused import taken_apart

from ..errors import WeightsError
from ..ops.fp8 import Fp8Linear, ScaledNumbers, StaticLinear, quantized
from ..ops.linear import Linear
from ..ops.low_rank import Adaptable
from ..parallel.partition import vocabulary_part
from .adapters import Matrix
from .config import ModelConfig
from .precision import TORCH_TYPES
from .reader import Reader
from .sections import sections_of
from .shards import Piece

Placed = TypeVar("Placed", bound=Adaptable)
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
        self._decoder = config.decoder
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
        return self.placed(super().column_parallel(*names), *names)

    def row_parallel(self, name: str, *biases: str) -> Linear:
        """See Reader."""
        return self.placed(super().row_parallel(name, *biases), name)

    def head(self, name: str | None, table: Tensor | None, bias: Tensor | None) -> Linear:
        """See Reader."""
        linear, decoder = super().head(name, table, bias), self._decoder
        part = range(decoder.vocab_size)
        if self._rank is not None:
            part = vocabulary_part(decoder.vocab_size, self._rank, self._tensor_para_size)
        is_cut = len(part) < decoder.vocab_size
        self.matrices[decoder.names["head"]] = Matrix(linear, 0, len(part), 0 if is_cut else None, [part], False)
        return linear

    def placed(self, linear: Placed, *names: str, is_extendable: bool = True) -> Placed:
        """Note where the matrices of a linear layer are, for adapters; see Matrix."""
        first = 0
        for name in names:
            key = f"{name}.weight"
            shape, axis = self._here(key), self._tensors[key].split_axis
            cut = [part for part in self._parts(key) if part is not None]
            self.matrices[name] = Matrix(
                linear, first, shape[0], axis if cut else None, cut, is_extendable and shape[0] > 1
            )
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
        return self._rounding(self._unrounded(names, bias), names)

    def _rounding(self, linear: Linear, names: Sequence[str]) -> Linear:
        """Have a matrix round its input, if the files have scales for that."""
        scales = [self._input_scale(name) for name in names]
        if not any(each is not None for each in scales):
            return linear
        static = StaticLinear(linear, scales, [self._here(name)[0] for name in names])
        self._count(static.size_bytes - linear.size_bytes)
        return static

    def _input_scale(self, name: str) -> Tensor | None:
        if name not in self._located or not (place := self._located[name].input_scale):
            return None
        file, stored = place
        piece = Piece(f"{name}.input.scales", (1,), _TYPES[stored.data_type], file, stored.offset)
        scale = self._shards(piece).float().view(())
        if not scale.is_meta and not 0 < float(scale) < float("inf"):
            raise WeightsError(f"the scale of the input of {name} is {float(scale)}, and no positive number")
        return scale

    def _rounds_input(self, name: str) -> bool:
        return name in self._located and self._located[name].input_scale is not None

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """See Reader."""
        if self._rounds_input(name):
            raise WeightsError(
                f"{name} is not multiplied with what config.json says has a scale, but becomes part of other matrices:"
                " give a directory whose activations have none"
            )
        return super().tensor(name, dtype)

    def _unrounded(self, names: Sequence[str], bias: Tensor | None) -> Linear:
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
