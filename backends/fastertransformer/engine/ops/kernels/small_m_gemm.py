"""A matrix times some rows on the tensor cores: each program reads some rows of the matrix, or a part of them.

int8 is multiplied as integers, and FP8 as FP8 by bf16: each row of x is then two rows of digits, as columns of one
product; see int8.py.

If the matrix has few rows, several programs share them (split-k) to keep all of the GPU busy; the last one to finish
adds their parts, in the programs' order, so a result does not change from run to run.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .elements import activated, converted, gated, load_vector, rows_of


@triton.jit(do_not_specialize=["rows"])
def small_m_gemm(  # noqa: C901 (one kernel)
    y, x, units, weight, scales, bias, residual, other, other_scales, other_bias, parts, arrivals,
    rows, outputs, inputs, scale_first, scale_count, scale_width: tl.constexpr,
    has_scales: tl.constexpr, has_bias: tl.constexpr, activation: tl.constexpr, has_residual: tl.constexpr,
    is_split: tl.constexpr, is_native: tl.constexpr, uses_pdl: tl.constexpr, padded: tl.constexpr,
    splits: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr, is_gated: tl.constexpr,
):  # fmt: skip
    """Compute y [rows, outputs] = residual + activation(scales * (x @ weight.T) + bias); for the others, see gemv.

    x: [rows, inputs], or its digits, [2, rows, inputs], times units, fp32 [rows].
    padded: rows that a program multiplies, as many as the tensor cores take. parts: fp32 [splits, rows, outputs], any
    content. arrivals: int32 [programs along rows and outputs], zeros before and afterwards.
    """
    is_int8: tl.constexpr = is_split and x.dtype.element_ty == tl.int8
    blocks = tl.cdiv(rows, padded)  # next to each other, for they read the same part of the matrix
    n, is_other = rows_of(block_n, tl.program_id(0) // blocks * block_n, is_gated)
    m = tl.program_id(0) % blocks * padded + tl.arange(0, padded)
    row_at = tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * inputs
    weight_rows = weight + row_at
    if is_gated:
        weight_rows = tl.where(is_other[:, None], other + row_at, weight_rows)
    scale_rows = scales
    if scale_width:
        scale_at = tl.minimum(n, outputs - 1)[:, None] * scale_count
        scale_rows = scales + scale_at
        if is_gated:
            scale_rows = tl.where(is_other[:, None], other_scales + scale_at, scale_rows)
    steps = tl.cdiv(inputs, block_k * splits)
    first = tl.program_id(1) * steps * block_k
    if uses_pdl:
        gdc_wait()
    column = tl.arange(0, 2 * padded if is_split else padded)
    row = tl.program_id(0) % blocks * padded + column % padded
    x += (column // padded * rows + row)[None, :] * inputs
    is_row = (row < rows)[None, :]
    sums = tl.zeros([block_n, 2 * padded if is_split else padded], tl.int32 if is_int8 else tl.float32)
    for step in tl.range(0, steps, num_stages=stages):
        k = first + step * block_k + tl.arange(0, block_k)
        is_k = k < inputs
        tile = tl.load(weight_rows + k[None, :], is_k[None, :], 0.0, eviction_policy="evict_first")
        v = tl.load(x + k[:, None], is_row & is_k[:, None], 0.0)
        if is_int8:
            sums = tl.dot(tile, v, sums, out_dtype=tl.int32)
        else:
            if not is_split:
                tile = converted(tile, v.dtype, is_native)
            if scale_width:
                k = first + step * block_k
                factor = tl.load(scale_rows + (scale_first + k) // scale_width, k < inputs, 0.0)
                sums += tl.dot(tile, v, input_precision="ieee") * factor
            elif is_split:  # tensor cores sum up products of FP8 in 14 bits or so
                sums += tl.dot(tile, v)
            else:
                sums = tl.dot(tile, v, sums, input_precision="ieee")
    if uses_pdl:  # not earlier: its programs would crowd where this one's have ended first
        gdc_launch_dependents()
    if is_split:
        high, low = tl.split(tl.permute(tl.reshape(sums, (block_n, 2, padded)), (0, 2, 1)))
        sums = high.to(tl.float32) * (256.0 if is_int8 else 16.0) + low.to(tl.float32)
        sums *= tl.load(units + m, m < rows, 0)[None, :]
    total = tl.trans(sums)  # [padded, block_n]
    columns, column_n = outputs, n
    if is_gated:
        columns, column_n = 2 * outputs, 2 * n + is_other.to(tl.int32)
    outputs_at = m[:, None] * columns + column_n[None, :]
    is_valid = (n < outputs)[None, :] & (m < rows)[:, None]
    is_last = True
    if splits > 1:
        tl.store(parts + tl.program_id(1) * rows * columns + outputs_at, total, is_valid)
        tl.debug_barrier()  # every thread's part is written before any says so
        is_last = tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel") == splits - 1
        if is_last:
            total = tl.zeros([padded, block_n], tl.float32)
            for split in range(splits):
                total += tl.load(parts + split * rows * columns + outputs_at, is_valid, 0.0, cache_modifier=".cg")
            tl.store(arrivals + tl.program_id(0), 0)
    if is_last:
        if has_scales and not scale_width:
            total *= load_vector(scales, other_scales, n, is_other, n < outputs, is_gated)[None, :]
        if has_bias:
            total += load_vector(bias, other_bias, n, is_other, n < outputs, is_gated)[None, :]
        if is_gated:
            pair = tl.program_id(0) // blocks * (block_n // 2) + tl.arange(0, block_n // 2)
            is_in = (pair < outputs)[None, :] & (m < rows)[:, None]
            tl.store(y + m[:, None] * outputs + pair[None, :], gated(total, activation).to(y.dtype.element_ty), is_in)
        else:
            total = activated(total, activation)
            if has_residual:
                total += tl.load(residual + outputs_at, is_valid, 0).to(tl.float32)
            tl.store(y + outputs_at, total.to(y.dtype.element_ty), is_valid)
