"""A SentencePiece model as the ``tokenizer.json`` that Hugging Face's library reads, with the same ids for a text.

Fields: sentencepiece, ``src/sentencepiece_model.proto``; what they come to: tokenizers, ``models`` and ``normalizers``,
as transformers' ``convert_slow_tokenizer.py`` puts them together. The file is a protocol buffer; a dozen of its fields
matter here, so that they are read without its library.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from handover.errors import CheckpointError

_SPACE = "▁"
_UNIGRAM, _BPE = 1, 2
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
# Kinds of a protocol buffer's fields.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Numbers of fields: of the model, of a piece, of trainer_spec and of normalizer_spec.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK, _UNK_ID = 3, 35, 40
_CHARSMAP, _ADD_DUMMY_PREFIX, _REMOVE_SPACES = 2, 3, 4


@dataclass(frozen=True)
class Pieces:
    """What a SentencePiece model says.

    Attributes:
        tokens: each piece, its score and its kind, in the order of ids.
        is_bpe: pieces are merged by score; else the most probable division is taken (Unigram).
        unknown_id: of what no piece covers.
        has_bytes: what no piece covers is spelled in bytes.
        charsmap: the normalizer's table.
        adds_space: a text is given a space in front.
        removes_spaces: spaces around a text are dropped, and several are one.
    """

    tokens: list[tuple[str, float, int]] = field(default_factory=list)
    is_bpe: bool = False
    unknown_id: int = 0
    has_bytes: bool = False
    charsmap: bytes = b""
    adds_space: bool = True
    removes_spaces: bool = True


def read_pieces(model: bytes) -> Pieces:
    """Read a ``tokenizer.model``.

    Raises:
        CheckpointError: it is damaged, or neither Unigram nor BPE.
    """
    try:
        return _read(model)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise CheckpointError("the checkpoint's tokenizer.model is damaged", "copy the checkpoint again") from error


def _read(model: bytes) -> Pieces:
    tokens: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(model):
        if number == _PIECES:
            piece = dict(_fields(value))
            score = struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0
            tokens.append((piece.get(1, b"").decode(), score, piece.get(3, 1)))
        elif number == _TRAINER:
            trainer = dict(_fields(value))
        elif number == _NORMALIZER:
            normalizer = dict(_fields(value))
    kind = trainer.get(_MODEL_TYPE, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise CheckpointError(
            f"the checkpoint's tokenizer.model is of SentencePiece's type {kind}",
            "transformers has Unigram (1) and BPE (2); give another tokenizer",
        )
    return Pieces(
        tokens=tokens,
        is_bpe=kind == _BPE,
        unknown_id=trainer.get(_UNK_ID, 0),
        has_bytes=bool(trainer.get(_BYTE_FALLBACK, 0)),
        charsmap=normalizer.get(_CHARSMAP, b""),
        adds_space=bool(normalizer.get(_ADD_DUMMY_PREFIX, 1)),
        removes_spaces=bool(normalizer.get(_REMOVE_SPACES, 1)),
    )


def describe(pieces: Pieces, added: Mapping[str, int]) -> dict[str, Any]:
    """Render ``tokenizer.json``'s content without a post-processor.

    Args:
        pieces: of the model.
        added: ids of special tokens that the model lacks.
    """
    special = {token: number for number, (token, _, kind) in enumerate(pieces.tokens) if kind in (_UNKNOWN, _CONTROL)}
    own = {token: number for number, (token, _, kind) in enumerate(pieces.tokens) if kind == _USER_DEFINED}
    tokens = [(token, number, True) for token, number in {**special, **added}.items()]
    tokens += [(token, number, False) for token, number in own.items()]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(*token) for token in sorted(tokens, key=lambda token: token[1])],
        "normalizer": _normalizer(pieces),
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": _decoder(pieces),
        "model": _bpe(pieces) if pieces.is_bpe else _unigram(pieces),
    }


def _added(token: str, number: int, is_special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": is_special}
    return {"id": number, "content": token, **flags}


def _normalizer(pieces: Pieces) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if pieces.charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(pieces.charsmap).decode()})
    if pieces.removes_spaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if pieces.adds_space:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _decoder(pieces: Pieces) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}]
    if pieces.has_bytes:
        steps.append({"type": "ByteFallback"})
    steps.append({"type": "Fuse"})
    if pieces.adds_space:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _unigram(pieces: Pieces) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": pieces.unknown_id,
        "vocab": [[token, score] for token, score, _ in pieces.tokens],
        "byte_fallback": pieces.has_bytes,
    }


def _bpe(pieces: Pieces) -> dict[str, Any]:
    vocabulary = {token: number for number, (token, _, _) in enumerate(pieces.tokens)}
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": pieces.tokens[pieces.unknown_id][0],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": pieces.has_bytes,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": [list(pair) for pair in _merges(pieces, vocabulary)],
    }


def _merges(pieces: Pieces, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """List every pair of pieces that is a piece, those of the highest score first."""
    found = []
    for token, score, kind in pieces.tokens:
        if kind != 1:
            continue
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in vocabulary and right in vocabulary:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Give a protocol buffer's fields: their numbers, and whole numbers or bytes."""
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
