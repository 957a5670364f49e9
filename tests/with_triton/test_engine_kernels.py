"""The kernels against fp64: on a GPU, or by Triton's interpreter where triton is importable (TRITON_INTERPRET=1)."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

HAS_GPU = torch.cuda.is_available()

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
KINDS = ("plain", "layer norm, gelu", "rms norm, relu", "residual", "int8, all")
DTYPES = [torch.float16, torch.float32, *[torch.bfloat16] * HAS_GPU]  # the interpreter multiplies bf16 wrongly
ACTIVATIONS = {
    "": lambda x: x,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "rows"), [*itertools.product(KINDS, (1, 2, 8, 13)), ("int8, all", 40)])
def test_a_product_is_what_fp64_says(kind: str, rows: int, dtype: torch.dtype) -> None:
    from backends.fastertransformer.engine.kernels.product import Tiling, choose, multiply
    from backends.fastertransformer.engine.linear import Norming

    outputs, inputs = 200, 320  # neither fills its tiles
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
        norm = Norming(gain, None if "rms" in kind else shift, 1e-5, "rms" in kind)
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
