"""Products with matrices of FP8 against fp64: on a GPU, or by Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from backends.fastertransformer.engine.model.blocks.feed_forward import DenseWeights
from backends.fastertransformer.engine.ops.experts import ExpertMatrices, Experts
from backends.fastertransformer.engine.ops.experts import run_experts as run_in_torch
from backends.fastertransformer.engine.ops.fp8 import Fp8Linear, ScaledNumbers, StaticLinear
from backends.fastertransformer.engine.ops.linear import Blocks, Norm

HAS_GPU = torch.cuda.is_available()
HAS_FP8 = HAS_GPU and torch.cuda.get_device_capability() >= (8, 9)
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
LIMITS = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [torch.float16, *[torch.bfloat16] * HAS_GPU]  # the interpreter multiplies bf16 wrongly
OUTPUTS, INPUTS = 72, 320  # neither fills its tiles
BLOCKS = [None, Blocks(128, 0), Blocks(96, 32), Blocks(64, 0)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def numbers_of(*shape: int, blocks: Blocks | None, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw every FP8 number there is -> numbers, scales by block, and what they mean in fp64."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, shape, generator=generator) + 128 * torch.randint(0, 2, shape, generator=generator)
    numbers = codes.to(DEVICE, torch.uint8).view(torch.float8_e4m3fn)
    width, first = blocks or (shape[-1], 0)
    count = -(-(first + shape[-1]) // width)
    scales = 1e-3 + 1e-3 * torch.rand(*shape[:-1], count, generator=generator).to(DEVICE)
    columns = (torch.arange(shape[-1], device=DEVICE) + first) // width
    return numbers, scales, numbers.double() * scales.double()[..., columns]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize(("rows", "norm"), [(1, ""), (1, "layer"), (1, "rms"), (3, "rms"), (40, ""), (100, "layer")])
def test_a_product_is_what_fp64_says(rows: int, norm: str, blocks: Blocks | None, dtype: torch.dtype) -> None:
    from backends.fastertransformer.engine.ops.kernels.gemm import Tiling, choose, multiply

    numbers, scales, exact = numbers_of(OUTPUTS, INPUTS, blocks=blocks, seed=1)
    x, bias, residual = drawn(rows, INPUTS, dtype=dtype, seed=2), drawn(OUTPUTS, dtype=dtype), drawn(rows, OUTPUTS)
    residual, expected, normed = residual.to(dtype), x.double(), None
    if norm:
        gain, shift = 1 + 0.1 * drawn(INPUTS, dtype=dtype, seed=5), 0.1 * drawn(INPUTS, dtype=dtype, seed=6)
        normed = Norm(gain, shift if norm == "layer" else None, 1e-5, norm == "rms")
        whole = ((INPUTS,), gain.double())
        expected = (
            F.rms_norm(expected, *whole, 1e-5) if normed.is_rms else F.layer_norm(expected, *whole, shift.double())
        )
        expected = expected.to(dtype).double() if rows > 1 else expected  # what the tensor cores multiply
    expected = F.silu(expected @ exact.T + bias.double()) + residual.double()
    tiling = None if choose(rows, OUTPUTS, INPUTS, numbers.dtype) else Tiling(64, 64, 4, 1, 2)
    found = multiply(x, numbers, bias, scales, normed, "silu", residual, tiling=tiling, blocks=blocks)
    assert error(found, expected) < LIMITS[dtype]


@pytest.mark.parametrize("blocks", BLOCKS[:2], ids=str)
@pytest.mark.parametrize("norm", ["", "rms"])
def test_rows_of_bf16_are_multiplied_by_digits(norm: str, blocks: Blocks | None) -> None:
    """Without a norm these have every bit of the numbers, and only the sums are rounded."""
    from backends.fastertransformer.engine.ops.kernels.gemm import multiply

    numbers, scales, exact = numbers_of(OUTPUTS, INPUTS, blocks=blocks, seed=1)
    x = drawn(40, INPUTS, dtype=torch.bfloat16, seed=2) * torch.logspace(-6, 4, 40, device=DEVICE)[:, None]
    x, gain, expected = x.bfloat16(), (1 + 0.1 * drawn(INPUTS, seed=5)).bfloat16(), x.bfloat16().double()
    normed = Norm(gain, None, 1e-9, is_rms=True) if norm else None
    if normed:
        expected = F.rms_norm(expected, (INPUTS,), gain.double(), 1e-9)
    found = multiply(x, numbers, None, scales, normed, blocks=blocks, out=drawn(40, OUTPUTS))
    # Tensor cores sum up a block's products in 14 bits or so.
    limit = 1e-3 if HAS_GPU else 3e-7
    for row, meant in zip(found, expected @ exact.T, strict=True):
        assert error(row, meant) < (2e-3 if norm else limit)
    x[3, 100], x[5, 200] = torch.inf, torch.nan
    lost = multiply(x, numbers, None, scales, normed, blocks=blocks, out=drawn(40, OUTPUTS)).isfinite().all(1)
    assert [row for row, is_finite in enumerate(lost.tolist()) if not is_finite] == [3, 5]


def test_more_rows_of_bf16_keep_every_bit_beside_a_large_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not dequantized, which rounds it, up to 256 rows of bf16."""
    from backends.fastertransformer.engine.ops.kernels import gemm
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    if HAS_GPU and torch.cuda.get_device_capability() < (9, 0):
        return  # dequantized there
    kind = torch.float8_e4m3fn
    known = [(256, 4096, True), (257, 4096, True), (256, 4096, False), (256, 1024, True)]
    assert [gemm.choose(n, wide, 64, kind, True, digits) is not None for n, wide, digits in known] == [1, 0, 0, 0]
    monkeypatch.setattr(gemm, "_LEAST_TILES", 3)
    numbers, scales, exact = numbers_of(130, 320, blocks=None, seed=1)
    x = drawn(150, 320, dtype=torch.bfloat16, seed=2)
    found = TritonOps(DEVICE).linear_fp32(Fp8Linear(ScaledNumbers.of(numbers, scales, None)), x)
    assert error(found, x.double() @ exact.T) < (1e-3 if HAS_GPU else 3e-7)


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e-6, 3e4])
def test_one_row_keeps_its_range(value: float) -> None:
    """What is not finite stays so, and small numbers are exact beside large ones."""
    from backends.fastertransformer.engine.ops.kernels.gemm import multiply

    numbers, scales, exact = numbers_of(OUTPUTS, INPUTS, blocks=None, seed=1)
    x = drawn(1, INPUTS, dtype=torch.bfloat16 if HAS_GPU else torch.float16, seed=2)
    x[0, 64:128] *= value
    x[0, 70] = value
    found = multiply(x, numbers, None, scales, out=drawn(1, OUTPUTS))
    if value in (1e-6, 3e4):
        assert error(found, x.double() @ exact.T) < 1e-6
    else:
        assert not found.isfinite().any()


# One row and many: no blocks, and those that begin within one.
@pytest.mark.in_ci(when=lambda at: HAS_GPU or at.rows == 4 or at.blocks in BLOCKS[:3:2])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 150])
def test_operations_are_what_torch_gives(rows: int, blocks: Blocks | None) -> None:
    """Gated products too, in fewer and more rows than the kernels multiply; also by blocks that these do not know."""
    from backends.fastertransformer.engine.ops.ops import Ops
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    half, blocks = torch.float16, Blocks(40, 8) if blocks == BLOCKS[2] else blocks
    x, residual = drawn(1, rows, INPUTS, dtype=half, seed=3), drawn(1, rows, OUTPUTS, dtype=half, seed=4)
    both = []
    for seed in (1, 2):
        numbers, scales, _ = numbers_of(OUTPUTS, INPUTS, blocks=blocks, seed=seed)
        both.append(Fp8Linear(ScaledNumbers.of(numbers, 0.05 * scales, blocks)))
    norm = Norm(1 + 0.1 * drawn(INPUTS, dtype=half, seed=5), None, 1e-5, is_rms=True)
    for gate in (both[1], Fp8Linear(both[1]._scaled, drawn(OUTPUTS, dtype=half))):
        found, expected = (kind(DEVICE).gated_linear(both[0], gate, x, norm, "silu") for kind in (TritonOps, Ops))
        assert error(found, expected.double()) < 4e-3
    for given in ({}, {"residual": residual}):
        one, other = ({key: each.clone() for key, each in given.items()} for _ in range(2))
        found, expected = (
            TritonOps(DEVICE).linear(both[0], x, norm, **one),
            Ops(DEVICE).linear(both[0], x, norm, **other),
        )
        assert error(found, expected.double()) < 4e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_numbers_become_what_they_stand_for(blocks: Blocks | None, dtype: torch.dtype) -> None:
    from backends.fastertransformer.engine.ops.kernels.elementwise import dequantize

    numbers, scales, exact = numbers_of(13, 2000, blocks=blocks, seed=1)
    expected = (numbers.float() * (exact / numbers.double()).nan_to_num(0).float()).to(dtype)
    found = dequantize(numbers, scales, dtype, blocks)
    assert (found.double() - expected.double()).abs().max() <= torch.finfo(dtype).eps * expected.double().abs().max()
    assert error(found, exact) < LIMITS[dtype]


@pytest.mark.parametrize("block", [256, 1024])
@pytest.mark.parametrize("blocks", [None, Blocks(128, 0), Blocks(64, 0)], ids=str)
@pytest.mark.parametrize("kind", ["", "rms", "layer", "gate"])
def test_rows_are_rounded_so_that_the_largest_number_fits(
    kind: str, blocks: Blocks | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are one block of a program, and rows that are several; as they are, normed, or halves to gate."""
    from backends.fastertransformer.engine.ops.kernels import fp8_rows

    monkeypatch.setattr(fp8_rows, "_MOST_BLOCK", block)
    x = drawn(5, 640, dtype=torch.float16, seed=1) * torch.tensor([1e-3, 1, 0, 50, 1], device=DEVICE)[:, None].half()
    gain, shift = 1 + 0.1 * drawn(640, dtype=torch.float16, seed=2), drawn(640, dtype=torch.float16, seed=3)
    norm, exact, wide, activation = None, x.double(), ((640,), gain.double()), None
    if kind == "gate":
        second, activation = drawn(5, 640, dtype=torch.float16, seed=4), "silu"
        x, exact = torch.cat((x, second), 1), (F.silu(exact) * second.double()).half().double()
    elif kind:
        norm = Norm(gain, shift if kind == "layer" else None, 1e-5, kind == "rms")
        exact = F.rms_norm(exact, *wide, 1e-5) if norm.is_rms else F.layer_norm(exact, *wide, shift.double(), 1e-5)
    codes, scales = fp8_rows.round_rows(x, norm, blocks, activation)
    scales = scales.T if blocks else scales
    grouped = exact.view(5, -1, blocks.width if blocks else 640)
    most, near = grouped.abs().amax(-1), 1e-3 if kind == "gate" else 1e-4  # fp16 may be rounded to the neighbour
    assert codes.dtype == torch.float8_e4m3fn and scales.shape == most.shape
    torch.testing.assert_close(scales.double(), (most / 448).clamp(min=1e-12), rtol=near, atol=0.0)
    found = codes.double().view(grouped.shape) * scales.double()[..., None]
    step = (grouped.abs() / 8).maximum(most[..., None] / 448 / 512)  # between neighbours
    assert ((found - grouped).abs() <= 0.51 * step + near * grouped.abs() + near * 6e-5).all()
    x[1, 300] = torch.inf
    lost = fp8_rows.round_rows(x, norm, blocks, activation)[1]
    lost = lost.T if blocks else lost
    assert not lost[1].isfinite().all() and lost[0].isfinite().all()


@pytest.mark.parametrize("rows", [3, 70, 200])
@pytest.mark.parametrize("width", [64, 128])
def test_rounded_rows_are_multiplied_by_block(width: int, rows: int) -> None:
    """The tiles of few and more rows and of many, by numbers that FP8 has."""
    from backends.fastertransformer.engine.ops.kernels import fp8_rows

    if HAS_GPU and not HAS_FP8:
        return  # what needs it is refused there
    numbers, scales, exact = numbers_of(300, 3 * width, blocks=Blocks(width, 0), seed=1)
    codes, units, meant = numbers_of(rows, 3 * width, blocks=Blocks(width, 0), seed=2)
    expected = meant @ exact.T
    for tiles in (fp8_rows._FEW, fp8_rows._MANY):
        turned = units.T.contiguous(), numbers, scales.T.contiguous()
        found = fp8_rows.multiply_blocks(codes, *turned, torch.float16, tiles)
        # Tensor cores sum up a block's products in 14 bits or so.
        assert error(found, expected) < (5e-3 if HAS_GPU else 1e-3)


@pytest.mark.parametrize("blocks", [None, Blocks(128, 0)], ids=str)
@pytest.mark.parametrize("rows", [2, 20, 150])
def test_what_is_rounded_is_near_what_is_not(rows: int, blocks: Blocks | None) -> None:
    """Few rows are not rounded; many are, by the operations that a GPU with FP8 has."""
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    if HAS_GPU and not HAS_FP8:
        return  # what needs it is refused there
    numbers, scales, exact = numbers_of(96, 256, blocks=blocks, seed=1)
    linear = Fp8Linear(ScaledNumbers.of(numbers, scales, blocks), drawn(96).half(), rounds=True)
    x = drawn(1, rows, 256, dtype=torch.float16, seed=2)
    expected = x.double() @ exact.T + linear.bias.double()
    found = TritonOps(DEVICE).linear(linear, x)
    assert found.dtype == torch.float16 and found.shape == expected.shape
    assert error(found, expected) < 1e-3 if rows == 2 else 5e-3 < error(found, expected) < 6e-2
    both = linear(x)  # torch's way to do the same
    assert error(both, expected) < 6e-2


@pytest.mark.parametrize("blocks", [None, Blocks(128, 0)], ids=str)
def test_halves_are_gated_where_they_are_rounded(blocks: Blocks | None) -> None:
    """Only by a product that alone multiplies them, and of many rows."""
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    if HAS_GPU and not HAS_FP8:
        return  # what needs it is refused there
    made = []
    for seed, shape in enumerate([(512, 128), (96, 256)]):
        numbers, scales, exact = numbers_of(*shape, blocks=blocks, seed=seed)
        made.append((Fp8Linear(ScaledNumbers.of(numbers, scales, blocks), rounds=True), exact))
    (joined, both), (out, exact) = made
    into, gate = (
        Fp8Linear(ScaledNumbers(joined.weight[rows], joined.scales[rows], *(blocks or (128, 0))), rounds=True)
        for rows in (slice(256), slice(256, None))
    )
    block = DenseWeights(into, gate, out, "silu")
    into.joined = joined  # as on a GPU
    ops, x = TritonOps(DEVICE), drawn(1, 20, 128, dtype=torch.float16, seed=2)
    residual = drawn(1, 20, 96, dtype=torch.float16, seed=3)
    first, second = (x.double() @ both.T).chunk(2, -1)
    expected = residual.double() + (F.silu(first) * second) @ exact.T
    context: Any = SimpleNamespace(ops=ops, tasks=None)
    alone, shared = block.inner(x, None, context, out), block.inner(x, None, context)
    assert (alone.shape[-1], shared.shape[-1]) == (512, 256)
    found = [ops.linear(out, each, residual=residual.clone()) for each in (alone, shared)]
    assert error(found[0], found[1].double()) < 1e-3
    assert 5e-3 < error(found[0], expected) < 6e-2
    assert block.inner(x[:, :16], None, context, out).shape[-1] == 256
    scaled = replace(block, ia3=torch.ones(1, 256, dtype=torch.float16, device=DEVICE))
    assert torch.equal(scaled.inner(x, None, context, out), shared)


@pytest.mark.parametrize("rows", [1, 40])
def test_scales_of_inputs_are_followed_by_every_operation(rows: int) -> None:
    """A product for all rows of two matrices, and one for each where their scales differ."""
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    ops, half = TritonOps(DEVICE), torch.float16
    x, residual = drawn(1, rows, INPUTS, dtype=half, seed=2), drawn(1, rows, OUTPUTS, dtype=half, seed=3)
    norm = Norm(1 + 0.1 * drawn(INPUTS, dtype=half, seed=5), None, 1e-5, is_rms=True)
    normed = ops.norm(x, norm)
    for given in ([0.005, 0.005], [0.005, 0.02], [None, 0.02])[: 3 if rows == 1 else 1]:
        scales = [None if each is None else torch.tensor(each, device=DEVICE) for each in given]
        wholes, made = [], []
        for seed in (1, 2):
            numbers, weights, exact = numbers_of(OUTPUTS, INPUTS, blocks=None, seed=seed)
            plain = Fp8Linear(ScaledNumbers.of(numbers, weights, None))
            made.append(StaticLinear(plain, scales, [32, OUTPUTS - 32]))
            inputs = [normed if each is None else fp8_by_hand(normed, each).to(half) for each in scales]
            parts = zip(inputs, exact.split([32, OUTPUTS - 32]), strict=True)
            wholes.append(torch.cat([each.double() @ rows.T for each, rows in parts], -1))
        assert error(ops.linear(made[0], x, norm, residual=residual.clone()), wholes[0] + residual.double()) < 2e-3
        assert error(ops.gated_linear(made[0], made[1], x, norm, "silu"), F.silu(wholes[0]) * wholes[1]) < 2e-3
        assert error(ops.partial_linear(made[0], normed), wholes[0]) < 2e-3


def fp8_by_hand(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("blocks", [None, Blocks(128, 0), Blocks(64, 32)], ids=str)
@pytest.mark.parametrize(("rows", "is_gated"), [(1, True), (9, False), (60, True)])
def test_experts_compute_what_torch_does(rows: int, is_gated: bool, blocks: Blocks | None) -> None:
    from backends.fastertransformer.engine.ops.kernels.grouped_gemm import run_experts

    count, hidden, inter = 5, 160, 192
    shapes = (count, inter * (1 + is_gated), hidden), (count, hidden, inter)
    matrices = []
    for seed, shape in enumerate(shapes):
        numbers, scales, _ = numbers_of(*shape, blocks=blocks, seed=seed)
        matrices.append(ExpertMatrices(0, (), numbers, None, 0.2 * scales, blocks))
    layer = Experts(matrices[0], matrices[1], is_gated, "silu")
    draws = (torch.randperm(count - 1, generator=torch.Generator().manual_seed(row)) for row in range(rows))
    chosen, counts = torch.stack([each[:3] for each in draws]).to(DEVICE), drawn(rows, 3, seed=5).abs()
    x = drawn(rows, hidden, dtype=torch.float16, seed=6)
    expected = run_in_torch(layer, x.double(), chosen, counts)
    assert error(run_experts(layer, x, chosen, counts), expected) < 3e-3
