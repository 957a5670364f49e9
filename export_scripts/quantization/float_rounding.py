"""Floating point of 8 and 4 bits: round to nearest, ties to even, as torch and the OCP formats have it.

Numbers are rounded by the processor's own addition: beside a number so large that its last digit is the last that the
small type keeps, a sum has no room for more. E4M3FN: "FP8 Formats for Deep Learning" (2022); E2M1: OCP Microscaling
Formats (MX) 1.0, 5.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from export_scripts.quantization.bands import Band, filled
from export_scripts.tensors.dtypes import Array

_DIGITS, _BIAS = 23, 127
_SURELY = 6  # binary digits: what exceeds the largest number by less than 1 in 64 is rounded to it
_EXPONENT = np.uint32(0x7F800000)


@dataclass(frozen=True)
class SmallFloat:
    """A type without infinities.

    Attributes:
        digits: of the mantissa, the leading one not counted.
        exponent_bits: of its exponent, whose least value is written as 1.
        least_exponent: of the smallest number that has all digits.
        largest: its largest number.
    """

    digits: int
    exponent_bits: int
    least_exponent: int
    largest: float

    def encode(self, band: Band, peak: float, codes: Array) -> None:
        """Write the bits of the numbers nearest to ``band.scaled``, the sign first, into ``codes``.

        Args:
            band: what the numbers differ by goes to its ``rounded``.
            peak: the largest magnitude; it may be more than this type's.
            codes: bytes of the band's shape.
        """
        self._round(band.scaled, band.rounded, band.spare)
        if peak > self.largest * (1 + 2.0**-_SURELY):
            shape = band.rounded.shape
            np.minimum(band.rounded, filled(shape, self.largest), out=band.rounded)
            np.maximum(band.rounded, filled(shape, -self.largest), out=band.rounded)
        self._write_codes(band, codes)
        band.rounded -= band.scaled

    def _round(self, values: Array, result: Array, spare: Array) -> None:
        """Find the nearest numbers with this type's digits; zeros lose their sign."""
        # 1.5 keeps the sum in one binade, whatever the sign.
        by = np.float32(1.5 * 2.0 ** (_DIGITS - self.digits))
        np.bitwise_and(values.view(np.uint32), _EXPONENT, out=spare.view(np.uint32))
        spare *= by
        np.maximum(spare, filled(spare.shape, float(by) * 2.0**self.least_exponent), out=spare)
        np.add(values, spare, out=result)
        result -= spare

    def _write_codes(self, band: Band, codes: Array) -> None:
        """Write the bits of numbers of this type, which are rounded already; zeros have lost their sign."""
        # So small, fp32 has as few digits left as this type has below its least exponent: its bits are these bits.
        np.multiply(band.rounded, np.float32(2.0 ** (1 - _BIAS - self.least_exponent)), out=band.spare)
        bits, signs = band.spare.view(np.uint32), band.signs.view(np.uint8)
        bits >>= np.uint32(_DIGITS - self.digits)
        np.copyto(codes, bits, casting="unsafe")  # the sign lies beyond the lowest byte
        np.signbit(band.scaled, out=band.signs)
        signs *= np.uint8(1 << self.digits + self.exponent_bits)  # it shifts bytes four times more slowly
        codes |= signs


E4M3 = SmallFloat(3, 4, -6, 448.0)
E2M1 = SmallFloat(1, 2, 0, 6.0)
