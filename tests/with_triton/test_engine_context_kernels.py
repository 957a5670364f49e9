"""The kernels of contexts, many tokens at once, against torch: on a GPU, or by Triton's interpreter."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)

from backends.fastertransformer.engine.cache.kv_cache import PAGE
from backends.fastertransformer.engine.ops.linear import HeadNorms, Norm
from backends.fastertransformer.engine.ops.ops import Ops
from backends.fastertransformer.engine.ops.packed_rows import NumberedRows
from backends.fastertransformer.engine.ops.positions import AttentionSpec, Relative, Rotary, Rotation, plain_frequencies

HAS_GPU = torch.cuda.is_available()

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [*LIMITS] if HAS_GPU else [torch.float32, torch.float16]


def _rotary(width: int, is_by_pairs: bool) -> Rotary:
    return Rotary(width, is_by_pairs, plain_frequencies(width, device=DEVICE), 1.3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotary"),
    [
        (heads, kv_heads, size, rotary)
        for heads, kv_heads, size in [(3, 3, 64), (2, 1, 256), (5, 5, 80), (12, 3, 32)]
        for rotary in (None, _rotary(16, True), _rotary(32, False), _rotary(20, False), _rotary(64, False))
        if not rotary or rotary.width <= size
    ],
)
def test_tokens_are_normed_and_turned_and_kept(
    heads: int, kv_heads: int, size: int, rotary: Rotary | None, has_norm: bool, dtype: torch.dtype
) -> None:
    from backends.fastertransformer.engine.ops.kernels.kv_write import kv_write, rotate_and_write

    torch.manual_seed(0)
    tokens = 7
    qkv = torch.randn(tokens, heads + 2 * kv_heads, size).to(DEVICE, dtype)
    q, k, v = qkv.transpose(0, 1).split((heads, kv_heads, kv_heads))
    memory = torch.randn(2, 5, kv_heads, PAGE, size).to(DEVICE, dtype)
    pages = torch.tensor([4, 4, 1, 1, 1, 3, 0], dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([30, 31, 0, 1, 2, 17, 5], device=DEVICE)
    positions = torch.tensor([62, 63, 64, 65, 66, 2000, 0], device=DEVICE)
    expected_q, expected_k, expected = q.float().clone(), k.float().clone(), memory.clone()
    gains, norms = 1 + 0.1 * torch.randn(2, size, device=DEVICE), None  # fp32, whatever is normed
    if has_norm:
        norms = HeadNorms(*(Norm(gain, None, 1e-3, is_rms=True) for gain in gains))
        expected_q, expected_k = (
            F.rms_norm(x, (size,), gain, 1e-3) for x, gain in zip((expected_q, expected_k), gains, strict=True)
        )
    if rotary:
        turn = Rotation(positions[None], rotary, torch.float32)
        expected_q, expected_k = turn(expected_q[None])[0], turn(expected_k[None])[0]
    expected[0, pages, :, offsets] = expected_k.to(dtype).transpose(0, 1)  # indexed axes come first: [T, H, D]
    expected[1, pages, :, offsets] = v.transpose(0, 1)
    if rotary or has_norm:
        found = rotate_and_write(q, k, v, memory, pages, offsets, positions, rotary, norms)
        for mine, theirs in zip(found, (expected_q, expected_k, v), strict=True):
            assert float((mine.float() - theirs.float()).norm() / theirs.float().norm()) < max(LIMITS[dtype], 1e-5)
        assert torch.equal(memory[1], expected[1])
        assert (memory[0] - expected[0]).abs().max() < 8 * max(LIMITS[dtype], 1e-4)  # position 2000 in fp32
    else:
        kv_write(k, v, memory, pages, offsets)
        assert torch.equal(memory, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 1024), (13, 2000)])
def test_int8_becomes_the_numbers_that_it_stands_for(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    from backends.fastertransformer.engine.ops.kernels.elementwise import dequantize

    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=DEVICE)
    scales = torch.rand(outputs, device=DEVICE).to(dtype)
    expected = (weight.double() * scales.double()[:, None]).to(dtype)
    assert torch.equal(dequantize(weight, scales, dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_rms", [False, True])
def test_every_row_is_normed(is_rms: bool, dtype: torch.dtype) -> None:
    from backends.fastertransformer.engine.ops.kernels.elementwise import normalize

    torch.manual_seed(0)
    x = (torch.randn(5, 1000, device=DEVICE) * 3 + 1).to(dtype)
    weight, bias = torch.randn(2, 1000, device=DEVICE).to(dtype).unbind()
    wide = (1000,), weight.double()
    expected = F.rms_norm(x.double(), *wide, 1e-5) if is_rms else F.layer_norm(x.double(), *wide, bias.double(), 1e-5)
    found = normalize(x, Norm(weight, None if is_rms else bias, 1e-5, is_rms))
    assert float((found.double() - expected).norm() / expected.norm()) < LIMITS[dtype]


# A bias is added alike whether heads fill their tile (64) or not (80).
@pytest.mark.in_ci(when=lambda at: HAS_GPU or at.size == 80 or at.kind == "plain")
@pytest.mark.parametrize("dtype", [*LIMITS] if HAS_GPU else [torch.float32], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["plain", "slopes", "by distance"])
@pytest.mark.parametrize("size", [64, 80, 128, 256] if HAS_GPU else [64, 80])  # the interpreter takes 4 s for each
def test_rows_attend_within_themselves(size: int, kind: str, is_causal: bool, dtype: torch.dtype) -> None:
    from backends.fastertransformer.engine.ops.kernels.prefill_attention import attend_rows
    from backends.fastertransformer.engine.ops.kernels.row_blocks import PackedRows

    torch.manual_seed(0)
    heads, far, ends = 2, 20, [0, 270, 271, 335, 368]
    tokens = 400
    q, k, v = torch.randn(tokens, 3, heads, size).to(DEVICE, dtype).permute(1, 2, 0, 3).unbind()
    table = torch.randn(heads, 2 * far + 1, device=DEVICE)
    bias = {"slopes": torch.rand(heads, device=DEVICE), "by distance": table}.get(kind)
    rows = PackedRows(torch.tensor(ends, dtype=torch.int32, device=DEVICE), tokens, 270)
    found = attend_rows(q, k, v, rows, 0.2, bias, is_causal)
    for begin, end in pairwise(ends):
        own, steps = slice(begin, end), torch.arange(end - begin, device=DEVICE)
        distance = steps - steps[:, None]
        scores = q[:, own].double() @ k[:, own].double().transpose(1, 2) * 0.2
        if kind == "slopes":
            scores += bias[:, None, None] * distance
        elif kind == "by distance":
            scores += table[:, distance.clamp(-far, far) + far]
        if is_causal:
            scores = scores.masked_fill(distance > 0, -torch.inf)
        expected = scores.softmax(-1) @ v[:, own].double()
        assert float((found[:, own].double() - expected).norm() / expected.norm()) < 2 * LIMITS[dtype]


@pytest.mark.parametrize("few_programs", [0, 4096])
def test_as_many_rows_as_one_likes_attend_and_some_are_empty(
    few_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head by head, and all heads together."""
    from backends.fastertransformer.engine.ops.kernels import prefill_attention as rows
    from backends.fastertransformer.engine.ops.kernels.prefill_attention import attend_rows
    from backends.fastertransformer.engine.ops.kernels.row_blocks import PackedRows

    monkeypatch.setattr(rows, "_CACHED_BYTES", 0)
    monkeypatch.setattr(rows, "_FEW_PROGRAMS", few_programs)
    torch.manual_seed(0)
    lengths = [0, 5, 0, 1, 70] + [3, 0] * 17 + [40, 0, 0]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    q, k, v = torch.randn(3, 3, sum(lengths), 64, device=DEVICE).unbind()
    found = attend_rows(q, k, v, PackedRows(ends, sum(lengths), 70), 0.2, is_causal=True)
    parts = (torch.split(each.double(), lengths, 1) for each in (q, k, v))
    how: dict[str, Any] = {"is_causal": True, "scale": 0.2}
    expected = [F.scaled_dot_product_attention(*row, **how) for row in zip(*parts, strict=True)]
    assert (found - torch.cat(expected, 1)).abs().max() < 2e-5


@pytest.mark.parametrize("has_bias", [False, True])
def test_an_encoders_rows_attend_as_with_a_mask(has_bias: bool) -> None:
    from backends.fastertransformer.engine.ops.triton_ops import TritonOps

    torch.manual_seed(0)
    q, k, v = torch.randn(1, 187, 3 * 3 * 64, device=DEVICE).view(1, 187, 3, 3, 64).permute(2, 0, 3, 1, 4).unbind()
    bias = Relative(torch.randn(3, 32, device=DEVICE), is_both_ways=True) if has_bias else None
    rows = NumberedRows.of(np.zeros(187, int), np.zeros(2, int), np.array([170, 17]), 0).on(DEVICE)
    outs = []
    for kind in (Ops, TritonOps):
        outs.append(kind(DEVICE).encoder_attention(rows, AttentionSpec(0.3, bias), q, None)(q, k, v, q))
    assert (outs[0] - outs[1]).abs().max() < 2e-5
