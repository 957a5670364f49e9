"""Quantize a few rows at a time, in memory that stays in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from export_scripts.tensors.dtypes import Array, widen

_ELEMENTS = 1 << 17
"""Numbers of a band: a call costs little beside them, and four arrays of them in fp32 stay in the cache."""
_WIDE = 1 << 10  # columns: of fewer, numpy takes copies of some rows together


class Band:
    """Some rows in fp32 and memory for what is made of them.

    Attributes:
        scaled, rounded, spare: of the same shape, for whoever quantizes.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.values, self.scaled, self.rounded, self.spare = (np.empty(shape, np.float32) for _ in range(4))


def bands(values: Array, data_type: str) -> Iterator[tuple[slice, Band]]:
    """Yield bands of a matrix's rows, in fp32; each is valid until the next is asked for."""
    rows, columns = values.shape
    most = max(1, min(rows, _ELEMENTS // max(1, columns)))
    band = Band((most, columns))
    # A number for each row, or each column, is else copied out as many times as numpy's buffer has room for.
    usual = np.setbufsize(16) if columns >= _WIDE else np.getbufsize()
    try:
        for start in range(0, rows, most):
            place = slice(start, min(start + most, rows))
            if place.stop - start < most:
                band = Band((place.stop - start, columns))
            if data_type == "bf16":
                bits = band.values.view(np.uint32)
                np.copyto(bits, values[place])
                bits <<= np.uint32(16)
            else:
                np.copyto(band.values, values[place])
            yield place, band
    finally:
        np.setbufsize(usual)


@lru_cache(maxsize=32)
def filled(shape: tuple[int, ...], number: float) -> Array:
    """Return an array of one number, to be read: numpy compares two arrays four times as fast as one and a number."""
    return np.full(shape, number, np.float32)


def magnitudes(values: Array) -> Array:
    """Return numbers of fp32, fp16 or bf16 without their signs, in the same type."""
    if values.itemsize == 4:
        wide: Array = np.abs(values)
        return wide
    return np.bitwise_and(values.view(np.uint16), np.uint16(0x7FFF)).view(values.dtype)


def largest(unsigned: Array, data_type: str, axis: int) -> Array:
    """Return the largest of some magnitudes along an axis, in fp32."""
    # They are ordered as their bits are, and whole numbers are compared quickly.
    found = unsigned.view(f"i{unsigned.itemsize}").max(axis)
    return widen(found.view(unsigned.dtype), data_type)


def in_bytes(codes: Array, result: Array) -> None:
    """Put two numbers of 4 bits into a byte, the first into its lower half."""
    pairs = codes.view("<u2")
    pairs |= pairs >> np.uint16(4)
    np.copyto(result, pairs, casting="unsafe")


class Errors:
    """Sums of squares of each row, band by band: of what the numbers that come back differ by, and of the numbers."""

    def __init__(self, rows: int) -> None:
        self._sums = np.empty((2, rows, 1, 1), np.float32)

    def add(self, place: slice, errors: Array, values: Array) -> None:
        """Sum the squares of a band's rows up."""
        for sums, each in zip(self._sums[:, place], (errors, values), strict=True):
            np.matmul(each[:, None, :], each[:, :, None], out=sums)

    def of(self, units: Array | None = None) -> Array:
        """Return both, [2, rows]; ``units`` are what a row's numbers were divided by."""
        sums = self._sums[:, :, 0, 0].astype(np.float64)
        return sums if units is None else sums * np.square(units, dtype=np.float64)
