"""The steps of generation: what the scheduler and the sampler call, on the slots of the cache.

Rank 0 calls these; if several processes hold the network, ``parallel`` makes all of them take the same steps. So a
step's arguments are numbers and numpy arrays, and its result stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from ..arrays import MOST_SLOTS, Array, upload
from ..cache.kv_cache import KvCache
from ..model.adapters import AdapterPlaces
from ..model.network import Network
from ..model.prefixes import Prefix
from ..ops.adapted_rows import AdaptedRows
from ..ops.drafted_states import DraftedStates
from ..ops.logits import argmax
from ..ops.packed_rows import NumberedRows, Rows
from .collective import Collective, collective_step
from .graphs import Chosen, StepGraphs
from .predictions import Predictions
from .slots import RowSlots
from .threads import StepThreads

# Rows whose decode step reads about as many experts as an input does, 8 of 128 each.
_MANY_ROWS = 16


class Steps(Collective):
    """The steps of one process.

    Args:
        network: all of it, or this process's part.
        cache: of this process.
        prefixes: of this process's layers and heads, by task.
        adapters: of this process; None: rows cannot have any.
        drafting: the steps of a draft model, which this process computes alone; None: there is none, or another has it.

    Attributes:
        slots: what is in them.
        predictions: logits.
        config: of the network.
        device: of the network and the cache.
        places: of adapters on the device.
    """

    def __init__(
        self,
        network: Network,
        cache: KvCache,
        prefixes: Sequence[Prefix] = (),
        adapters: AdapterPlaces | None = None,
        drafting: Steps | None = None,
    ) -> None:
        self.network, self.cache, self.adapters, self.drafting = network, cache, adapters, drafting
        self.places = adapters.count if adapters else 0
        self.config, self.device = network.config, network.weights.like.device
        self.slots, self.predictions = (
            RowSlots(network, cache, prefixes, self.places),
            Predictions(network, self.places),
        )
        self._threads, self._has_experts = StepThreads(network), network.config.has_experts
        self._drafted: DraftedStates | StepGraphs | None = None  # of the last step, until its right tokens are known
        self._graphs: StepGraphs | None = None
        self._adapted_graphs: StepGraphs | None = None  # of calls some of whose rows have adapters

    def raise_if_rank_lost(self) -> None:
        """Raise GroupLostError if another process was lost: the device's results are then invalid."""

    def raise_if_peer_timed_out(self) -> None:
        """Raise GroupLostError if numbers are not finite because another process has timed out."""

    @collective_step
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

    @collective_step
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
        return self._extend(NumberedRows.of(ids, starts, lengths, first), starts, embeddings)

    def _extend(self, rows: NumberedRows, starts: Array, embeddings: Array | None = None) -> Tensor:
        longest, first, lengths = 0, int(rows.tokens[2, 0]), rows.lengths
        if starts.any():
            longest = self.cache.longest(first, starts + lengths)
        adapters = self.slots.adapters_of(rows.tokens[2])
        graphs = self._graphs if adapters is None else self._adapted_graphs
        if graphs and embeddings is None and not self.config.encoder:
            is_captured = not (longest and (self.cache.has_windows or self._continues_plainly(rows)))
            run = graphs.extend if longest else graphs.begin
            if is_captured and (hidden := run(rows)) is not None:
                return hidden
        return self.network.extend(*self._uploaded(rows, embeddings), longest, self._adapted(adapters))

    def _continues_plainly(self, rows: NumberedRows) -> bool:
        return self.network.is_latent and self.network.ops.latent.continues_plainly(rows.starts, rows.lengths)

    def _adapted(self, adapters: Array | None) -> AdaptedRows | None:
        """Prepare the products of adapters, given the place of each token's; None: no token has any."""
        if adapters is None:
            return None
        return self.network.ops.adapted_rows(upload(adapters, self.device), self.places, adapters)

    @property
    def can_chunk(self) -> bool:
        """Whether a prompt may be run in chunks: not an encoder's, and not where a GPU would attend to it by torch."""
        network = self.network
        is_fast = not network.ops.can_capture or network.can_capture_continued
        return not self.config.encoder and is_fast

    def can_mix(self, rows: int, tokens: int, contexts: int = 1) -> bool:
        """Return whether a step in which some rows decode, and others run some tokens, is best taken as one pass.

        It is if there is a graph of it, and for inputs so large that they need no graph: see warmup.py. Nor does one
        need it that is larger than those of which there are graphs where many rows decode by experts: these are read
        for both at once, and that takes longer than to launch kernel by kernel. Where torch attends to the cache,
        because there is a bias, a prompt is faster in a pass of its own.
        """
        if not (graphs := self._mixing_graphs):
            return False
        largest = graphs.largest_input
        if self._has_experts and rows >= _MANY_ROWS:
            largest = min(largest, graphs.largest_mixed)
        is_large = tokens > largest > 0
        return is_large or graphs.size_of_mixed(rows, tokens, contexts) > 0

    def mixed_room(self, rows: int) -> int:
        """Return the tokens that contexts may have in one captured pass with rows that decode; 0: there is none."""
        return graphs.mixed_room(rows) if (graphs := self._mixing_graphs) else 0

    @property
    def _mixing_graphs(self) -> StepGraphs | None:
        if self._graphs is None or self.cache.has_windows or not self.network.can_capture_continued:
            return None
        return self._graphs

    @collective_step
    def mix(self, ids: Array, starts: Array, lengths: Array, first: int) -> tuple[Chosen, Tensor, Chosen | None]:
        """Run one token of each of the rows before the slot ``first``, and several of the rows from there on, at once.

        Args:
            ids: int64 [T], packed, of the rows from slot ``first`` on.
            starts: int64 [B], position of each one's first token.
            lengths: int64 [B], T together.
            first: the slot; every row before it decodes.

        Returns:
            What decode returns of the rows before it; the hidden states of the others, see extend; and the logits and
            argmax tokens that follow these, a row each, if they were computed: then they are valid until the next step.
        """
        ones, nothing = np.ones(first, np.int64), np.zeros(first, np.int64)
        every = np.concatenate((ones, lengths))
        rows = NumberedRows.of(np.concatenate((nothing, ids)), np.concatenate((nothing, starts)), every, 0)
        own_ids, positions = self.slots.ids[:first], self.slots.positions[:first]
        graphs = self._graphs if self.slots.adapters_of(rows.tokens[2]) is None else self._adapted_graphs
        found = graphs.mix(rows, own_ids, positions) if graphs and not self._continues_plainly(rows) else None
        hidden, logits, following = found or (*self._mix(rows, own_ids, positions), None)
        chosen = self._choose(hidden[:first], logits, first)
        self.predictions.decoded = chosen[0]
        if following is None or self.network.comm.is_split:
            return chosen, hidden[first:], None
        return chosen, hidden[first:], (following, argmax(following))

    def _mix(self, rows: NumberedRows, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        placed, cache, _ = self._uploaded(rows, None)
        placed.ids[: len(ids)], placed.positions[: len(ids)] = ids, positions
        adapted = self._adapted(self.slots.adapters_of(rows.tokens[2]))
        hidden = self.network.extend(placed, cache, longest=cache.most_entries, adapted=adapted)
        if not self.network.weights.head:
            return hidden, None
        first = slice(0, len(ids))
        return hidden, self.network.logits(hidden[first], None, adapted and adapted.part(first))

    def _uploaded(self, rows: NumberedRows, embeddings: Array | None) -> tuple[Rows, KvCache, Tensor | None]:
        self._threads.fit(rows.tokens.shape[1])
        given = None if embeddings is None else upload(embeddings, self.device)
        return rows.on(self.device), self.cache, given

    @property
    def problem_with_drafts(self) -> str:
        """Why no step verifies drafts; empty: steps do."""
        if self.network.ops.can_capture and not self.network.can_capture_continued:
            return "on a GPU this model's rows are continued by torch, row by row"
        return ""

    def can_verify(self, rows: int, tokens: int) -> bool:
        """Return whether a step may run some tokens of some rows: on a GPU if there is a graph of it."""
        if tokens > MOST_SLOTS:
            return False
        if not self.network.ops.can_capture:
            return True
        has_graph = self._graphs is not None and self._graphs.has_drafts(rows, tokens)
        return has_graph and not self.cache.has_windows

    @collective_step
    def verify(self, ids: Array, starts: Array, lengths: Array) -> Tensor:
        """Run the next token of each of the first rows, and the drafts behind it; like extend otherwise.

        Torch decodes them, as if each token were a row: it writes all keys and values before it reads any, and reads
        a row's in place. On a GPU a decode step's kernel does both at once, and this is an input that continues rows.
        """
        rows, is_gpu = NumberedRows.of(ids, starts, lengths, 0), self.network.ops.can_capture
        if is_gpu and not self.cache.states:
            return self._extend(rows, starts)
        adapters = self.slots.adapters_of(rows.tokens[2])
        graphs = self._graphs if adapters is None else self._adapted_graphs
        if graphs and is_gpu and (hidden := graphs.draft(rows)) is not None:
            self._drafted = graphs
            return hidden
        placed, cache, _ = self._uploaded(rows, None)
        adapted, drafted = self._adapted(adapters), None
        if cache.states:
            drafted = self.network.ops.drafted_states(cache.states.of_slots[placed.row_slots], placed)
        self._drafted = drafted
        if is_gpu:
            return self.network.extend(placed, cache, None, cache.longest(0, starts + lengths), adapted, drafted)
        return self.network.decode(placed.ids, placed.positions, placed.slots, cache, adapted, drafted)

    @collective_step
    def settle(self, counts: Array) -> None:
        """Let the states of rows go on by the first tokens that verify ran of each, int64 [B]."""
        drafted, self._drafted = self._drafted, None
        assert drafted, "no step has run drafts"
        drafted.settle(upload(counts.astype(np.int32), self.device))

    @collective_step
    def decode(self, count: int) -> Chosen:
        """Run one token of each of the first rows, and advance their positions.

        Rows after them, which have just joined, stay as they are.

        Returns:
            Logits and argmax tokens, where this process predicts: valid until the next step. The tokens are the next
            step's input, unless set_tokens sets others.
        """
        chosen, adapters = None, self.slots.adapters_of(slice(0, count))
        if graphs := self._graphs if adapters is None else self._adapted_graphs:
            # Its padding would write to rows that have joined.
            with self.slots.hidden(count, graphs.rows_of_step(count)):
                chosen = graphs.decode(count)
        chosen = chosen or self._decode(count, None, self._adapted(adapters))
        self.predictions.decoded = chosen[0]
        return chosen

    def _decode(self, count: int, out: Tensor | None = None, adapted: AdaptedRows | None = None) -> Chosen:
        self._threads.fit(count)
        rows = slice(0, count)
        ids, positions = self.slots.ids[rows], self.slots.positions[rows]
        hidden = self.network.decode(ids, positions, rows, self.cache, adapted)
        logits = self.network.logits(hidden, out, adapted) if self.network.weights.head else None
        return self._choose(hidden, logits, count)

    def _choose(self, hidden: Tensor, logits: Tensor | None, count: int) -> Chosen:
        """Set the argmax of the first rows as their next input, and advance their positions; see decode."""
        ids, positions = self.slots.ids[:count], self.slots.positions[:count]
        if logits is None:
            positions += 1
            return hidden, ids
        return logits, self.network.comm.argmax(logits, ids, positions)

    @collective_step
    def capture(self, rows: int, tokens: int, continued: int = 0, mixed: int = 0, is_adapted: int = 0) -> None:
        """Capture a step as a CUDA graph; all slots must be free.

        Args:
            rows: of a decode step; 0: the next.
            tokens: of inputs of new rows; 0: the next.
            continued: tokens of inputs that continue rows; 0: the next.
            mixed: tokens of steps in which some rows decode and one is continued.
            is_adapted: whether rows may have adapters.
        """
        if self._graphs is None:
            self._graphs = StepGraphs(self.network, self.cache, self._decode)
        graphs = self._graphs
        if is_adapted:
            self._adapted_graphs = graphs = self._adapted_graphs or self._graphs.of_adapted(
                self.slots.adapters, self.places
            )
        graphs.capture(rows, tokens, continued, mixed)
        self.slots.positions.zero_()
        self.cache.clear_sources()

    def release_graphs(self) -> None:
        """Release the CUDA graphs: NCCL does not close its connections while a graph uses them. No step follows."""
        for graphs in filter(None, (self._graphs, self._adapted_graphs)):
            graphs.release()
        if self.drafting:
            self.drafting.release_graphs()

    @collective_step
    def begin_adapter(self, number: int, path: Array) -> None:
        """Begin to read an adapter to the host of each process, under a number; its path is UTF-8, uint8 [n]."""
        assert self.adapters, "there are places"
        self.adapters.begin(number, Path(path.tobytes().decode()))

    def wait_for_adapter(self, number: int) -> None:
        """Wait until one that was begun is read in this process; any thread may."""
        assert self.adapters, "there are places"
        self.adapters.wait(number)

    @collective_step
    def end_adapter(self, number: int) -> None:
        """Keep an adapter that was begun; processes that still read it end first."""
        assert self.adapters, "there are places"
        self.adapters.end(number)

    @collective_step
    def place_adapter(self, number: int, place: int) -> None:
        """Write an adapter to a place of each device."""
        assert self.adapters, "there are places"
        self.adapters.place(number, place)

    @collective_step
    def drop_adapter(self, number: int) -> None:
        """Forget an adapter that no row has any more."""
        assert self.adapters, "there are places"
        self.adapters.drop(number)

    def close(self) -> None:
        """End the steps; none follows."""
        self.release_graphs()
