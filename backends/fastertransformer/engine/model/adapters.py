"""Adapters in one process: its slices of them on the host, and the places for some on the device."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from models.decoder import Decoder
from models.peft import WEIGHTS_FILE, linear_layers, read_adapter
from models.safetensors import StoredTensor

from ..errors import WeightsError
from ..ops.linear import Linear
from ..ops.low_rank import Adaptable, LowRank
from .precision import TORCH_TYPES
from .shards import Piece, map_piece

# The most of adapters' first matrices that lie behind a layer's own, and that a step with adapters reads whichever its
# rows have: in 2 us or so, less than a kernel takes that reads the rows' own.
_MOST_BEHIND_BYTES = 8 << 20


@dataclass(frozen=True)
class Matrix:
    """A matrix of the model within a linear layer, or what takes its place, of this process.

    Attributes:
        linear: the layer.
        first: its first row there.
        rows: of it.
        axis: along which ranks share it; None: this process has all of it.
        cut: what of that axis this process has, one behind the other.
        is_extendable: whether its product may be made with adapters' matrices behind it.
    """

    linear: Adaptable
    first: int
    rows: int
    axis: int | None
    cut: list[range]
    is_extendable: bool = True

    def slice(self, values: Tensor, axis: int) -> Tensor:
        """Return this process's part of an adapter's matrix, whose axis is that of the model's."""
        if axis != self.axis:
            return values
        return torch.cat([values.narrow(axis, part.start, len(part)) for part in self.cut], axis)


class _Own(NamedTuple):
    """This process's slices of what an adapter adds to one matrix."""

    low_rank: LowRank
    first: int
    down: Tensor
    up: Tensor


class AdapterPlaces:
    """The places of a process's device, and the adapters on its host by number.

    Args:
        matrices: of the process, by name; their linear layers get the places.
        decoder: that adapters are for.
        count: places.
        rank: that they have room for.
        like: gives device and type.

    Attributes:
        size_bytes: of the device's memory that all places take.
    """

    def __init__(self, matrices: Mapping[str, Matrix], decoder: Decoder, count: int, rank: int, like: Tensor) -> None:
        self.count, self.rank, self._decoder, self._like = count, rank, decoder, like
        self._layers = linear_layers(decoder)
        self._targets: dict[str, tuple[LowRank, int]] = {}
        self._host: dict[int, list[_Own]] = {}
        self._begun: dict[int, Future[list[_Own]]] = {}
        self._matrices = matrices
        by_linear: dict[Adaptable, list[tuple[int, str]]] = {}
        for name in (rows.name for layer in self._layers.values() for rows in layer.rows if rows.name in matrices):
            matrix = matrices[name]
            whole = matrix.linear.joined or matrix.linear
            by_linear.setdefault(whole, []).append((matrix.linear.joined_at + matrix.first, name))
        for linear, places in by_linear.items():
            self._add(linear, sorted(places))
        found = {low_rank for low_rank, _ in self._targets.values()}
        self.size_bytes = sum(each.size_bytes for each in found)

    def _add(self, linear: Adaptable, places: list[tuple[int, str]]) -> None:
        parts = [self._matrices[name].rows for _, name in places]
        inputs, down = self._inputs(places[0][1]), None
        behind = self.count * len(parts) * self.rank
        is_small = behind * inputs * self._like.itemsize <= _MOST_BEHIND_BYTES
        is_product = self._matrices[places[0][1]].is_extendable
        if is_small and is_product and isinstance(linear, Linear):
            linear.with_adapters = linear.extended(behind)
        if isinstance(linear, Linear) and linear.with_adapters:
            down = linear.with_adapters.weight[len(linear.weight) :]
            for name in (name for _, name in places if self._matrices[name].linear is not linear):
                joined = self._matrices[name].linear
                assert isinstance(joined, Linear), "it was joined"
                joined.weight = linear.weight[joined.joined_at :][: len(joined.weight)]
        linear.low_rank = LowRank(self.count, self.rank, inputs, parts, self._like, down, not is_product)
        for first, name in places:
            self._targets[name] = linear.low_rank, first

    def _inputs(self, name: str) -> int:
        """Return the inputs of a matrix in this process."""
        matrix = self._matrices[name]
        if matrix.axis == 1:
            return sum(map(len, matrix.cut))
        return next(layer.inputs for layer in self._layers.values() if any(rows.name == name for rows in layer.rows))

    def begin(self, number: int, directory: Path) -> None:
        """Begin to read this process's slices of an adapter to the host, while steps are taken."""
        reader = ThreadPoolExecutor(1, "adapter")
        self._begun[number] = reader.submit(self._read, directory)
        reader.shutdown(wait=False)  # the thread ends with what it reads

    def wait(self, number: int) -> None:
        """Wait until an adapter is read here, or has failed to be; any thread may."""
        wait(filter(None, [self._begun.get(number)]))  # none where processes have started again meanwhile

    def end(self, number: int) -> None:
        """Keep what was begun, under the adapter's number.

        Raises:
            WeightsError: it is damaged, does not fit the model, or has a larger rank than there is room for.
        """
        self._host[number] = self._begun.pop(number).result()

    @torch.inference_mode()
    def _read(self, directory: Path) -> list[_Own]:
        if self._like.is_cuda:
            torch.cuda.set_device(self._like.device)  # of this thread, which pins memory
        updates = read_adapter(directory, self._decoder, WeightsError)
        if (rank := max(update.rank for update in updates.values())) > self.rank:
            raise WeightsError(
                f"{directory} has rank {rank}, and there is room for {self.rank}",
                "set max_adapter_rank in config.pbtxt",
            )
        own = list[_Own]()
        for name, update in updates.items():
            down = self._values(directory, f"{name}.lora_A", update.down)
            up = self._values(directory, f"{name}.lora_B", update.up) * update.scale
            for rows in (each for each in self._layers[name].rows if each.name in self._targets):
                matrix, (low_rank, first) = self._matrices[rows.name], self._targets[rows.name]
                part = matrix.slice(up[rows.first : rows.first + rows.outputs], 0)
                own.append(_Own(low_rank, first, self._kept(matrix.slice(down, 1)), self._kept(part)))
        return own

    def _values(self, directory: Path, name: str, stored: StoredTensor) -> Tensor:
        piece = Piece(name, stored.shape, TORCH_TYPES[stored.data_type], WEIGHTS_FILE, stored.offset)
        values = map_piece(directory, piece).float()
        if not bool(values.isfinite().all()):
            raise WeightsError(f"{directory / WEIGHTS_FILE}: {name} has numbers that are not finite")
        return values

    def _kept(self, values: Tensor) -> Tensor:
        kept = values.to(self._like.dtype, memory_format=torch.contiguous_format, copy=True)
        return kept.pin_memory() if self._like.is_cuda else kept

    def place(self, number: int, place: int) -> None:
        """Write an adapter to a place of the device, over the one that was there."""
        for low_rank in {low_rank for low_rank, _ in self._targets.values()}:
            low_rank.clear(place)
        for low_rank, first, down, up in self._host[number]:
            low_rank.write(place, first, down, up)

    def drop(self, number: int) -> None:
        """Forget an adapter; a place that has it keeps it until another one comes there."""
        self._host.pop(number, None)
