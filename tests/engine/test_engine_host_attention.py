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


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(10, 5, 64), (2, 2, 128), (5, 5, 20)])
def test_threads_share_rows_and_parts_of_their_heads(rows: int, heads: int, kv_heads: int, size: int) -> None:
    """With long rows; the numbers are torch's, and the same to the last bit for any number of threads."""
    pages, length, threads = 48, 1500, torch.get_num_threads()
    q, k, v = (drawn(rows, each, 1, size, seed=each) for each in (heads, kv_heads, kv_heads))
    tables = torch.arange(rows * pages).view(rows, pages).int()
    positions, windows = torch.full((rows,), length - 1), torch.full((rows,), 1 << 30)
    kv = drawn(2, rows * pages * PAGE, kv_heads, size).view(2, -1, PAGE, kv_heads, size).transpose(2, 3)
    found = []
    try:
        for count, ops in ((1, Ops(CPU)), (1, HostOps(CPU)), (3, HostOps(CPU)), (2, HostOps(CPU))):
            torch.set_num_threads(count)
            found.append(ops.decode_attention(positions, tables, windows, AttentionSpec(0.3), q)(q, k, v, kv))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1], found[2]) and torch.equal(found[1], found[3])


def test_extreme_scores_and_what_is_no_number_are_as_by_torch() -> None:
    positions, windows, tables = torch.tensor([40, 40, 40, 0]), torch.full((4,), 1 << 30), torch.arange(8).view(4, 2)
    q, k, v = (drawn(4, heads, 1, 16, seed=heads) for heads in (4, 2, 2))
    q[0] *= 1e4  # one entry takes it all
    q[1, 2] = float("nan")
    found = []
    for ops in (Ops(CPU), HostOps(CPU)):
        kv = drawn(2, 8 * PAGE, 2, 16).view(2, 8, PAGE, 2, 16).transpose(2, 3)
        kv[0, 4, 1, 3] = float("nan")  # a key of row 2, of one head
        found.append(ops.decode_attention(positions, tables.int(), windows, AttentionSpec(0.3), q)(q, k, v, kv))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found[1][1, 2].isnan().all() and found[1][2, 2:].isnan().all() and int(found[1].isnan().sum()) == 3 * 16
