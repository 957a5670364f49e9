"""Kernels over a cache of FP8, against the same over the numbers that it means: on a GPU, or interpreted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backends.fastertransformer.engine.cache.fp8_entries import flatten, pack, restore_entries, unpack
from backends.fastertransformer.engine.cache.kv_cache import PAGE
from backends.fastertransformer.engine.ops.linear import HeadNorms, Norm
from backends.fastertransformer.engine.ops.positions import AttentionSpec, Rotary, plain_frequencies

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if HAS_GPU else [torch.float32]
LIMITS = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
UNBOUNDED = 1 << 31
HEADS = [(4, 1, 64), (6, 2, 80), (2, 2, 128)]  # H, Hkv, D


def memories(pages: int, kv_heads: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Draw a cache of FP8, and the numbers that it means."""
    spread = torch.logspace(-3, 2, pages)[None, :, None, None, None]
    entries = pack(torch.randn(2, pages, kv_heads, PAGE, size) * spread.roll(3, 1))
    return flatten(entries).to(DEVICE), unpack(entries, dtype).to(DEVICE)


def drawn(batch: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw q, k and v of one token of each row, [B, H, 1, D]; a row's keys are large and another's small."""
    scale = torch.tensor([1.0, 300.0, 1e-3])[:, None, None]
    qkv = torch.randn(3, batch, heads, size) * scale.roll(0)[:, : batch or None, None]
    q, k, v = (each[:, : (heads if index == 0 else kv_heads)] for index, each in enumerate(qkv))
    q, k = q / 10, k / 100
    return [each[:, :, None].to(DEVICE, dtype) for each in (q, k, v)]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def test_bytes_are_the_nearest_numbers_of_e4m3_by_a_power_of_two() -> None:
    x = torch.randn(50, 3, 40) * torch.logspace(-9, 9, 50)[:, None, None]
    x[3] = 0
    kept = pack(x)
    found, step = unpack(kept, torch.float32), (x.abs() / 16).maximum(x.abs().amax(-1, keepdim=True) / 448 / 1024 * 2)
    assert kept.shape == (50, 3, 41) and ((found - x).abs() <= step * 1.0001).all()
    scales = x.abs().amax(-1) / 448
    mantissa, exponent = torch.frexp(scales)
    expected = torch.where(mantissa == 0.5, exponent - 1, exponent).add(127).clamp(min=1)
    assert torch.equal(kept[..., -1].int(), torch.where(scales == 0, 1, expected).int())
    codes = (x.double() / torch.exp2(expected.double() - 127)[..., None]).to(torch.float8_e4m3fn)
    assert torch.equal(kept[..., :-1], codes.view(torch.uint8))
    assert torch.equal(
        restore_entries(flatten(kept[:, :, None].expand(-1, -1, PAGE, -1))), kept[:, :, None].expand(-1, -1, PAGE, -1)
    )
    x[7, 1, 2], x[8, 0, 0] = torch.nan, torch.inf
    lost = unpack(pack(x), torch.float32)
    assert not lost[7, 1].isfinite().any() and not lost[8, 0].isfinite().any() and lost[8, 1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
def test_a_row_attends_to_what_its_cells_mean_and_keeps_its_token(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype
) -> None:
    from backends.fastertransformer.engine.ops.kernels.decode_attention import attend
    from backends.fastertransformer.engine.ops.kernels.grouped_decode import _FEW, _MANY, attend_groups
    from backends.fastertransformer.engine.ops.kernels.row_plan import plan_rows

    torch.manual_seed(0)
    ends, width = [1, 65, 140], 5
    batch = len(ends)
    kept, meant = memories(batch * width + 1, kv_heads, size, dtype)
    tables = (torch.randperm(batch * width) + 1).view(batch, width).to(DEVICE, torch.int32)
    q, k, v = drawn(batch, heads, kv_heads, size, dtype)
    positions, windows = torch.tensor(ends, device=DEVICE) - 1, torch.full((batch,), UNBOUNDED, device=DEVICE)
    plan, spec = plan_rows(positions, windows), AttentionSpec(0.3)
    memories_of_ways = kept.clone(), kept.clone(), kept.clone()
    for tiles, memory in zip((_FEW, _MANY, None), memories_of_ways, strict=True):
        if tiles:
            both = [attend_groups(q, k, v, each, tables, plan, spec, tiles=tiles) for each in (memory, meant.clone())]
        elif heads == kv_heads:
            both = [attend(q, k, v, each, tables, positions, windows, 0.3) for each in (memory, meant.clone())]
        else:
            break
        assert error(*both) < LIMITS[dtype]
        expected = restore_entries(kept.cpu())
        for row, end in enumerate(ends):
            page, cell = int(tables[row, (end - 1) // PAGE]), (end - 1) % PAGE
            for part, new in enumerate((k, v)):
                expected[part, page, :, cell] = pack(new[row, :, 0].cpu())
        assert torch.equal(restore_entries(memory.cpu()), expected)


# Each size with a window; without one, the size that fills no tile. Below 0 it is a chunk.
@pytest.mark.in_ci(when=lambda at: HAS_GPU or at.window > 0 or (at.size == 80 and not at.window))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
@pytest.mark.parametrize("window", [0, 40, -24])
def test_tokens_attend_to_what_their_pages_mean(
    heads: int, kv_heads: int, size: int, window: int, dtype: torch.dtype
) -> None:
    from backends.fastertransformer.engine.ops.kernels.grouped_prefill import extend
    from backends.fastertransformer.engine.ops.kernels.row_blocks import PackedRows

    torch.manual_seed(1)
    befores, counts = [100, 0, 37], [9, 40, 1]
    kept, meant = memories(31, kv_heads, size, dtype)
    tables = (torch.randperm(30) + 1).view(3, 10).to(DEVICE, torch.int32)
    slots = torch.arange(3).repeat_interleave(torch.tensor(counts)).to(DEVICE)
    places = zip(befores, counts, strict=True)
    positions = torch.cat([before + torch.arange(count) for before, count in places]).to(DEVICE)
    ends = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    packed = PackedRows(ends, sum(counts), 140)
    q = (torch.randn(heads, sum(counts), size) / 10).to(DEVICE, dtype)
    spec = AttentionSpec(0.3, window=max(window, 0), chunk=max(-window, 0))
    found, expected = (extend(q, memory, tables, slots, positions, packed, spec) for memory in (kept, meant))
    assert error(found, expected) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16] if not HAS_GPU else DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rotated", "by_pairs", "has_norm", "size"),
    [(0, False, False, 64), (64, False, True, 64), (64, False, False, 64), (16, True, False, 80)],
)
def test_keys_and_values_of_many_tokens_become_the_bytes_of_what_would_be_kept(
    rotated: int, by_pairs: bool, has_norm: bool, size: int, dtype: torch.dtype
) -> None:
    from backends.fastertransformer.engine.ops.kernels.kv_write import rotate_and_write

    torch.manual_seed(2)
    kv_heads, tokens = 3, 20
    plain = torch.zeros(2, 4, kv_heads, PAGE, size, dtype=dtype, device=DEVICE)
    kept = torch.full((2, 4, kv_heads, PAGE, size + 1), 255, dtype=torch.uint8, device=DEVICE)
    every = torch.randn(3, 6, tokens, size).to(DEVICE, dtype)
    every[1, 0, 3], every[2, 1] = every[1, 0, 3] * 500, every[2, 1] / 1000
    pages = (torch.arange(tokens) % 3 + 1).int().to(DEVICE)
    offsets = (torch.arange(tokens) * 5 % PAGE).to(DEVICE)
    positions = torch.arange(tokens, device=DEVICE) + 7
    rotary = Rotary(rotated, by_pairs, plain_frequencies(rotated, device=DEVICE), 1.3) if rotated else None
    gains = [Norm(1 + torch.rand(size, device=DEVICE).to(dtype), None, 1e-6, is_rms=True) for _ in range(2)]
    norms = HeadNorms(*gains) if has_norm else None
    results = []
    for memory in (plain, kept):
        q, k, v = every[0].clone(), every[1, :kv_heads].clone(), every[2, :kv_heads].clone()
        results.append(rotate_and_write(q, k, v, memory, pages, offsets, positions, rotary, norms))
    for found, expected in zip(results[1], results[0], strict=True):
        assert torch.equal(found, expected)
    entries, exact = restore_entries(kept), pack(plain)
    at = pages.long(), slice(None), offsets
    assert torch.equal(entries[:, at[0], :, at[2]], exact[:, at[0], :, at[2]])
    untouched = torch.ones(4, PAGE, dtype=torch.bool, device=DEVICE)
    untouched[pages.long(), offsets] = False
    assert (entries.permute(1, 3, 0, 2, 4)[untouched] == 255).all()
