"""Read the experts of a Hugging Face directory onto a device: those that are tensors of their own, and arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ft_format.weight_format import KEY
from models.mxfp4 import GROUP, MXFP4_NUMBERS

from ..errors import WeightsError
from ..ops import mxfp4
from ..ops.experts import ExpertMatrices
from ..ops.fp8 import LEAST_BLOCK, ScaledNumbers, block_of
from ..ops.linear import PACKED, Linear
from .hub_reader import HubReader
from .shards import Piece


class ExpertsReader(HubReader):
    """Reads what HubReader does, and experts."""

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
        if not self._is_cpu and any(self._rounds_input(name) for own in weights for name in own):
            raise WeightsError(
                f"{weights[0][0]} and other experts have scales for their inputs, which a CPU alone rounds by: give a"
                " directory whose activations have none, or serve it without a GPU"
            )
        if not self._is_cpu and self._keeps_fp8([name for own in weights for name in own]):
            first = self._kept(weights[0])
            if not first.blocks or block_of(first.blocks) >= LEAST_BLOCK:
                return self._kept_experts(weights, first)

        def fill(expert: int, target: Tensor) -> None:
            for name, part in zip(weights[expert], target.chunk(len(weights[expert])), strict=True):
                self._copy(name, part)

        rows, columns = self._here(weights[0][0])
        made = self._expert_matrices(len(names), (len(names[0]) * rows, columns), fill, None)
        if not made.packed:
            return made
        packed = tuple(self._rounding(linear, own) for linear, own in zip(made.packed, weights, strict=True))
        return replace(made, packed=packed)

    def _kept_experts(self, weights: Sequence[Sequence[str]], first: ScaledNumbers) -> ExpertMatrices:
        """Read the matrices of experts as FP8, of which the first are given; all have scales for as many columns."""
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
        """Put the experts' matrices, [out, in], into one tensor, or on a CPU each into a packed one.

        Raises:
            WeightsError: they become int8 on a GPU.
        """
        weights, kept = self._precision.weights, self._precision.kept
        if weights and not self._is_cpu:
            raise WeightsError(f"{weights.name} experts are multiplied by a CPU alone: leave {KEY} out")
        one_bytes = torch.Size(shape).numel() * kept.itemsize
        self.largest_bytes = max(self.largest_bytes, one_bytes)
        bias_bytes = 0 if biases is None else biases.nbytes
        if not self._is_cpu:
            weight = self.empty((count, *shape))
            for expert, target in enumerate(weight):
                fill(expert, target)
            self.size_bytes += weight.nbytes
            return ExpertMatrices(weight.nbytes + bias_bytes, (), weight, biases)
        packed, target = list[Linear](), self._scratch(shape, kept)
        for expert in range(count):
            fill(expert, target)
            packed.append(PACKED[weights](target, None if biases is None else biases[expert], is_lent=True))
        size_bytes = sum(each.size_bytes for each in packed)
        self.size_bytes += size_bytes - bias_bytes
        self.saved_bytes += count * one_bytes + bias_bytes - size_bytes
        return ExpertMatrices(size_bytes, tuple(packed))


def _in_turn(rows: Tensor, turns: int) -> Tensor:
    """View rows that take turns behind each other: all first ones, then all second ones, [turns, rows / turns, ...]."""
    return rows.view(-1, turns, rows.shape[1]).transpose(0, 1)
