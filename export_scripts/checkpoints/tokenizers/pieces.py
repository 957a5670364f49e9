"""What a SentencePiece model says: its pieces, how a text is normalised, which tokens are special.

Fields: sentencepiece, ``src/sentencepiece_model.proto``. The file is a protocol buffer; a dozen of its fields matter
here, so that they are read without its library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from handover.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Kinds of pieces."""
UNIGRAM, BPE = 1, 2
"""Kinds of models."""
# Kinds of a protocol buffer's fields.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Numbers of fields: of the model, of a piece, of trainer_spec and of normalizer_spec.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK, _UNK_ID = 3, 35, 40
_NAMED = {"unk_token": (40, 45, 0, "<unk>"), "bos_token": (41, 46, 1, "<s>"), "eos_token": (42, 47, 2, "</s>")}
"""Numbers of the fields of a special token's id and of its piece, and what they are by default."""
_CHARSMAP, _ADD_DUMMY_PREFIX, _REMOVE_SPACES = 2, 3, 4


@dataclass(frozen=True)
class Pieces:
    """What a SentencePiece model says.

    Attributes:
        tokens: each piece, its score and its kind, in the order of ids.
        kind: UNIGRAM: the most probable division is taken; BPE: pieces are merged by score; others: words or letters.
        unknown_id: of what no piece covers.
        has_bytes: what no piece covers is spelled in bytes.
        charsmap: the normalizer's table.
        adds_space: a text is given a space in front.
        removes_spaces: spaces around a text are dropped, and several are one.
        special: the unknown, begin and end token that its training named, by transformers' name.
    """

    tokens: list[tuple[str, float, int]] = field(default_factory=list)
    kind: int = UNIGRAM
    unknown_id: int = 0
    has_bytes: bool = False
    charsmap: bytes = b""
    adds_space: bool = True
    removes_spaces: bool = True
    special: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_unigram(self) -> bool:
        """Whether its kind is UNIGRAM."""
        return self.kind == UNIGRAM

    @property
    def ids(self) -> dict[str, int]:
        """Ids by piece."""
        return {token: number for number, (token, _, _) in enumerate(self.tokens)}


def read_pieces(model: bytes) -> Pieces:
    """Read a ``tokenizer.model``.

    Raises:
        CheckpointError: it is damaged, or empty.
    """
    try:
        return _read(model)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise CheckpointError("the checkpoint's tokenizer.model is damaged", "copy the checkpoint again") from error


def _read(model: bytes) -> Pieces:
    tokens: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in fields(model):
        if number == _PIECES:
            piece = dict(fields(value))
            score = struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0
            tokens.append((piece.get(1, b"").decode(), score, piece.get(3, 1)))
        elif number == _TRAINER:
            trainer = dict(fields(value))
        elif number == _NORMALIZER:
            normalizer = dict(fields(value))
    if not tokens:
        raise CheckpointError("the checkpoint's tokenizer.model has no pieces", "copy the checkpoint again")
    return Pieces(
        tokens=tokens,
        kind=trainer.get(_MODEL_TYPE, UNIGRAM),
        unknown_id=trainer.get(_UNK_ID, 0),
        has_bytes=bool(trainer.get(_BYTE_FALLBACK, 0)),
        charsmap=normalizer.get(_CHARSMAP, b""),
        adds_space=bool(normalizer.get(_ADD_DUMMY_PREFIX, 1)),
        removes_spaces=bool(normalizer.get(_REMOVE_SPACES, 1)),
        special=dict(_special(trainer)),
    )


def _special(trainer: Mapping[int, Any]) -> Iterator[tuple[str, str]]:
    for name, (id_field, piece_field, usual_id, usual) in _NAMED.items():
        if trainer.get(id_field, usual_id) < 1 << 63:  # or it is -1: there is none
            yield name, trainer[piece_field].decode() if trainer.get(piece_field) else usual


def fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield a protocol buffer's fields: their numbers, and whole numbers or bytes."""
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        kind = key & 7
        if kind == _VARINT:
            value, place = _varint(content, place)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, place = _varint(content, place)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise IndexError(f"a field of kind {kind}")
        if place + size > len(content):
            raise IndexError("a field ends beyond the file")
        yield key >> 3, content[place : place + size]
        place += size


def _varint(content: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
        shift += 7
