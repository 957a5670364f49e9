"""Numbers become codes group by group: in C (``groups.c``) where there is a compiler, else by numpy, to the same bytes.

A group is a box of a matrix whose numbers have one scale: a number's code is that of the nearest quotient.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from export_scripts.quantization.bands import Errors, bands, filled, in_bytes, largest, magnitudes
from export_scripts.quantization.float_rounding import E2M1, E4M3, SmallFloat
from export_scripts.tensors.dtypes import STORAGE, Array
from ft_format.c_library import NoLibraryError, compiled

INT4 = "int4"
"""Whole numbers from -8 to 7, 8 added to each."""
Form = SmallFloat | str
_SOURCE = Path(__file__).with_name("groups.c")
_FLAGS = ("-ffp-contract=off", "-fno-trapping-math")
_TYPES, _FORMS = tuple(STORAGE), (E4M3, E2M1, INT4)  # in the order of the source's own
_LEAST, _LARGEST = -8, 7
_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_long


class Codes(NamedTuple):
    """Rows of a matrix as codes.

    Attributes:
        codes: bytes, [rows, columns]; of 4 bits two in a byte, the first in its lower half, [rows, columns / 2].
        squared_errors: of each row, what the numbers that come back differ by, in fp64.
        squares: of each row's numbers.
    """

    codes: Array
    squared_errors: Array
    squares: Array


class _Library:
    def __init__(self, path: Path) -> None:
        found = ctypes.CDLL(str(path))
        self.peaks, self.encode = found.peaks, found.encode
        self.peaks.argtypes = (_POINTER, _INT, *(_LONG,) * 4, _POINTER)
        self.encode.argtypes = (_POINTER, _INT, _INT, *(_LONG,) * 4, *(_POINTER,) * 4)
        self.peaks.restype = self.encode.restype = None


@lru_cache
def library() -> _Library | None:
    """Compile or find what is in C; None: there is none here, which is said once.

    Who forks processes asks before, so that they have it too.
    """
    try:
        return _Library(compiled("groups", (_SOURCE,), _FLAGS))
    except (NoLibraryError, OSError, AttributeError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"convert: note: numpy quantizes, which takes four times as long as C: {error}\n")
        return None


def peaks(values: Array, data_type: str, group: tuple[int, int] | None = None) -> Array:
    """Return the largest magnitude of each group, in fp32, [groups down, groups across].

    Args:
        values: [rows, columns], as they are stored.
        data_type: fp32, fp16 or bf16, theirs.
        group: rows and columns of one, fewer at the ends; None: each row is one.
    """
    rows, columns = values.shape
    down, across = group or (1, columns)
    shape = -(-rows // down), -(-columns // across)
    if (own := library()) is None:
        return _peaks(magnitudes(values), data_type, down, across)
    given, found = np.require(values, requirements=("C", "A")), np.empty(shape, np.float32)
    own.peaks(given.ctypes.data, _TYPES.index(data_type), rows, columns, down, across, found.ctypes.data)
    return found


def encode(values: Array, data_type: str, form: Form, scales: Array, group: tuple[int, int] | None = None) -> Codes:
    """Divide numbers by their groups' scales, in fp32, and round once.

    Args:
        values: [rows, columns], as they are stored; of codes of 4 bits groups are even.
        data_type: fp32, fp16 or bf16, theirs.
        form: E4M3, E2M1 or INT4; what is too large becomes the largest.
        scales: fp32, [groups down, groups across].
        group: as of ``peaks``.
    """
    rows, columns = values.shape
    down, across = group or (1, columns)
    if (own := library()) is None:
        return _encode(values, data_type, form, scales, down, across)
    given, divisors = np.require(values, requirements=("C", "A")), np.require(scales, np.float32, ("C", "A"))
    codes = np.empty((rows, columns if form is E4M3 else columns // 2), np.uint8)
    sums = np.empty((2, rows))
    places = (each.ctypes.data for each in (divisors, codes, *sums))
    kinds = _TYPES.index(data_type), _FORMS.index(form)
    own.encode(given.ctypes.data, *kinds, rows, columns, down, across, *places)
    return Codes(codes, *sums)


def _peaks(unsigned: Array, data_type: str, down: int, across: int) -> Array:
    if down == 1:
        return largest(unsigned, data_type, 1)[:, None]
    columns = unsigned.shape[1]
    found = [largest(unsigned[start : start + down], data_type, 0) for start in range(0, len(unsigned), down)]
    padded = np.pad(found, ((0, 0), (0, -columns % across)))
    peaks: Array = padded.reshape(len(found), -1, across).max(2)
    return peaks


def _encode(values: Array, data_type: str, form: Form, scales: Array, down: int, across: int) -> Codes:
    rows, columns = values.shape
    given = values if isinstance(form, str) else magnitudes(values)
    codes, errors = np.empty(values.shape, np.uint8), Errors(rows)
    for start in range(0, rows, rows if down == 1 else down):
        stop = rows if down == 1 else start + down
        for inner, band in bands(given[start:stop], data_type):
            place = slice(start + inner.start, start + inner.stop)
            by = scales[place] if down == 1 else np.repeat(scales[start // down], across)[:columns]
            np.divide(band.values, by, out=band.scaled)
            if isinstance(form, str):
                np.rint(band.scaled, out=band.rounded)
                np.minimum(band.rounded, filled(band.rounded.shape, _LARGEST), out=band.rounded)
                np.maximum(band.rounded, filled(band.rounded.shape, _LEAST), out=band.rounded)
                np.copyto(codes[place], band.rounded.astype(np.int8).view(np.uint8))
                band.rounded -= band.scaled
            else:
                form.encode(band.scaled, band, codes[place])
            if down == 1:
                errors.add(place, band.rounded, band.scaled)
            else:
                band.rounded *= by
                errors.add(place, band.rounded, band.values)
    if isinstance(form, str):
        codes -= np.uint8(_LEAST % 256)
    else:
        form.add_signs(codes, values)
    sums = errors.of(scales[:, 0] if down == 1 else None)
    if form is E4M3:
        return Codes(codes, *sums)
    packed = np.empty((rows, columns // 2), np.uint8)
    in_bytes(codes, packed)
    return Codes(packed, *sums)
