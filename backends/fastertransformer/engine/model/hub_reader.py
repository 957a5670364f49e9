"""Read tensors of a Hugging Face directory onto a device: of each the rank's slice, out of the file of safetensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from models.fused import taken_apart
from models.safetensors import StoredTensor

from .config import ModelConfig
from .precision import TORCH_TYPES
from .reader import Reader
from .shards import Piece

Located = Mapping[str, tuple[str, StoredTensor]]
"""By a tensor's name, its file and its place there."""


class HubReader(Reader):
    """Reads tensors as transformers saves them: one rank's slices, or whole ones (rank None).

    Args:
        located: where they are; empty: their numbers are made up.
        config: of the whole model.
        others: see Reader.
    """

    def __init__(self, located: Located, config: ModelConfig, *others: Any) -> None:
        super().__init__(config, *others)
        assert config.decoder, "config.json was not read"
        of_files = replace(taken_apart(config.decoder), has_tied_head=False).tensors()
        self._located, self._file_shapes = located, {name: tensor.shape for name, tensor in of_files.items()}

    def _copy(self, name: str, target: Tensor) -> None:
        axis, part = self._tensors[name].split_axis, None
        if axis is not None and self._rank is not None:
            width = target.shape[axis]
            copies = self._tensors[name].shape[axis] // self._file_shapes[name][axis]  # of a head of keys or values
            first = self._rank // copies * width
            part = range(first, first + width)
        target.copy_(self._bring(self._piece(name, part), target.dtype))

    def _piece(self, name: str, part: range | None) -> Piece:
        """Return where rows of a tensor, or columns if it is split by these, lie; None: all of it."""
        file, stored = self._located.get(name, ("", None))
        shape, offset = self._file_shapes[name], stored.offset if stored else 0
        dtype = TORCH_TYPES[stored.data_type] if stored else self._dtype
        if part is None or len(part) == shape[axis := self._tensors[name].split_axis or 0]:
            return Piece(name, shape, dtype, file, offset)
        if axis:
            place, stride = offset + part.start * dtype.itemsize, shape[1] * dtype.itemsize
            return Piece(f"{name}.{part.start}", (shape[0], len(part)), dtype, file, place, stride)
        place = offset + part.start * torch.Size(shape[1:]).numel() * dtype.itemsize
        return Piece(f"{name}.{part.start}", (len(part), *shape[1:]), dtype, file, place)

    def _head_rows(self, name: str, part: range, is_packed: bool) -> tuple[Tensor, bool]:
        shape = (len(part), *self._file_shapes[name][1:])
        rows = self._scratch(shape, self._precision.compute) if is_packed else self.empty(shape, self.head_type)
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
        target = self._scratch(shape, self._precision.compute) if first else self.empty(shape)
        for name, part in zip(names, torch.split(target, [each[0] for each in shapes]), strict=True):
            self._copy(name, part)
        return target
