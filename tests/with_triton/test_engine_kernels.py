"""The kernels against fp64: on a GPU, or by Triton's interpreter where triton is importable (TRITON_INTERPRET=1)."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
import triton
import triton.language as tl
from torch import Tensor

from backends.fastertransformer.engine.ops.kernels.int8 import digits_of

HAS_GPU = torch.cuda.is_available()

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
KINDS = ("plain", "layer norm, gelu", "rms norm, relu", "residual", "int8, all")
DTYPES = [torch.float16, torch.float32, *[torch.bfloat16] * HAS_GPU]  # the interpreter multiplies bf16 wrongly
ACTIVATIONS = {
    "": lambda x: x,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "exact_gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "rows"), [*itertools.product(KINDS, (1, 2, 8, 13)), ("int8, all", 40), ("int8, all", 150)]
)
def test_a_product_is_what_fp64_says(kind: str, rows: int, dtype: torch.dtype) -> None:
    from backends.fastertransformer.engine.ops.kernels.gemm import Tiling, choose, multiply
    from backends.fastertransformer.engine.ops.linear import Norm

    outputs, inputs = 200 if HAS_GPU or rows > 1 else 41, 320  # neither fills its tiles; a row's are of few outputs
    x = drawn(rows, inputs, dtype=dtype, seed=1) + 0.5
    weight = drawn(outputs, inputs, dtype=dtype, seed=2) * inputs**-0.5
    bias, residual = drawn(outputs, dtype=dtype, seed=3), drawn(rows, outputs, dtype=dtype, seed=4)
    gain, shift = 1 + 0.1 * drawn(inputs, dtype=dtype, seed=5), 0.1 * drawn(inputs, dtype=dtype, seed=6)
    is_all = kind == "int8, all"
    scales = drawn(outputs, dtype=dtype, seed=7).abs() * 0.01 if is_all else None
    if is_all:
        weight = (weight * inputs**0.5 * 40).clamp(-127, 127).round().to(torch.int8)
    norm = None
    if "norm" in kind or is_all:
        norm = Norm(gain, None if "rms" in kind else shift, 1e-5, "rms" in kind)
    activation = kind.partition(", ")[2] if "norm" in kind else "silu" if is_all else ""
    has_residual = is_all or kind == "residual"

    expected = x.double()
    if norm:
        whole = (inputs,)
        expected = (
            F.rms_norm(expected, whole, gain.double(), 1e-5)
            if norm.is_rms
            else F.layer_norm(expected, whole, gain.double(), shift.double(), 1e-5)
        )
        if rows > 1:
            expected = expected.to(dtype).double()  # what the tensor cores multiply
    expected = expected @ weight.double().T * (1 if scales is None else scales.double()) + bias.double()
    expected = ACTIVATIONS[activation](expected) + (residual.double() if has_residual else 0)

    poisoned = torch.full((rows + 1, outputs), torch.nan, dtype=dtype, device=DEVICE)
    out = poisoned[:rows]
    if has_residual:
        out.copy_(residual)
    tiling = None if choose(rows, outputs, inputs, weight.dtype) else Tiling(64, 64, 4, 1, 2)
    found = multiply(x, weight, bias, scales, norm, activation, out if has_residual else None, out, None, tiling)
    assert found is out
    assert relative_error(found, expected) < LIMITS[dtype]
    assert poisoned[rows:].isnan().all()


# One row: int8 in 16 bits, whole numbers in 32.
@pytest.mark.in_ci(when=lambda at: HAS_GPU or at.rows > 1 or at.is_int8 == (at.dtype == torch.float16))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize(
    ("rows", "activation", "has_norm", "has_bias"),
    [
        (1, "silu", True, False),
        (1, "exact_gelu", False, True),
        (3, "squared_relu", True, True),
        (18, "gelu", True, False),
    ],
)
def test_a_gated_product_is_what_fp64_says(
    rows: int, activation: str, has_norm: bool, has_bias: bool, is_int8: bool, dtype: torch.dtype
) -> None:
    from backends.fastertransformer.engine.ops.kernels.gemm import Gate, Tiling, multiply
    from backends.fastertransformer.engine.ops.linear import Norm

    outputs, inputs = 101 if HAS_GPU or rows > 1 else 21, 320  # neither fills its tiles; a row's are of few outputs
    x, norm = drawn(rows, inputs, dtype=dtype, seed=1), None
    expected, products, given = x.double(), [], list[tuple[Tensor, Tensor | None, Tensor | None]]()
    if has_norm:
        norm = Norm(1 + 0.1 * drawn(inputs, dtype=torch.float32, seed=2), None, 1e-5, is_rms=True)
        expected = F.rms_norm(expected, (inputs,), norm.weight.double(), norm.eps)
        expected = expected.to(dtype).double() if rows > 1 else expected
    for seed in (3, 6):
        weight, scales = drawn(outputs, inputs, dtype=dtype, seed=seed) * inputs**-0.5, None
        bias = drawn(outputs, dtype=dtype, seed=seed + 1) if has_bias else None
        if is_int8:
            weight = (weight * inputs**0.5 * 40).clamp(-127, 127).round().to(torch.int8)
            scales = (1 + drawn(outputs, dtype=dtype, seed=seed + 2).abs()) * 0.001
        product = expected @ weight.double().T * (1 if scales is None else scales.double())
        products.append(product + (0 if bias is None else bias.double()))
        given.append((weight, bias, scales))
    (weight, bias, scales), other = given
    tiling = None if rows < 16 else Tiling(32, 64, 4, 1, 2)
    found = multiply(x, weight, bias, scales, norm, activation, tiling=tiling, gate=Gate(*other))
    assert relative_error(found, ACTIVATIONS[activation](products[0]) * products[1]) < 2 * LIMITS[dtype]


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_what_is_gated_is_what_torch_gives(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and more rows than the kernels multiply, and biases of one matrix only."""
    from backends.fastertransformer.engine.ops.host.panels import Panels
    from backends.fastertransformer.engine.ops.linear import Linear, Norm
    from backends.fastertransformer.engine.ops.ops import Ops
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    monkeypatch.setattr(Panels, "of", lambda *given: None)  # in the interpreter a CPU's weights lie as a GPU's
    half = torch.float16
    x = drawn(1, rows, 64, dtype=half, seed=1)
    activated, gate = (Linear(drawn(48, 64, dtype=half, seed=seed) / 8) for seed in (2, 3))
    gate.bias = drawn(48, dtype=half, seed=4)
    joined = [Linear(drawn(48, 64, dtype=half, seed=seed) / 8) for seed in (2, 3)]
    joined[0].joined = Linear(torch.cat([each.weight for each in joined]))  # as join does on a GPU
    gain, shift = drawn(2, 64, dtype=half, seed=6).unbind()
    for norm in (None, Norm(gain, None, 1e-5, is_rms=True), Norm(gain, shift, 1e-5)):
        for pair in ((activated, gate), joined):
            found, expected = (
                kind(DEVICE).gated_linear(pair[0], pair[1], x, norm, "silu") for kind in (TritonOps, Ops)
            )
            assert found.shape == expected.shape and relative_error(found, expected.double()) < 3e-3


# Int8 is widened alike with a norm and without, which 16 bits show without int8.
@pytest.mark.in_ci(when=lambda at: HAS_GPU or at.has_norm or not at.is_int8)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("block_n", "ahead", "warps"), [(8, 1, 4), (4, 2, 8), (2, 3, 4), (1, 9, 4)])
def test_one_row_is_what_fp64_says_however_much_is_asked_for_ahead(
    block_n: int, ahead: int, warps: int, has_norm: bool, is_int8: bool, dtype: torch.dtype
) -> None:
    from backends.fastertransformer.engine.ops.kernels.gemm import Tiling, multiply
    from backends.fastertransformer.engine.ops.linear import Norm

    outputs, inputs = 37 if HAS_GPU else 11, 1104  # the interpreter takes its time; no block_n divides either
    x = drawn(1, inputs, dtype=dtype, seed=1)
    x[0, 5], x[0, 300:316] = 90.0, 0.0  # one number far from the others, and a group of zeros
    weight = drawn(outputs, inputs, dtype=dtype, seed=2)
    scales = drawn(outputs, dtype=dtype, seed=3).abs() * 0.01 if is_int8 else None
    if is_int8:
        weight = (weight * 40).clamp(-127, 127).round().to(torch.int8)
    norm = Norm(1 + 0.1 * drawn(inputs, dtype=dtype, seed=4), drawn(inputs, dtype=dtype, seed=5), 1e-5)
    tiling = Tiling(block_n, 512, warps, ahead)
    found = multiply(x, weight, None, scales, norm if has_norm else None, tiling=tiling)
    expected = x.double()
    if has_norm:
        expected = F.layer_norm(expected, (inputs,), norm.weight.double(), norm.bias.double(), norm.eps)
    expected = expected @ weight.double().T * (1 if scales is None else scales.double())
    assert relative_error(found, expected) < LIMITS[dtype]
    few, scales = weight[:3].contiguous(), None if scales is None else scales[:3]
    for fault in (torch.inf, torch.nan):  # a row that has lost its numbers must tell
        x[0, 700] = fault
        assert not multiply(x, few, None, scales, norm if has_norm else None, tiling=tiling).isfinite().any()


@triton.jit
def write_digits(x, low, high, unit, groups: tl.constexpr, is_native: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, groups)[:, None] * 16 + tl.arange(0, 8)[None, :]
    words, more, units = digits_of(tl.load(x + at), tl.load(x + at + 8), is_native)
    for place in tl.static_range(4):
        tl.store(low + tl.arange(0, groups) * 4 + place, words[place])
        tl.store(high + tl.arange(0, groups) * 4 + place, more[place])
    tl.store(unit + tl.arange(0, groups), units)


@pytest.mark.parametrize("spread", [1e-20, 1.0, 1e20])
def test_digits_are_the_numbers_to_one_part_in_16384_of_the_largest_of_16(spread: float) -> None:
    x = drawn(8, 16, dtype=torch.float32, seed=1) * spread
    x[3], x[4, 2] = 0.0, 50 * spread
    low, high = torch.empty(2, 32, dtype=torch.int32, device=DEVICE)
    unit = torch.empty(8, device=DEVICE)
    write_digits[(1,)](x, low, high, unit, 8, HAS_GPU)
    bytes_of = [each.view(torch.uint8).view(8, 16).long() for each in (low, high)]
    signed = torch.where(bytes_of[1] > 127, bytes_of[1] - 256, bytes_of[1])
    found = (signed * 256 + bytes_of[0]) * unit[:, None].double()
    assert ((found - x.double()).abs() <= x.abs().amax(1, keepdim=True).double() / 16384).all()
