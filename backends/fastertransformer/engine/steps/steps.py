"""What generation asks of the network: a step at a time, on the slots of the cache.

The one process that samples calls these; where the network is spread over several, ``parallel`` has every other process
take the same steps. So a step's arguments are numbers and numpy arrays, and its result stays on the device.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..cache.kv_cache import KvCache
from ..cache.sizing import MOST_SLOTS, upload
from ..model.network import Network
from ..model.packed_rows import NumberedRows, Rows
from ..model.prefixes import Prefix
from ..request.parse import Array
from ..sampling.sampling import argmax
from .graphs import Chosen, StepGraphs, most_rows
from .threads import Threads

_P = ParamSpec("_P")
_R = TypeVar("_R")
STEP_NAMES: list[str] = []
_log = logging.getLogger(__name__)


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

    Attributes:
        ids: int64 [MOST_SLOTS], on the device: the token of each slot that comes next into the network.
        positions: int64 [MOST_SLOTS], on the device: where that stands.
    """

    def __init__(self, network: Network, cache: KvCache, prefixes: Sequence[Prefix] = ()) -> None:
        self.network, self.cache, self._prefixes = network, cache, prefixes
        self.config = network.config
        self._threads = Threads(network)
        self.device = network.weights.like.device
        self.ids, self.positions = torch.zeros(2, MOST_SLOTS, dtype=torch.long, device=self.device)
        self._saved: dict[int, list[int]] = {}
        self._graphs: StepGraphs | None = None
        self._warned: set[str] = set()  # kinds of steps that ran without a CUDA graph
        self._given: Tensor | None = None  # rank 0's hidden states that are asked about
        self._decoded: Tensor | None = None  # this process's logits of the last decode

    def together(self, name: str, arguments: Sequence[object]) -> AbstractContextManager[None]:
        """Have the other processes take the step too; a process that is alone has none."""
        return nullcontext()

    def raise_if_rank_lost(self) -> None:
        """Raise GroupLostError where another process was lost: what the device gives then means nothing."""

    def raise_if_peer_timed_out(self) -> None:
        """Raise GroupLostError where numbers are not finite because another process has stopped answering."""

    @_step
    def place(
        self,
        first: int,
        needs: Array,
        positions: Array,
        windows: Array,
        sources: Array,
        keys: Array,
        tasks: Array,
        ids: Array | None = None,
    ) -> None:
        """Give the slots from ``first`` on to new rows; int64 [n] each.

        Args:
            first: slot; those before it keep what they have.
            needs: entries of the cache that each will take.
            positions: where each row stands behind its context.
            windows: how many tokens each keeps.
            sources: tokens that each row's encoder is given; 0: there is none.
            keys: what each goes on from, see save; -1: nothing.
            tasks: whose prefix each begins with; -1: nobody's.
            ids: what comes next into the network, of rows that begin with a step; None: contexts are run.
        """
        saved = {slot: self._saved.pop(key) for slot, key in enumerate(keys.tolist(), first) if key >= 0}
        self.cache.place(first, needs, windows, sources, saved)
        self.positions[first : first + len(needs)] = upload(positions, self.device)
        if ids is not None:
            self.ids[first : first + len(needs)] = upload(ids, self.device)
        for slot, task in enumerate(tasks.tolist(), first):
            if task >= 0:
                self.cache.restore(slot, self._prefixes[task])

    @_step
    def leave(self, count: int, kept: int, targets: Array, sources: Array) -> None:
        """Free slots; see KvCache.leave."""
        self.cache.leave(count, kept, targets, sources)
        if len(targets):
            to, of = upload(np.stack((targets, sources)), self.device)
            self.ids[to], self.positions[to] = self.ids[of], self.positions[of]

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
            ids: int64 [T], one row behind the other.
            lengths: int64 [B] of the rows, T together.
            tasks: int64 [B], IA3 task of each row; -1: none.
            first: slot of the first row.
            embeddings: see extend.
            wants_attentions: whether somebody asks what each layer attends to.

        Returns:
            [T, hidden], good until the next step; and the latter by layer, fp32 [B, H, S, S], S being the longest row;
            empty where nobody asks.
        """
        known = upload(np.stack((lengths, tasks)), self.device)
        self.cache.sources[:, first : first + len(lengths)] = known
        rows = NumberedRows.of(ids, np.zeros_like(lengths), lengths, first)
        attentions: list[Tensor] = []
        if embeddings is None and not wants_attentions and (encoded := self._captured(rows)) is not None:
            return encoded, attentions
        asked = attentions if wants_attentions else None
        return self.network.encode(*self._uploaded(rows, embeddings), asked), attentions

    @_step
    def extend(self, ids: Array, starts: Array, lengths: Array, first: int, embeddings: Array | None = None) -> Tensor:
        """Run several tokens of each of the rows in the slots from ``first`` on; see Network.extend.

        Args:
            ids: int64 [T], one row behind the other.
            starts: int64 [B], where each row's first one stands.
            lengths: int64 [B] of the rows, T together.
            first: slot of the first row.
            embeddings: fp32 [T, hidden], NaN where a token has its own; None: all have.

        Returns:
            [T, hidden], before the final norm; good until the next step.
        """
        rows, longest = NumberedRows.of(ids, starts, lengths, first), 0
        if starts.any():
            room = self.cache.room(slice(first, first + len(lengths)))
            longest = min(int((starts + lengths).max()), room)
        is_plain = not longest and embeddings is None and not self.config.encoder
        if is_plain and (hidden := self._captured(rows)) is not None:
            return hidden
        return self.network.extend(*self._uploaded(rows, embeddings), longest)

    def _captured(self, rows: NumberedRows) -> Tensor | None:
        """Run new rows by what was captured; None: that has no room for them."""
        if not self._graphs:
            return None
        if (hidden := self._graphs.begin(rows)) is None:
            most, (_, tokens), count = self._graphs.largest_input, rows.tokens.shape, len(rows.lengths)
            limit = f"inputs of up to {most} tokens and {most_rows(most)} rows" if most else "no inputs"
            self._warn_uncaptured("input", f"{tokens} tokens in {count} rows", limit)
        return hidden

    def _warn_uncaptured(self, kind: str, size: str, limit: str) -> None:
        """Warn, once for each kind, of what no CUDA graph has room for."""
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning(
                "%s of %s runs without a CUDA graph, which is slower: graphs were captured of %s", kind, size, limit
            )

    def _uploaded(self, rows: NumberedRows, embeddings: Array | None) -> tuple[Rows, KvCache, Tensor | None]:
        self._threads.fit(rows.tokens.shape[1])
        given = None if embeddings is None else upload(embeddings, self.device)
        return rows.on(self.device), self.cache, given

    @_step
    def decode(self, count: int) -> Chosen:
        """Run one token of each of the first rows, and go on to their next positions.

        Returns:
            What follows, where this process predicts: good until the next step. The argmax tokens are what the next
            step goes on from, unless ids is written to.
        """
        chosen = self._graphs.decode(count) if self._graphs else None
        if self._graphs and not chosen:
            self._warn_uncaptured("decode step", f"{count} rows", f"steps of up to {self._graphs.largest_step} rows")
        chosen = chosen or self._decode(count)
        self._decoded = chosen[0]
        return chosen

    def _decode(self, count: int) -> Chosen:
        self._threads.fit(count)
        rows = slice(0, count)
        ids, positions = self.ids[rows], self.positions[rows]
        hidden = self.network.decode(ids, positions, rows, self.cache)
        if not self.network.weights.head:
            positions += 1
            return hidden, ids
        logits = self.network.logits(hidden)
        return logits, self.network.comm.argmax(logits, ids, positions)

    def choose(self, hidden: Tensor) -> Chosen:
        """Say what follows hidden states, [N, hidden]."""
        logits = self.logits(hidden)
        return logits, argmax(logits)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [..., hidden] -> fp32 [..., V]."""
        if not self.network.comm.is_split:
            return self.network.logits(hidden)
        self._given = hidden.reshape(-1, hidden.shape[-1])
        return self.predict(len(self._given)).view(*hidden.shape[:-1], -1)

    @_step
    def predict(self, count: int) -> Tensor:
        """Say what follows rank 0's hidden states, so many of them, by all processes that have a part of the head."""
        given, self._given = self._given, None
        if given is None:
            given = self.network.weights.like.new_empty(count, self.config.hidden_units)
        comm = self.network.comm
        given = comm.broadcast(given.contiguous())
        if not self.network.weights.head:
            return self.network.weights.like
        return comm.gather_logits(self.network.logits(given))

    def whole(self, chosen: Chosen) -> Tensor:
        """Give the logits of all tokens, fp32 [N, V], of what choose or the last decode gave."""
        logits = chosen[0]
        return logits if logits.shape[1] == self.config.vocab_size else self.gather()

    @_step
    def gather(self) -> Tensor:
        """Put together what the processes have of the logits of the last decode, [N, V]."""
        if not self.network.weights.head or self._decoded is None:
            return self.network.weights.like
        return self.network.comm.gather_logits(self._decoded)

    def go_on_with(self, first: int, tokens: Tensor) -> None:
        """Have the slots from ``first`` on begin their next step with tokens, [N]."""
        self.ids[first : first + len(tokens)] = tokens
        self.tell(first, first + len(tokens))

    @_step
    def tell(self, first: int, end: int) -> None:
        """Let every process know rank 0's tokens of slots."""
        self.network.comm.broadcast(self.ids[first:end])

    @_step
    def capture(self, rows: int, tokens: int) -> None:
        """Have a graph of the steps of so many rows, or of contexts of so many tokens; no slot may be in use."""
        if self._graphs is None:
            self._graphs = StepGraphs(self.network, self.cache, self._decode)
        self._graphs.capture(rows, tokens)
        self.positions.zero_()
        self.cache.forget_sources()

    @_step
    def copy(self, targets: Array, sources: Array, length: int) -> None:
        """Overwrite slots with what the first ``length`` entries of others hold: int64 [n] each."""
        self.cache.copy(targets, sources, length)

    @_step
    def wipe(self, slots: Array) -> None:
        """Forget what slots hold, int64 [n], so that no number stays that is not finite."""
        self.cache.wipe(slots)

    @_step
    def save(self, slot: int, length: int, key: int) -> None:
        """Keep a slot's first ``length`` entries; the slot is about to be left."""
        self._saved[key] = self.cache.save(slot, length)

    @_step
    def forget(self, key: int) -> None:
        """Drop what was saved under a key, if anything."""
        if key in self._saved:
            self.cache.forget(self._saved.pop(key))

    def close(self) -> None:
        """Take leave: no step follows."""
        if self._graphs:
            self._graphs = None
            gc.collect()  # at once: NCCL does not part from a process while a graph still uses it
