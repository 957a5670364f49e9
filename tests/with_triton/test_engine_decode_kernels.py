"""The kernels of a decode step against torch: on a GPU, or by Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backends.fastertransformer.engine.cache.kv_cache import PAGE
from backends.fastertransformer.engine.ops.logits import (
    NOT_FINITE,
    DrawLimits,
    argmax,
    draw,
    keep_allowed,
    keep_top_k,
    keep_top_p,
)
from backends.fastertransformer.engine.ops.ops import Ops
from backends.fastertransformer.engine.ops.positions import Rotary, Rotation, plain_frequencies

HAS_GPU = torch.cuda.is_available()

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [*LIMITS] if HAS_GPU else [torch.float32]
SHAPES = [(64, 2, 3, 12), (80, 1, 2, 8), (128, 3, 1, 20), (32, 2, 5, 6), (256, 1, 2, 5)]  # D, H, B, pages of each row
if HAS_GPU:  # more programs than it has processors: other tiles
    SHAPES += [(128, 20, 3, 30), (128, 48, 6, 12), (64, 40, 9, 20)]
UNBOUNDED = 1 << 31


def _rotary(width: int, is_by_pairs: bool) -> Rotary:
    return Rotary(width, is_by_pairs, plain_frequencies(width, device=DEVICE), 1.3)


def attended(
    q: Tensor, k: Tensor, v: Tensor, memory: Tensor, tables: Tensor, rows: list[tuple[int, int]], bias: Tensor | None
) -> Tensor:
    """In fp64, a row and a cell at a time."""
    out = []
    for row, (position, window) in enumerate(rows):
        cells = torch.arange(min(position + 1, window), device=q.device)
        pages = tables[row, cells // PAGE].long()
        keys, values = (each[pages, :, cells % PAGE].double() for each in memory)  # [n, H, D]
        keys[position % window], values[position % window] = k[row, :, 0].double(), v[row, :, 0].double()
        scores = torch.einsum("hd,nhd->hn", q[row, :, 0].double(), keys) * 0.3
        if bias is not None:
            distance = (position - cells) % window
            is_slope = bias.dim() == 1
            scores += -bias[:, None] * distance if is_slope else bias[:, distance.clamp(max=bias.shape[1] - 1)]
        out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), values))
    return torch.stack(out)[:, :, None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "slopes", "by distance"])
@pytest.mark.parametrize(("size", "heads", "batch", "width"), SHAPES)
def test_each_row_attends_to_its_own_cells_and_keeps_its_token(
    size: int, heads: int, batch: int, width: int, kind: str, dtype: torch.dtype
) -> None:
    from backends.fastertransformer.engine.ops.kernels.decode_attention import attend

    torch.manual_seed(0)
    memory = torch.randn(2, batch * width + 1, heads, PAGE, size).to(DEVICE, dtype)
    tables = (torch.randperm(batch * width) + 1).view(batch, width).to(DEVICE, torch.int32)
    q, k, v = torch.randn(batch, 1, 3, heads, size).to(DEVICE, dtype).permute(2, 0, 3, 1, 4).unbind()
    rows = [(int(torch.randint(width * PAGE, ())), UNBOUNDED) for _ in range(batch)]
    rows[0], rows[-1] = (0, UNBOUNDED), (77, 50)
    bias = {"slopes": torch.rand(heads), "by distance": torch.randn(heads, 33)}.get(kind)
    bias = None if bias is None else bias.to(DEVICE)
    positions, windows = torch.tensor(rows, device=DEVICE).T.contiguous()
    expected, kept = attended(q, k, v, memory, tables, rows, bias), memory.clone()
    for row, (position, window) in enumerate(rows):
        page, cell = int(tables[row, position % window // PAGE]), position % window % PAGE
        kept[0, page, :, cell], kept[1, page, :, cell] = k[row, :, 0], v[row, :, 0]
    for _ in range(2):  # what the first one leaves must not matter
        found = attend(q, k, v, memory, tables, positions, windows, 0.3, bias)
        assert float((found.double() - expected).norm() / expected.norm()) < LIMITS[dtype]
        assert torch.equal(memory, kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "heads", "batch", "width"), SHAPES)
def test_each_row_attends_to_what_was_kept_and_nothing_is_written(
    size: int, heads: int, batch: int, width: int, dtype: torch.dtype
) -> None:
    """A decoder's attention to its encoder's output: every cell of a row, each with a length of its own."""
    from backends.fastertransformer.engine.ops.kernels.decode_attention import attend

    torch.manual_seed(0)
    memory = torch.randn(2, batch * width + 1, heads, PAGE, size).to(DEVICE, dtype)
    tables = (torch.randperm(batch * width) + 1).view(batch, width).to(DEVICE, torch.int32)
    q = torch.randn(batch, 1, heads * size).to(DEVICE, dtype).view(batch, 1, heads, size).transpose(1, 2)
    lengths, kept = torch.randint(1, width * PAGE + 1, (batch,), device=DEVICE), memory.clone()
    lengths[0] = 1
    found = attend(q, None, None, memory, tables, lengths, lengths, 0.3)
    for row, length in enumerate(lengths.tolist()):
        cells = torch.arange(length, device=DEVICE)
        keys, values = (each[tables[row, cells // PAGE].long(), :, cells % PAGE].double() for each in memory)
        scores = torch.einsum("hd,nhd->hn", q[row, :, 0].double(), keys) * 0.3
        expected = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
        assert float((found[row, :, 0].double() - expected).norm() / expected.norm()) < LIMITS[dtype]
    assert torch.equal(memory, kept)


@pytest.mark.parametrize("rotary", [_rotary(16, True), _rotary(64, False), _rotary(20, False), _rotary(8, True)])
def test_queries_and_keys_are_turned_on_the_way(rotary: Rotary) -> None:
    from backends.fastertransformer.engine.ops.kernels.decode_attention import attend

    torch.manual_seed(0)
    memory = torch.randn(2, 25, 2, PAGE, 64, device=DEVICE)
    tables = (torch.randperm(24) + 1).view(3, 8).to(DEVICE, torch.int32)
    q, k, v = torch.randn(3, 1, 3, 2, 64, device=DEVICE).permute(2, 0, 3, 1, 4).unbind()
    positions, windows = torch.tensor([3, 200, 255], device=DEVICE), torch.full((3,), UNBOUNDED, device=DEVICE)
    turn, other = Rotation(positions[:, None], rotary, torch.float32), memory.clone()
    found = attend(q, k, v, memory, tables, positions, windows, 0.3, None, rotary)
    expected = attend(
        turn(q).contiguous(), turn(k).contiguous(), v.contiguous(), other, tables, positions, windows, 0.3
    )
    assert (found - expected).abs().max() < 1e-4 and (memory - other).abs().max() < 1e-4


@pytest.mark.parametrize(("rows", "columns"), [(1, 51200), (3, 97), (5, 4001)])
def test_the_argmax_goes_where_the_next_step_begins(rows: int, columns: int) -> None:
    from backends.fastertransformer.engine.ops.kernels.sampling import argmax_step

    logits = torch.randn(rows, columns, device=DEVICE)
    logits[0, 7] = logits[0, 90] = 9.0
    if rows > 1:
        logits[1] = float("nan")
    for _ in range(2):  # what the first one leaves must not matter
        ids, positions = torch.full((rows,), -5, device=DEVICE), torch.arange(rows, device=DEVICE)
        tokens = argmax_step(logits, ids, positions)
        assert torch.equal(tokens, argmax(logits)) and tokens[0] == 7
        assert ((ids == tokens) | (tokens == NOT_FINITE)).all() and ((ids >= 0) & (ids < columns)).all()
        assert positions.tolist() == list(range(1, rows + 1))


@pytest.mark.parametrize("count", [1, 45])
def test_the_limits_of_draws_are_gathered_and_their_numbers_made(count: int) -> None:
    from backends.fastertransformer.engine.ops.kernels.sampling import draw_limits

    torch.manual_seed(0)
    floats, integers = torch.rand(64, 3, device=DEVICE), torch.randint(-(1 << 62), 1 << 62, (64, 5), device=DEVICE)
    floats[::2, 1] = 1.0
    integers[:, 2], integers[:2, 2] = integers[:, 2] % 5000, torch.tensor([0, (1 << 31) + 7])
    integers[0, 1], integers[1, 1] = -1, -(1 << 63)
    slots = torch.randperm(64, device=DEVICE)[:count]
    slots[0] = 0
    columns = integers[:, 1], integers[:, 2], integers[:, 4], floats[:, 2], floats[:, 1]
    for given in (columns, columns[:-1]):
        found, expected = draw_limits(slots, *given), Ops(DEVICE).draw_limits(slots, *given)
        assert (found.scales is None) == (expected.scales is None) == (given is not columns)
        for one, other in zip(found[:4], expected[:4], strict=True):
            assert one is None or (one.dtype == other.dtype and torch.equal(one, other))


@pytest.mark.parametrize("columns", [40, 4001])
def test_a_token_is_drawn_as_from_the_sorted_nucleus(columns: int) -> None:
    from backends.fastertransformer.engine.ops.kernels.sampling import draw_tokens

    torch.manual_seed(0)
    logits = 3 * torch.randn(8, columns, device=DEVICE)
    logits[2] = logits[2].round()  # equal ones, of which the first are kept
    logits[3, 5:] = -float("inf")
    rows = torch.tensor([0, 2, 3, 7, 2, 1, 4], device=DEVICE)
    top_k = torch.tensor([0, 40, 0, 7, 0, 1, 0], device=DEVICE)
    top_p = torch.tensor([0.9, 0.5, 1.0, 1.0, 0.3, 0.9, 1e-30], device=DEVICE)
    kept = keep_top_p(keep_top_k(logits[rows], top_k, 40), top_p)
    for _ in range(2):
        uniform = torch.rand(len(rows), dtype=torch.float64, device=DEVICE)
        assert torch.equal(draw_tokens(logits, rows, DrawLimits(top_k, top_p, uniform)), draw(kept, uniform))


# Less than one block of columns, and several.
@pytest.mark.in_ci(when=lambda at: at.columns != 4001)
@pytest.mark.parametrize("columns", [40, 4001, 70000])
def test_a_token_is_drawn_of_all(columns: int) -> None:
    from backends.fastertransformer.engine.ops.kernels.sampling import draw_tokens

    torch.manual_seed(0)
    logits = 3 * torch.randn(4, columns, device=DEVICE)
    logits[1, 1:] = -float("inf")
    logits[2, : columns // 2] = -float("inf")
    logits[3, 7] = 30.0  # weighs more than all others
    rows = torch.tensor([0, 1, 2, 3, 0, 2], device=DEVICE)
    top_k = torch.tensor([0, 0, columns, 0, 5, 0], device=DEVICE)  # one row of another kind among them
    top_p, scales = torch.ones(6, device=DEVICE), torch.tensor([1.0, 0.5, 2.0, 1.5, 1.0, 0.1], device=DEVICE)
    scaled = keep_top_k(logits[rows] * scales[:, None], torch.where(top_k == columns, 0, top_k), 5)
    for part in (0.3,) if columns > 5000 else (0.0, 0.999999, *torch.rand(2).tolist()):
        uniform = torch.full((6,), part, dtype=torch.float64, device=DEVICE)
        limits = DrawLimits(top_k, top_p, uniform, scales)
        assert torch.equal(draw_tokens(logits, rows, limits), draw(scaled, uniform))
        kept = torch.tensor([0, 1, 2, 3, 5], device=DEVICE)  # without the row of another kind
        limits = DrawLimits(top_k[kept], top_p[kept], uniform[kept], scales[kept], keeps_all=True)
        assert torch.equal(draw_tokens(logits, rows[kept], limits), draw(scaled[kept], uniform[kept]))


def test_what_is_drawn_from_numbers_that_are_none_is_a_token() -> None:
    from backends.fastertransformer.engine.ops.kernels.sampling import draw_tokens, warm_up

    warm_up(97, DEVICE)
    logits = torch.full((1, 97), float("nan"), device=DEVICE)
    ones = torch.ones(1, device=DEVICE)
    found = draw_tokens(logits, ones.long() - 1, DrawLimits(ones.long() * 3, ones / 2, ones.double() / 2))
    assert 0 <= int(found) < 97


@pytest.mark.parametrize("columns", [40, 4001])
def test_what_a_grammar_does_not_allow_is_masked(columns: int) -> None:
    from backends.fastertransformer.engine.ops.kernels.sampling import keep_allowed as keep_by_kernel

    torch.manual_seed(0)
    logits = torch.randn(4, columns, device=DEVICE)
    logits[2, ::2] = -float("inf")  # a bad word may come where nothing else is allowed
    for rows in (None, torch.tensor([3, 0, 2], device=DEVICE)):
        count = len(logits) if rows is None else len(rows)
        bits = torch.randint(256, (count, columns // 8 + 4), dtype=torch.uint8, device=DEVICE)
        expected = keep_allowed(logits.clone(), rows, bits)
        assert torch.equal(keep_by_kernel(logits.clone(), rows, bits), expected)
        assert expected.isinf().any() and expected.isfinite().any()


@pytest.mark.parametrize("width", [64, 1536, 2048])
def test_tokens_and_positions_are_looked_up_and_added(width: int) -> None:
    from backends.fastertransformer.engine.ops.kernels.elementwise import embed

    tokens, places = torch.randn(50, width, device=DEVICE), torch.randn(20, width, device=DEVICE)
    ids, positions = torch.tensor([[3, 0], [49, 19], [0, 44]], device=DEVICE).T  # with gaps
    assert torch.equal(embed(ids, positions, tokens, places), tokens[ids] + places[positions.clamp(max=19)])
    assert torch.equal(embed(ids, positions, tokens, None), tokens[ids])
