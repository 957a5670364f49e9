"""What generation asks of the network: a step at a time, on the slots of the cache.

The one process that samples calls these; where the network is spread over several, ``parallel`` has every other process
take the same steps. So a step's arguments are numbers and numpy arrays, and its result stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from .cache import KvCache
from .network import Network, Source
from .prefixes import Prefix
from .request import Array

_P = ParamSpec("_P")
_R = TypeVar("_R")
STEP_NAMES: list[str] = []


def _step(take: Callable[Concatenate[Steps, _P], _R]) -> Callable[Concatenate[Steps, _P], _R]:
    """Make a method one that all processes take together."""
    STEP_NAMES.append(take.__name__)

    @wraps(take)
    def together(self: Steps, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self.together(take.__name__, args):
            return take(self, *args, **kwargs)

    return together


class Steps:
    """The steps of one process. Arguments of a step are given by position.

    Args:
        network: all of it, or this process's part.
        cache: of that part.
        prefixes: of that part, by task.
    """

    def __init__(self, network: Network, cache: KvCache, prefixes: Sequence[Prefix] = ()) -> None:
        self.network, self.cache, self._prefixes = network, cache, prefixes
        self.config = network.config
        self.device = network.weights.like.device
        self._saved: dict[int, Sequence[Tensor]] = {}
        self._has_tasks = False  # whether a row ever had an IA3 task

    def together(self, name: str, arguments: Sequence[Any]) -> AbstractContextManager[None]:
        """Have the other processes take the step too; a process that is alone has none."""
        return nullcontext()

    @_step
    def reserve(self, slots: int, capacity: int, cross_capacity: int, kept: int) -> None:
        """Make room for so many slots of so many tokens; what the first ``kept`` hold stays."""
        self.cache.reserve(slots, capacity, cross_capacity, kept)

    @_step
    def encode(
        self,
        ids: Array,
        lengths: Array,
        tasks: Array,
        first: int,
        embeddings: Array | None = None,
        wants_attentions: int = 0,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the encoder, and have the slots from ``first`` on remember what it makes.

        Args:
            ids: int64 [B, S], padded.
            lengths: int64 [B].
            tasks: int64 [B], IA3 task of each row; -1: none.
            first: slot of the first row.
            embeddings: see extend.
            wants_attentions: whether somebody asks what each layer attends to.

        Returns:
            [B, S, hidden], and the latter by layer, fp32 [B, H, S, S]; empty where nobody asks.
        """
        given = None if embeddings is None else torch.from_numpy(embeddings).to(self.device)
        tokens, sources = torch.from_numpy(ids).to(self.device), np.stack((lengths, tasks), axis=1)
        slots = slice(first, first + len(ids))
        self._has_tasks |= bool((tasks >= 0).any())
        known = torch.from_numpy(sources).to(self.device)
        of_tasks = known[:, 1] if self._has_tasks else None
        attentions: list[Tensor] = []
        encoded = self.network.encode(tokens, known[:, 0], of_tasks, given, attentions if wants_attentions else None)
        if self.config.family == "t5":
            self.cache.sources[slots] = known
            self.network.remember(encoded, slots, self.cache, of_tasks)
        return encoded, attentions

    def _source(self, slots: slice, longest: int) -> Source | None:
        """Say what rows answer to, given their longest source; 0: they have none."""
        if not longest:
            return None
        known = self.cache.sources[slots]
        return Source(known[:, 0], longest, known[:, 1] if self._has_tasks else None)

    @_step
    def set_windows(self, first: int, windows: Array) -> None:
        """Say how many tokens the slots from ``first`` on keep, int64 [B]."""
        self.cache.windows[first : first + len(windows)] = torch.from_numpy(windows).to(self.device)

    @_step
    def put_prefixes(self, first: int, tasks: Array) -> None:
        """Begin the slots from ``first`` on with the prefixes of tasks, int64 [B]; -1: none."""
        for slot, task in enumerate(tasks.tolist(), first):
            if task >= 0:
                self.cache.restore(slot, self._prefixes[task])

    @_step
    def extend(
        self,
        ids: Array,
        starts: Array,
        lengths: Array,
        first: int,
        longest: int,
        longest_source: int = 0,
        embeddings: Array | None = None,
    ) -> Tensor:
        """Run several tokens of each of the rows in the slots from ``first`` on; see Network.extend.

        Args:
            ids: int64 [B, T], padded.
            starts: int64 [B].
            lengths: int64 [B].
            first: slot of the first row.
            longest: the most entries that a row has afterwards.
            longest_source: the most tokens that a row's encoder was given; 0: there is none.
            embeddings: fp32 [B, T, hidden], NaN where a token has its own; None: all have.

        Returns:
            [B, T, hidden], before the final norm.
        """
        given = None if embeddings is None else torch.from_numpy(embeddings).to(self.device)
        tokens, begins, counts = (torch.from_numpy(array).to(self.device) for array in (ids, starts, lengths))
        slots = slice(first, first + len(ids))
        past, source = begins if starts.any() else None, self._source(slots, longest_source)
        return self.network.extend(tokens, past, counts, slots, self.cache, longest, given, source)

    @_step
    def decode(self, ids: Array, positions: Array, first: int, longest: int, longest_source: int = 0) -> Tensor:
        """Run one token of each of the rows in the slots from ``first`` on: int64 [B] each -> [B, hidden]."""
        both, slots = torch.from_numpy(np.stack((ids, positions))).to(self.device), slice(first, first + len(ids))
        source = self._source(slots, longest_source)
        return self.network.decode(both[0], both[1], slots, self.cache, longest, source)

    @_step
    def copy(self, targets: Array, sources: Array, length: int) -> None:
        """Overwrite slots with what the first ``length`` entries of others hold: int64 [n] each."""
        self.cache.copy(torch.from_numpy(targets), torch.from_numpy(sources), length)

    @_step
    def wipe(self, slots: Array) -> None:
        """Forget what slots hold, int64 [n], so that no number stays that is not finite."""
        self.cache.wipe(torch.from_numpy(slots))

    @_step
    def save(self, slot: int, length: int, key: int) -> None:
        """Keep a copy of a slot's first ``length`` entries."""
        self._saved[key] = self.cache.save(slot, length)

    @_step
    def restore(self, slot: int, key: int) -> None:
        """Put back what was saved under a key."""
        self.cache.restore(slot, self._saved[key])

    @_step
    def forget(self, key: int) -> None:
        """Drop what was saved under a key, if anything."""
        self._saved.pop(key, None)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [..., hidden] -> fp32 [..., V]."""
        return self.network.logits(hidden)

    def close(self) -> None:
        """Take leave: no step follows."""
