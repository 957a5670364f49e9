"""How the pieces of a vocabulary stand for bytes; an exported model's tokenizers carry a copy of this file.

A byte-level BPE (GPT-2's) writes each byte as one character. SentencePiece and what comes from it write a space as
U+2581, and bytes that no piece has as ``<0xE4>``.
"""

from __future__ import annotations

import re

SPACE = "\u2581"
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
LETTERS = {chr(byte): byte for byte in _PRINTED} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""The byte of each character that a byte-level BPE writes: itself where it prints, else one from 256 on."""
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


def of_letters(piece: str) -> bytes:
    """Return the bytes of a byte-level BPE's piece; one with another character stands for itself."""
    if set(piece) <= LETTERS.keys():
        return bytes(LETTERS[letter] for letter in piece)
    return piece.encode()


def byte_of(piece: str) -> bytes | None:
    """Return the byte of a SentencePiece's piece; None: it is a text."""
    found = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(found[1], 16)]) if found else None
