"""Read tensors of a Hugging Face directory onto a device: of each the rank's slice, out of the file of safetensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.directory import find_tensors
from models.safetensors import StoredTensor

from ..errors import WeightsError
from .config import ModelConfig
from .precision import TORCH_TYPES
from .reader import Reader
from .shards import Piece

Located = Mapping[str, tuple[str, StoredTensor]]
"""By a tensor's name, its file and its place there."""
_MOST_LISTED = 20
_UNUSED = ".rotary_emb.inv_freq"
"""End of names that older versions of transformers saved; their numbers are those that config.json says."""


def locate(directory: Path, config: ModelConfig) -> Located:
    """Find every tensor of a model in the files of a directory.

    Raises:
        WeightsError: names those that are missing, have another shape or type, or are not the model's.
    """
    found, problems = find_tensors(directory, WeightsError), list[str]()
    assert config.layout
    embedding = config.layout.embedding
    if config.has_tied_head and embedding not in found and config.head in found:
        found[embedding] = found.pop(config.head)  # whoever saves each tensor once keeps one of its two names
    for name, shape in config.file_shapes.items():
        if name not in found:
            problems += [f"{name}: missing"] if name != config.head or not config.has_tied_head else []
        elif (stored := found[name][1]).shape != shape:
            problems.append(f"{name}: {list(stored.shape)}, expected {list(shape)}")
        elif stored.data_type not in TORCH_TYPES:
            problems.append(f"{name}: of type {stored.data_type}; legal are {', '.join(TORCH_TYPES)}")
    others = (name for name in found if name not in config.file_shapes and not name.endswith(_UNUSED))
    problems += [f"{name}: the model that config.json describes has none" for name in others]
    if problems:
        noun = "tensor is" if len(problems) == 1 else "tensors are"
        more = [f"... and {len(problems) - _MOST_LISTED} more"] if len(problems) > _MOST_LISTED else []
        lines = "\n  ".join(problems[:_MOST_LISTED] + more)
        raise WeightsError(f"{len(problems)} {noun} unusable in {directory}:\n  {lines}")
    return found


class HubReader(Reader):
    """Reads tensors as transformers saves them: one rank's slices, or whole ones (rank None).

    Args:
        located: where they are; empty: their numbers are made up.
        config: of the whole model.
        others: see Reader.
    """

    def __init__(self, located: Located, config: ModelConfig, *others: Any) -> None:
        super().__init__(config, *others)
        self._located, self._file_shapes = located, config.file_shapes

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
