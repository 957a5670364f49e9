"""Latent attention's kernels against the plain form in fp64: on a GPU, or by Triton's interpreter."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from backends.fastertransformer.engine.arrays import UNBOUNDED
from backends.fastertransformer.engine.cache.kv_cache import PAGE, KvCache
from backends.fastertransformer.engine.cache.sizing import CacheShape, Entry
from backends.fastertransformer.engine.ops.latent_attention import LatentUp
from backends.fastertransformer.engine.ops.linear import Norm
from backends.fastertransformer.engine.ops.packed_rows import NumberedRows, Rows
from backends.fastertransformer.engine.ops.positions import AttentionSpec, Rotary

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = [*LIMITS] if HAS_GPU else [torch.float32, torch.float16]


class Sizes(NamedTuple):
    """The sizes of a layer: heads, P, R, V, N, and how it rotates."""

    heads: int
    plain: int
    rotated: int
    value: int
    latent: int
    is_by_pairs: bool = True


SIZES = [Sizes(4, 12, 8, 10, 24), Sizes(20, 16, 16, 16, 64, False)]
SIZES += [Sizes(16, 128, 64, 128, 512), Sizes(128, 128, 64, 128, 512), Sizes(20, 192, 64, 256, 512)] if HAS_GPU else []


class Layer:
    """A layer with random weights, the cells of some rows, and what the plain form makes of them in fp64."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, lengths: list[int]) -> None:
        torch.manual_seed(0)
        self.sizes, self.dtype, size = sizes, dtype, sizes.rotated + sizes.latent
        gain = torch.rand(sizes.latent, device=DEVICE).to(dtype) + 0.5
        matrix = torch.randn(sizes.heads, sizes.plain + sizes.value, sizes.latent, device=DEVICE) / sizes.latent**0.5
        self.up = LatentUp(Norm(gain, None, 1e-6, is_rms=True), matrix.to(dtype), sizes.plain)
        rotary = Rotary(sizes.rotated, sizes.is_by_pairs, torch.rand(sizes.rotated // 2, device=DEVICE), 1.3)
        self.spec = AttentionSpec(0.2, rotary=rotary, is_latent=True)
        shape = CacheShape((Entry(1, size, parts=1),), dtype, is_head_major=True)
        self.cache = KvCache(shape, DEVICE, 1 << 26, max(lengths) + 40)
        self.cache.kv[0].fill_(1e4)  # what an earlier row left must not matter
        self.cache.kv[0][:, 0] = torch.nan
        rows = [self.cache.allocator.take(length) for length in lengths]
        self.cache.allocate(0, rows, np.full(len(rows), UNBOUNDED))
        self.narrow = [torch.randn(n, sizes.latent + sizes.rotated, device=DEVICE).to(dtype) for n in lengths]
        self.q = [torch.randn(sizes.heads, n, sizes.plain + sizes.rotated, device=DEVICE).to(dtype) for n in lengths]

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate [..., T, R] as complex numbers."""
        assert self.spec.rotary
        angles = positions[:, None].double() * self.spec.rotary.inverse_frequencies.double()
        waves = torch.polar(torch.full_like(angles, self.spec.rotary.factor), angles)
        halves = x.double().unflatten(-1, (-1, 2) if self.sizes.is_by_pairs else (2, -1))
        axis = -1 if self.sizes.is_by_pairs else -2
        turned = torch.view_as_real(torch.complex(*halves.unbind(axis)) * waves)
        return (turned if self.sizes.is_by_pairs else turned.transpose(-1, -2)).flatten(-2)

    def entries(self, row: int) -> Tensor:
        """What the cache holds of a row, [T, R + N], as it is rounded."""
        latent, key = self.narrow[row].double().split((self.sizes.latent, self.sizes.rotated), -1)
        latent = latent / (latent.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.up.norm.weight.double()
        turned = self.turn(key, torch.arange(len(key), device=DEVICE))
        return torch.cat((turned, latent), -1).to(self.dtype)

    def write(self, row: int, count: int) -> None:
        """Write a row's first entries to its pages."""
        for place, entry in enumerate(self.entries(row)[:count]):
            self.cache.kv[0][0, self.cache.page_tables[row, place // PAGE], 0, place % PAGE] = entry

    def expected(self, row: int, first: int) -> Tensor:
        """Attend from a row's tokens from a place on to all before them, [H, T, V]."""
        held = self.entries(row).double()
        made = torch.einsum("tn,hsn->hts", held[:, self.sizes.rotated :], self.up.matrix.double())
        keys, values = made.split((self.sizes.plain, self.sizes.value), -1)
        shared = held[:, : self.sizes.rotated].expand(self.sizes.heads, -1, -1)
        places = torch.arange(len(held), device=DEVICE)
        plain, rotated = self.q[row].double().split((self.sizes.plain, self.sizes.rotated), -1)
        query = torch.cat((plain, self.turn(rotated, places)), -1)[:, first:]
        scores = query @ torch.cat((keys, shared), -1).mT * self.spec.scale
        return scores.masked_fill(places > places[first:, None], -torch.inf).softmax(-1) @ values

    def holds(self, row: int) -> bool:
        """Whether a row's pages hold its entries."""
        pages = self.cache.page_tables[row].long()
        held = self.cache.kv[0][0, pages, 0].flatten(0, 1)[: len(self.narrow[row])]
        return error(held, self.entries(row)) < LIMITS[self.dtype]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_row_attends_to_its_own_entries_and_keeps_its_token(sizes: Sizes, dtype: torch.dtype) -> None:
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    lengths = [1, 64, 33, 290]
    layer = Layer(sizes, dtype, lengths)
    for row, length in enumerate(lengths):
        layer.write(row, length - 1)
    positions = torch.tensor(lengths, device=DEVICE) - 1
    tables, windows = layer.cache.page_tables[:4], layer.cache.windows[:4]
    q, narrow = torch.stack([each[:, -1:] for each in layer.q]), torch.stack([each[-1:] for each in layer.narrow])
    for _ in range(2):  # what the first one leaves must not matter
        attend = TritonOps(DEVICE).latent.decode_attention(positions, tables, windows, layer.spec, q)
        found = attend(q, narrow, layer.up, layer.cache.kv[0])
        assert found.shape == (4, sizes.heads, 1, sizes.value)
        expected = torch.stack([layer.expected(row, length - 1) for row, length in enumerate(lengths)])
        assert error(found, expected) < LIMITS[dtype]
        assert all(layer.holds(row) for row in range(4))


# More heads than a program has are computed in one type.
@pytest.mark.in_ci(when=lambda at: HAS_GPU or at.sizes.heads == 4 or at.dtype == torch.float16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_go_on_several_tokens_at_a_time_and_one(sizes: Sizes, dtype: torch.dtype) -> None:
    """A long one whose entries programs share, one that begins, and two of one token; padding behind them."""
    from backends.fastertransformer.engine.ops.kernels import latent_prefill
    from backends.fastertransformer.engine.ops.kernels.row_blocks import Split
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    lengths, firsts = [300, 21, 70, 1], [290, 0, 69, 0]
    layer = Layer(sizes, dtype, lengths)
    cache = layer.cache
    for row, first in enumerate(firsts):
        layer.write(row, first)
    spans = list(zip(firsts, lengths, strict=True))
    counts = [end - first for first, end in spans]
    positions = torch.cat([torch.arange(*span, device=DEVICE) for span in spans])
    slots = torch.arange(4, device=DEVICE).repeat_interleave(torch.tensor(counts, device=DEVICE))
    ends = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=DEVICE)
    rows = Rows(positions, positions, slots, ends, None)
    q = torch.cat([layer.q[row][:, first:] for row, first in enumerate(firsts)], 1)[None]
    narrow = torch.cat([layer.narrow[row][first:] for row, first in enumerate(firsts)])[None]
    extend, splits = latent_prefill.extend_latent, (Split(3, 32, 0), Split(rounds=0))
    for split in splits:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(latent_prefill, "extend_latent", partial(extend, split=split))
            attend = TritonOps(DEVICE).latent.extend_attention(cache, rows, 320, layer.spec, q)
            found = attend(q, narrow, layer.up, cache.kv[0])[0]
        for row, own in enumerate(found.split(counts, 1)):
            assert error(own, layer.expected(row, firsts[row])) < LIMITS[dtype], (row, split)
            assert layer.holds(row)


@pytest.mark.parametrize("dtype", DTYPES[:1] + DTYPES[2:], ids=str)
@pytest.mark.parametrize("sizes", SIZES if HAS_GPU else SIZES[:1], ids=str)
def test_a_chunk_behind_a_context_attends_in_the_plain_form(
    sizes: Sizes, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values are made a few pages at a time; rows that begin, and rows of one token, are among the rest."""
    from backends.fastertransformer.engine.ops import latent_continued
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    monkeypatch.setattr(latent_continued, "LEAST_TOKENS", 8)
    monkeypatch.setattr(latent_continued, "_PIECE_BYTES", 1 << 15)
    made = list[tuple[int, int]]()
    make = latent_continued._made

    def count(kv: Tensor, pages: Tensor, first: int, stop: int, *more: int) -> tuple[Tensor, Tensor]:
        made.append((first, stop))
        return make(kv, pages, first, stop, *more)

    monkeypatch.setattr(latent_continued, "_made", count)
    lengths, firsts = [21, 300, 130, 70, 1], [0, 290, 37, 69, 0]
    layer = Layer(sizes, dtype, lengths)
    for row, first in enumerate(firsts):
        layer.write(row, first)
    counts = [end - first for first, end in zip(firsts, lengths, strict=True)]
    ids = np.zeros(sum(counts), np.int64)
    rows = NumberedRows.of(ids, np.array(firsts), np.array(counts), 0)
    q = torch.cat([layer.q[row][:, first:] for row, first in enumerate(firsts)], 1)[None]
    narrow = torch.cat([layer.narrow[row][first:] for row, first in enumerate(firsts)])[None]
    ops = TritonOps(DEVICE).latent
    assert not ops.continues_plainly(rows.starts, rows.lengths), "so few gain nothing"
    monkeypatch.setattr(latent_continued, "LEAST_PAIRS", 290 * 10 + 37 * 93)
    assert ops.continues_plainly(rows.starts, rows.lengths)
    attend = ops.extend_attention(layer.cache, rows.on(DEVICE), 320, layer.spec, q)
    found = attend(q, narrow, layer.up, layer.cache.kv[0])[0]
    assert (290, 300) in made and (37, 130) in made and len(made) > 3, "the context is made in pieces"
    for row, own in enumerate(found.split(counts, 1)):
        assert error(own, layer.expected(row, firsts[row])) < LIMITS[dtype], row
        assert layer.holds(row)


@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_new_rows_attend_in_the_plain_form(sizes: Sizes) -> None:
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    lengths = [40, 3]
    layer = Layer(sizes, torch.float32, lengths)
    positions = torch.cat([torch.arange(length, device=DEVICE) for length in lengths])
    slots = torch.arange(2, device=DEVICE).repeat_interleave(torch.tensor(lengths, device=DEVICE))
    ends = torch.tensor([0, 40, 43], dtype=torch.int32, device=DEVICE)
    q, narrow = torch.cat(layer.q, 1)[None], torch.cat(layer.narrow)[None]
    attend = TritonOps(DEVICE).latent.prefill_attention(
        layer.cache, Rows(positions, positions, slots, ends, None), layer.spec, q
    )
    for row, own in enumerate(attend(q, narrow, layer.up, layer.cache.kv[0])[0].split(lengths, 1)):
        assert error(own, layer.expected(row, 0)) < LIMITS[torch.float32]
        assert layer.holds(row)
