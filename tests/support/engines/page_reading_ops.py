"""Operations in torch that read and write a row's pages where a GPU's kernels do, and steps that take it for a GPU.

Torch's own attention of a row that is continued takes the keys and values of the call's tokens as they are given; the
kernels write them to the row's pages first, and read all from there. So only these operations show on a CPU that a pass
reads a page that the row does not have. Page 0, where everybody writes, holds NaN whenever it could be read.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backends.fastertransformer.engine import loading
from backends.fastertransformer.engine.arrays import MOST_SLOTS
from backends.fastertransformer.engine.cache.kv_cache import PAGE, KvCache
from backends.fastertransformer.engine.ops.drafted_states import DraftedStates
from backends.fastertransformer.engine.ops.ops import Ops
from backends.fastertransformer.engine.ops.packed_rows import Rows
from backends.fastertransformer.engine.ops.positions import Attend, AttentionSpec
from backends.fastertransformer.engine.ops.state_rows import StateRows
from backends.fastertransformer.engine.ops.torch_attention import attend_masked, biased
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.steps import Steps
from support.engines.faked_graphs import fake_graphs
from support.engines.paged_steps import paged_steps


class PageReadingOps(Ops):
    """See above; rows that keep their last tokens only are not among what it runs."""

    can_capture = can_capture_experts = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.latent.can_capture = True

    def state_rows(self, states: Tensor, rows: Rows | None) -> StateRows:
        told = _told(rows) if rows else None
        return super().state_rows(states[: len(told.lengths or ())] if told else states, told)

    def drafted_states(self, states: Tensor, rows: Rows) -> DraftedStates:
        told = _told(rows)
        return super().drafted_states(states[: len(told.lengths or ())], told)

    def kv_write(self, kv: Tensor, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        super().kv_write(kv, pages, offsets, k, v)
        kv[:, 0] = float("nan")

    def extend_attention(self, cache: KvCache, rows: Rows, longest: int, spec: AttentionSpec, like: Tensor) -> Attend:
        assert not cache.has_windows
        rotate = spec.rotation(rows.positions[None], like)
        places = cache.page_tables[rows.slots, rows.positions // PAGE], rows.positions % PAGE
        ends = rows.ends.tolist()

        def attend(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
            q, k = (rotate(q), rotate(k)) if rotate else (q, k)
            self.kv_write(kv, *places, k[0], v[0])
            attended = torch.zeros_like(q)
            for begin, end in zip(ends, ends[1:], strict=False):
                if end > begin and int(slot := rows.slots[begin]) < MOST_SLOTS:
                    own, positions = slice(begin, end), rows.positions[begin:end]
                    table = cache.page_tables[slot]
                    attended[:, :, own] = _attend_to_pages(q[:, :, own], kv, table, positions, spec, sinks)
            return attended

        return self._with_norms(attend)

    def decode_attention(
        self, positions: Tensor, tables: Tensor, windows: Tensor, spec: AttentionSpec, like: Tensor
    ) -> Attend:
        rotate = spec.rotation(positions[:, None], like)
        pages = tables.gather(1, (positions // PAGE).clamp(max=tables.shape[1] - 1)[:, None])[:, 0]

        def attend(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
            q, k = (rotate(q), rotate(k)) if rotate else (q, k)
            self.kv_write(kv, pages, positions % PAGE, k[:, :, 0].transpose(0, 1), v[:, :, 0].transpose(0, 1))
            attended = torch.zeros_like(q)
            for row in torch.nonzero(windows > 1)[:, 0].tolist():  # the others are free slots
                own = slice(row, row + 1)
                attended[own] = _attend_to_pages(q[own], kv, tables[row], positions[own], spec, sinks)
            return attended

        return self._with_norms(attend)


def _told(rows: Rows) -> Rows:
    """Tell the host the lengths of rows; the last have no tokens, and are left out, but for one if all have none."""
    lengths = [length for length in rows.ends.diff().tolist() if length] or [len(rows.ids)]
    return rows._replace(ends=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0), lengths=lengths)


def _attend_to_pages(
    q: Tensor, kv: Tensor, table: Tensor, positions: Tensor, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Attend from some tokens of a row, q [1, H, n, D], to what its pages hold then."""
    reach = spec.window or int(positions[-1]) + 1
    first, last = max(0, int(positions[0]) + 1 - reach), int(positions[-1])
    pages = table[first // PAGE : last // PAGE + 1].long()
    held = torch.arange(first, last + 1)
    entries = kv[:, pages].transpose(1, 2).flatten(2, 3)[:, :, first % PAGE :][:, :, : len(held)]
    is_seen = (held <= positions[:, None]) & (held > positions[:, None] - reach)
    bias = spec.bias(positions[None], held[None]) if spec.bias else None
    return attend_masked(q, entries[:1], entries[-1:], biased(is_seen[None, None], bias, q), spec, sinks=sinks)


def captured_steps(settings: Settings, pages: int, monkeypatch: pytest.MonkeyPatch, *mixed: int) -> Steps:
    """Open steps that have captured decode steps of 16 rows, inputs that go on, and mixed steps of these sizes."""
    monkeypatch.setattr(loading, "choose_ops", PageReadingOps)
    fake_graphs(monkeypatch)
    steps = paged_steps(settings, pages)
    for sizes in ((16, 0), (0, 0, 64), *((0, 0, 0, size) for size in mixed)):
        steps.capture(*sizes)
    return steps
