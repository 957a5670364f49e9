"""The LoRA adapters that requests may name, and which of them have a place on the device.

A row holds its adapter's place from its prefill on. Where no place is free, the adapter that was held by no row for
longest makes way for the next one; where rows hold all of them, a row waits. One that is unloaded is refused to new
requests at once, and forgotten with the last row that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np
import torch

from models.decoder import Decoder
from models.described import find_model_tensors
from models.peft import CONFIG_FILE, WEIGHTS_FILE, adapters_in, check_name, copied_head, read_adapter

from ..arrays import Array
from ..errors import RequestError
from ..model.precision import TORCH_TYPES
from ..model.shards import Piece, map_piece
from .schema import Inputs, texts

NAME = "lora_name"
_PART_BYTES, _COMPARED_BYTES = 1 << 20, 1 << 26
Versions = list[tuple[int, int, int]] | None


class AdapterSteps(Protocol):
    """What all processes do for adapters; see Steps."""

    places: int

    def begin_adapter(self, number: int, path: Array, /) -> None:
        """See Steps."""

    def wait_for_adapter(self, number: int, /) -> None:
        """See Steps."""

    def end_adapter(self, number: int, /) -> None:
        """See Steps."""

    def place_adapter(self, number: int, place: int, /) -> None:
        """See Steps."""

    def drop_adapter(self, number: int, /) -> None:
        """See Steps."""


class Adapter:
    """An adapter.

    Attributes:
        name: by which requests ask for it.
        path: of its directory.
        rank: the largest of its products.
        number: by which the processes know it.
        root: what the prefix cache's pages of its rows begin with; adapters with the same content have the same.
        place: on the device; None: it has none.
        rows: of requests that are not answered yet.
        holders: rows that have their pages, and so hold the place.
        used: when a row held it last; larger is later.
        is_known: whether new requests may name it.
    """

    def __init__(self, owner: Adapters, name: str, path: Path, rank: int, number: int, root: int) -> None:
        self._owner, self.name, self.path, self.rank, self.number, self.root = owner, name, path, rank, number, root
        self.place: int | None = None
        self.rows = self.holders = self.used = 0
        self.is_known = True

    @property
    def fits(self) -> bool:
        """Whether one more row can hold its place now."""
        return self.place is not None or self._owner.has_place

    def hold(self) -> None:
        """Hold its place for one more row; it gets one if it has none."""
        if self.place is None:
            self._owner.give_place(self)
        self.holders += 1

    def release(self) -> None:
        """Hold its place for one row less."""
        self.holders -= 1
        self.used = self._owner.now()

    def note_rows(self, more: int) -> None:
        """Count rows of requests that came, or were answered; an unloaded one is forgotten with its last row."""
        self.rows += more
        self._owner.forget_unused(self)


class Adapters:
    """All adapters of an engine.

    Attributes:
        known: those that requests may name.
    """

    def __init__(self) -> None:
        self.known: dict[str, Adapter] = {}
        self._numbers, self._clock = count(1), count(1)
        self._roots: dict[str, int] = {}  # by the digest of the files
        self._leaving: list[Adapter] = []  # that rows still have
        self._steps: AdapterSteps | None = None
        self._has_begun = False
        self._decoder: Decoder | None = None
        self._model = Path()
        self._placed: list[Adapter | None] = []
        self._loading = Lock()

    def use(self, steps: AdapterSteps, decoder: Decoder | None, directory: Path) -> None:
        """Serve by these steps from now on: all that were known before, or those of a model's directory.

        Raises:
            EngineError: one is damaged, or does not fit the model.
        """
        is_first, self._steps, self._decoder, self._model = not self._has_begun, steps, decoder, directory
        self._has_begun = True
        self._placed = [None] * steps.places
        if is_first:
            for name, path in adapters_in(directory).items() if steps.places else ():
                self.load(name, path, lambda change: change())
            return
        for adapter in (*self.known.values(), *self._leaving):
            adapter.place, adapter.rows, adapter.holders = None, 0, 0
            self._begin(adapter)
            steps.end_adapter(adapter.number)

    def leave_steps(self) -> None:
        """Let go of the steps, whose memory is to be freed."""
        self._steps = None

    def load(self, name: str, path: Path, between_steps: Callable[[Callable[[], None]], None]) -> None:
        """Load an adapter, one at a time; its files are read while steps are taken.

        Args:
            name: by which requests ask for it.
            path: of its directory.
            between_steps: has the steps' thread make a change between two of them, and waits for it.

        Raises:
            EngineError: the name is taken or no name, or the directory's adapter is damaged or does not fit.
        """
        check_name(name, RequestError)
        with self._loading:
            if name in self.known:
                raise RequestError(f"an adapter '{name}' is loaded already; unload it first")
            if not self._placed or not self._decoder or not self._steps:
                hint = "max_adapters is 0, as it is where the model came without any"
                raise RequestError(f"no adapter can be loaded: {hint}")
            path, steps = path.absolute(), self._steps
            before = _versions(path)
            updates = read_adapter(path, self._decoder, RequestError)
            _check_head(path, self._model, self._decoder)
            root = self._roots.setdefault(_digest(path), -1 - len(self._roots))
            rank = max(update.rank for update in updates.values())
            adapter = Adapter(self, name, path, rank, next(self._numbers), root)
            between_steps(lambda: self._begin(adapter))
            steps.wait_for_adapter(adapter.number)
            between_steps(lambda: self._end(adapter, steps, before))

    def unload(self, name: str) -> None:
        """Refuse an adapter to new requests, and forget it with the last row that has it.

        Raises:
            RequestError: there is none of this name.
        """
        adapter = self.find(name)
        del self.known[name]
        adapter.is_known = False
        self._leaving.append(adapter)
        self.forget_unused(adapter)

    def find(self, name: str, where: str = "") -> Adapter:
        """Return the adapter of a name.

        Raises:
            RequestError: there is none.
        """
        if name in self.known:
            return self.known[name]
        if not self.known:
            raise RequestError(f"{NAME} is '{name[:80]}'{where}, and this model has no adapters; leave it out")
        names = ", ".join(sorted(self.known))
        raise RequestError(f"{NAME} is '{name[:80]}'{where}; it must be one of {names}, or left out")

    @property
    def has_place(self) -> bool:
        """Whether a place is free, or held by no row."""
        return any(each is None or not each.holders for each in self._placed)

    def give_place(self, adapter: Adapter) -> None:
        """Write an adapter to a free place, or over the one that was held by no row for longest."""
        idle = {place: each for place, each in enumerate(self._placed) if each is None or not each.holders}
        place = min(idle, key=lambda place: each.used if (each := idle[place]) else 0)
        if before := idle[place]:
            before.place = None
        self._placed[place] = None  # should the next line fail
        assert self._steps
        self._steps.place_adapter(adapter.number, place)
        self._placed[place], adapter.place = adapter, place

    def now(self) -> int:
        """Return a number that grows."""
        return next(self._clock)

    def forget_unused(self, adapter: Adapter) -> None:
        """Forget an adapter that was unloaded and that no row has."""
        if adapter.is_known or adapter.rows or adapter not in self._leaving:
            return
        self._leaving.remove(adapter)
        if adapter.place is not None:
            self._placed[adapter.place] = None
        assert self._steps
        self._steps.drop_adapter(adapter.number)

    def _begin(self, adapter: Adapter) -> None:
        assert self._steps
        self._steps.begin_adapter(adapter.number, np.frombuffer(bytes(adapter.path), np.uint8))

    def _end(self, adapter: Adapter, begun: AdapterSteps, before: Versions) -> None:
        """Let requests name an adapter that is read, if its files are still those that were checked."""
        if self._steps is not begun:  # processes were lost and started again meanwhile
            self._begin(adapter)
        assert self._steps
        self._steps.end_adapter(adapter.number)
        if _versions(adapter.path) != before:
            self._steps.drop_adapter(adapter.number)
            raise RequestError(f"{adapter.path} was written while it was read; load it again")
        self.known[adapter.name] = adapter


def parse_adapters(sent: Inputs, adapters: Adapters | None) -> list[Adapter | None]:
    """Read the adapter of each row; None: it has none, which an empty name says too.

    Raises:
        RequestError: a name is unknown.
    """
    if NAME not in sent.tensors:
        return [None] * sent.batch
    adapters = adapters or Adapters()
    return [adapters.find(name, f" in row {row}") if name else None for row, name in enumerate(texts(NAME, sent))]


def listed(adapters: Mapping[str, Adapter]) -> dict[str, dict[str, str | int]]:
    """Describe adapters by name: their directory, and their rank."""
    return {name: {"path": str(each.path), "rank": each.rank} for name, each in adapters.items()}


def _digest(directory: Path) -> str:
    digests = []
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        found = sha256()
        with (directory / name).open("rb") as stream:
            while part := stream.read(_PART_BYTES):
                found.update(part)
        digests.append(found.hexdigest())
    return " ".join(digests)


def _check_head(directory: Path, model: Path, decoder: Decoder) -> None:
    """Compare the head that an adapter was trained on, if it has it, with the model's.

    Raises:
        RequestError: they differ in the adapter's type.
    """
    if (stored := copied_head(directory, decoder, RequestError)) is None:
        return
    places = find_model_tensors(model, decoder, RequestError)
    names = [f"{decoder.names[role]}.weight" for role in ("head", "embedding")]
    place = next(places[name] for name in names if name in places)
    copied, own = (
        map_piece(folder, Piece(names[0], each.shape, TORCH_TYPES[each.data_type], file, each.offset))
        for folder, file, each in ((directory, WEIGHTS_FILE, stored), (model, place.file, place.stored))
    )
    step = max(1, _COMPARED_BYTES // (4 * decoder.hidden_units))
    pairs = zip(torch.split(copied, step), torch.split(own, step), strict=True)
    if not all(bool((first == other.to(first.dtype)).all()) for first, other in pairs):
        raise RequestError(
            f"{directory / WEIGHTS_FILE}: {names[0].removesuffix('.weight')}.base_layer is not the model's own"
            "; give an adapter of this very model, or merge it"
        )


def _versions(directory: Path) -> Versions:
    """Return what changes when an adapter's files are written; None: one is not there."""
    try:
        found = [(directory / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except (OSError, ValueError):  # a path may hold a null byte
        return None
    return [(each.st_ino, each.st_size, each.st_mtime_ns) for each in found]
