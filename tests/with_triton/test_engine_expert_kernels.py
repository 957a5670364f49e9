"""The kernels of mixtures against torch, which tests compare with transformers: on a GPU, or interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from backends.fastertransformer.engine.ops.experts import ExpertMatrices, Experts
from backends.fastertransformer.engine.ops.experts import run_experts as run_in_torch
from backends.fastertransformer.engine.ops.gates import ClampedGate
from backends.fastertransformer.engine.ops.linear import Linear, Norm
from backends.fastertransformer.engine.ops.routing import Router
from backends.fastertransformer.engine.ops.routing import choose as choose_in_torch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = [torch.float16, torch.float32, *[torch.bfloat16] * HAS_GPU]  # the interpreter multiplies bf16 wrongly
SILU = ClampedGate(1.702, 1.0, 0.5)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("experts", [8, 60])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_normalised": False, "scale": 2.5},
        {"is_sigmoid": True, "choice_bias": True},
        {"is_sigmoid": True, "choice_bias": True, "groups": 4, "groups_used": 2},
        {"groups": 4, "groups_used": 2, "is_group_of_two": False, "is_normalised": False},
    ],
    ids=str,
)
def test_experts_are_chosen_as_torch_does(experts: int, changes: dict[str, object]) -> None:
    from backends.fastertransformer.engine.ops.kernels.expert_choice import choose

    bias = drawn(experts, seed=2) if changes.get("choice_bias") else None
    plain = Router(Linear(drawn(experts, 4)), 3, False, None, True, 1.0, 1, 1, True)
    router = replace(plain, **{**changes, "choice_bias": bias})
    products = drawn(9, experts, seed=1)
    found, expected = choose(router, products), choose_in_torch(router, products)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=2e-6, atol=1e-7)
    products[2] = torch.nan  # as of a row that has overflowed
    assert ((chosen := choose(router, products)[0]) >= 0).all() and (chosen < experts).all()


def test_a_router_of_some_rows_has_the_kernel_for_few() -> None:
    from backends.fastertransformer.engine.ops.kernels import gemm

    known = ((17, 32), (256, 128), (257, 128), (17, 31), (17, 129))
    assert [gemm.choose(*rows, 320, torch.float16) is not None for rows in known] == [True, True, False, False, False]
    weight, x = drawn(40, 520, dtype=torch.float16, seed=1), drawn(37, 520, dtype=torch.float16, seed=2)
    found, expected = torch.empty(37, 40, device=DEVICE), x.double() @ weight.double().T
    gemm.multiply(x, weight, out=found)
    assert (found - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize("pairs", [(1, 8), (300, 1), (500, 3), (1100, 4)])
@pytest.mark.parametrize("drawn_of", [11, 14], ids=["some experts have none", "some pairs are of no expert"])
def test_pairs_are_sorted_by_expert(pairs: tuple[int, int], drawn_of: int) -> None:
    """In one turn of a program, and in several."""
    from backends.fastertransformer.engine.ops.kernels.expert_choice import sort_by_expert

    chosen = torch.randint(0, drawn_of, pairs, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    order, ends = sort_by_expert(chosen, 13)
    assert torch.equal(order.long(), chosen.flatten().argsort(stable=True))
    assert torch.equal(ends.long(), chosen.flatten().bincount(minlength=13)[:13].cumsum(0))


# The kernel for few rows takes both types by the same lines.
@pytest.mark.in_ci(when=lambda at: HAS_GPU or at.rows > 6 or at.dtype == torch.float16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "activation", "clamped", "has_bias"),
    [(1, "silu", None, False), (6, "silu", SILU, True), (40, "squared_relu", None, False), (150, "gelu", None, True)],
)
def test_experts_compute_what_torch_does(
    rows: int, activation: str, clamped: ClampedGate | None, has_bias: bool, dtype: torch.dtype
) -> None:
    """Few rows, some and many, of which some experts have none; no side fills its tiles."""
    from backends.fastertransformer.engine.ops.kernels import few_experts, grouped_gemm

    count, hidden, inter, is_gated = 7, 520 if rows == 1 else 72, 40, activation != "squared_relu"
    wide = inter * (2 if is_gated else 1)
    into, out = drawn(count, wide, hidden, seed=1) * hidden**-0.5, drawn(count, hidden, inter, seed=2) * inter**-0.5
    biases = [drawn(count, width, seed=3) if has_bias else None for width in (wide, hidden)]
    draws = (torch.randperm(count - 1, generator=torch.Generator().manual_seed(row)) for row in range(rows))
    chosen = torch.stack([each[:3] for each in draws])
    chosen, counts, x = chosen.to(DEVICE), drawn(rows, 3, seed=5).abs(), drawn(rows, hidden, seed=6)

    def layer(kind: torch.dtype) -> Experts:
        weights, added = ([None if each is None else each.to(kind) for each in own] for own in ((into, out), biases))
        first, last = (ExpertMatrices(0, (), weight, bias) for weight, bias in zip(weights, added, strict=True))
        return Experts(first, last, is_gated, activation, clamped)

    expected = run_in_torch(layer(torch.float64), x.to(dtype).double(), chosen, counts)
    norm = Norm((drawn(hidden, seed=7) + 1).to(dtype), None, 1e-5, is_rms=True)
    if rows <= 6:
        normed = F.rms_norm(x.to(dtype).double(), (hidden,), norm.weight.double(), norm.eps)
        exact = run_in_torch(layer(torch.float64), normed, chosen, counts)
        found = few_experts.run_experts(layer(dtype), x.to(dtype), chosen, counts, norm)
        assert (found.double() - exact).norm() / exact.norm() < LIMITS[dtype]
    parts = []
    for first, end in ((0, 3), (3, count)):  # of two processes, each of which has some experts whole
        own = layer(dtype)
        into_, out_ = (
            ExpertMatrices(0, (), each.weight[first:end], None if each.bias is None else each.bias[first:end])
            for each in (own.into, own.out)
            if each.weight is not None
        )
        part = replace(own, into=into_, out=out_, first=first)
        parts.append(grouped_gemm.run_experts(part, x.to(dtype), part.numbered(chosen), counts).double())
    assert (sum(parts) - expected).norm() / expected.norm() < LIMITS[dtype]
    for kernels in (few_experts, grouped_gemm)[rows > 6 :]:
        found = kernels.run_experts(layer(dtype), x.to(dtype), chosen, counts)
        assert found.dtype == dtype and found.shape == (rows, hidden)
        assert (found.double() - expected).norm() / expected.norm() < LIMITS[dtype]
        stream = x.to(dtype).clone()  # that the sum is added to
        added = kernels.run_experts(layer(dtype), stream, chosen, counts, residual=stream)
        assert added is stream
        meant = x.to(dtype) + expected
        assert (added.double() - meant).norm() / meant.norm() < LIMITS[dtype]


# Few rows and sorted ones; a GPU takes bf16 by instructions of its own. Wider rows take several steps.
@pytest.mark.in_ci(when=lambda at: HAS_GPU or (at.hidden == 96 and at.rows in (1, 40) and at.dtype == torch.float16))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "clamped", "hidden"), [(1, SILU, 96), (1, SILU, 1056), (6, None, 96), (40, SILU, 96), (150, None, 96)]
)
def test_experts_of_mxfp4_are_what_transformers_makes_of_their_bytes(
    rows: int, clamped: ClampedGate | None, hidden: int, dtype: torch.dtype
) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from backends.fastertransformer.engine.ops.kernels import few_experts, grouped_gemm

    count, inter, draw = 5, 160 if rows > 6 else 32, torch.Generator().manual_seed(0)
    packed, meant = list[ExpertMatrices](), list[ExpertMatrices]()
    for outputs, inputs in ((2 * inter, hidden), (hidden, inter)):
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8, generator=draw)
        powers = torch.randint(119, 125, blocks.shape[:3], dtype=torch.uint8, generator=draw)
        powers[:, 0, 0] = 0  # 2**-127
        weight, bias = convert_moe_packed_tensors(blocks, powers), drawn(count, outputs, seed=3)
        weight, kept = weight.transpose(1, 2).to(DEVICE, torch.float64), blocks.flatten(2).to(DEVICE)
        packed.append(ExpertMatrices(0, (), kept, bias.to(dtype), powers.to(DEVICE)))
        meant.append(ExpertMatrices(0, (), weight, bias.to(dtype).double()))
    chosen = torch.stack([torch.randperm(count - 1, generator=draw)[:2] for _ in range(rows)]).to(DEVICE)
    counts, x = drawn(rows, 2, seed=5).abs(), drawn(rows, hidden, seed=6).to(dtype)
    layer, exact = (Experts(into, out, True, "silu", clamped) for into, out in (packed, meant))
    expected = run_in_torch(exact, x.double(), chosen, counts)
    for kernels in (few_experts, grouped_gemm)[rows > 6 :]:
        found = kernels.run_experts(layer, x, chosen, counts)
        assert found.dtype == dtype and (found.double() - expected).norm() / expected.norm() < LIMITS[dtype]
    norm = Norm((drawn(hidden, seed=7) + 1).to(dtype), None, 1e-5, is_rms=True)
    if rows <= 6:
        normed = F.rms_norm(x.double(), (hidden,), norm.weight.double(), norm.eps)
        expected = run_in_torch(exact, normed, chosen, counts)
        found = few_experts.run_experts(layer, x, chosen, counts, norm)
        assert (found.double() - expected).norm() / expected.norm() < LIMITS[dtype]
