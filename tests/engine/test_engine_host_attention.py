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
