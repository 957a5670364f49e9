"""The kernels of adapters against torch, which tests compare with PEFT: on a GPU, or interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from backends.fastertransformer.engine.ops.low_rank import GroupedRows, LowRank

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = [torch.float16, torch.float32, *[torch.bfloat16] * HAS_GPU]  # the interpreter multiplies bf16 wrongly


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def adapters(count: int, rank: int, inputs: int, parts: list[int], dtype: torch.dtype) -> LowRank:
    found = LowRank(count, rank, inputs, parts, torch.empty(0, dtype=dtype, device=DEVICE))
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
