"""Attention of one token of each row by a kernel in C, against torch's over the same pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engines.network_runs import CPU
from torch import Tensor

from backends.fastertransformer.engine.cache.page_allocator import PAGE
from backends.fastertransformer.engine.ops.host_ops import HostOps
from backends.fastertransformer.engine.ops.linear import HeadNorms, Norm
from backends.fastertransformer.engine.ops.ops import Ops
from backends.fastertransformer.engine.ops.positions import AttentionSpec, Rotary, plain_frequencies

PAGES = 40


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def poisoned_cache(kv_heads: int, size: int, seen: Tensor) -> Tensor:
    """Make a layer's cache in which entries that no row has are not finite; seen: counted over all pages."""
    kv = drawn(2, PAGES * PAGE, kv_heads, size)
    others = torch.ones(PAGES * PAGE, dtype=torch.bool)
    others[seen] = False
    kv[:, others] = float("nan")
    return kv.view(2, PAGES, PAGE, kv_heads, size).transpose(2, 3)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 8), (6, 2, 64), (5, 1, 20), (2, 2, 128)])
@pytest.mark.parametrize("rotary", ["", "halves", "pairs", "part"])
def test_a_token_attends_as_by_torch(heads: int, kv_heads: int, size: int, rotary: str) -> None:
    """Rows of one token, of a page and more, and one whose window has come round, so that it overwrites an entry."""
    positions, windows = torch.tensor([0, 31, 32, 95, 70]), torch.tensor([1 << 30, 1 << 30, 1 << 30, 1 << 30, 40])
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1))
    tables = order[:20].view(5, 4).int()
    lengths = torch.minimum(positions + 1, windows).tolist()
    places = [
        tables[row, torch.arange(length) // PAGE] * PAGE + torch.arange(length) % PAGE
        for row, length in enumerate(lengths)
    ]
    width = size // 2 if rotary == "part" else size
    turns = Rotary(width, rotary == "pairs", plain_frequencies(width), 1.5) if rotary else None
    spec = AttentionSpec(0.3, rotary=turns)
    qkv = drawn(5, 1, (heads + 2 * kv_heads) * size, seed=2).view(5, 1, -1, size).transpose(1, 2)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    norms = HeadNorms(*(Norm(1 + drawn(size, seed=seed), None, 1e-5, is_rms=True) for seed in (3, 4)))
    ways: list[dict[str, Any]] = [{}, {"norms": norms}, {"sinks": drawn(heads)}]
    for given in ways:
        found, caches = [], []
        for ops in (Ops(CPU), HostOps(CPU)):
            kv = poisoned_cache(kv_heads, size, torch.cat(places))
            found.append(ops.decode_attention(positions, tables, windows, spec, q)(q, k, v, kv, **given))
            caches.append(kv.nan_to_num(7.0))
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(caches[1], caches[0], rtol=1e-5, atol=1e-5)


def test_tokens_of_one_row_see_each_other_whatever_their_order() -> None:
    """Drafts are decoded so: the last token's keys are needed by none, and the first one's by all."""
    table, positions = torch.arange(1, 5).int(), torch.tensor([72, 71, 70, 69, 68])
    q, k, v = (drawn(5, heads, 1, 16, seed=heads) for heads in (4, 2, 2))
    spec, windows = AttentionSpec(0.3, rotary=Rotary(16, False, plain_frequencies(16), 1.0)), torch.full((5,), 1 << 30)
    seen, found = PAGE + torch.arange(68), []
    for ops in (Ops(CPU), HostOps(CPU)):
        kv = poisoned_cache(2, 16, seen)
        found.append(ops.decode_attention(positions, table.expand(5, -1), windows, spec, q)(q, k, v, kv))
    kv, alone = poisoned_cache(2, 16, seen), torch.empty_like(q)
    for at in reversed(range(5)):  # a step for each
        own = slice(at, at + 1)
        attend = Ops(CPU).decode_attention(positions[own], table[None], windows[own], spec, q)
        alone[own] = attend(q[own], k[own], v[own], kv)
    for each in found:
        torch.testing.assert_close(each, alone, rtol=1e-5, atol=1e-5)
