"""Floating point of 8 and 4 bits: round to nearest, ties to even, as torch and the OCP formats have it.

Magnitudes are rounded by the processor's own subtraction: from a number so large that its last digit is the last that
the small type keeps, what is left has no room for more. E4M3FN: "FP8 Formats for Deep Learning" (2022); E2M1: OCP
Microscaling Formats (MX) 1.0, 5.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from export_scripts.quantization.bands import Band, filled
from export_scripts.tensors.dtypes import Array

_DIGITS, _BIAS = 23, 127


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

    def encode(self, scaled: Array, band: Band, codes: Array) -> None:
        """Write the bits of the numbers nearest to some magnitudes into ``codes``.

        Args:
            scaled: the magnitudes, of the band's shape.
            band: what the numbers differ by goes to its ``rounded``.
            codes: bytes of the band's shape.
        """
        self._round(scaled, band.rounded, band.spare)
        np.minimum(band.rounded, filled(band.rounded.shape, self.largest), out=band.rounded)
        self._write_codes(band, codes)
        band.rounded -= scaled

    def add_signs(self, codes: Array, values: Array) -> None:
        """Put the signs of numbers, zeros included, on the bits of their magnitudes."""
        signs = np.less(values.view(f"i{values.itemsize}"), 0).view(np.uint8)
        signs *= np.uint8(1 << self.digits + self.exponent_bits)  # a shift takes four times as long
        codes |= signs

    def _round(self, values: Array, result: Array, spare: Array) -> None:
        """Find the nearest numbers with this type's digits."""
        # A power of two times the number itself has the number's binade, and at a tie an even last digit. What is
        # left of it may be in the binade below, whose numbers lie closer: so near to a power of two all round to it.
        by = 2.0 ** (_DIGITS - self.digits)
        np.multiply(values, np.float32(by), out=spare)
        np.maximum(spare, filled(spare.shape, 1.5 * by * 2.0**self.least_exponent), out=spare)
        np.subtract(spare, values, out=result)
        np.subtract(spare, result, out=result)

    def _write_codes(self, band: Band, codes: Array) -> None:
        """Write the bits of magnitudes of this type, which are rounded already."""
        # So small, fp32 has as few digits left as this type has below its least exponent: its bits are these bits.
        np.multiply(band.rounded, np.float32(2.0 ** (1 - _BIAS - self.least_exponent)), out=band.spare)
        bits = band.spare.view(np.uint32)
        bits >>= np.uint32(_DIGITS - self.digits)
        np.copyto(codes, bits, casting="unsafe")


E4M3 = SmallFloat(3, 4, -6, 448.0)
E2M1 = SmallFloat(1, 2, 0, 6.0)
