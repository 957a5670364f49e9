"""Headers of HTTP/2 calls (HPACK, RFC 7541), as far as it takes to see whether one of them has a certain name.

Names are stated once and are then an index, counted from the newest of the connection's table. So nothing of the table
has to be kept but which of its entries have the name, and none of the coded values has to be read.
"""

from __future__ import annotations

import re

from deployment.guard.frames import COMPRESSION_ERROR, BrokenConnectionError

NAME = b"triton_grpc_error"
"""Metadata by which a stream asks for gRPC's own errors."""

_CODED, _CODED_BYTES = b"M\x86I\xea\x8ak+$E\xb2\xc3", 12
"""The name in HPACK's Huffman code without its last bits, and its length with them."""

_INDEXES_ALONE = re.compile(rb"[\x80-\xfe]*").fullmatch
"""As a connection's later calls have them: each byte a header that was stated before."""

_FIRST_OF_TABLE = 62  # below are the entries that every connection has
_MOST_NOTED = 1024


class HeaderWatch:
    """What a connection has said of the name so far."""

    def __init__(self) -> None:
        self._count = 0
        self._named: set[int] = set()
        self._block, self._at = b"", 0

    def has_name(self, block: bytes) -> bool:
        """Read the headers of one call; BrokenConnectionError: they are malformed."""
        if not self._named and _INDEXES_ALONE(block):
            return False
        self._block, self._at, found = block, 0, False
        try:
            while self._at < len(block):
                first = block[self._at]
                if first & 0x80:
                    found |= self._is_named(self._integer(7))
                elif first & 0x60 == 0x20:
                    self._integer(5)  # a size of the table
                else:
                    found |= self._literal(bool(first & 0x40))
        except IndexError:
            raise BrokenConnectionError(COMPRESSION_ERROR, "headers are malformed") from None
        return found

    def _literal(self, is_kept: bool) -> bool:
        index = self._integer(6 if is_kept else 4)
        is_named = self._is_named(index) if index else self._string()
        self._string()
        if is_kept:
            self._count += 1
            if is_named:
                if len(self._named) >= _MOST_NOTED:
                    raise BrokenConnectionError(COMPRESSION_ERROR, "a header's name is stated again and again")
                self._named.add(self._count)
        return is_named

    def _is_named(self, index: int) -> bool:
        return self._count - (index - _FIRST_OF_TABLE) in self._named if index >= _FIRST_OF_TABLE else False

    def _string(self) -> bool:
        """Pass a string; says whether it is the name."""
        is_coded = bool(self._block[self._at] & 0x80)
        size = self._integer(7)
        begin, self._at = self._at, self._at + size
        if self._at > len(self._block):
            raise IndexError
        if is_coded:
            return size == _CODED_BYTES and self._block.startswith(_CODED, begin)
        return size == len(NAME) and self._block.startswith(NAME, begin)

    def _integer(self, bits: int) -> int:
        most = (1 << bits) - 1
        value = self._block[self._at] & most
        self._at += 1
        if value < most:
            return value
        for shift in range(0, 28, 7):
            byte = self._block[self._at]
            self._at += 1
            value += (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise IndexError
