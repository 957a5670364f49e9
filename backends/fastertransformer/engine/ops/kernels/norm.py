"""Layer norm, or division by the root mean square."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .elements import moments


@triton.jit
def norm_rows(
    y, x, gain, shift, inputs, eps,
    is_rms: tl.constexpr, has_shift: tl.constexpr, is_chained: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Compute y [rows, inputs] = norm(x [rows, inputs]) along inputs: a program a row."""
    if is_chained:
        gdc_wait()
        gdc_launch_dependents()
    x += tl.program_id(0) * inputs
    y += tl.program_id(0) * inputs
    mean, scale = moments(x, inputs, eps, is_rms, block)
    for start in range(0, inputs, block):
        k = start + tl.arange(0, block)
        v = (
            (tl.load(x + k, k < inputs, 0).to(tl.float32) - mean)
            * scale
            * tl.load(gain + k, k < inputs, 0).to(tl.float32)
        )
        if has_shift:
            v += tl.load(shift + k, k < inputs, 0).to(tl.float32)
        tl.store(y + k, v.to(y.dtype.element_ty), k < inputs)
