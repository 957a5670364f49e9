"""Products of packed weights: their numbers against numpy, and how many shapes oneDNN has to compile code for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backends.fastertransformer.engine.linear import Linear, padded_rows


@pytest.mark.parametrize("shape", [(1,), (3, 1), (5, 1), (65,), (3, 43), (0,), (2, 0)])
def test_any_number_of_rows_is_multiplied(shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(1)
    weight, bias, x = (generator.standard_normal(size).astype(np.float32) for size in ((24, 16), 24, (*shape, 16)))
    found = Linear(torch.from_numpy(weight), torch.from_numpy(bias))(torch.from_numpy(x))
    np.testing.assert_allclose(found.numpy(), x @ weight.T + bias, rtol=1e-4, atol=1e-5)


def test_few_shapes_are_multiplied_whatever_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
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
