"""A checkpoint of one torch file for each training rank: pipeline stages gathered, tensor-parallel parts joined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.pickled import StoredTensor
from export_scripts.checkpoints.files.torch_file import TorchFile
from export_scripts.checkpoints.files.torch_format import open_torch_file
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.schema import LazyTensor, split_layer, with_layer
from handover.errors import CheckpointError

# The first pipeline stage of a stack holds this; the stack's later stages keep copies of it.
_REPEATED = "_relative_position_embedding."

JoinAxis = Callable[[str], int | None]
"""Axis along which training's tensor parallelism cut a key's tensor; None: every rank holds all of it."""


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor of torch files, whose parts may lie in those of several training ranks.

    Attributes:
        stored: file and tensor of each tensor-parallel rank, in order.
        axis: along which they are joined; None: one part is all.
    """

    stored: tuple[tuple[TorchFile, StoredTensor], ...]
    axis: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the joined tensor."""
        shape = list(self.stored[0][1].shape)
        if self.axis is not None:
            shape[self.axis] = sum(tensor.shape[self.axis] for _, tensor in self.stored)
        return tuple(shape)

    @property
    def data_type(self) -> str:
        """fp32, fp16 or bf16."""
        return self.stored[0][1].storage.data_type

    @property
    def part_count(self) -> int:
        """Parts that it is joined from."""
        return len(self.stored)

    @property
    def unproved(self) -> tuple[str, ...]:
        """Files that hold it without a checksum of its bytes."""
        return tuple(file.name for file, tensor in self.stored if not file.has_checksum(tensor))

    @property
    def checksums(self) -> tuple[object, ...] | None:
        """What its parts' checksums say of their values, without reading them; None: one has none."""
        found = tuple(file.checksum(tensor) for file, tensor in self.stored)
        return None if None in found else found

    def parts(self) -> tuple[Array, ...]:
        """Map the parts, without copying; bf16 comes as uint16."""
        return tuple(file.read(tensor) for file, tensor in self.stored)


def tensors_of(file: TorchFile, state: Mapping[str, Any]) -> tuple[dict[str, LazyTensor], tuple[str, ...]]:
    """Take the tensors of a file that holds them whole, and the keys of what is none."""
    tensors = ((key, each) for key, each in state.items() if isinstance(each, StoredTensor))
    found: dict[str, LazyTensor] = {key: JoinedTensor(((file, each),), None) for key, each in tensors}
    return found, tuple(key for key in state if key not in found)


class RankFiles:
    """The state of a model, from the files of all training ranks; keys are read, weights are not.

    Args:
        archive: the files.
        names: file of each pipeline stage, for each tensor-parallel rank; where a stage has several, each holds some of
            its tensors, and what two of them hold is the first one's.
        rename: from a saved key to the table's.
        open_file: opens one file.
        keep: whether a key is one of this state; layers are numbered by all.

    Attributes:
        beside: keys of what lies in the files beside the model.
    """

    def __init__(
        self,
        archive: Archive,
        names: Sequence[Sequence[str | tuple[str, ...]]],
        rename: Callable[[str], str] = str,
        open_file: Callable[[Archive, str], TorchFile] = open_torch_file,
        keep: Callable[[str], bool] = lambda key: True,
    ) -> None:
        self._archive = archive
        self.beside: tuple[str, ...] = ()
        self._repeated: list[tuple[str, tuple[TorchFile, Any], tuple[TorchFile, Any]]] = []
        # Per tensor-parallel rank: key with the model's own layer number -> (file, value).
        self._ranks = [self._read_rank(stages, rename, open_file, keep) for stages in names]

    def keys(self) -> tuple[str, ...]:
        """Every key of the model, layers numbered through all pipeline stages."""
        return tuple(self._ranks[0])

    def other_keys(self) -> tuple[str, ...]:
        """Keys whose values are not tensors."""
        others = (key for key, (_, value) in self._ranks[0].items() if not isinstance(value, StoredTensor))
        return (*others, *self.beside)

    def tensors(self, join_axis: JoinAxis) -> Mapping[str, JoinedTensor]:
        """Join the training ranks' tensors, without reading them.

        Raises:
            CheckpointError: ranks hold different keys, types or shapes.
        """
        ranks = self._ranks
        for number, rank in enumerate(ranks[1:], start=1):
            if differing := sorted(ranks[0].keys() ^ rank.keys()):
                raise CheckpointError(f"{self._archive.path}: rank {number} has other keys than rank 0: {differing}")
        joined = {}
        for key, (_, value) in ranks[0].items():
            if isinstance(value, StoredTensor):
                axis = join_axis(key) if len(ranks) > 1 else None
                parts = tuple(rank[key] for rank in ranks)
                self._check_parts(key, [part for _, part in parts], axis)
                joined[key] = JoinedTensor(parts if axis is not None else parts[:1], axis)
        return joined

    def copies(self, join_axis: JoinAxis) -> Iterator[tuple[str, JoinedTensor, JoinedTensor]]:
        """List what ``tensors`` leaves out: key, the tensor that is taken, and the one that should equal it.

        These are what every tensor-parallel rank holds, and what every pipeline stage of a stack does.
        """
        for key, first, again in self._repeated:
            yield key, JoinedTensor((first,), None), JoinedTensor((again,), None)
        for key, taken in self._ranks[0].items():
            if isinstance(taken[1], StoredTensor) and join_axis(key) is None:
                for other in self._ranks[1:]:
                    yield key, JoinedTensor((taken,), None), JoinedTensor((other[key],), None)

    def _check_parts(self, key: str, parts: list[Any], axis: int | None) -> None:
        def fixed(part: Any) -> Any:
            if not isinstance(part, StoredTensor):
                return None
            shape = [size for index, size in enumerate(part.shape) if index != axis]
            return part.storage.data_type, len(part.shape), shape

        if any(fixed(part) != fixed(parts[0]) for part in parts) or (axis is not None and axis >= len(parts[0].shape)):
            raise CheckpointError(f"{self._archive.path}: the training ranks' parts of {key} do not fit together")

    def _read_rank(
        self,
        stages: Sequence[str | tuple[str, ...]],
        rename: Callable[[str], str],
        open_file: Callable[[Archive, str], TorchFile],
        keep: Callable[[str], bool],
    ) -> dict[str, tuple[TorchFile, Any]]:
        """Gather one tensor-parallel rank's pipeline stages; a stage counts the layers of each stack from 0."""
        found: dict[str, tuple[TorchFile, Any]] = {}
        first_layer: Counter[str] = Counter()  # by the name of the stack: a T5 has two
        for stage in stages:
            layers: Counter[str] = Counter()
            earlier = frozenset(found)
            for file in [open_file(self._archive, name) for name in ((stage,) if isinstance(stage, str) else stage)]:
                for saved_key, value in file.state.items():
                    key = rename(saved_key)
                    pattern, layer = split_layer(key)
                    if layer is not None:
                        stack = pattern.partition("{layer}")[0]
                        layers[stack] = max(layers[stack], layer + 1)
                        key = with_layer(key, first_layer[stack] + layer)
                    if keep(key):
                        self._take(found, earlier, key, (file, value))
            first_layer += layers
        return found

    def _take(
        self,
        found: dict[str, tuple[TorchFile, Any]],
        earlier: frozenset[str],
        key: str,
        value: tuple[TorchFile, Any],
    ) -> None:
        """Note one tensor; what another file of the stage has too is one again."""
        if key not in found:
            found[key] = value
        elif key in earlier and _REPEATED not in key:
            raise CheckpointError(f"{self._archive.path}: {key} is there twice")
        elif isinstance(value[1], StoredTensor):
            self._repeated.append((key, found[key], value))


@dataclass(frozen=True)
class StatesTogether:
    """Parts of one model's state that training's ranks hold in different ways."""

    parts: tuple[RankFiles, ...]

    def keys(self) -> tuple[str, ...]:
        """Every key."""
        return tuple(chain.from_iterable(part.keys() for part in self.parts))

    def other_keys(self) -> tuple[str, ...]:
        """Keys whose values are not tensors."""
        return tuple(key for part in self.parts for key in part.other_keys())

    def tensors(self, join_axis: JoinAxis) -> Mapping[str, JoinedTensor]:
        """Join the training ranks' tensors, without reading them."""
        return {key: tensor for part in self.parts for key, tensor in part.tensors(join_axis).items()}

    def copies(self, join_axis: JoinAxis) -> Iterator[tuple[str, JoinedTensor, JoinedTensor]]:
        """List what ``tensors`` leaves out."""
        for part in self.parts:
            yield from part.copies(join_axis)
