"""A network that computes nothing: its keys are the tokens themselves, and what follows depends on all that it finds.

It reads a row's tokens, or the last ones where the cache has a reach, through the page table, so a page that is lost,
shared by error or written too early changes the next token. The cache, the steps, the sampler and the scheduler around
it are the engine's own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backends.fastertransformer.engine.cache.kv_cache import PAGE, KvCache
from backends.fastertransformer.engine.cache.sizing import CacheShape, Entry
from backends.fastertransformer.engine.model.config import ModelConfig
from backends.fastertransformer.engine.ops.ops import Ops
from backends.fastertransformer.engine.ops.packed_rows import Rows
from backends.fastertransformer.engine.steps.steps import Steps

CPU = torch.device("cpu")
SHAPE = CacheShape((Entry(1, 1),), torch.float32)


class RememberingNetwork:
    """What Steps needs of a network. It counts the tokens that were run as contexts, in ``extended``."""

    def __init__(self, config: ModelConfig) -> None:
        self.config, self.ops, self.can_capture, self.extended = config, Ops(CPU), False, 0
        self.weights = SimpleNamespace(decoder=None, encoder=None, like=torch.zeros(1), head=True)
        self.comm = SimpleNamespace(is_split=False, argmax=self.ops.argmax_step, broadcast=lambda tokens: tokens)

    def extend(
        self, rows: Rows, cache: KvCache, embeddings: Any = None, longest: int = 0, adapted: Any = None
    ) -> Tensor:
        self._write(rows.ids, rows.positions, rows.slots, cache)
        self.extended += len(rows.ids)
        hidden = torch.zeros(len(rows.ids), self.config.vocab_size)
        for end in (rows.ends[1:] - 1).tolist():
            hidden[end] = self._next(int(rows.slots[end]), int(rows.positions[end]), cache)
        return hidden

    def decode(self, ids: Tensor, positions: Tensor, slots: slice, cache: KvCache, adapted: Any = None) -> Tensor:
        places = torch.arange(slots.start, slots.stop)
        self._write(ids, positions, places, cache)
        return torch.stack(
            [self._next(*place, cache) for place in zip(places.tolist(), positions.tolist(), strict=True)]
        )

    def logits(self, hidden: Tensor, out: Tensor | None = None, adapted: Any = None) -> Tensor:
        return hidden if out is None else out.copy_(hidden)

    def _write(self, ids: Tensor, positions: Tensor, slots: Tensor, cache: KvCache) -> None:
        pages = cache.page_tables[slots, positions // PAGE].long()
        cache.kv[0][0, pages, 0, positions % PAGE, 0] = ids.float()

    def _next(self, slot: int, position: int, cache: KvCache) -> Tensor:
        pages = cache.page_tables[slot].long()
        seen = cache.kv[0][0, pages, 0, :, 0].flatten()[: position + 1].long().numpy()
        seen = seen[-cache.allocator.window :]  # all, if that is 0
        weights = np.random.default_rng(hash(seen.tobytes()) % 2**63).random(self.config.vocab_size)
        return torch.from_numpy((3 * weights).astype(np.float32))


def remembering_steps(config: ModelConfig, pages: int, reach: int = 0) -> Steps:
    cache = KvCache(SHAPE, CPU, (pages + 1) * PAGE * SHAPE.token_bytes, config.max_pos_seq_len, reach=reach)
    cache.kv[0].fill_(95.0)  # what an earlier row left must not matter
    return Steps(RememberingNetwork(config), cache)  # type: ignore[arg-type]
