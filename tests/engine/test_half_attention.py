"""Attention of one token of every row to keys and values in bf16 and fp16 on a CPU, against the formula in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backends.fastertransformer.engine.ops import torch_attention
from backends.fastertransformer.engine.ops.positions import AttentionSpec
from backends.fastertransformer.engine.ops.torch_attention import attend_masked

ROWS, HEADS, KEYS, SIZE = 5, 6, 40, 16
SPEC = AttentionSpec(scale=0.3)


def formula(q: Tensor, k: Tensor, v: Tensor, scores_added: Tensor) -> Tensor:
    """softmax(scale q k + what is added) v; the keys' heads are repeated."""
    q, k, v = (each.double() for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    return (SPEC.scale * q @ k.transpose(2, 3) + scores_added.double()).softmax(-1) @ v


@pytest.mark.parametrize("rows_at_a_time", [1, 2, ROWS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", ["none", "of each row", "of all rows", "added, of each head"])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_it_is_rounded_once(
    kv_heads: int, mask: str, dtype: torch.dtype, rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_attention, "_MOST_CONVERTED", rows_at_a_time * 2 * kv_heads * KEYS * SIZE)
    torch.manual_seed(0)
    q = torch.randn(ROWS, HEADS, 1, SIZE).to(dtype)
    k, v = (torch.randn(ROWS, KEYS, kv_heads, SIZE).to(dtype).transpose(1, 2) for _ in range(2))
    shape = {"none": (1, 1, 1, KEYS), "of each row": (ROWS, 1, 1, KEYS), "of all rows": (1, 1, 1, KEYS)}
    added = torch.zeros(shape.get(mask, (ROWS, HEADS, 1, KEYS)))
    if mask in shape and mask != "none":
        is_seen = torch.rand(added.shape) < 0.5
        is_seen[..., 0] = True
        given: Tensor | None = is_seen
        added = added.masked_fill(~is_seen, -torch.inf)
    elif mask == "none":
        given = None
    else:
        given = added = torch.randn(added.shape).to(dtype)
    attended = attend_masked(q, k, v, given, SPEC)
    assert attended.dtype == dtype
    expected = formula(q, k, v, added)
    # Half a unit in the last place of the type, and fp32's own rounding.
    torch.testing.assert_close(attended.double(), expected, rtol=torch.finfo(dtype).eps / 2, atol=2e-6)
