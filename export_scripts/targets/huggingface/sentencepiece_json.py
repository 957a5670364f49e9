"""A SentencePiece model as the ``tokenizer.json`` that Hugging Face's library reads, with the same ids for a text.

What its parts come to: tokenizers, ``models`` and ``normalizers``, as transformers' ``convert_slow_tokenizer.py`` put
them together before version 5.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from export_scripts.checkpoints.tokenizers.pieces import (
    BPE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    Pieces,
)
from handover.errors import CheckpointError

_SPACE = "▁"


def describe(pieces: Pieces, added: Mapping[str, int]) -> dict[str, Any]:
    """Render ``tokenizer.json``'s content without a post-processor.

    Args:
        pieces: of the model.
        added: ids of special tokens that the model lacks.

    Raises:
        CheckpointError: the model is neither Unigram nor BPE.
    """
    if pieces.kind not in (UNIGRAM, BPE):
        raise CheckpointError(
            f"the checkpoint's tokenizer.model is of SentencePiece's type {pieces.kind}",
            "transformers has Unigram (1) and BPE (2); give another tokenizer",
        )
    special = {token: number for number, (token, _, kind) in enumerate(pieces.tokens) if kind in (UNKNOWN, CONTROL)}
    own = {token: number for number, (token, _, kind) in enumerate(pieces.tokens) if kind == USER_DEFINED}
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
        "model": _unigram(pieces) if pieces.is_unigram else _bpe(pieces),
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
        if kind != NORMAL:
            continue
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in vocabulary and right in vocabulary:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]
