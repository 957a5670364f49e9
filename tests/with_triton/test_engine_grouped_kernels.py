"""Attention of query heads that share KV heads, against fp64: on a GPU, or by Triton's interpreter."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from backends.fastertransformer.engine.cache.kv_cache import PAGE
from backends.fastertransformer.engine.ops.linear import HeadNorms, Norm
from backends.fastertransformer.engine.ops.positions import AttentionSpec, Rotary, Rotation

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [*LIMITS] if HAS_GPU else [torch.float32, torch.float16]
UNBOUNDED = 1 << 31
HEADS = [(4, 1, 64), (6, 2, 80), (3, 3, 16), (20, 1, 24)]  # H, Hkv, D
# Each with every soft cap, window and chunk (below 0) on a GPU; the interpreter takes seconds for one.
CAPS_AND_WINDOWS = [(0.0, 0), (5.0, 0), (0.0, 40)]
CHUNKS = [-24, -PAGE, -3, -77]  # the first does not divide pages; those shorter than a block, longer than some rows
VARIANTS = (
    [(*heads, *limits) for heads in HEADS for limits in [*CAPS_AND_WINDOWS, *((0.0, chunk) for chunk in CHUNKS)]]
    if HAS_GPU
    else [
        *((*HEADS[0], *limits) for limits in CAPS_AND_WINDOWS),
        *((*heads, *limits) for heads, limits in zip(HEADS[1:], CAPS_AND_WINDOWS, strict=True)),
        *((*HEADS[2], 0.0, chunk) for chunk in CHUNKS[:1]),
        *(pytest.param(*HEADS[1], 0.0, chunk, marks=pytest.mark.long) for chunk in CHUNKS[1:]),
    ]
)


def seen(scores: Tensor, spec: AttentionSpec, queries: Tensor, keys: Tensor) -> Tensor:
    """Cap and mask fp64 scores [..., T, S] of tokens at positions [T] and [S]."""
    scores = scores * spec.scale
    if spec.softcap:
        scores = spec.softcap * (scores / spec.softcap).tanh()
    distance = queries[:, None] - keys
    is_seen = (distance >= 0) & ((distance < spec.window) | (not spec.window))
    if spec.chunk:
        is_seen &= queries[:, None] // spec.chunk == keys // spec.chunk
    return scores.masked_fill(~is_seen, -torch.inf)


def limited(softcap: float, limit: int) -> AttentionSpec:
    """Return how tokens attend that see a window, or those of their chunk, below 0; 0: all before them."""
    return AttentionSpec(0.3, softcap=softcap, window=max(limit, 0), chunk=max(-limit, 0))


def unseen_pages(spec: AttentionSpec, position: int) -> int:
    """Return how many of a row's first pages no token from a position on sees."""
    return int(spec.first_seen(torch.tensor(position))) // PAGE


def drawn_sinks(heads: int, window: int) -> Tensor | None:
    """Draw them for some of the variants, those of rows whose cells programs share among them."""
    return 2 * torch.randn(heads, device=DEVICE) if window or heads == HEADS[1][0] else None


def attended(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spec: AttentionSpec,
    first: int,
    sinks: Tensor | None = None,
    earliest: int = 0,
) -> Tensor:
    """Attend from q [H, T, D], whose first token is at a position, to [Hkv, S, D], likewise, in fp64."""
    group = len(q) // len(keys)
    keys, values = (each.double().repeat_interleave(group, 0) for each in (keys, values))
    queries = first + torch.arange(q.shape[1], device=q.device)
    places = earliest + torch.arange(keys.shape[1], device=q.device)
    scores = seen(q.double() @ keys.transpose(1, 2), spec, queries, places)
    if sinks is None:
        return scores.softmax(-1) @ values
    columns = sinks.double()[:, None, None].expand(-1, q.shape[1], 1)
    return torch.cat((scores, columns), -1).softmax(-1)[..., :-1] @ values


def split(heads: int, kv_heads: int, size: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q, k and v as one product makes them, [tokens, (H + 2 Hkv) D] -> [heads, tokens, D] each."""
    qkv = torch.randn(tokens, heads + 2 * kv_heads, size).to(DEVICE, dtype).transpose(0, 1)
    q, k, v = qkv.split((heads, kv_heads, kv_heads))
    return q, k, v


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# Without a cap, a window or a chunk in both types.
@pytest.mark.in_ci(when=lambda at: HAS_GPU or at.dtype == torch.float16 or not (at.softcap or at.window))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "softcap", "window"), VARIANTS)
def test_each_row_attends_to_its_own_cells_and_keeps_its_token(
    heads: int, kv_heads: int, size: int, softcap: float, window: int, dtype: torch.dtype
) -> None:
    from backends.fastertransformer.engine.ops.kernels.grouped_decode import attend_groups
    from backends.fastertransformer.engine.ops.kernels.row_plan import plan_rows

    torch.manual_seed(0)
    ends = [1, 64, 65, 290]  # cells of each row with its own
    batch, width = len(ends), 10
    memory = torch.randn(2, batch * width + 1, kv_heads, PAGE, size).to(DEVICE, dtype)
    tables = (torch.randperm(batch * width) + 1).view(batch, width).to(DEVICE, torch.int32)
    q, k, v = (each.transpose(0, 1)[:, :, None] for each in split(heads, kv_heads, size, batch, dtype))
    positions, windows = torch.tensor(ends, device=DEVICE) - 1, torch.full((batch,), UNBOUNDED, device=DEVICE)
    spec, kept = limited(softcap, window), memory.clone()
    expected, sinks = [], drawn_sinks(heads, window)
    for row, end in enumerate(ends):
        page, cell = int(tables[row, (end - 1) // PAGE]), (end - 1) % PAGE
        kept[0, page, :, cell], kept[1, page, :, cell] = k[row, :, 0], v[row, :, 0]
        keys, values = kept[:, tables[row].long()].transpose(1, 2).flatten(2, 3)[:, :, :end]
        expected.append(attended(q[row], keys, values, spec, end - 1, sinks))
        tables[row, : unseen_pages(spec, end - 1)] = 0  # may be given back
    memory[:, 0] = kept[:, 0] = torch.inf  # which is never read
    for _ in range(2):  # what the first one leaves must not matter
        found = attend_groups(q, k, v, memory, tables, plan_rows(positions, windows), spec, sinks=sinks)
        assert found.shape == q.shape
        assert error(found, torch.stack(expected)) < LIMITS[dtype]
        assert torch.equal(memory, kept)


@pytest.mark.parametrize("window", [0, 30, -60])
def test_a_row_that_keeps_its_last_tokens_only_attends_to_these(window: int) -> None:
    from backends.fastertransformer.engine.ops.kernels.grouped_decode import attend_groups
    from backends.fastertransformer.engine.ops.kernels.row_plan import plan_rows

    torch.manual_seed(0)
    ring, position, size = 50, 77, 32
    memory = torch.randn(2, 3, 2, PAGE, size, device=DEVICE)
    tables = torch.tensor([[2, 1]], dtype=torch.int32, device=DEVICE)
    q, k, v = (each.transpose(0, 1)[:, :, None] for each in split(4, 2, size, 1, torch.float32))
    spec = limited(0.0, window)
    cells = torch.arange(position - ring + 1, position, device=DEVICE) % ring
    before = memory[:, tables[0].long()].transpose(1, 2).flatten(2, 3)[:, :, cells]
    keys, values = torch.cat((before, torch.stack((k[0], v[0]))), 2)
    expected = attended(q[0], keys, values, spec, position, earliest=position - ring + 1)
    where = torch.tensor([position], device=DEVICE), torch.tensor([ring], device=DEVICE)
    found = attend_groups(q, k, v, memory, tables, plan_rows(*where), spec)
    assert error(found[0], expected) < LIMITS[torch.float32]
    assert torch.equal(memory[0, 2, :, position % ring], k[0, :, 0])


@pytest.mark.parametrize(
    ("width", "by_pairs", "has_norm"), [(0, False, True), (16, True, False), (40, False, True), (64, False, False)]
)
def test_queries_and_keys_are_normed_and_turned_on_the_way(width: int, by_pairs: bool, has_norm: bool) -> None:
    from backends.fastertransformer.engine.ops.kernels.grouped_decode import attend_groups
    from backends.fastertransformer.engine.ops.kernels.row_plan import plan_rows

    torch.manual_seed(0)
    memory = torch.randn(2, 25, 2, PAGE, 64, device=DEVICE)
    tables = (torch.randperm(24) + 1).view(3, 8).to(DEVICE, torch.int32)
    q, k, v = (each.transpose(0, 1)[:, :, None] for each in split(6, 2, 64, 3, torch.float32))
    positions, windows = torch.tensor([3, 200, 255], device=DEVICE), torch.full((3,), UNBOUNDED, device=DEVICE)
    rotary = Rotary(width, by_pairs, torch.rand(width // 2, device=DEVICE), 1.3) if width else None
    gains = 1 + 0.3 * torch.randn(2, 64, device=DEVICE)
    norms = HeadNorms(*(Norm(gain, None, 1e-3, is_rms=True) for gain in gains)) if has_norm else None
    found = attend_groups(
        q, k, v, memory, tables, plan_rows(positions, windows), AttentionSpec(0.3, rotary=rotary), norms
    )
    if norms:
        q, k = F.rms_norm(q, (64,), gains[0], 1e-3), F.rms_norm(k, (64,), gains[1], 1e-3)
    if rotary:
        turn = Rotation(positions[:, None], rotary, torch.float32)
        q, k = turn(q), turn(k)
    other = memory.clone()
    expected = attend_groups(
        q.contiguous(), k.contiguous(), v, other, tables, plan_rows(positions, windows), AttentionSpec(0.3)
    )
    assert (found - expected).abs().max() < 1e-4 and (memory - other).abs().max() < 1e-4


@pytest.mark.parametrize("count", [1, 5, 64, 150])
def test_a_plan_has_the_rows_with_most_cells_first(count: int) -> None:
    from backends.fastertransformer.engine.ops.kernels.row_plan import plan_rows

    torch.manual_seed(0)
    positions, windows = torch.randint(0, 300, (count,), device=DEVICE), torch.full((count,), UNBOUNDED, device=DEVICE)
    windows[::3] = 100
    plan = plan_rows(positions, windows)
    rows, tokens, slots, places, limits = plan[:-1].view(5, count)
    cells = torch.minimum(positions + 1, windows)
    assert torch.equal(rows, cells.argsort(descending=True, stable=True)) and int(plan[-1]) == int(cells.sum())
    assert torch.equal(tokens, rows) and torch.equal(slots, rows)
    assert torch.equal(places, positions[rows]) and torch.equal(limits, windows[rows])


def test_a_plan_of_packed_rows_has_those_of_one_token() -> None:
    from backends.fastertransformer.engine.ops.kernels.row_plan import plan_rows

    ends = torch.tensor([0, 1, 4, 5, 5, 6], dtype=torch.int32, device=DEVICE)  # of 1, 3, 1, 0 and 1 tokens
    positions, slots = (
        torch.tensor([7, 0, 1, 2, 90, 30], device=DEVICE),
        torch.tensor([3, 1, 1, 1, 0, 8], device=DEVICE),
    )
    plan = plan_rows(positions, None, slots, ends)
    rows, tokens, chosen, places, _ = plan[:-1].view(5, 5).tolist()
    assert (rows[:3], tokens[:3], chosen[:3]) == ([2, 4, 0], [4, 5, 0], [0, 8, 3])
    assert places == [90, 30, 7, -1, -1] and int(plan[-1]) == 91 + 31 + 8


@pytest.mark.parametrize("tiles", [(16, 7, 16, 4, 0), (16, 16, 16, 4, 2)])
def test_a_row_much_longer_than_the_others_is_attended_to_in_pieces(tiles: tuple[int, ...]) -> None:
    from backends.fastertransformer.engine.ops.kernels.grouped_decode import GroupTiles, attend_groups
    from backends.fastertransformer.engine.ops.kernels.row_plan import plan_rows

    torch.manual_seed(0)
    lengths, size = [3, 20, 290, 7, 33], 32
    memory = torch.randn(2, 51, 2, PAGE, size, device=DEVICE)
    tables = (torch.randperm(50) + 1).view(5, 10).to(DEVICE, torch.int32)
    q, k, v = (each.transpose(0, 1)[:, :, None] for each in split(4, 2, size, 5, torch.float32))
    positions, windows = torch.tensor(lengths, device=DEVICE) - 1, torch.full((5,), UNBOUNDED, device=DEVICE)
    spec, plan, before = AttentionSpec(0.3), plan_rows(positions, windows), memory.clone()
    sinks = 2 * torch.randn(4, device=DEVICE) if tiles[-1] else None
    found = attend_groups(q, k, v, memory, tables, plan, spec, sinks=sinks, tiles=GroupTiles(*tiles))
    for row, length in enumerate(lengths):
        past = before[:, tables[row].long()].transpose(1, 2).flatten(2, 3)[:, :, : length - 1]
        keys, values = torch.cat((past, torch.stack((k[row], v[row]))), 2)
        assert error(found[row], attended(q[row], keys, values, spec, length - 1, sinks)) < LIMITS[torch.float32]


@pytest.mark.parametrize("dtype", [*LIMITS] if HAS_GPU else [torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "softcap", "window"), VARIANTS)
def test_rows_attend_within_themselves(
    heads: int, kv_heads: int, size: int, softcap: float, window: int, dtype: torch.dtype
) -> None:
    from backends.fastertransformer.engine.ops.kernels.grouped_prefill import attend_group_rows
    from backends.fastertransformer.engine.ops.kernels.row_blocks import PackedRows

    torch.manual_seed(0)
    ends, tokens = [0, 90, 91, 123], 130
    q, k, v = split(heads, kv_heads, size, tokens, dtype)
    rows = PackedRows(torch.tensor(ends, dtype=torch.int32, device=DEVICE), tokens, 90)
    spec, sinks = limited(softcap, window), drawn_sinks(heads, window)
    found = attend_group_rows(q, k, v, rows, spec, sinks=sinks)
    for begin, end in pairwise(ends):
        own = slice(begin, end)
        expected = attended(q[:, own], k[:, own], v[:, own], spec, 0, sinks)
        assert error(found[:, own], expected) < 2 * LIMITS[dtype]


@pytest.mark.parametrize("dtype", [*LIMITS] if HAS_GPU else [torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "softcap", "window"), VARIANTS)
def test_rows_go_on_with_what_their_pages_hold(
    heads: int, kv_heads: int, size: int, softcap: float, window: int, dtype: torch.dtype
) -> None:
    """Among them rows of one token, an empty one, and one that begins; programs share the cells of the longest two."""
    from backends.fastertransformer.engine.ops.kernels.grouped_prefill import extend
    from backends.fastertransformer.engine.ops.kernels.launch import scratch_of
    from backends.fastertransformer.engine.ops.kernels.row_blocks import PackedRows, Split

    torch.manual_seed(0)
    given = [(100, 20), (0, 17), (150, 1), (5, 0), (31, 2), (0, 1)]  # cells before, and tokens
    width, tokens = 5, sum(count for _, count in given)
    memory = torch.randn(2, len(given) * width + 1, kv_heads, PAGE, size).to(DEVICE, dtype)
    memory[:, 0] = torch.nan  # what padding left behind
    tables = (torch.randperm(len(given) * width) + 1).view(len(given), width).to(DEVICE, torch.int32)
    slots = torch.tensor([row for row, (_, count) in enumerate(given) for _ in range(count)], device=DEVICE)
    places = [before + place for before, count in given for place in range(count)]
    ends = torch.tensor([0, *(count for _, count in given)], device=DEVICE).cumsum(0, dtype=torch.int32)
    q, _, _ = split(heads, kv_heads, size, tokens, dtype)
    spec, positions = limited(softcap, window), torch.tensor(places, device=DEVICE)
    for row, (before, count) in enumerate(given):
        tables[row, -(-(before + count) // PAGE) :] = 0
    listed = tables.clone()
    for row, (before, _) in enumerate(given):
        tables[row, : unseen_pages(spec, before)] = 0
    assert (window != 0) == (not torch.equal(tables, listed))
    tiles = (32, 64, 4, 1, 0) if window and not HAS_GPU else None  # blocks of two pages, one of which is gone
    packed, split_up = PackedRows(ends, tokens, 151), Split(least=16, cost=4)
    sinks = drawn_sinks(heads, window)
    found = extend(q, memory, tables, slots, positions, packed, spec, tiles, split_up, sinks)
    assert not scratch_of(DEVICE).get(0, 0)[1].any()  # the next launch counts from 0
    for row, ((before, count), end) in enumerate(zip(given, ends[1:].tolist(), strict=True)):
        keys, values = memory[:, listed[row].long()].transpose(1, 2).flatten(2, 3)[:, :, : before + count]
        own = slice(end - count, end)
        if count:
            expected = attended(q[:, own], keys, values, spec, before, sinks)
            assert error(found[:, own], expected) < 2 * LIMITS[dtype]
