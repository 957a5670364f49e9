"""The steps of generation: what the scheduler and the sampler call, on the slots of the cache.

Rank 0 calls these; if several processes hold the network, ``parallel`` makes all of them take the same steps. So a
step's arguments are numbers and numpy arrays, and its result stays on the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..cache.block_manager import pages_of
from ..cache.kv_cache import KvCache, table_of
from ..cache.page_pool import RowPages
from ..cache.sizing import MOST_SLOTS, UNBOUNDED, upload
from ..model.network import Network
from ..model.packed_rows import NumberedRows, Rows
from ..model.prefixes import Prefix
from ..request.schema import Array
from ..sampling import scoring
from ..sampling.sampling import argmax
from .graphs import Chosen, StepGraphs
from .threads import StepThreads

_Step = TypeVar("_Step", bound=Callable[..., Any])
_collective_steps: dict[str, Callable[..., Any]] = {}


def _collective(step: _Step) -> _Step:
    """Register a method that all processes call together; see Steps.collective."""
    _collective_steps[step.__name__] = step
    return step


class Steps:
    """The steps of one process.

    Args:
        network: all of it, or this process's part.
        cache: of this process.
        prefixes: of this process's layers and heads, by task.

    Attributes:
        collective: by name, the steps that all processes take together; their arguments are passed by position.
        ids: int64 [MOST_SLOTS], on the device: the next input token of each slot.
        positions: int64 [MOST_SLOTS], on the device: the position of that token.
    """

    collective: ClassVar[Mapping[str, Callable[..., Any]]] = _collective_steps

    def __init__(self, network: Network, cache: KvCache, prefixes: Sequence[Prefix] = ()) -> None:
        self.network, self.cache, self._prefixes = network, cache, prefixes
        self.config = network.config
        self._threads = StepThreads(network)
        self.device = network.weights.like.device
        self.ids, self.positions = torch.zeros(2, MOST_SLOTS, dtype=torch.long, device=self.device)
        self._graphs: StepGraphs | None = None
        self._given: Tensor | None = None  # rank 0's hidden states, for predict
        self._decoded: Tensor | None = None  # this process's logits of the last decode

    def raise_if_rank_lost(self) -> None:
        """Raise GroupLostError if another process was lost: the device's results are then invalid."""

    def raise_if_peer_timed_out(self) -> None:
        """Raise GroupLostError if numbers are not finite because another process has timed out."""

    def allocate(
        self,
        first: int,
        rows: Sequence[RowPages],
        positions: Array,
        windows: Array | None = None,
        tasks: Array | None = None,
        ids: Array | None = None,
    ) -> None:
        """Allocate the slots from ``first`` on to new rows; arrays are int64 [n].

        Args:
            first: slot; the slots before it are unchanged.
            rows: their pages.
            positions: of each row's first token after its context.
            windows: how many tokens each row keeps; None: all.
            tasks: whose prefix each row begins with; -1, or None: no prefix.
            ids: next input token of rows that begin with a decode step; None: contexts are run first.
        """
        most = np.full(len(rows), UNBOUNDED) if windows is None else windows
        tables = (table_of([row.listed for row in rows]), table_of([row.source for row in rows]))
        self.place(first, *tables, positions, most, tasks, ids)

    @_collective
    def place(
        self,
        first: int,
        tables: Array,
        source_tables: Array,
        positions: Array,
        windows: Array,
        tasks: Array | None,
        ids: Array | None,
    ) -> None:
        """Write the block tables, int32 [n, pages], and the state of new rows; see allocate."""
        self.cache.place(first, tables, source_tables, windows)
        self.positions[first : first + len(tables)] = upload(positions, self.device)
        if ids is not None:
            self.ids[first : first + len(tables)] = upload(ids, self.device)
        for row, task in enumerate(() if tasks is None else tasks.tolist()):
            if task >= 0:
                self.cache.restore(tables[row], self._prefixes[task])

    @_collective
    def update(self, changes: Array) -> None:
        """Write pages to block tables: slot, column and page of each, int64 [3, n]."""
        self.cache.update(changes)

    @_collective
    def free(self, count: int, kept: int, targets: Array, sources: Array) -> None:
        """Free slots, and move others into the gaps.

        Args:
            count: slots in use.
            kept: slots in use afterwards.
            targets: int64 [n], slots that others move to.
            sources: int64 [n], the slots that move.
        """
        self.cache.free(count, kept, targets, sources)
        if len(targets):
            to, of = upload(np.stack((targets, sources)), self.device)
            self.ids[to], self.positions[to] = self.ids[of], self.positions[of]

    @_collective
    def encode(
        self,
        ids: Array,
        lengths: Array,
        tasks: Array,
        first: int,
        embeddings: Array | None = None,
        wants_attentions: int = 0,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the encoder, and write its output's keys and values to the slots from ``first`` on; see Network.encode.

        Args:
            ids: int64 [T], packed.
            lengths: int64 [B] of the rows, T together.
            tasks: int64 [B], IA3 task of each row; -1: none.
            first: slot of the first row.
            embeddings: see extend.
            wants_attentions: whether to return the attention weights.

        Returns:
            [T, hidden], valid until the next step; and the attention weights of each layer, or an empty list.
        """
        known = upload(np.stack((lengths, tasks)), self.device)
        self.cache.sources[:, first : first + len(lengths)] = known
        rows = NumberedRows.of(ids, np.zeros_like(lengths), lengths, first)
        attentions: list[Tensor] = []
        if self._graphs and embeddings is None and not wants_attentions:
            encoded = self._graphs.begin(rows)
            if encoded is not None:
                return encoded, attentions
        asked = attentions if wants_attentions else None
        return self.network.encode(*self._uploaded(rows, embeddings), asked), attentions

    @_collective
    def extend(self, ids: Array, starts: Array, lengths: Array, first: int, embeddings: Array | None = None) -> Tensor:
        """Run several tokens of each of the rows in the slots from ``first`` on; see Network.extend.

        Args:
            ids: int64 [T], packed.
            starts: int64 [B], position of each row's first token.
            lengths: int64 [B] of the rows, T together.
            first: slot of the first row.
            embeddings: fp32 [T, hidden], NaN where a token's own embedding is used; None: everywhere.

        Returns:
            [T, hidden], before the final norm; valid until the next step.
        """
        rows, longest = NumberedRows.of(ids, starts, lengths, first), 0
        if starts.any():
            longest = self.cache.longest(first, starts + lengths)
        if self._graphs and embeddings is None and not self.config.encoder:
            is_captured = not (longest and self.cache.has_windows)
            run = self._graphs.extend if longest else self._graphs.begin
            if is_captured and (hidden := run(rows)) is not None:
                return hidden
        return self.network.extend(*self._uploaded(rows, embeddings), longest)

    @property
    def can_chunk(self) -> bool:
        """Whether a prompt may be run in chunks: not an encoder's, and not where a GPU would continue it by torch."""
        network = self.network
        return not self.config.encoder and (not network.ops.can_capture or network.can_capture_continued)

    def can_mix(self, rows: int, tokens: int, contexts: int = 1) -> bool:
        """Say whether a step in which some rows decode, and others run some tokens, is best taken as one pass."""
        has_graph = self._graphs is not None and self._graphs.size_of_mixed(rows, tokens, contexts) > 0
        return has_graph and not self.cache.has_windows

    @_collective
    def mix(self, ids: Array, starts: Array, lengths: Array, first: int) -> tuple[Chosen, Tensor]:
        """Run one token of each of the rows before the slot ``first``, and several of the rows from there on, at once.

        Args:
            ids: int64 [T], packed, of the rows from slot ``first`` on.
            starts: int64 [B], position of each one's first token.
            lengths: int64 [B], T together.
            first: the slot; every row before it decodes.

        Returns:
            What decode returns of the rows before it, and the hidden states of the others, see extend.
        """
        ones, nothing = np.ones(first, np.int64), np.zeros(first, np.int64)
        every = np.concatenate((ones, lengths))
        rows = NumberedRows.of(np.concatenate((nothing, ids)), np.concatenate((nothing, starts)), every, 0)
        own = self.ids[:first], self.positions[:first]
        found = self._graphs.mix(rows, *own) if self._graphs else None
        hidden, logits = found or self._mix(rows, *own)
        chosen = self._choose(hidden[:first], logits, first)
        self._decoded = chosen[0]
        return chosen, hidden[first:]

    def _mix(self, rows: NumberedRows, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        placed, cache, _ = self._uploaded(rows, None)
        placed.ids[: len(ids)], placed.positions[: len(ids)] = ids, positions
        hidden = self.network.extend(placed, cache, longest=cache.most_entries)
        return hidden, self.network.logits(hidden[: len(ids)]) if self.network.weights.head else None

    def _uploaded(self, rows: NumberedRows, embeddings: Array | None) -> tuple[Rows, KvCache, Tensor | None]:
        self._threads.fit(rows.tokens.shape[1])
        given = None if embeddings is None else upload(embeddings, self.device)
        return rows.on(self.device), self.cache, given

    @_collective
    def decode(self, count: int) -> Chosen:
        """Run one token of each of the first rows, and advance their positions.

        Returns:
            Logits and argmax tokens, where this process predicts: valid until the next step. The tokens are the next
            step's input, unless set_tokens sets others.
        """
        chosen = self._graphs.decode(count) if self._graphs else None
        chosen = chosen or self._decode(count)
        self._decoded = chosen[0]
        return chosen

    def _decode(self, count: int) -> Chosen:
        self._threads.fit(count)
        rows = slice(0, count)
        ids, positions = self.ids[rows], self.positions[rows]
        hidden = self.network.decode(ids, positions, rows, self.cache)
        return self._choose(hidden, self.network.logits(hidden) if self.network.weights.head else None, count)

    def _choose(self, hidden: Tensor, logits: Tensor | None, count: int) -> Chosen:
        """Set the argmax of the first rows as their next input, and advance their positions; see decode."""
        ids, positions = self.ids[:count], self.positions[:count]
        if logits is None:
            positions += 1
            return hidden, ids
        return logits, self.network.comm.argmax(logits, ids, positions)

    def argmax(self, hidden: Tensor) -> Chosen:
        """Give the logits and the argmax tokens that follow hidden states, [N, hidden]."""
        logits = self.logits(hidden)
        return logits, argmax(logits)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [..., hidden] -> fp32 [..., V]."""
        if not self.network.comm.is_split:
            return self.network.logits(hidden)
        self._given = hidden.reshape(-1, hidden.shape[-1])
        return self.predict(len(self._given)).view(*hidden.shape[:-1], -1)

    @_collective
    def predict(self, count: int) -> Tensor:
        """Compute the logits of ``count`` hidden states of rank 0 in all processes that have a part of the head."""
        given = self._broadcast_given(count)
        if not self.network.weights.head:
            return self.network.weights.like
        return self.network.comm.gather_logits(self.network.logits(given))

    def score(self, hidden: Tensor, tokens: Array, most: int) -> Tensor:
        """Score the token after each hidden state, and the ``most`` largest: [N, hidden], [N] -> see score_rows."""
        if not self.network.comm.is_split:
            return scoring.score_rows(self.network.logits(hidden), upload(tokens, self.device), most)
        self._given = hidden
        return scoring.merge_parts(self.summarize(tokens, most), most)

    @_collective
    def summarize(self, tokens: Array, most: int) -> list[Tensor]:
        """Summarize the logits of hidden states of rank 0 in all processes that have a part of the head."""
        given = self._broadcast_given(len(tokens))
        if not self.network.weights.head:
            return []
        return self.network.comm.gather_summaries(self.network.logits(given), upload(tokens, self.device), most)

    def _broadcast_given(self, count: int) -> Tensor:
        given, self._given = self._given, None
        if given is None:
            given = self.network.weights.like.new_empty(count, self.config.hidden_units)
        return self.network.comm.broadcast(given.contiguous())

    def full_logits(self, chosen: Chosen) -> Tensor:
        """Give the logits of all tokens, fp32 [N, V], of what argmax or the last decode returned."""
        logits = chosen[0]
        return logits if logits.shape[1] == self.config.vocab_size else self.gather_logits()

    @_collective
    def gather_logits(self) -> Tensor:
        """Gather the processes' parts of the last decode step's logits, [N, V], in rank 0."""
        if not self.network.weights.head or self._decoded is None:
            return self.network.weights.like
        return self.network.comm.gather_logits(self._decoded)

    def set_tokens(self, first: int, tokens: Tensor) -> None:
        """Set the next input tokens, [N], of the slots from ``first`` on, in all processes."""
        self.ids[first : first + len(tokens)] = tokens
        self.broadcast_tokens(first, first + len(tokens))

    @_collective
    def broadcast_tokens(self, first: int, end: int) -> None:
        """Broadcast rank 0's next input tokens of slots."""
        self.network.comm.broadcast(self.ids[first:end])

    @_collective
    def capture(self, rows: int, tokens: int, continued: int = 0, mixed: int = 0) -> None:
        """Capture a step as a CUDA graph; all slots must be free.

        Args:
            rows: of a decode step; 0: the next.
            tokens: of inputs of new rows; 0: the next.
            continued: tokens of inputs that continue rows; 0: the next.
            mixed: tokens of steps in which some rows decode and one is continued.
        """
        if self._graphs is None:
            self._graphs = StepGraphs(self.network, self.cache, self._decode)
        self._graphs.capture(rows, tokens, continued, mixed)
        self.positions.zero_()
        self.cache.clear_sources()

    def copy(self, targets: Sequence[RowPages], sources: Sequence[RowPages], length: int) -> None:
        """Copy the first ``length`` entries of rows, and their encoders' output, to others; see KvCache.copy."""
        count = pages_of(length)
        both = [[page for row in rows for page in (*row.pages[:count], *row.source)] for rows in (targets, sources)]
        pages = [pair for pair in zip(*both, strict=True) if pair[0] != pair[1]]  # rows may share pages
        slots = np.array([[row.slot for row in rows] for rows in (targets, sources)])
        self.copy_pages(np.array(pages, np.int64).reshape(-1, 2).T, slots)

    @_collective
    def copy_pages(self, pages: Array, slots: Array) -> None:
        """Copy pages, int64 [2 (target, source), n], and what slots have of their encoder inputs, likewise."""
        self.cache.copy(pages, slots)

    @_collective
    def clear(self, pages: Array) -> None:
        """Zero pages, int64 [n], so that no non-finite number stays in them."""
        self.cache.clear(pages)

    def close(self) -> None:
        """Release the CUDA graphs; no step follows."""
        if self._graphs:
            self._graphs = None
            gc.collect()  # at once: NCCL cannot close its connections while a graph still uses them
