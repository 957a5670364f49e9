"""The kernels of adapters against torch, which tests compare with PEFT: on a GPU, or interpreted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from backends.fastertransformer.engine.ops.adapted import AdaptedOps
from backends.fastertransformer.engine.ops.adapted_rows import GroupedRows
from backends.fastertransformer.engine.ops.linear import ACTIVATIONS, Linear, Norm
from backends.fastertransformer.engine.ops.low_rank import LowRank
from backends.fastertransformer.engine.ops.ops import Ops

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = [torch.float16, torch.float32, *[torch.bfloat16] * HAS_GPU]  # the interpreter multiplies bf16 wrongly


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def adapters(
    count: int, rank: int, inputs: int, parts: list[int], dtype: torch.dtype, has_marks: bool = False
) -> LowRank:
    found = LowRank(count, rank, inputs, parts, torch.empty(0, dtype=dtype, device=DEVICE), has_marks=has_marks)
    for place in range(count):
        found.write(place, 0, found.down[place], found.up[place])
    found.down.copy_(drawn(*found.down.shape, seed=1) * inputs**-0.5)
    found.up.copy_(drawn(*found.up.shape, seed=2) * rank**-0.5)
    return found


# Sizes that take long by the interpreter are computed in one type.
@pytest.mark.in_ci(when=lambda at: HAS_GPU or at.tokens < 64 or at.dtype == torch.float16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "count", "rank", "parts"),
    [(1, 3, 16, [48, 24, 24]), (37, 5, 8, [70]), (64, 16, 24, [40, 40]), (600, 2, 80, [130, 20])],
)
def test_rows_get_what_their_adapters_add(
    tokens: int, count: int, rank: int, parts: list[int], dtype: torch.dtype
) -> None:
    """Of layers with several matrices, whose sides fill no tile; some rows have no adapter, some adapters no row."""
    from backends.fastertransformer.engine.ops.kernels.low_rank import SortedRows

    low_rank, x = adapters(count, rank, 200, parts, dtype), drawn(tokens, 200, dtype=dtype, seed=3)
    places = np.random.default_rng(tokens).integers(0, count + 1, tokens)
    places[places == 1] = count
    found, expected = (drawn(tokens, sum(parts), dtype=dtype, seed=4) for _ in range(2))
    before = found.clone()
    SortedRows(torch.from_numpy(places).to(DEVICE), count).add(found, x, low_rank)
    GroupedRows(places, count, DEVICE).add(expected, x, low_rank)
    limit = LIMITS[dtype] * float(expected.float().abs().max())
    assert float((found.float() - expected.float()).abs().max()) < limit
    assert torch.equal(found[places == count], before[places == count])


def test_some_of_the_rows_get_what_their_adapters_add() -> None:
    from backends.fastertransformer.engine.ops.kernels.low_rank import SortedRows

    low_rank, x = adapters(3, 4, 64, [48], torch.float32), drawn(20, 64, seed=3)
    places = torch.arange(20).mul(7).remainder(4)
    found, expected = torch.zeros(2, 20, 48, device=DEVICE)
    rows = SortedRows(places.to(DEVICE), 3)
    for part in (slice(0, 7), slice(7, 20)):
        rows.part(part).add(found[part], x[part], low_rank)
    GroupedRows(places.numpy(), 3, DEVICE).add(expected, x, low_rank)
    assert float((found - expected).abs().max()) < LIMITS[torch.float32] * float(expected.abs().max())


@pytest.mark.in_ci(when=lambda at: HAS_GPU or at.dtype == torch.float16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_down_shared", [False, True])
@pytest.mark.parametrize(("tokens", "rank"), [(1, 3), (37, 40), (530, 16)])
def test_heads_get_what_their_rows_adapters_add(
    tokens: int, rank: int, is_down_shared: bool, dtype: torch.dtype
) -> None:
    """Matrices of which one is for all heads, and gaps between rows, as latent attention has both; against fp64."""
    from backends.fastertransformer.engine.ops.kernels.low_rank import SortedRows

    count, heads, inputs, outputs = 3, 2, 70, 150
    down = drawn(count, 1 if is_down_shared else heads, rank, inputs, dtype=dtype, seed=1) * inputs**-0.5
    up = drawn(count, heads if is_down_shared else 1, rank, outputs, dtype=dtype, seed=2).mT * rank**-0.5
    x = drawn(tokens, heads, inputs + 9, dtype=dtype, seed=3).transpose(0, 1)[..., :inputs]
    low_rank = adapters(count, rank, inputs, [outputs], dtype, has_marks=True)
    low_rank.clear(1)
    places = np.random.default_rng(tokens).integers(0, count + 1, tokens)
    found = drawn(heads, tokens, outputs, dtype=dtype, seed=4)
    before, expected = found.clone(), found.double()
    SortedRows(torch.from_numpy(places).to(DEVICE), count).add_by_head(found, x, down, up, low_rank)
    GroupedRows(places, count, DEVICE).add_by_head(expected, x.double(), down.double(), up.double(), low_rank)
    assert float((found.double() - expected).abs().max()) < LIMITS[dtype] * float(expected.abs().max())
    is_left = (places == count) | (places == 1)
    assert torch.equal(found[:, is_left], before[:, is_left])


def test_rows_whose_adapters_leave_a_layer_alone_are_passed_over() -> None:
    """Sums in fp32 beside matrices of 16 bits, as the head's."""
    from backends.fastertransformer.engine.ops.kernels.low_rank import SortedRows

    low_rank = adapters(4, 16, 96, [300], torch.float16, has_marks=True)
    low_rank.clear(2)
    low_rank.up[2] = float("nan")  # what is cleared is not read
    places, x = np.arange(20) % 5, drawn(20, 96, dtype=torch.float16, seed=3)
    found, expected = drawn(20, 300, seed=4), drawn(20, 300, seed=4)
    before = found.clone()
    SortedRows(torch.from_numpy(places).to(DEVICE), 4).add(found, x, low_rank)
    GroupedRows(places, 4, DEVICE).add(expected, x, low_rank)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-3)
    assert torch.equal(found[(places == 2) | (places == 4)], before[(places == 2) | (places == 4)])


def followed(low_rank: LowRank, weight: Tensor, bias: Tensor | None) -> Linear:
    """Return a layer with its adapters' first matrices behind its own."""
    linear, whole = Linear(weight, bias), Linear(weight[:1])
    whole.weight = torch.cat((weight, low_rank.down.flatten(0, 1)))
    whole.bias = None if bias is None else F.pad(bias, (0, len(whole.weight) - len(weight)))
    for each, numbers in ((linear, weight), (whole, whole.weight)):
        each.weight, each.panels, each._is_packed = numbers, None, False  # as on a GPU
    linear.low_rank, linear.with_adapters = low_rank, whole
    return linear


# The rank beyond a block, and the many adapters, stand for the kernel's other halves.
@pytest.mark.in_ci(when=lambda at: HAS_GPU or at.dtype == torch.float16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "count", "rank", "parts", "activation", "is_gated"),
    [
        (1, 3, 16, [48, 24, 24], "", False),
        (37, 5, 8, [70], "gelu", False),
        (40, 16, 40, [40, 300], "", False),
        (33, 3, 24, [280, 280], "silu", True),
        (20, 2, 40, [30, 30], "silu", True),
    ],
)
def test_a_layer_and_its_adapters_are_multiplied_at_once(
    tokens: int, count: int, rank: int, parts: list[int], activation: str, is_gated: bool, dtype: torch.dtype
) -> None:
    """Against a product and what adapters add to it in torch; some rows have no adapter, some adapters no row."""
    from backends.fastertransformer.engine.ops.kernels.low_rank import SortedRows

    low_rank, x = adapters(count, rank, 96, parts, dtype), drawn(tokens, 1, 96, dtype=dtype, seed=3)
    weight, outputs = drawn(sum(parts), 96, dtype=dtype, seed=5) * 0.1, sum(parts) // (2 if is_gated else 1)
    bias = None if is_gated else drawn(sum(parts), dtype=dtype, seed=6)
    residual = None if is_gated else drawn(tokens, 1, outputs, dtype=dtype, seed=7)
    places = np.random.default_rng(tokens).integers(0, count + 1, tokens)
    places[places == 1] = count
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    double = LowRank(count, rank, 96, parts, x.new_empty(0, dtype=torch.float64))
    double.down.copy_(low_rank.down), double.up.copy_(low_rank.up)
    double.changing = low_rank.changing
    GroupedRows(places, count, DEVICE).add(expected, x.double(), double)
    if is_gated:
        first, second = expected.chunk(2, -1)
        expected = ACTIVATIONS[activation](first) * second
    else:
        expected = ACTIVATIONS[activation](expected) + residual.double()
    found = SortedRows(torch.from_numpy(places).to(DEVICE), count).multiply(
        lambda whole, x: F.linear(x, whole.weight, whole.bias),
        followed(low_rank, weight, bias), x, activation, residual, is_gated,
    )  # fmt: skip
    assert found is not None and found.shape == (tokens, 1, outputs) and (residual is None or found is residual)
    assert float((found.double() - expected).abs().max()) < 2 * LIMITS[dtype] * float(expected.abs().max())


@pytest.mark.parametrize("has_room", [True, False])
def test_operations_with_adapters_give_what_torch_gives(has_room: bool) -> None:
    """A gate, whose matrices lie together, and a product that is added; with the first matrices behind, and without."""
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    places, x = torch.tensor([2, 0, 1, 0, 2, 1, 1]), drawn(7, 1, 64, seed=3)
    gate, out = adapters(2, 4, 64, [32, 32], torch.float32), adapters(2, 4, 32, [64], torch.float32)
    joined, last = (followed(each, drawn(64, inputs, seed=5) * 0.1, None) for each, inputs in ((gate, 64), (out, 32)))
    joined.joined = joined
    found = []
    if not has_room:
        joined.with_adapters = last.with_adapters = None
    for kind in (TritonOps, Ops):
        ops: Any = kind(DEVICE)
        ops = AdaptedOps(ops, ops.adapted_rows(places.to(DEVICE), 2))
        y = ops.gated_linear(joined, joined, x, Norm(drawn(64, seed=8), None, 1e-5, is_rms=True), "silu")
        found.append(ops.linear(last, y, residual=drawn(7, 1, 64, seed=9)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_row_computes_the_same_whatever_is_beside_it() -> None:
    from backends.fastertransformer.engine.ops.kernels.low_rank import SortedRows

    low_rank, x = adapters(4, 16, 96, [64], torch.float16), drawn(20, 96, dtype=torch.float16, seed=3)
    places = np.arange(20) % 5
    together, alone = torch.zeros(20, 64, dtype=torch.float16, device=DEVICE), torch.zeros_like(x[:1, :64])
    SortedRows(torch.from_numpy(places).to(DEVICE), 4).add(together, x, low_rank)
    SortedRows(torch.from_numpy(places[7:8]).to(DEVICE), 4).add(alone, x[7:8], low_rank)
    assert torch.equal(together[7:8], alone)


def test_a_graph_follows_the_adapters_of_its_rows() -> None:
    from backends.fastertransformer.engine.ops.kernels.low_rank import SortedRows

    low_rank, x = adapters(4, 16, 512, [128, 64], torch.float16), drawn(32, 512, dtype=torch.float16, seed=3)
    places, y = torch.full((32,), 4, device=DEVICE), torch.zeros(32, 192, dtype=torch.float16, device=DEVICE)

    def step() -> None:
        SortedRows(places, 4).add(y, x, low_rank)

    step()
    assert not y.any()
    again = step
    if HAS_GPU:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        again = graph.replay
    for seed in range(3):
        drawn_places = np.random.default_rng(seed).integers(0, 5, 32)
        places.copy_(torch.from_numpy(drawn_places))
        y.zero_()
        again()
        expected = torch.zeros_like(y)
        GroupedRows(drawn_places, 4, DEVICE).add(expected, x, low_rank)
        torch.testing.assert_close(y, expected, rtol=0, atol=2e-2)
