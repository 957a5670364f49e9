"""A SentencePiece model with fairseq's ids: its four special tokens, the pieces, seven words to fill up.

Ids: fairseq, ``data/dictionary.py`` (``<s>``, ``<pad>``, ``</s>``, ``<unk>``); transformers, XGLMTokenizer (version 4:
``fairseq_tokens_to_ids``, ``fairseq_offset``, ``num_madeup_words``). Format: ``sentencepiece_model.proto``, encoded by
protobuf. A piece's id is its place in the file: they are put into another order here, and a text is cut as before.
"""

from __future__ import annotations

import struct

from export_scripts.checkpoints.tokenizers.pieces import fields
from handover.errors import CheckpointError

_PIECE, _TEXT, _SCORE, _TYPE = 1, 1, 2, 3  # field numbers: of a piece in the model, and of what a piece is
_CONTROL = 3
_VARINT, _BYTES, _FIXED32 = 0, 2, 5  # wire types
_OWN_SPECIAL = ("<unk>", "<s>", "</s>")
_FILLING_WORDS = 7


def with_fairseq_ids(model: bytes) -> bytes:
    """Put the pieces of a ``sentencepiece.bpe.model`` into the order of fairseq's ids.

    Raises:
        CheckpointError: it is not a SentencePiece model that begins with <unk>, <s>, </s>.
    """
    try:
        parts = list(fields(model))
        if b"".join(_field(*part) for part in parts) != model:
            raise ValueError("its fields are not all messages")
        pieces = [content for number, content in parts if number == _PIECE]
        names = tuple(dict(fields(piece))[_TEXT].decode() for piece in pieces[: len(_OWN_SPECIAL)])
    except (IndexError, KeyError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"sentencepiece.bpe.model is not a SentencePiece model: {error}") from error
    if names != _OWN_SPECIAL:
        raise CheckpointError(
            f"sentencepiece.bpe.model begins with {', '.join(names)} instead of {', '.join(_OWN_SPECIAL)}",
            "its ids are not known; write a tokenizer.json with transformers' save_pretrained()",
        )
    unknown, start, end, *others = pieces
    filling = (_control(f"<madeupword{number}>") for number in range(_FILLING_WORDS))
    ordered = (start, _control("<pad>"), end, unknown, *others, *filling)
    rest = (_field(number, content) for number, content in parts if number != _PIECE)
    return b"".join((*(_field(_PIECE, piece) for piece in ordered), *rest))


def _control(text: str) -> bytes:
    """Make a piece that no text is cut into."""
    score = bytes([_SCORE << 3 | _FIXED32]) + struct.pack("<f", 0.0)
    return _field(_TEXT, text.encode()) + score + bytes([_TYPE << 3 | _VARINT, _CONTROL])


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | _BYTES]) + _as_varint(len(content)) + content


def _as_varint(value: int) -> bytes:
    content = bytearray()
    while value > 0x7F:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*content, value])
