"""Products of packed weights: their numbers against numpy, and how many shapes oneDNN has to compile code for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from backends.fastertransformer.engine.ops import choose_ops
from backends.fastertransformer.engine.ops.host import panels
from backends.fastertransformer.engine.ops.linear import Int8Linear, Linear, Norm, padded_rows


@pytest.mark.parametrize("shape", [(1,), (3, 1), (5, 1), (65,), (3, 43), (0,), (2, 0)])
def test_any_number_of_rows_is_multiplied(shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(1)
    weight, bias, x = (generator.standard_normal(size).astype(np.float32) for size in ((24, 16), 24, (*shape, 16)))
    found = Linear(torch.from_numpy(weight), torch.from_numpy(bias))(torch.from_numpy(x))
    np.testing.assert_allclose(found.numpy(), x @ weight.T + bias, rtol=1e-4, atol=1e-5)


def test_few_shapes_are_multiplied_whatever_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "host_kernels", lambda: None)
    linear, seen = Linear(torch.randn(8, 16)), set()
    if not linear._is_packed:
        assert torch.equal(linear(torch.ones(3, 16))[0], linear(torch.ones(5, 16))[0])
        return
    real = torch.ops.mkldnn._linear_pointwise

    def note(x: Tensor, *rest: Any) -> Tensor:
        seen.add(tuple(x.shape))
        product: Tensor = real(x, *rest)
        return product

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", note)
    for rows in range(1, 301):
        assert linear(torch.ones(rows, 16)).shape == (rows, 8)
    assert len(seen) == 1 + 13 + 4 * 8 + 2  # 1, 4 to 16 rows, four doublings, 2 of the next


def test_padding_is_small() -> None:
    padded = {rows: padded_rows(rows) for rows in range(4097)}
    assert padded[0] == 0 and padded[1] == 1 and len(set(padded.values())) == 79
    assert all(0 <= padded[rows] - rows <= max(2, rows / 8) for rows in padded)


@pytest.mark.parametrize("kind", [Linear, Int8Linear])
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
@pytest.mark.parametrize("is_rms", [False, True])
def test_what_comes_before_and_behind_a_product_is_what_fp64_says(kind: type[Linear], rows: int, is_rms: bool) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    weight = drawn(48, 32).mul_(10).round_()  # integers below 127 are int8's own, by a scale of 1
    weight[torch.arange(48), torch.arange(48) % 32] = 127
    linear, residual, ops = kind(weight, drawn(48)), drawn(rows, 1, 48), choose_ops(device)
    for _ in range(2):  # what is kept for one norm is not taken for another
        norm = Norm(1 + drawn(32), None if is_rms else drawn(32), 1e-5, is_rms)
        x = drawn(rows, 1, 32) + 0.5
        wide = x.double()
        centred = wide if is_rms else wide - wide.mean(-1, keepdim=True)
        expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
        expected = (expected if norm.bias is None else expected + norm.bias.double()) @ weight.double().T
        expected = F.gelu(expected + linear.bias.double(), approximate="tanh")  # type: ignore[union-attr]
        limit = 2e-3 if dtype == torch.float16 else 1e-5 if kind is Linear else 1e-4
        assert error(ops.linear(linear, x, norm, "gelu"), expected) < limit
        expected += residual.double()
        added = ops.linear(linear, x, norm, "gelu", residual)
        assert added.data_ptr() == residual.data_ptr()
        assert error(residual, expected) < limit


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm()) if expected.numel() else 0.0
